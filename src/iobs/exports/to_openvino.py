"""OpenVINO: the intermediate representation, a graph in XML and its weights.

OpenVINO reads the graph of the ONNX export with weights of 32 bits. Then each matrix on a grid is replaced by a
constant of type i4 or i8, which the graph multiplies by its scales. There is no zero point, so a zero stays a zero.

Operations: https://docs.openvino.ai/2025/documentation/openvino-ir-format/operation-sets.html.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
from torch import Tensor

from iobs.errors import ModelError, first_line
from iobs.exports.source import Codes, ExportSource, Foreign, LayerMatrix, Written, choose_codes, in_pairs, needed
from iobs.exports.to_onnx import FILE as GRAPH
from iobs.exports.to_onnx import traced

FILE = "openvino_model.xml"


def write_openvino(source: ExportSource, directory: Path) -> list[Written]:
    """Write openvino_model.xml and openvino_model.bin.

    Raises:
        ModelError: a package is not installed, the inputs of the model are unknown, torch cannot trace it, or OpenVINO
            cannot read the graph.
    """
    openvino, onnx = needed("openvino", "openvino"), needed("onnx", "openvino")
    opset = needed("openvino.opset13", "openvino")
    between = directory / GRAPH
    graph = traced(source)
    coded, written = _freed(onnx, graph, source)
    onnx.save_model(graph, str(between), save_as_external_data=True, location=f"{GRAPH}_data")
    try:
        model = openvino.convert_model(str(between))
    except Exception as error:  # a RuntimeError in most cases
        raise ModelError(f"OpenVINO cannot read the graph of {source.model.source}: {first_line(error)}") from error
    for parameter in model.get_parameters():
        if parameter.friendly_name in coded:
            parameter.output(0).replace(_product(openvino, opset, *coded[parameter.friendly_name]).output(0))
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    openvino.save_model(model, str(directory / FILE), compress_to_fp16=False)
    del model
    for file in directory.glob(f"{GRAPH}*"):
        file.unlink()
    source.copy_files(directory)
    return written


def _freed(
    onnx: ModuleType, graph: Foreign, source: ExportSource
) -> tuple[dict[str, tuple[LayerMatrix, Codes]], list[Written]]:
    """Make the matrices with codes inputs of the graph: OpenVINO folds constants into others when it reads a graph.

    Returns:
        The matrices and their codes by the names of these inputs, and the records of all matrices.
    """
    stored = {tensor.name: tensor for tensor in graph.graph.initializer}
    coded, written = {}, []
    for matrix in source.matrices():
        constant = stored.get(f"model.{matrix.name}")
        codes = None if constant is None else choose_codes(matrix.rows, source.bits)
        if codes is None or constant is None:
            written.append(matrix.written("float32"))
            continue
        graph.graph.initializer.remove(constant)
        graph.graph.input.append(onnx.helper.make_tensor_value_info(constant.name, constant.data_type, constant.dims))
        coded[constant.name] = matrix, codes
        written.append(matrix.written_as(codes))
    return coded, written


def _product(openvino: ModuleType, opset: ModuleType, matrix: LayerMatrix, coded: Codes) -> Foreign:
    """The operations that compute a matrix: groups of equal width at once, a shorter last group beside them."""
    rows, columns = coded.codes.shape
    full = columns // coded.group * coded.group
    parts = []
    for first, last, group in ((0, full, coded.group), (full, columns, columns - full)):
        if first == last:
            continue
        groups = (last - first) // group
        codes = coded.codes[:, first:last].reshape(rows, groups, group)
        scales = coded.scales[:, first // coded.group :][:, :groups]
        wide = opset.convert(_integers(openvino, codes, coded.bits), "f32")
        scaled = opset.multiply(wide, opset.constant(scales.unsqueeze(2).numpy()))
        parts.append(opset.reshape(scaled, np.array([rows, last - first]), False))
    product = parts[0] if len(parts) == 1 else opset.concat(parts, 1)
    if matrix.transposed:
        product = opset.transpose(product, np.array([1, 0]))
    if matrix.parameter.ndim != 2:  # a kernel of a convolution
        product = opset.reshape(product, np.array(matrix.parameter.shape), False)
    return product


def _integers(openvino: ModuleType, codes: Tensor, bits: int) -> Foreign:
    """A constant of codes."""
    if bits == 4:
        tensor = openvino.Tensor(in_pairs(codes), openvino.Shape(codes.shape), openvino.Type.i4)
    else:
        tensor = openvino.Tensor(codes.contiguous().numpy())
    return openvino.op.Constant(tensor, shared_memory=False)
