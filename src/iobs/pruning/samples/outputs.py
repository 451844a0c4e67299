"""Outputs of a model: logits, class axis, labels and padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor, nn

from iobs.core.late import library_object
from iobs.errors import CalibrationError
from iobs.pruning.samples.batches import Batch, inputs, position_count, positions


def attended(model: nn.Module, batch: Batch) -> Tensor | None:
    """Mask of the positions that are not padding, (samples, positions) bool.

    Returns None without an attention mask, and for encoder-decoder models, whose mask covers the encoder only.
    """
    arguments = inputs(batch)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    mask = arguments.get("attention_mask") if isinstance(arguments, Mapping) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None


def attended_count(model: nn.Module, batch: Batch) -> int:
    """Number of positions that are not padding; for data without positions the number of samples."""
    mask = attended(model, batch)
    return position_count(batch) if mask is None else int(mask.sum())


def is_by_position(scores: Tensor, batch: Batch) -> bool:
    """True if a model's scores have an output for every position of text; False if they have one for each sample."""
    return positions(batch) > 1 and scores.ndim > 2


def unpadded(values: Tensor, mask: Tensor | None) -> Tensor:
    """Drop padded positions: (samples, positions, channels) -> (count, channels). Other shapes are unchanged."""
    if mask is None or values.ndim != 3 or values.shape[:2] != mask.shape:
        return values
    return values[mask.to(values.device)]


def _refuse_classes(labels: Tensor, classes: int) -> None:
    """Raise if floating labels, one for each distribution, are numbers of classes."""
    if bool(((labels >= 0) & (labels < classes) & (labels == labels.round())).all()):
        raise CalibrationError(
            f"The labels are numbers of classes, {tuple(labels.shape)} for scores of {classes} classes, but of type "
            f"{labels.dtype}, which means measured numbers; give labels.long()."
        )


def returns_states(model: nn.Module) -> bool:
    """True if a model of transformers has no head, as an encoder of texts: its outputs are hidden states."""
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return False
    names = "MODEL_MAPPING", "MODEL_FOR_TEXT_ENCODING_MAPPING"
    headless = [library_object("transformers", name).get(type(model.config), ()) for name in names]
    return any(kind in classes if isinstance(classes, tuple) else kind is classes for classes in headless)


def class_axis(scores: Tensor, batch: Batch, model: nn.Module | None = None) -> int | None:
    """The dimension of the classes in a model's scores; None if the outputs are numbers, not a distribution.

    Outputs are numbers if they are hidden states, if there is one output, or if the labels are floating. Without labels
    they are numbers if the scores have the shape of a floating input. The shape of integer labels gives the dimension
    of the classes. Without them it is the last dimension, or the second of four or more dimensions, as for pixels.

    Args:
        scores: of the batch.
        batch: with its labels, if there are any.
        model: whose scores they are; None: the scores are no hidden states.

    Raises:
        CalibrationError: numbers of classes are given as floating labels.
    """
    if scores.ndim < 2 or (model is not None and returns_states(model)):
        return None
    arguments, labels = inputs(batch), targets(batch)
    axis = 1 if scores.ndim > 3 else scores.ndim - 1
    if labels is not None and labels.is_floating_point():
        if scores.shape[axis] > 1 and labels.shape in (scores.shape[:-1], scores.shape[:1] + scores.shape[2:]):
            _refuse_classes(labels, scores.shape[axis])
        return None
    if labels is not None and labels.shape == scores.shape[:-1]:
        axis = scores.ndim - 1
    elif labels is not None and labels.shape == scores.shape[:1] + scores.shape[2:]:
        axis = 1
    elif (
        labels is None
        and isinstance(arguments, Tensor)
        and arguments.is_floating_point()
        and arguments.shape == scores.shape
    ):
        return None
    return axis if scores.shape[axis] > 1 else None


def targets(batch: Batch) -> Tensor | None:
    """The labels of a batch: the entry "labels" of a mapping, the second entry of a tuple, or None."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    else:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return labels if isinstance(labels, Tensor) else None


def tensors_of(output: object) -> list[Tensor]:
    """The tensors of a model's output, also those inside tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        return [output]
    opened = _opened(output)
    values: Iterable[object] = opened.values() if isinstance(opened, Mapping) else ()
    values = opened if isinstance(opened, (tuple, list)) else values
    return [tensor for value in values for tensor in tensors_of(value)]


def _opened(output: object) -> object:
    """A dataclass as a mapping of its fields; other outputs as they are."""
    if isinstance(output, (Mapping, type)) or not is_dataclass(output):
        return output
    return {field.name: getattr(output, field.name) for field in fields(output)}


def logits(output: object) -> Tensor:
    """The logits in a model's output: the entry "logits", otherwise its first tensor that is not the loss.

    Tuples and mappings inside are opened if there is no tensor beside them.

    The loss is the entry "loss", or a tensor without dimensions before others.

    Raises:
        CalibrationError: the output holds no tensor.
    """
    output = _opened(output)
    if isinstance(output, Tensor):
        return output
    kind = type(output).__name__
    if isinstance(output, Mapping):
        if "logits" in output:
            return logits(output["logits"])
        output = tuple(value for key, value in output.items() if key != "loss")
    values = output if isinstance(output, (tuple, list)) else ()
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors:
        return next((tensor for tensor in tensors if tensor.ndim), tensors[0])
    inner = next((value for value in values if tensors_of(value)), None)
    if inner is None:
        raise CalibrationError(
            f"The model returned a {kind} without a tensor in it. Return a tensor, or a tuple, a mapping or a "
            "dataclass with one."
        )
    return logits(inner)
