"""Formats of other runtimes in which models are exported; `iobs.exports` has their writers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExportFormat:
    """One format.

    Attributes:
        bits: numbers of bits that the format can hold.
        weights: patterns of the files that hold the weights and the graph.
        what: the runtime that reads it.
        packages: names of the optional packages that it is written with.
    """

    bits: tuple[int, ...]
    weights: tuple[str, ...]
    what: str
    packages: tuple[str, ...] = ()


FORMATS = {
    "gguf": ExportFormat((4, 8, 16, 32), ("*.gguf",), "llama.cpp", ("gguf",)),
    "nemotron-nas": ExportFormat((16, 32), ("*.safetensors",), "vLLM, mlx-lm, transformers"),
    "onnx": ExportFormat((4, 8), ("*.onnx", "*.onnx_data"), "ONNX Runtime", ("onnx", "onnxscript")),
    "compressed-tensors": ExportFormat((4, 8), ("*.safetensors",), "transformers, vLLM", ("compressed_tensors",)),
    "openvino": ExportFormat((4, 8), ("openvino_model.*",), "OpenVINO", ("openvino", "onnx", "onnxscript")),
}
