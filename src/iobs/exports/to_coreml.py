"""Core ML: an ML program whose pruned matrices are a bit mask and the values that are not zero.

coremltools writes it on any system; only macOS and iOS can run it. Batch norms are folded into the convolutions before
them, which changes values and keeps zeros.

Form: https://apple.github.io/coremltools/docs-guides/source/opt-pruning-overview.html.
"""

from __future__ import annotations

import logging
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from iobs.core.modes import in_eval_mode, silenced
from iobs.errors import ModelError, first_line
from iobs.exports.graph import ForwardGraph, Inputs, inputs_of, single
from iobs.exports.source import ExportSource, Foreign, LayerMatrix, Written, needed

FILE = "model.mlpackage"
_MOST = 64  # samples of a batch
_TOKENS = 2048  # of a text, at most
_LEAST_ZEROS = 0.1  # share of zeros from which a mask is worth its bits


def write_coreml(source: ExportSource, directory: Path) -> list[Written]:
    """Write model.mlpackage; weights have 16 bits if that is asked for, otherwise 32.

    Raises:
        ModelError: coremltools is not installed, the inputs of the model are unknown, or it cannot be converted.
    """
    with silenced("coremltools", logging.CRITICAL, redirect_stderr):
        tools = needed("coremltools", "coreml")
        optimize = needed("coremltools.optimize.coreml", "coreml")
        inputs = inputs_of(source)
        kind = "float16" if source.bits == 16 else "float32"
        try:
            model = _converted(tools, source, inputs, kind)
            masks = optimize.OpThresholdPrunerConfig(
                threshold=1e-30, minimum_sparsity_percentile=_LEAST_ZEROS, weight_threshold=1
            )
            model = optimize.prune_weights(model, optimize.OptimizationConfig(global_config=masks))
        except Exception as error:  # coremltools raises many types
            raise ModelError(f"coremltools cannot convert {source.model.source}: {first_line(error)}") from error
        model.save(str(directory / FILE))
        masks_in_file = _masks(tools, directory / FILE)
    source.copy_files(directory)
    return [_record(matrix, kind, masks_in_file) for matrix in source.matrices()]


def _converted(tools: ModuleType, source: ExportSource, inputs: Inputs, kind: str) -> Foreign:
    """The model in Core ML, for batches and texts of any length up to a limit."""
    ranges = {"batch": tools.RangeDim(1, _MOST), "tokens": tools.RangeDim(1, _TOKENS)}
    described = []
    for name, tensor in inputs.tensors.items():
        free = inputs.moving[name]
        shape = [ranges[free[axis]] if axis in free else size for axis, size in enumerate(tensor.shape)]
        dtype = np.float32 if tensor.is_floating_point() else np.int32
        described.append(tools.TensorType(name=name, shape=shape, dtype=dtype))
    with in_eval_mode(source.module), torch.no_grad(), silenced("transformers"):
        graph = ForwardGraph(single(source.module), inputs).eval()
        traced = torch.jit.trace(graph, tuple(inputs.tensors.values()), check_trace=False)  # type: ignore[no-untyped-call]
    return tools.convert(
        traced,
        inputs=described,
        convert_to="mlprogram",
        minimum_deployment_target=tools.target.iOS16,
        compute_precision=tools.precision.FLOAT16 if kind == "float16" else tools.precision.FLOAT32,
        skip_model_load=True,
    )


def _masks(tools: ModuleType, package: Path) -> list[Tensor]:
    """Masks of the matrices in the written file, flat: True where a value is stored."""
    model = tools.models.MLModel(str(package), skip_model_load=True)
    load = needed("coremltools.converters.mil.frontend.milproto.load", "coreml").load
    program = load(
        model.get_spec(),
        specification_version=model.get_spec().specificationVersion,
        file_weights_dir=model.weights_dir,
    )
    masks = []
    for function in program.functions.values():
        for operation in function.operations:
            if operation.op_type == "constexpr_sparse_to_dense":
                bits = np.unpackbits(operation.mask.val.view(np.uint8).flatten(), bitorder="little")
                masks.append(torch.from_numpy(bits[: int(np.prod(operation.outputs[0].shape))].astype(bool)))
    return masks


def _record(matrix: LayerMatrix, kind: str, masks: list[Tensor]) -> Written:
    """The record of a matrix; its mask in the file is the one with zeros at all of its zeros."""
    rounded = matrix.weight.to(getattr(torch, kind))
    nonzero = (rounded != 0).flatten()
    masked = any(torch.equal(mask, nonzero) for mask in masks)
    return matrix.written(f"{kind} with a bit mask" if masked else kind, rounded)
