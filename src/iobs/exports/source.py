"""The model of an export: its module, its matrices, and an example of its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from iobs.errors import ModelError, NonFiniteError
from iobs.models import LoadedModel, load
from iobs.models.companions import copy_companions
from iobs.pruning.network.layers import find_layers, library_class

Example = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Source:
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

    def matrices(self) -> dict[str, bool]:
        """Names of the parameters that are weight matrices of layers, and True for one that is stored transposed.

        The output head of a language model is none of them, nor are fused experts.
        """
        head = _head(self.module)
        found = {}
        for layer in find_layers(self.module):
            if layer.expert is None and layer.view is None and layer.stored(self.module) is not head:
                found[layer.key] = layer.transposed
        return found

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
        """Check that all weights are finite.

        Raises:
            NonFiniteError: one is not; names its parameter.
        """
        for name, parameter in self.module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise NonFiniteError(f"The weight {name!r} holds NaN or infinity; it cannot be exported.")


def source_of(model: nn.Module | LoadedModel | str | Path, bits: int | None, example: Example | None) -> Source:
    """The source of an export, from a module, a loaded model, or the name of a model.

    Raises:
        ModelError: the model cannot be loaded.
    """
    if isinstance(model, str | Path):
        model = load(model)
    if isinstance(model, nn.Module):
        model = LoadedModel(model, None, type(model).__name__, "other", None, _write)
    return Source(model, bits, example)


def flat(weight: Tensor, transposed: bool) -> Tensor:
    """A parameter as a matrix (outputs, inputs): kernels of convolutions are flattened."""
    return weight.t() if transposed else weight.flatten(1)


def is_pretrained(module: nn.Module) -> bool:
    """Check that a module is a model of transformers."""
    return isinstance(module, library_class("transformers.modeling_utils", "PreTrainedModel"))


def _head(module: nn.Module) -> object:
    """Weight of the output head of a model of transformers, or None."""
    head = module.get_output_embeddings() if is_pretrained(module) else None  # type: ignore[operator]
    return getattr(head, "weight", None)


def _write(model: LoadedModel, directory: Path) -> None:
    raise ModelError(f"{model.source} was given as a module, without files that could be copied to {directory}.")
