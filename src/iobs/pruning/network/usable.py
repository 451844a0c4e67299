"""Models that a run can prune; all others are refused in one sentence before any work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError, ModelError
from iobs.pruning.network.layers import is_compressed, joined, library_class
from iobs.pruning.network.modes import state


def require_usable(model: object, *, in_memory: bool = True, removes_units: bool = False) -> None:
    """Raise unless iobs can read, run and write the weights of a model.

    Args:
        model: what the user gave as the model.
        in_memory: False if a store holds the weights, and the model's own tensors are without values.
        removes_units: refuse also wrappers that remember the shapes of the parameters.

    Raises:
        ModelError: it is no module, compiled by torch.jit or torch.export, split over processes, made in inference
            mode, without values (meta device), or has stored matrices of `iobs.accelerate`.
        LayerSelectionError: a lazy layer was never called.
    """
    require_module(model)
    assert isinstance(model, nn.Module)
    for path, module in model.named_modules():
        if reason := _unusable(module, removes_units):
            raise ModelError(f"{path or 'The model'} is a {type(module).__name__}: {reason}")
    require_shapes(model)
    for name, tensor in _tensors(model):
        if isinstance(tensor, library_class("torch.distributed.tensor", "DTensor")):
            raise ModelError(
                f"{name} is split over processes (fully_shard or tensor parallelism): prune the model before it is "
                "split, then split it, and call iobs.keep_sparse to train it further."
            )
        if tensor.is_meta and in_memory:
            raise ModelError(
                f"{name} has no values here (meta device; accelerate's offload, or an empty model): load the whole "
                "model into main memory, without device_map. If it does not fit on the device, prune an "
                "OffloadedStore of it, or use --low-memory on the command line."
            )
        if tensor.is_inference():
            raise ModelError(
                f"{name} was made in inference mode, so that it cannot be trained or changed: copy the model outside "
                "of torch.inference_mode, model = copy.deepcopy(model), and prune the copy."
            )
    require_unstored(model)


def _unusable(module: nn.Module, removes_units: bool) -> str | None:
    """The reason why a model with this module is refused, and what to do; None if it is not."""
    if isinstance(module, torch.jit.ScriptModule):
        if next(module.parameters(), None) is not None:
            return "torch.jit hides the layers inside. Prune the Python modules, and script or trace them afterwards."
    elif any(kind.__module__.startswith("torch.export") for kind in type(module).__mro__):
        return "an exported program is a fixed graph. Prune the Python module, and export it afterwards."
    elif isinstance(module, library_class("torch.distributed.fsdp", "FullyShardedDataParallel")):
        return "it splits and flattens the parameters. Prune the model before it is wrapped."
    elif isinstance(module, library_class("deepspeed.runtime.engine", "DeepSpeedEngine")):
        return "it splits and flattens the parameters. Prune the model before deepspeed.initialize."
    elif removes_units and isinstance(module, nn.parallel.DistributedDataParallel):
        return "it reduces gradients of the shapes that it was built with. Prune its .module, then wrap that again."
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes of a module, such as tables of a first call."""
    yield from state(model)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield joined(path, name), value


def without_shape(model: nn.Module) -> list[str]:
    """The names of parameters of lazy layers that were never called."""
    return [name for name, value in model.named_parameters() if isinstance(value, nn.UninitializedParameter)]


def require_module(model: object) -> None:
    """Raise unless a model is a module.

    Raises:
        ModelError: it is not.
    """
    if isinstance(model, library_class("torch.export", "ExportedProgram")):
        raise ModelError("An exported program is a fixed graph. Prune the Python module, and export it afterwards.")
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        raise ModelError(f"The model must be an instance of torch.nn.Module, got {got}.")


def require_shapes(model: nn.Module) -> None:
    """Raise if a parameter waits for the first call of a lazy layer.

    Raises:
        LayerSelectionError: one does.
    """
    if without := without_shape(model):
        raise LayerSelectionError(f"{without[0]!r} has no shape yet; call the model on a batch first.")


def require_unstored(
    model: nn.Module, advice: str = "No solver changes them. Prune the dense model, and accelerate it last."
) -> None:
    """Raise if a layer is a stored matrix.

    Args:
        model: the network.
        advice: what to do otherwise, in a sentence or two.

    Raises:
        ModelError: a layer is one.
    """
    stored = (
        library_class("iobs.inference.modules", "StoredLayer"),
        library_class("iobs.inference.offsets", "OffsetLinear"),
    )
    names = [
        path
        for path, module in model.named_modules()
        if isinstance(module, stored) or any(map(is_compressed, module.parameters(recurse=False)))
    ]
    if names:
        raise ModelError(
            f"{len(names)} layers of the model, {names[0]!r} first, are stored matrices of iobs.accelerate or of a "
            f"packed file. {advice}"
        )
