"""The source of an export: the model, the weight matrices of its layers and their codes, and the records of both."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from iobs.core.grids import codes_and_scales, over_columns
from iobs.core.late import library_class
from iobs.core.patterns import Grid
from iobs.errors import ModelError, NonFiniteError, PatternError
from iobs.models import LoadedModel, load
from iobs.models.loaded import unwritable
from iobs.models.output import copy_companions
from iobs.pruning.network.layers import find_layers

Example = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Foreign: TypeAlias = Any  # an object of an optional package, or of transformers
_LEAST, _MOST = 2.0**-24, 65504.0  # positive float16 numbers: scales of all formats fit into them
_FACTORS = 16  # scales that are tried for 4 bits
_GROUP = 32  # columns that share a scale where weights are rounded to 4 bits
_GRIDS = (128, 64, _GROUP)  # groups of grids that are looked for


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
        raise ModelError(
            f"An export to {target} needs {missing}, which is not installed; run: pip install 'iobs[export]'"
        ) from error


# ---- weight matrices as whole numbers times scales, in groups of columns; a zero weight always has the code 0
@dataclass(frozen=True)
class Codes:
    """A matrix of whole numbers times scales.

    Attributes:
        codes: (rows, columns), int8, from -(2^(bits-1) - 1) to 2^(bits-1) - 1.
        scales: (rows, groups), float32, representable in float16.
        group: neighbouring columns that share a scale; the last group may be shorter.
        bits: of a code.
        exact: the products are the weights; otherwise the weights were rounded.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bits: int
    exact: bool

    @property
    def weight(self) -> Tensor:
        """The products, (rows, columns), float32."""
        return self.codes.float() * over_columns(self.scales, Grid(self.bits, self.group), self.codes.shape[1])


def codes_of(weight: Tensor, bits: int, group: int) -> Codes:
    """The codes of a matrix: its own if it lies on such a grid, otherwise the nearest codes.

    Args:
        weight: (rows, columns), floating, finite.
        bits: 2 to 8.
        group: columns that share a scale.
    """
    return exact_codes(weight, bits, group) or nearest_codes(weight, bits, group)


def choose_codes(matrix: Tensor, bits: int | None, whole: bool = False) -> Codes | None:
    """The codes of a matrix for formats with any group: its own, or the nearest ones if bits are given.

    Args:
        matrix: (rows, columns), floating, finite.
        bits: 8 gets one scale a row, 4 one for 32 columns; None: None is returned for a matrix on no grid.
        whole: groups must divide the number of columns; a row is a group where none does.
    """
    columns = matrix.shape[1]
    groups = [group for group in _GRIDS if group < columns and not (whole and columns % group)]
    for count in (4, 8) if bits is None else (bits,):
        for group in (columns, *groups):
            codes = exact_codes(matrix, count, group)
            if codes is not None:
                return codes
    if bits is None:
        return None
    return nearest_codes(matrix, bits, columns if bits == 8 or groups[-1:] != [_GROUP] else _GROUP)


def exact_codes(weight: Tensor, bits: int, group: int) -> Codes | None:
    """The codes of a matrix on a grid, with scales in float16; None if the matrix is on no such grid."""
    grid = Grid(bits, group)
    try:
        codes, scales = codes_and_scales(weight, grid)
    except PatternError:
        return None
    return Codes(codes, scales, group, bits, True) if torch.equal(scales.half().float(), scales) else None


def nearest_codes(weight: Tensor, bits: int, group: int) -> Codes:
    """The nearest codes for scales of least squared error among some, one for each row and group of columns."""
    grid = Grid(bits, group)
    rows, columns = weight.shape
    groups = grid.scales(columns)
    table = torch.nn.functional.pad(weight.float(), (0, groups * group - columns)).reshape(rows * groups, group)
    largest = table.abs().amax(1, keepdim=True) / grid.levels
    best, error = _half(largest), torch.full_like(largest, torch.inf)
    for step in range(_FACTORS if bits <= 4 else 1):
        scale = _half(largest * (1 - 0.5 * step / _FACTORS))
        squares = (_codes(table, scale, grid) * scale - table).square().sum(1, keepdim=True)
        best, error = torch.where(squares < error, scale, best), torch.minimum(squares, error)
    codes = _codes(table, best, grid).to(torch.int8).reshape(rows, -1)[:, :columns].contiguous()
    return Codes(codes, best.reshape(rows, groups), group, bits, False)


def _half(scale: Tensor) -> Tensor:
    """Scales as float16 numbers, none of them zero or infinite."""
    return scale.clamp(_LEAST, _MOST).half().float()


def _codes(table: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    return (table / scale).round_().clamp_(-grid.levels, grid.levels)


def in_pairs(codes: Tensor) -> npt.NDArray[np.uint8]:
    """The int8 codes of 4 bits as bytes, ceil(entries / 2); two codes share a byte, the first one in its lower half."""
    values: npt.NDArray[np.uint8] = codes.contiguous().numpy().reshape(-1).view(np.uint8) & np.uint8(15)
    values = np.append(values, np.zeros(len(values) % 2, np.uint8))
    return values[::2] | (values[1::2] << np.uint8(4))


# ---- language models of llama's form: what several targets require of them, and the widths of the layers
@dataclass(frozen=True)
class LayerWidths:
    """The widths of one layer, as its weights have them; the configuration may have other ones.

    Attributes:
        heads: number of query heads.
        kv_heads: number of heads of keys and values.
        neurons: width of the MLP.
    """

    heads: int
    kv_heads: int
    neurons: int


def require_llama_like(
    source: ExportSource, target: str, kinds: Collection[str], positions: Collection[str]
) -> Foreign:
    """The configuration of a model of llama's form.

    Args:
        source: the model.
        target: name of the target, for the messages.
        kinds: the `model_type` that the target holds.
        positions: the kinds of rotary positions that the target holds.

    Raises:
        ModelError: it is another model, or one that the target cannot hold.
    """
    config = getattr(source.module, "config", None)
    kind = getattr(config, "model_type", type(source.module).__name__)
    if kind not in kinds or source.model.task not in ("causal-lm", "other") or config is None:
        names = ", ".join(kinds)
        raise ModelError(f"An export to {target} knows language models of the kinds {names}, not {kind!r}; try onnx.")
    if config.hidden_act != "silu":
        raise ModelError(f"Readers of {target} compute silu in such a model, not {config.hidden_act}; try onnx.")
    position = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if position not in positions:
        raise ModelError(f"Positions of the kind {position!r} cannot be exported to {target} yet; try onnx.")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if sliding or (kind == "mistral" and getattr(config, "sliding_window", None)):
        raise ModelError(f"Attention in a sliding window cannot be exported to {target} yet; try onnx.")
    return config


def head_width(config: Foreign) -> int:
    """Columns of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def widths_of_layers(module: nn.Module, config: Foreign) -> list[LayerWidths]:
    """The widths of all layers, from the shapes of their weights.

    Raises:
        ModelError: a layer has no attention or MLP of llama's form.
    """
    each = head_width(config)
    widths = []
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        try:
            attention = [module.get_parameter(f"{layer}.self_attn.{name}_proj.weight") for name in "qk"]
            neurons = module.get_parameter(f"{layer}.mlp.gate_proj.weight").shape[0]
        except AttributeError as error:
            raise ModelError(f"{layer} is no layer of llama's form ({error}); try onnx.") from error
        heads, kv_heads = (weight.shape[0] // each for weight in attention)
        widths.append(LayerWidths(heads, kv_heads, neurons))
    return widths
