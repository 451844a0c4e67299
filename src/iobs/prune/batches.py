"""Calibration batches: a tensor, a tuple of inputs and targets, or a mapping as Hugging Face models take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError, IOBSError, NonFiniteError, is_out_of_memory

Batch = Any  # Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]

# What networks raise when they are called with what they cannot take.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError)


def collect(batches: Iterable[Batch] | Tensor | Mapping[str, Any]) -> list[Batch]:
    """All batches as a list.

    Raises:
        CalibrationError: there is none, one is empty or of a type that models cannot take, or a single (inputs,
            targets) stands where a list of batches should.
        NonFiniteError: NaN or infinity in a batch; names the batch.
    """
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    if isinstance(batches, tuple) and _is_pair(batches):
        raise CalibrationError("A single batch (inputs, targets) goes into a list: [(inputs, targets)].")
    try:
        result = list(batches)
    except TypeError:
        raise CalibrationError(
            f"Calibration data are batches of inputs, a list of tensors say; got {type(batches).__name__}."
        ) from None
    if not result:
        raise CalibrationError("There is no calibration data: give at least one batch of inputs.")
    for index, batch in enumerate(result):
        if size(batch, index) == 0:
            raise CalibrationError(f"Calibration batch {index} is empty.")
        for tensor in tensors(batch):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"Calibration batch {index} holds NaN or infinity; leave it out or repair it.")
    return result


def _is_pair(batches: tuple[Any, ...]) -> bool:
    """Whether a tuple is one batch (inputs, targets) rather than several batches of inputs, as `Tensor.split` makes."""
    kinds = {(one.ndim, one.dtype) for one in batches if isinstance(one, Tensor)}
    return len(kinds) > 1 or (len(batches) == 2 and batches[0] is batches[1])


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, those of a mapping within a tuple too."""
    if isinstance(batch, Tensor):
        return [batch]
    values: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch
    return [tensor for value in values if isinstance(value, (Tensor, Mapping)) for tensor in tensors(value)]


def size(batch: Batch, index: int = 0) -> int:
    """Number of samples of a batch: the first dimension that its tensors share."""
    if not isinstance(batch, (Tensor, Mapping, tuple, list)):
        raise CalibrationError(
            f"Calibration batch {index} is a {type(batch).__name__}; "
            "a batch is a tensor, a tuple (inputs, targets), or a mapping of tensors."
        )
    if isinstance(batch, (tuple, list)) and any(isinstance(entry, (tuple, list)) and tensors(entry) for entry in batch):
        raise CalibrationError(
            f"Calibration batch {index} holds tensors in a tuple within a tuple; name a model's inputs in a mapping "
            "instead: ({name: tensor, ...}, targets)."
        )
    sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.ndim}
    if len(sizes) != 1:
        raise CalibrationError(
            f"The tensors of calibration batch {index} do not agree on a number of samples: {sizes}."
        )
    return sizes.pop()


def positions(batch: Batch) -> int:
    """How many places of a sample a model answers for: its tokens, or 1 where it is no text."""
    rows = (tensor for tensor in tensors(inputs(batch)) if tensor.ndim == 2 and not tensor.is_floating_point())
    return max((tensor.shape[1] for tensor in rows), default=1)


def attended(model: nn.Module, batch: Batch) -> Tensor | None:
    """Which positions are no padding, (samples, positions) bool; None where the batch does not say.

    Nor does it where an encoder's mask says nothing of the decoder's positions.
    """
    given = inputs(batch)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    mask = given.get("attention_mask") if isinstance(given, Mapping) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None


def unpadded(values: Tensor, mask: Tensor | None) -> Tensor:
    """What is no padding of (samples, positions, channels), as (count, channels); as it is where laid out otherwise."""
    if mask is None or values.ndim != 3 or values.shape[:2] != mask.shape:
        return values
    return values[mask.to(values.device)]


def take(batch: Batch, rows: Tensor) -> Batch:
    """Some samples of a batch."""
    return _map(batch, lambda tensor: tensor[rows.to(tensor.device)] if tensor.ndim else tensor)


def first_sample(batch: Batch) -> Batch:
    """The first sample of a batch, as a batch of one."""
    return take(batch, torch.zeros(1, dtype=torch.int64))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    return _map(batch, lambda tensor: tensor.to(device))


def _map(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return change(batch)

    def changed(value: Any) -> Any:
        return _map(value, change) if isinstance(value, (Tensor, Mapping)) else value

    if isinstance(batch, Mapping):
        return {key: changed(value) for key, value in batch.items()}
    return tuple(map(changed, batch))


def join(batches: Sequence[Batch]) -> Batch:
    """The samples of several batches as one; what is no tensor is taken from the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat([*batches]) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(
            join(entries) if isinstance(entries[0], (Tensor, Mapping)) else entries[0]
            for entries in zip(*batches, strict=True)
        )
    return first


def layout(batch: Batch) -> tuple[Any, ...]:
    """The names and shapes of a sample's tensors."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[1:])
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return tuple((name, layout(value)) for name, value in entries if isinstance(value, (Tensor, Mapping)))


def inputs(batch: Batch) -> Batch:
    """What the model is called with: a tuple's first entry, otherwise the whole batch."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def forward(model: nn.Module, batch: Batch) -> Any:
    """Call the model as its kind of batch asks for, on its device, with copies: it may work on its input in place."""
    device = next(model.parameters()).device
    given = _map(inputs(batch), lambda tensor: tensor.to(device, copy=True))
    return model(**given) if isinstance(given, Mapping) else model(given)


def shapes(batch: Batch) -> str:
    """The shapes and dtypes of a batch's tensors, for a message."""
    found = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors(batch))
    return f"tensors of shape {found}"


def called(model: nn.Module, batch: Batch, name: str, kind: type[IOBSError]) -> Any:
    """As `forward`; what the model refuses is an error of the given kind, with the batch's name and its complaint."""
    try:
        return forward(model, batch)
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        raise kind(f"The model cannot take {name}: {type(error).__name__}: {error}") from error


@torch.no_grad()
def require_all_accepted(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Call the model with the first sample of the first batch of each kind: those of other shapes or dtypes differ.

    Raises:
        CalibrationError: the model cannot take it; gives the batch's number, the shapes and the model's own complaint.
    """
    checked = set()
    for number, batch in enumerate(batches):
        kind = layout(batch), tuple(tensor.dtype for tensor in tensors(batch))
        if kind in checked:
            continue
        checked.add(kind)
        called(model, first_sample(batch), f"calibration batch {number}, {shapes(batch)}", CalibrationError)


def class_axis(scores: Tensor, batch: Batch) -> int | None:
    """Which dimension of a network's scores are its classes; None where its outputs are numbers and no distribution.

    Integer targets show it by their shape. Numbers are a single output, outputs whose targets are real numbers, and
    without targets what has the shape of its input. Else the last dimension is taken; of four or more the second, as
    it is for pixels.
    """
    if scores.ndim < 2:
        return None
    given, wanted = inputs(batch), targets(batch)
    axis = 1 if scores.ndim > 3 else scores.ndim - 1
    if wanted is not None and wanted.is_floating_point():
        return None
    if wanted is not None and wanted.shape == scores.shape[:-1]:
        axis = scores.ndim - 1
    elif wanted is not None and wanted.shape == scores.shape[:1] + scores.shape[2:]:
        axis = 1
    elif wanted is None and isinstance(given, Tensor) and given.is_floating_point() and given.shape == scores.shape:
        return None
    return axis if scores.shape[axis] > 1 else None


def targets(batch: Batch) -> Tensor | None:
    """What a batch says that the outputs should be; None where it does not."""
    if isinstance(batch, Mapping):
        found = batch.get("labels")
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def logits(output: Any) -> Tensor:
    """The tensor that a model's answer is about: its logits, or its first or only tensor.

    Raises:
        CalibrationError: the output holds no tensor.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if "logits" in output:
            return logits(output["logits"])
        output = tuple(value for key, value in output.items() if key != "loss")
    for value in output if isinstance(output, (tuple, list)) else ():
        if isinstance(value, Tensor):
            return value
    raise CalibrationError(f"The model returned a {type(output).__name__} without a tensor in it.")
