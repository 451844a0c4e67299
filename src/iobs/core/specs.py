"""Names of models, data, tables and formats as users write them, checked without loading what they name.

The command line checks paths here first: loading a model, or only torch, takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from iobs.core.files import expanded
from iobs.errors import DataError, ModelError, ProblemError

CONFIG_NAME = "iobs.json"  # of a directory with a network that code builds
_WEIGHTS = (".safetensors", ".packed")
_FUNCTION = re.compile(r"^(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)$")


@dataclass(frozen=True)
class ExportFormat:
    """A format of another runtime in which models are exported.

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


FORMATS = {  # `iobs.exports` has the writers
    "gguf": ExportFormat((4, 8, 16, 32), ("*.gguf",), "llama.cpp", ("gguf",)),
    "nemotron-nas": ExportFormat((16, 32), ("*.safetensors",), "vLLM, mlx-lm, transformers"),
    "onnx": ExportFormat((4, 8), ("*.onnx", "*.onnx_data"), "ONNX Runtime", ("onnx", "onnxscript")),
    "compressed-tensors": ExportFormat((4, 8), ("*.safetensors",), "transformers, vLLM", ("compressed_tensors",)),
    "openvino": ExportFormat((4, 8), ("openvino_model.*",), "OpenVINO", ("openvino", "onnx", "onnxscript")),
}


def is_function_spec(spec: str) -> bool:
    """Check that `spec` has the form FILE.py:function."""
    return _FUNCTION.match(spec) is not None


def file_and_function(spec: str) -> tuple[Path, str]:
    """The file and the name of FILE.py:function.

    Raises:
        ModelError: the text has another form, or the file does not exist.
    """
    match = _FUNCTION.match(spec)
    if match is None:
        raise ModelError(f"{spec!r} does not read FILE.py:function.")
    file = file_of(spec)
    if not file.is_file():
        raise ModelError(f"{file} does not exist; {spec!r} should name a Python file and a function in it.")
    return file, match["function"]


def file_of(spec: str) -> Path:
    """The file of FILE.py:function."""
    return expanded(spec.rpartition(":")[0]).resolve()


def require_model(spec: str) -> None:
    """Check that the name of a model is no wrong path.

    Args:
        spec: a directory, a Hugging Face name, `timm:NAME` or `FILE.py:function`.

    Raises:
        ModelError: it is empty, a file that is no model, a path that does not exist, or a directory without a model.
    """
    if not spec:  # it would be the current folder
        raise ModelError("The name of the model is an empty text; a variable of the shell may be unset.")
    if is_function_spec(spec):
        file_and_function(spec)
    elif not spec.startswith("timm:"):
        path = expanded(spec)
        if path.is_file():
            raise ModelError(f"{spec} is a file; give the directory that holds it, or FILE.py:function.")
        if not path.is_dir() and _reads_like_a_path(spec):
            raise ModelError(f"{spec} does not exist; give a model directory, a Hugging Face name or FILE.py:function.")
        described = [path / name for name in ("config.json", CONFIG_NAME)]
        if path.is_dir() and not any(map(Path.is_file, described)) and not any(path.glob("*.packed")):
            raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model directory.")


def _reads_like_a_path(text: str) -> bool:
    """Check that `text` is not a hub name (NAME or OWNER/NAME), so the user must have meant a path."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text or text.endswith("/") or " " in text


def require_data(specs: Sequence[str], corpora: Collection[str]) -> None:
    """Check that the names of data sources are no wrong paths.

    Args:
        specs: as `iobs.data.open_source`.
        corpora: names of public corpora.

    Raises:
        DataError: a source is empty or does not exist.
        ModelError: the file of FILE.py:function does not exist.
    """
    if "" in specs:  # it would be the current folder
        raise DataError("A data source is an empty text; a variable of the shell may be unset.")
    if len(specs) == 1 and is_function_spec(specs[0]):
        file_and_function(specs[0])
    elif len(specs) != 1 or not (specs[0] in corpora or expanded(specs[0]).is_dir()):
        for file in map(expanded, specs):
            if not file.is_file():
                raise DataError(
                    f"{file} is not a file; --data takes text files (.txt, .jsonl, also .gz), one .npz, one folder or "
                    f"zip of images, one FILE.py:function, or one of {', '.join(corpora)}."
                )


def require_recipe(name: str, names: Collection[str]) -> None:
    """Check that a recipe exists: one of `names`, or a .yaml file.

    Raises:
        ProblemError: it does not.
    """
    if name not in names and not (name.endswith((".yaml", ".yml")) and expanded(name).is_file()):
        raise ProblemError(f"There is no recipe {name}; give {', '.join(names)}, or a .yaml file.")


def require_table(file: Path) -> None:
    """Check that a table exists.

    Raises:
        DataError: it does not.
    """
    _require_file(file, "a .csv, .parquet or .npz file")


def require_questions(file: Path) -> None:
    """Check that a file of questions exists.

    Raises:
        DataError: it does not.
    """
    _require_file(file, "questions as .jsonl or .jsonl.gz")


def _require_file(file: Path, kinds: str) -> None:
    if not file.is_file():
        raise DataError(f"There is no file {file}; give {kinds}.")


def require_written(directory: Path) -> None:
    """Check that the directory of a pruned model exists, and holds weights.

    Raises:
        ModelError: it does not.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; give the one that iobs prune wrote.")
    if not any(any(place.glob(f"*{end}")) for place in (directory, directory / "model") for end in _WEIGHTS):
        raise ModelError(f"{directory} holds no .safetensors file; give the directory that iobs prune wrote.")
