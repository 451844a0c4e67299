"""The source of an export: the model, the weight matrices of its layers, and the records of what becomes of them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from iobs.errors import ModelError, NonFiniteError
from iobs.exports.values import Codes
from iobs.models import LoadedModel, load
from iobs.models.loaded import unwritable
from iobs.models.output import copy_companions
from iobs.pruning.network.layers import find_layers, library_class

Example = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Foreign: TypeAlias = Any  # an object of an optional package, or of transformers


@dataclass(frozen=True)
class Written:
    """One matrix of the model in the exported files.

    Attributes:
        name: of its parameter.
        form: type of the values in the file, such as "Q4_0" or "float16".
        entries: number of entries.
        zeros: entries that are zero in the model.
        kept: entries that are zero in the model and in the file.
        exact: the file holds the same numbers; otherwise they were rounded.
        added: zeros beside the matrix, where the format has no such width.
    """

    name: str
    form: str
    entries: int
    zeros: int
    kept: int
    exact: bool
    added: int = 0


@dataclass(frozen=True)
class Export:
    """The result of `iobs.export`. `print` shows it.

    Attributes:
        to: name of the target.
        path: the output directory.
        bytes: size of all files of weights and graphs, without companions such as the tokenizer.
        matrices: the weight matrices of the layers.
    """

    to: str
    path: Path
    bytes: int
    matrices: tuple[Written, ...]

    @property
    def zeros(self) -> int:
        """Zeros of the layers in the model."""
        return sum(matrix.zeros for matrix in self.matrices)

    @property
    def kept_zeros(self) -> int:
        """Zeros of the layers that are zero in the file, too."""
        return sum(matrix.kept for matrix in self.matrices)

    def __str__(self) -> str:
        forms = Counter(matrix.form for matrix in self.matrices)
        counts = ", ".join(f"{count} as {form}" for form, count in forms.most_common())
        rounded = sum(not matrix.exact for matrix in self.matrices)
        how = f"{rounded} of them rounded" if rounded else "all of them exactly"
        return (
            f"Written: {self.path}, {self.bytes:,} bytes. {len(self.matrices)} matrices: {counts}; {how}. "
            f"{self.kept_zeros:,} of {self.zeros:,} zeros are exact zeros in the file.{self._added()}"
        )

    def _added(self) -> str:
        """A sentence on the zeros beside matrices, or nothing."""
        added = sum(matrix.added for matrix in self.matrices)
        entries = sum(matrix.entries for matrix in self.matrices)
        return f" {added / entries:.1%} more zeros fill layers up to widths that {self.to} has." if added else ""


@dataclass(frozen=True)
class LayerMatrix:
    """The weight matrix of a layer.

    Attributes:
        name: of its parameter.
        parameter: the parameter.
        transposed: the parameter is stored as (inputs, outputs).
    """

    name: str
    parameter: Tensor
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """The parameter in main memory, in its own shape."""
        return self.parameter.detach().cpu()

    @property
    def rows(self) -> Tensor:
        """The parameter as a matrix (outputs, inputs): kernels of convolutions are flattened."""
        return self.weight.t() if self.transposed else self.weight.flatten(1)

    def written(self, form: str, after: Tensor | None = None) -> Written:
        """The record of the matrix.

        Args:
            form: type of the values in the file.
            after: the values that a reader of the file computes, in the shape of the parameter; None: its own.
        """
        return self._record(form, self.weight, self.weight if after is None else after)

    def written_as(self, codes: Codes) -> Written:
        """The record of the matrix, which is written as codes of its `rows`."""
        return self._record(f"int{codes.bits}", self.rows, codes.weight)

    def _record(self, form: str, before: Tensor, after: Tensor) -> Written:
        zero = before == 0
        same = bool((before.float() == after.float()).all())
        return Written(self.name, form, before.numel(), int(zero.sum()), int((zero & (after == 0)).sum()), same)


@dataclass(frozen=True)
class ExportSource:
    """A model to export, and how.

    Attributes:
        model: the model, with its tokenizer and companion files where it has them.
        bits: of the matrices of layers; None: as few as hold a matrix exactly.
        example: input of one forward pass, or None.
    """

    model: LoadedModel
    bits: int | None = None
    example: Example | None = None

    @property
    def module(self) -> nn.Module:
        """The network."""
        return self.model.module

    def matrices(self) -> list[LayerMatrix]:
        """The weight matrices of layers.

        The output head of a language model is none of them, nor are fused experts.
        """
        head = _head(self.module)
        matrices = {}
        for layer in find_layers(self.module):
            stored = layer.stored(self.module)
            if layer.expert is None and layer.view is None and stored is not head:
                matrices[layer.key] = LayerMatrix(layer.key, stored, layer.transposed)
        return [*matrices.values()]

    def copy_files(self, directory: Path) -> None:
        """Copy the configuration, the tokenizer and other companions of the weights, where the model has them."""
        folder = Path(self.model.source)
        if is_pretrained(self.module) and not (directory / "config.json").exists():
            self.module.config.save_pretrained(directory)  # type: ignore[union-attr, operator]
        if (self.model.task != "other" or self.model.tokenizer is not None) and folder.is_dir():
            copy_companions(folder, directory)
        elif self.model.tokenizer is not None:
            self.model.tokenizer.save_pretrained(directory)

    def require_finite(self) -> None:
        """Raise unless all weights are finite.

        Raises:
            NonFiniteError: one is not; names its parameter.
        """
        for name, parameter in self.module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise NonFiniteError(f"The weight {name!r} holds NaN or infinity; it cannot be exported.")


def source_of(model: nn.Module | LoadedModel | str | Path, bits: int | None, example: Example | None) -> ExportSource:
    """The source of an export, from a module, a loaded model, or the name of a model.

    Raises:
        ModelError: the model cannot be loaded, or is none.
    """
    if isinstance(model, str | Path):
        model = load(model)
    if isinstance(model, nn.Module):
        name = type(model).__name__
        refuse = unwritable(f"{name} was given as a module, without files that could be copied.")
        model = LoadedModel(model, None, name, "other", None, refuse)
    if not isinstance(model, LoadedModel):
        raise ModelError(f"An export needs a torch module or the name of a model, got {type(model).__name__}.")
    return ExportSource(model, bits, example)


def is_pretrained(module: nn.Module) -> bool:
    """True if a module is a model of transformers."""
    return isinstance(module, library_class("transformers.modeling_utils", "PreTrainedModel"))


def _head(module: nn.Module) -> object:
    """Weight of the output head of a model of transformers, or None."""
    head = module.get_output_embeddings() if is_pretrained(module) else None  # type: ignore[operator]
    return getattr(head, "weight", None)


def needed(package: str, target: str) -> ModuleType:
    """Import an optional package that a target is written with.

    Args:
        package: name to import, such as "onnx".
        target: name of the target, for the message.

    Raises:
        ModelError: the package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = package.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != missing:
            raise  # the package is there, but is broken
        extra = "export-coreml" if target == "coreml" else "export"
        raise ModelError(
            f"An export to {target} needs {missing}, which is not installed; run: pip install 'iobs[{extra}]'"
        ) from error
