"""Pruned models in the formats of other runtimes: `iobs.export`, and one file for each target of its table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import nn

from iobs.core.files import expanded
from iobs.core.specs import FORMATS, ExportFormat
from iobs.errors import ModelError
from iobs.exports.source import Example, Export, ExportSource, Written, needed, source_of
from iobs.exports.to_compressed_tensors import write_compressed_tensors
from iobs.exports.to_gguf import write_gguf
from iobs.exports.to_nemotron_nas import write_nemotron_nas
from iobs.exports.to_onnx import write_onnx
from iobs.exports.to_openvino import write_openvino
from iobs.models import LoadedModel, output_directory
from iobs.pruning.network.selection import require_unstored

__all__ = ["FORMATS", "WRITERS", "Export", "ExportFormat", "Written", "export", "require_packages"]


WRITERS: dict[str, Callable[[ExportSource, Path], list[Written]]] = {  # into an existing directory
    "gguf": write_gguf,
    "nemotron-nas": write_nemotron_nas,
    "onnx": write_onnx,
    "compressed-tensors": write_compressed_tensors,
    "openvino": write_openvino,
}


def require_packages(to: str) -> None:
    """Raise unless the packages of a target are installed, before a model is read.

    Raises:
        ModelError: a package is missing; the message has the command that installs it.
    """
    for package in FORMATS[to].packages:
        needed(package, to)


def export(
    model: nn.Module | LoadedModel | str | Path,
    path: str | Path,
    to: str,
    bits: int | None = None,
    example: Example | None = None,
    replaceable: Collection[str] = (),
) -> Export:
    """Write a pruned model in the format of another runtime. Zeros stay exact zeros.

    Weights on a grid (`iobs.Grid`) are written as their whole numbers and scales where the format has such a type.

    Args:
        model: a module, a `LoadedModel`, or the name of a model (a directory that `iobs prune` wrote).
        path: the output directory; it must not exist, or must be empty.
        to: name of the target, one of `iobs.exports.FORMATS`.
        bits: of the matrices of layers: 32, 16, 8 or 4, as far as the target has them. 8 and 4 round weights that are
            not on such a grid. Default: as few as hold a matrix exactly; floating point numbers otherwise.
        example: input of one forward pass, for targets that trace the model: a tensor, a tuple of positional arguments
            or a mapping of named ones. Default: made from the configuration of a model of transformers.
        replaceable: names that may already be in the output directory and will be replaced.

    Raises:
        ModelError: the target is unknown or cannot hold the model, or a package is not installed.
        NonFiniteError: a weight is NaN or infinite.
        OutputError: the output directory is not empty, or cannot be written.
    """
    if to not in FORMATS:
        raise ModelError(f"{to!r} is no target of an export; choose one of {', '.join(FORMATS)}.")
    target = FORMATS[to]
    if bits is not None and bits not in target.bits:
        choices = ", ".join(map(str, target.bits))
        raise ModelError(f"An export to {to} holds {choices} bits, not {bits!r}.")
    require_packages(to)
    source = source_of(model, bits, example)
    require_unstored(source.module, f"They cannot be written as {to}. Export the dense model.")
    source.require_finite()
    with output_directory(Path(path), replaceable) as temporary:
        written = WRITERS[to](source, temporary)
        files = {file for pattern in target.weights for file in temporary.rglob(pattern) if file.is_file()}
        size = sum(file.stat().st_size for file in files)
    return Export(to, expanded(path), size, tuple(written))
