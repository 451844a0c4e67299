"""Modes of a model during a run: eval mode with gradients, seeded draws, batch-norm statistics. All are restored."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn

from iobs.core.modes import full_precision, in_eval_mode
from iobs.errors import CalibrationError
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples, even

_TABLES = ("_parameters", "_buffers", "_modules")  # dictionaries of a module that it changes in place


def update_batch_norm(model: nn.Module, part: Samples) -> None:
    """Replace the running statistics by averages over the samples; modules that see no sample keep theirs.

    Raises:
        CalibrationError: a batch has one value per channel, which has no variance.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [module.momentum for module in norms]
    before = [{name: value.clone() for name, value in module.named_buffers()} for module in norms]
    try:
        for module in norms:
            module.reset_running_stats()
            module.momentum = None
            module.train()
        with torch.no_grad():
            for batch in even(part).batches:  # every batch has the same weight in the average
                batches.forward(model, batch)
    except ValueError as error:  # torch refuses one value per channel
        raise CalibrationError(f'batch_norm="update" cannot use this batch: {error}; join it with another.') from error
    finally:
        for module, momentum, buffers in zip(norms, momenta, before, strict=True):
            module.momentum = momentum
            module.eval()
            if module.num_batches_tracked is not None and not module.num_batches_tracked:
                for name, value in buffers.items():
                    module.get_buffer(name).copy_(value)


@contextmanager
def inferring(model: nn.Module) -> Iterator[None]:
    """Eval mode without KV cache, as a model is used afterwards. Everything is restored on exit."""
    with without_cache(model), in_eval_mode(model):
        yield


def without_cache(model: nn.Module) -> AbstractContextManager[None]:
    """Compute no KV cache, which a score does not use and which takes memory; restored on exit."""
    return _configured(model, "use_cache", False)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[frozenset[str]]:
    """Eval mode without KV cache, fused kernels, autocast or TF32; all floating parameters require gradients.

    Everything is restored on exit. Weights that the model drops meanwhile are freed.

    Yields:
        The names of the parameters that were frozen; none if all were, as in a model loaded for inference.
    """
    numbers = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
    frozen = {name for name, value in numbers.items() if not value.requires_grad}
    names = frozenset(frozen if len(frozen) < len(numbers) else ())
    device = next((value.device for value in numbers.values() if not value.is_meta), torch.device("cpu"))
    del numbers  # block by block the weights outside the blocks are dropped
    with ExitStack() as stack:
        # Implementations of transformers that multiply all experts at once hide the input of each expert.
        stack.enter_context(_configured(model, "_experts_implementation", "eager"))
        stack.enter_context(full_precision())
        stack.enter_context(without_cache(model))
        stack.enter_context(requiring_gradients(value for value in model.parameters() if value.is_floating_point()))
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(fused_attention(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))  # the model's own dtypes
        stack.enter_context(_uncompiled())
        stack.enter_context(_without_cudnn(model))
        yield names


@contextmanager
def _configured(model: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set a field of every configuration in the model, where the field is there, not off, and can be set."""
    # Models inside a wrapper or a model of the user's own have configurations too.
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    changed: list[tuple[object, object]] = []  # configurations with the value that they had
    try:
        for config in configs.values():
            if kept := getattr(config, name, None):
                with suppress(AttributeError, TypeError, ValueError):  # a frozen configuration of the user's own
                    setattr(config, name, value)
                    changed.append((config, kept))
        yield
    finally:
        for config, kept in changed:
            setattr(config, name, kept)


@contextmanager
def requiring_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let frozen parameters require gradients, as long as they exist: the context keeps none of them alive."""
    frozen = [weakref.ref(parameter) for parameter in parameters if not parameter.requires_grad]
    _require_gradients(frozen, True)
    try:
        yield
    finally:
        _require_gradients(frozen, False)


def _require_gradients(parameters: Sequence[weakref.ref[nn.Parameter]], required: bool) -> None:
    for reference in parameters:
        if (parameter := reference()) is not None:
            parameter.requires_grad_(required)


@contextmanager
def fused_attention(enabled: bool) -> Iterator[None]:
    """Enable or disable the fast path of nn.TransformerEncoderLayer, which hides the inputs of its layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled modules eagerly: hooks and torch function modes do not act inside a compiled graph."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _without_cudnn(model: nn.Module) -> Iterator[None]:
    """Disable cuDNN for models with recurrent layers, which have no gradient in eval mode there."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers on exit, such as counters that forward passes change."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before:
                put(buffer, before[name])


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a parameter or a buffer if it differs, since some buffers cannot be written to.

    A tensor whose shape has changed is left unchanged: a run changes no shapes.
    """
    if tensor.shape == value.shape and not torch.equal(tensor, value):
        tensor.copy_(value)


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of the model's devices; restore their states on exit."""
    devices = {value.device.index for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices if torch.cuda.is_available() else ()):
        # torch.manual_seed would seed all devices, and only the generators of these are restored.
        torch.default_generator.manual_seed(seed)
        for device in devices if torch.cuda.is_available() else ():
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


@contextmanager
def structure_kept_on_failure(model: nn.Module) -> Iterator[None]:
    """After an error give all modules and configurations their attributes, tensors and inner modules back.

    What was written into a tensor in place stays.
    """
    holders = list(_holders(model))
    before = [dict(vars(holder)) for holder in holders]
    tables = {
        id(table): (table, dict(table)) for attributes in before for name in _TABLES if (table := attributes.get(name))
    }
    try:
        yield
    except BaseException:
        for holder, attributes in zip(holders, before, strict=True):
            vars(holder).clear()
            vars(holder).update(attributes)
        for table, entries in tables.values():
            table.clear()
            table.update(entries)
        raise


def _holders(model: nn.Module) -> Iterator[object]:
    """The modules of a model, their configurations, and the configurations inside these; each once.

    Modules of torch.jit are left out: their tables are views of a program, which nothing here changes.
    """
    seen: set[int] = set()
    waiting: list[object] = [model]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in seen and not isinstance(holder, torch.jit.ScriptModule):
            seen.add(id(holder))
            yield holder
            if isinstance(holder, nn.Module):
                values = [*holder.children(), vars(holder).get("config")]
            else:
                values = [*vars(holder).values()]
            waiting += [value for value in values if isinstance(value, nn.Module) or _is_configuration(value)]


def _is_configuration(value: object) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__")


@contextmanager
def replaced_forwards(replacements: Iterable[tuple[nn.Module, Callable[..., object]]]) -> Iterator[None]:
    """Replace the forward of modules; restored on exit, also a forward that an adapter or a user set on the instance.

    Args:
        replacements: modules, each once, with what is called in place of their forward.
    """
    with ExitStack() as stack:
        for module, forward in replacements:
            stack.callback(_set_forward, module, vars(module).get("forward"))
            module.forward = forward
        yield


def _set_forward(module: nn.Module, forward: Callable[..., object] | None) -> None:
    """Set the forward of an instance; None: that of its class."""
    if forward is None:
        vars(module).pop("forward", None)  # a signal may end the context before it was set
    else:
        module.forward = forward


@contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Restore what the forward pass stored in modules: buffers, activations, and tables made of noise."""
    tables = [vars(module) for module in model.modules()]
    tables += [value for table in tables for value in table.values() if type(value) is dict]  # buffers among them
    before = [(table, dict(table)) for table in tables]
    lists = [(value, list(value)) for table in tables for value in table.values() if type(value) is list]
    try:
        yield
    finally:
        for value, old in lists:
            value[:] = old
        for table, entries in before:
            table.clear()
            table.update(entries)
