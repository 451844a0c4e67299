"""The graph of a model: one forward pass with tensors in and tensors out, and an example of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.exports.source import Example, ExportSource, is_pretrained
from iobs.pruning.samples.outputs import logits

_TOKENS = 8  # of the example of a language model; other lengths work too


@dataclass(frozen=True)
class Inputs:
    """Inputs of a graph.

    Attributes:
        tensors: by name.
        moving: dimensions of each tensor, by name, whose size is free in the graph.
        named: the model gets the tensors by name; otherwise by position.
    """

    tensors: dict[str, Tensor]
    moving: dict[str, dict[int, str]]
    named: bool = True


class ForwardGraph(nn.Module):
    """Forward pass of a model with plain tensors as outputs: logits, or the last hidden state."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.names, self.named = model, tuple(inputs.tensors), inputs.named
        self.fixed = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}

    def forward(self, *tensors: Tensor) -> Tensor:
        """The logits, or the first output that is not the loss, of the model for these inputs."""
        if not self.named:
            output = self.model(*tensors)
        else:
            output = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)
        return logits(_first_with_tensors(output))


def _first_with_tensors(output: object) -> object:
    """The first output inside an output that holds no tensor of its own; other outputs as they are."""
    values = [*output.values()] if isinstance(output, Mapping) else output
    if not isinstance(values, (tuple, list)) or not values or any(isinstance(value, Tensor) for value in values):
        return output
    return _first_with_tensors(values[0])


def inputs_of(source: ExportSource) -> Inputs:
    """The inputs of a model: the example of the user, or one that the configuration tells.

    Raises:
        ModelError: neither is there.
    """
    if source.example is not None:
        tensors = {name: _two(_single(tensor)) for name, tensor in _named(source.example).items()}
        free = {name: {0: "batch"} if tensor.ndim else {} for name, tensor in tensors.items()}
        return Inputs(tensors, free, isinstance(source.example, Mapping))
    shape = (getattr(source.module, "pretrained_cfg", None) or {}).get("input_size")  # of timm
    if shape is not None:
        return Inputs({"input": torch.zeros(2, *shape)}, {"input": {0: "batch"}}, named=False)
    config = getattr(source.module, "config", None)
    described = hasattr(config, "image_size") or hasattr(config, "vocab_size")  # ResNet, for one, has neither
    if not is_pretrained(source.module) or config is None or not described:
        raise ModelError(
            "The inputs of this model are unknown. For images say --shape 3,224,224 on the command line. In Python, "
            "give an example of one forward pass: iobs.export(model, directory, target, example=inputs)."
        )
    if hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return Inputs({"pixel_values": torch.zeros(2, config.num_channels, size, size)}, {"pixel_values": {0: "batch"}})
    ids = torch.arange(2 * _TOKENS).reshape(2, _TOKENS) % config.vocab_size
    words = {0: "batch", 1: "tokens"}
    if source.model.task == "causal-lm":
        return Inputs({"input_ids": ids}, {"input_ids": words})
    return Inputs(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"input_ids": words, "attention_mask": words}
    )


def _single(tensor: Tensor) -> Tensor:
    """A tensor of an example as the model is traced: on the CPU, floating point numbers in 32 bits."""
    return tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu()


def _two(tensor: Tensor) -> Tensor:
    """Repeat a batch of one sample: the tracer takes a dimension of size 1 for a constant."""
    return tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim and len(tensor) == 1 else tensor


def _named(example: Example) -> dict[str, Tensor]:
    if isinstance(example, Mapping):
        return dict(example)
    tensors = (example,) if isinstance(example, Tensor) else tuple(example)
    return {"input" if len(tensors) == 1 else f"input_{number}": tensor for number, tensor in enumerate(tensors)}


def single(module: nn.Module) -> nn.Module:
    """The module on the CPU in float32, a copy where it is not: few runtimes have all operators in 16 bits."""
    tensors = (*module.parameters(), *module.buffers())
    wide = all(tensor.dtype == torch.float32 or not tensor.is_floating_point() for tensor in tensors)
    return module if wide and all(tensor.is_cpu for tensor in tensors) else copy.deepcopy(module).cpu().float()
