"""OpenVINO: the intermediate representation, a graph in XML and its weights.

OpenVINO reads the graph of the ONNX export with weights of 32 bits. Then each matrix on a grid is replaced by a
constant of type i4 or i8, which the graph multiplies by its scales. There is no zero point, so a zero stays a zero.

Operations: https://docs.openvino.ai/2025/documentation/openvino-ir-format/operation-sets.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from torch import Tensor

from iobs.errors import ModelError, first_line
from iobs.exports.record import Written
from iobs.exports.requirements import Foreign, needed
from iobs.exports.source import Source, flat
from iobs.exports.to_onnx import FILE as GRAPH
from iobs.exports.to_onnx import traced
from iobs.exports.values import Codes, found_codes, in_pairs

FILE = "openvino_model.xml"


@dataclass(frozen=True)
class _Matrix:
    """Codes of a parameter, its shape, and True if it is stored transposed."""

    codes: Codes
    shape: tuple[int, ...]
    transposed: bool


def write_openvino(source: Source, directory: Path) -> list[Written]:
    """Write openvino_model.xml and openvino_model.bin.

    Raises:
        ModelError: a package is not installed, the inputs of the model are unknown, torch cannot trace it, or OpenVINO
            cannot read the graph.
    """
    openvino, onnx = needed("openvino", "openvino"), needed("onnx", "openvino")
    opset = needed("openvino.opset13", "openvino")
    between = directory / GRAPH
    graph = traced(source)
    found, written = _freed(onnx, graph, source)
    onnx.save_model(graph, str(between), save_as_external_data=True, location=f"{GRAPH}_data")
    try:
        model = openvino.convert_model(str(between))
    except Exception as error:  # a RuntimeError in most cases
        raise ModelError(f"OpenVINO cannot read the graph of {source.model.source}: {first_line(error)}") from error
    for parameter in model.get_parameters():
        matrix = found.get(parameter.friendly_name)
        if matrix is not None:
            parameter.output(0).replace(_product(openvino, opset, matrix).output(0))
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    openvino.save_model(model, str(directory / FILE), compress_to_fp16=False)
    del model
    for file in directory.glob(f"{GRAPH}*"):
        file.unlink()
    source.copy_files(directory)
    return written


def _freed(onnx: ModuleType, graph: Foreign, source: Source) -> tuple[dict[str, _Matrix], list[Written]]:
    """Make the matrices with codes inputs of the graph: OpenVINO folds constants into others when it reads a graph.

    Returns:
        The matrices by the names of these inputs, and the records of all matrices.
    """
    held = dict(source.module.named_parameters())
    stored = {one.name: one for one in graph.graph.initializer}
    found, written = {}, []
    for name, transposed in source.matrices().items():
        weight, own = held[name].detach().cpu(), stored.get(f"model.{name}")
        codes = None if own is None else found_codes(flat(weight, transposed), source.bits)
        if codes is None or own is None:
            written.append(Written.of(name, "float32", weight, weight))
            continue
        graph.graph.initializer.remove(own)
        graph.graph.input.append(onnx.helper.make_tensor_value_info(own.name, own.data_type, own.dims))
        found[own.name] = _Matrix(codes, tuple(weight.shape), transposed)
        written.append(Written.of(name, f"int{codes.bits}", flat(weight, transposed), codes.weight))
    return found, written


def _product(openvino: ModuleType, opset: ModuleType, matrix: _Matrix) -> Foreign:
    """The operations that compute a matrix: groups of equal width at once, a shorter last group beside them."""
    found = matrix.codes
    rows, columns = found.codes.shape
    full = columns // found.group * found.group
    parts = []
    for first, last, group in ((0, full, found.group), (full, columns, columns - full)):
        if first == last:
            continue
        groups = (last - first) // group
        codes = found.codes[:, first:last].reshape(rows, groups, group)
        scales = found.scales[:, first // found.group :][:, :groups]
        wide = opset.convert(_integers(openvino, codes, found.bits), "f32")
        scaled = opset.multiply(wide, opset.constant(scales.unsqueeze(2).numpy()))
        parts.append(opset.reshape(scaled, np.array([rows, last - first]), False))
    product = parts[0] if len(parts) == 1 else opset.concat(parts, 1)
    if matrix.transposed:
        product = opset.transpose(product, np.array([1, 0]))
    if len(matrix.shape) != 2:  # a kernel of a convolution
        product = opset.reshape(product, np.array(matrix.shape), False)
    return product


def _integers(openvino: ModuleType, codes: Tensor, bits: int) -> Foreign:
    """A constant of codes."""
    if bits == 4:
        tensor = openvino.Tensor(in_pairs(codes), openvino.Shape(codes.shape), openvino.Type.i4)
    else:
        tensor = openvino.Tensor(codes.contiguous().numpy())
    return openvino.op.Constant(tensor, shared_memory=False)
