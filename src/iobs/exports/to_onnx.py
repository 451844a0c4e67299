"""ONNX: graphs that ONNX Runtime and many other runtimes run.

Matrices of 8 or 4 bits are integers behind a `DequantizeLinear` with scales and no zero point, so that a zero stays a
zero. Activations stay floating point numbers. Blocks of columns with a scale each need opset 21.

Operator: https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iobs.core.modes import in_eval_mode, silenced
from iobs.errors import ModelError, first_line
from iobs.exports.source import (
    Example,
    ExportSource,
    Foreign,
    LayerMatrix,
    Written,
    choose_codes,
    in_pairs,
    is_pretrained,
    needed,
)
from iobs.pruning.samples.outputs import logits

_TOKENS = 8  # of the example of a language model; other lengths work too
FILE = "model.onnx"
_OPSET = 21
_LARGE = 1_500_000_000  # bytes from which the weights lie in a file of their own: a graph holds 2 GB at most


# ---- the graph: one forward pass with tensors in and tensors out, and an example of its inputs
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


# ---- the file
def write_onnx(source: ExportSource, directory: Path) -> list[Written]:
    """Write model.onnx, and the tokenizer and configuration of a model of transformers.

    Raises:
        ModelError: a package is not installed, the inputs of the model are unknown, or torch cannot trace it.
    """
    onnx = needed("onnx", "onnx")
    graph = traced(source)
    written = [_replaced(onnx, graph, matrix, source.bits) for matrix in source.matrices()]
    large = graph.ByteSize() > _LARGE
    onnx.save_model(graph, str(directory / FILE), save_as_external_data=large, location=f"{FILE}_data")
    source.copy_files(directory)
    return written


def traced(source: ExportSource) -> Foreign:
    """The graph of a model in ONNX (`onnx.ModelProto`) with weights of 32 bits.

    A weight has the name of its parameter after "model.".

    Raises:
        ModelError: as `write_onnx`.
    """
    needed("onnxscript", "onnx")
    inputs = inputs_of(source)
    names = tuple(inputs.tensors)
    dims = {name: torch.export.Dim(name) for free in inputs.moving.values() for name in free.values()}
    moving = tuple({axis: dims[free] for axis, free in inputs.moving[name].items()} for name in names)
    with silenced("torch.onnx"), in_eval_mode(source.module):
        graph = ForwardGraph(single(source.module), inputs).eval()
        _try(graph, inputs, source.model.source)
        try:
            program = torch.onnx.export(
                _captured(graph, tuple(inputs.tensors.values()), (moving,)),
                tuple(inputs.tensors.values()),
                dynamic_shapes=(moving,),
                input_names=names,
                output_names=("output",),
                opset_version=_OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # torch raises many types
            raise ModelError(f"torch cannot trace {source.model.source} for ONNX: {first_line(error)}") from error
    assert program is not None
    model = program.model_proto
    _warn_of_fixed(model, inputs.moving)
    for node in model.graph.node:  # stack traces: most of the bytes of a small model, and paths of this machine
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    return model


def _try(graph: ForwardGraph, inputs: Inputs, name: str) -> None:
    """Run the graph once: of an input that does not fit, the tracers say little.

    Raises:
        ModelError: the model does not take the inputs; says why.
    """
    try:
        with torch.no_grad():
            graph(*inputs.tensors.values())
    except Exception as error:  # the model's own
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in inputs.tensors.items())
        raise ModelError(f"{name} does not take the inputs {shapes}: {first_line(error)}") from error


def _warn_of_fixed(model: Foreign, moving: Mapping[str, Mapping[int, str]]) -> None:
    """Warn of dimensions of inputs that the tracer took for constants: the file runs with these sizes alone."""
    fixed = [
        f"{tensor.name}: {name} = {tensor.type.tensor_type.shape.dim[axis].dim_value}"
        for tensor in model.graph.input
        for axis, name in moving.get(tensor.name, {}).items()
        if not tensor.type.tensor_type.shape.dim[axis].dim_param
    ]
    if fixed:
        warnings.warn(
            f"The graph runs with these sizes of its inputs alone: {', '.join(fixed)}. torch could not trace the model "
            "for other sizes.",
            stacklevel=2,
        )


def _captured(graph: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> nn.Module | torch.export.ExportedProgram:
    """The graph as captured by torch.export; itself if only the exporter of ONNX can capture it.

    The exporter itself never reads the code of a model (strict=True), and takes len(inputs) for a constant.
    """
    for strict in (False, True):
        with silenced("torch._guards", logging.CRITICAL):  # an attempt that fails also logs its traceback
            try:
                return torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=strict)
            except Exception:  # torch raises many types
                continue
    return graph


def _replaced(onnx: ModuleType, model: Foreign, matrix: LayerMatrix, bits: int | None) -> Written:
    """Replace a matrix in the graph by integers and their scales, where it has such."""
    stored = next((tensor for tensor in model.graph.initializer if tensor.name == f"model.{matrix.name}"), None)
    coded = None if stored is None else choose_codes(matrix.rows, bits)
    if coded is None or stored is None:
        return matrix.written("float32")
    model.graph.initializer.remove(stored)
    axis = 0 if matrix.transposed else 1
    codes = coded.codes.t() if matrix.transposed else coded.codes
    scales = coded.scales.t() if matrix.transposed else coded.scales
    whole = scales.shape[axis] == 1  # one scale for each output
    kind = onnx.TensorProto.INT4 if coded.bits == 4 else onnx.TensorProto.INT8
    from_array = onnx.numpy_helper.from_array
    model.graph.initializer.append(_integers(onnx, f"{stored.name}.codes", codes, kind))
    scale = np.ascontiguousarray(scales.flatten().numpy() if whole else scales.numpy())
    model.graph.initializer.append(from_array(scale.astype(np.float32), f"{stored.name}.scales"))
    blocks = {"axis": 1 - axis} if whole else {"axis": axis, "block_size": coded.group}
    shape = tuple(matrix.parameter.shape)
    same = tuple(codes.shape) == shape
    result = stored.name if same else f"{stored.name}.matrix"
    nodes = [
        onnx.helper.make_node("DequantizeLinear", [f"{stored.name}.codes", f"{stored.name}.scales"], [result], **blocks)
    ]
    if not same:  # a kernel of a convolution
        model.graph.initializer.append(from_array(np.array(shape, dtype=np.int64), f"{stored.name}.shape"))
        nodes.append(onnx.helper.make_node("Reshape", [result, f"{stored.name}.shape"], [stored.name]))
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    return matrix.written_as(coded)


def _integers(onnx: ModuleType, name: str, codes: Tensor, kind: int) -> Foreign:
    """Codes as a tensor of the file."""
    values = in_pairs(codes) if kind == onnx.TensorProto.INT4 else codes.contiguous().numpy()
    return onnx.helper.make_tensor(name, kind, tuple(codes.shape), values.tobytes(), raw=True)
