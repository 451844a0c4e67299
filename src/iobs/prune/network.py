"""A network while it is being pruned: in eval mode, able to carry gradients, and back as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError
from iobs.prune import batches
from iobs.prune.parts import Part, even
from iobs.prune.settings import Settings


def update_batch_norm(model: nn.Module, part: Part) -> None:
    """Replace running statistics by the average over the calibration data; those that it does not reach stay.

    Raises:
        CalibrationError: a batch has one value a channel, which has no variance.
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
            for batch in even(part).batches:  # each counts the same in the average
                batches.forward(model, batch)
    except ValueError as error:  # of a batch with one value a channel
        raise CalibrationError(f'batch_norm="update" cannot use this batch: {error}; join it with another.') from error
    finally:
        for module, momentum, buffers in zip(norms, momenta, before, strict=True):
            module.momentum = momentum
            module.eval()
            if module.num_batches_tracked is not None and not module.num_batches_tracked:
                for name, value in buffers.items():
                    module.get_buffer(name).copy_(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[frozenset[str]]:
    """Dropout off, no key-value cache, nothing multiplied out of sight, gradients for everything; put back at the end.

    Numbers are of the network's own dtypes whatever autocast says outside.

    Gives the names of the parameters that were frozen; none where all were, as for inference.
    """
    training = [(module, module.training) for module in model.modules()]
    numbers = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
    frozen = {name: value for name, value in numbers.items() if not value.requires_grad}
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    # Implementations of transformers that multiply all experts at once hide what each is fed.
    experts = getattr(config, "_experts_implementation", None)
    fused_attention = torch.backends.mha.get_fastpath_enabled()  # as in nn.TransformerEncoderLayer
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    for value in frozen.values():
        value.requires_grad_(True)
    if cached:
        config.use_cache = False  # type: ignore[union-attr]
    if experts is not None:
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    try:
        with ExitStack() as stack:
            device = next((value.device for value in numbers.values() if not value.is_meta), torch.device("cpu"))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            if "torch._dynamo" in sys.modules:  # a compiled graph would take no notice of what looks inside
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if any(isinstance(module, nn.RNNBase) for module, _ in training):  # cuDNN's have no gradient in eval mode
                cudnn = torch.backends.cudnn
                others = cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32
                stack.enter_context(cudnn.flags(False, *others))
            yield frozenset(frozen if len(frozen) < len(numbers) else ())
    finally:
        torch.backends.mha.set_fastpath_enabled(fused_attention)
        _set_modes(model, dict(training))
        for value in frozen.values():
            value.requires_grad_(False)
        if cached:
            config.use_cache = cached  # type: ignore[union-attr]
        if experts is not None:
            config._experts_implementation = experts  # type: ignore[union-attr]


def _set_modes(module: nn.Module, training: dict[nn.Module, bool]) -> None:
    """Back to training mode, by `train` where that is all that is asked, as a module may do more than note its mode."""
    if all(training.get(inner, inner.training) for inner in module.modules()):
        module.train()
        return
    module.training = training.get(module, module.training)
    for child in module.children():
        _set_modes(child, training)


def state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Put back what a forward pass writes into buffers, such as counters."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before:
                put(buffer, before[name])


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a parameter or a buffer where it is another: not every buffer can be written to.

    One whose shape has changed stays as it is; it cannot be what a run changes.
    """
    if tensor.shape == value.shape and not torch.equal(tensor, value):
        tensor.copy_(value)


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Draws from torch's generators are the seed's inside, and as if nothing had been drawn afterwards."""
    devices = {value.device.index for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices if torch.cuda.is_available() else ()):
        # Of the devices whose generators come back: torch.manual_seed would seed all.
        torch.default_generator.manual_seed(seed)
        for device in devices if torch.cuda.is_available() else ():
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def changing(model: nn.Module, prunable: set[str], settings: Settings) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a run may change; forward passes of some networks change buffers too."""
    everything = any(step is not None and step.parameters == "all" for step in (settings.step, settings.polish))
    for name, value in model.named_parameters():
        if name in prunable or everything:
            yield name, value
    yield from model.named_buffers()
