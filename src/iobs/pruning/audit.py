"""Audit: count zeros entry by entry, in a model or in its files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.files import packed_hint, require_dense, weight_files
from iobs.core.grids import by_channel, codes_and_scales, entries_of, grid_of, stored_bits
from iobs.core.integers import Integers
from iobs.core.late import library_class
from iobs.core.patterns import NM, Budget, Grid, Pattern, Rate, Unstructured, as_pattern
from iobs.errors import AuditError, LayerSelectionError, ModelError, PatternError, listed, require_values
from iobs.pruning.network.folding import folded
from iobs.pruning.network.layers import Layer, find_layers, projections
from iobs.pruning.network.selection import require_visible
from iobs.pruning.report import AuditRow

_SLACK, _SIDE_BITS = 1.01, 400  # integers that are read back may have a longer code; by so many bits of a matrix
_CHANGED = "The layer was pruned to another pattern, or changed since."
_PRUNED_SHARE = 0.1  # a layer with a smaller share of the zeros that a pattern asks for counts as not pruned
_MASKED_SHARE = 0.9  # of the zeros of a rate, from which a matrix of integers counts as pruned to it

# Models of transformers whose layers Conv1D are stored as (inputs, outputs), and the names of these layers.
_WITH_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_CONV1D = re.compile(r"(?:^|\.)(?:c_attn|q_attn|c_proj|c_fc)\.weight$")
# Name, weights (rows, columns), and the positions of the kernel that it may have (`check`).
Matrix: TypeAlias = tuple[str, Tensor, tuple[int, ...]]


def audit(
    source: nn.Module | str | Path,
    pattern: Pattern | float | str | None = None,
    layers: Collection[str] | None = None,
) -> list[AuditRow]:
    """Count the zeros of every weight matrix of a model, or of a directory of safetensors files.

    Args:
        source: a model, or a directory (or one file) of safetensors, whose matrices are read as (outputs, inputs).
        pattern: a pattern, a sparsity such as 0.5, or text such as "2:4". It is checked in every pruned layer, of which
            there must be at least one; None: no check. A sparsity fails after an allocation (recipes "one-shot", "fast"
            and "best"), which gives some layers fewer zeros than others: the run's report and `iobs inspect` check all
            layers together. A `Rate` holds for all layers together, too.
        layers: names of the pruned layers, or one name. By default these are layers with at least a tenth of the zeros
            that the pattern asks for; dense layers may hold a few zeros. For a rate, and a grid that keeps all entries,
            they are the layers of integers times steps, or on the grid.

    Returns:
        One row per matrix, with the exact count of zeros; `asked` is positive for matrices that were checked.

    Raises:
        AuditError: a layer has fewer zeros than the pattern asks, or an N:M group keeps too many; no layer was pruned;
            weights are not on a grid, or need more bits than the rate has.
        LayerSelectionError: a name is that of no matrix.
        ModelError: `source` is neither; torch.jit or torch.export hide its layers, or it is on the meta device; the
            directory holds no safetensors file, or one is damaged.
        PatternError: the pattern is none, a budget, or does not fit a layer that was pruned.
    """
    if not isinstance(source, nn.Module | str | Path):
        raise ModelError(f"audit takes a model or a directory, got {type(source).__name__}.")
    expected = None if pattern is None else as_pattern(pattern)
    layers = {layers} if isinstance(layers, str) else layers
    if isinstance(expected, Budget):
        raise PatternError(
            f"{expected} is the size of a file, which `iobs inspect` shows in parts; matrices are checked for a rate, "
            'such as "rate:3.5".'
        )
    # Closed at once: until then the weights of a model are folded, and a caller may keep an error and its frames.
    with closing(_of_model(source) if isinstance(source, nn.Module) else _of_files(Path(source))) as matrices:
        return (
            _within(expected, matrices, layers) if isinstance(expected, Rate) else _checked(expected, matrices, layers)
        )


def _checked(pattern: Pattern | None, matrices: Iterator[Matrix], layers: Collection[str] | None) -> list[AuditRow]:
    """Rows of matrices; those of pruned layers are checked against a pattern, if there is one."""
    rows, checked = [], False
    for name, matrix, kernels in matrices:
        row = counted(name, matrix)
        if pattern is not None and (_is_pruned(row, matrix, pattern) if layers is None else name in layers):
            check(name, matrix, pattern, kernels)
            row.asked, checked = asked_zeros(pattern, row.shape), True
            row.bits = stored_bits(pattern, row.shape)
        rows.append(row)
    _require_known(layers, rows)
    if pattern is not None and not checked:
        if isinstance(pattern, Grid):
            raise AuditError(f"No layer lies on the grid {pattern}: the model was not pruned to it, or changed since.")
        most = max(rows, key=lambda row: row.sparsity, default=None)
        raise AuditError(
            f"No layer has a tenth of the zeros that {pattern} asks for; {most.name!r} has most, {most.zeros:,} of "
            f"{most.weights:,}. The model was not pruned to it, or something wrote into the weights afterwards."
            if most and most.zeros
            else f"No layer has a zero: the model is dense, and {pattern} holds nowhere."
        )
    return rows


def _within(rate: Rate, matrices: Iterator[Matrix], layers: Collection[str] | None) -> list[AuditRow]:
    """Rows of matrices that need at most the bits of a rate together, and have its zeros; `bits` is positive there."""
    no_integers = "are no integers times a step for each column"
    rows = []
    for name, matrix, kernels in matrices:
        row = counted(name, matrix)
        if layers is None or name in layers:
            row.bits = coded_bits(matrix)
            if row.bits is not None and rate.zeros and (layers is not None or _has_mask(row, rate)):
                check(name, matrix, rate, kernels)
                row.asked = asked_zeros(rate, row.shape)
        if row.bits is None and layers is not None and name in layers:
            raise AuditError(f"The weights of layer {name!r} {no_integers}. {_CHANGED}")
        rows.append(row)
    _require_known(layers, rows)
    stored = [row for row in rows if row.bits is not None]
    if not stored:
        raise AuditError(f"Nothing was pruned to {rate}: the weights of all layers {no_integers}.")
    bits = sum(row.bits or 0 for row in stored) / sum(row.weights for row in stored)
    if bits > rate.bits * _SLACK + _SIDE_BITS * len(stored) / sum(row.weights for row in stored):
        raise AuditError(f"The {len(stored)} layers need {bits:.4f} bits a weight, more than {rate}.")
    return rows


def coded_bits(matrix: Tensor) -> int | None:
    """Bits of a matrix as coded integers, the whole number above them; None if it is none."""
    integers = Integers.of(matrix)
    return None if integers is None else math.ceil(integers.bits())


def _require_known(names: Collection[str] | None, rows: Sequence[AuditRow]) -> None:
    """Raise LayerSelectionError unless every name is that of a matrix: an unknown layer would count as checked."""
    present = [row.name for row in rows]
    if unknown := [name for name in names or () if name not in present]:
        raise LayerSelectionError(f"layers={unknown} are names of no matrix; the matrices are {listed(present, 5)}.")


def _lies_on(matrix: Tensor, grid: Grid) -> bool:
    try:
        codes_and_scales(matrix, grid)
    except PatternError:
        return False
    return True


def _is_pruned(row: AuditRow, matrix: Tensor, pattern: Pattern) -> bool:
    """True if a layer was pruned: it has more zeros than dense layers have, or lies on a grid without zeros."""
    if isinstance(pattern, Grid):
        return _lies_on(matrix, pattern)
    try:
        return row.sparsity >= _PRUNED_SHARE * asked_zeros(pattern, row.shape) / row.weights
    except PatternError:  # raised again by `check` if the layer counts as pruned
        return row.sparsity >= 0.5


def _has_mask(row: AuditRow, rate: Rate) -> bool:
    """True if a matrix of integers has about the zeros of a rate.

    Others may be dense and integers by chance, as small ones of 16 bits are, or have a rate alone by a rule.
    """
    try:
        return row.zeros >= _MASKED_SHARE * asked_zeros(rate, row.shape)
    except PatternError:
        return False


def counted(name: str, matrix: Tensor, asked: int = 0) -> AuditRow:
    """The row of a matrix (rows, columns): its zeros, counted entry by entry."""
    return AuditRow(name, (matrix.shape[0], matrix.shape[1]), int((matrix == 0).sum()), asked)


def check(name: str, matrix: Tensor, pattern: Pattern, kernels: tuple[int, ...] = (1,)) -> None:
    """Raise AuditError unless a matrix (rows, columns) has the zeros that a pattern asks for.

    Args:
        name: of the layer.
        matrix: its weights.
        pattern: what they should have.
        kernels: positions of the kernel of a convolution, 1 for a linear layer; several where a file does not say.

    Raises:
        AuditError: it has fewer, and the message names the layer and both counts; or a weight is not on the grid.
    """
    grid = grid_of(pattern)
    if grid is not None:
        try:
            codes_and_scales(matrix, grid)
        except PatternError as error:
            raise AuditError(f"Layer {name!r}: {error} It was pruned to another pattern, or changed since.") from None
    shape = (matrix.shape[0], matrix.shape[1])
    if isinstance(pattern, Groups):
        _check_columns(name, matrix, pattern)
        return
    try:
        groups = pattern.groups(shape)
    except PatternError as error:
        raise PatternError(
            f"Layer {name!r} ({shape[0]} x {shape[1]}): {error} If it was not pruned, name those that were: "
            "iobs.audit(..., layers=[...])."
        ) from None
    orders = [by_channel(pattern, shape[1], kernel) for kernel in kernels]
    tables = [matrix if order is None else matrix[:, order] for order in orders]
    worst = min(int((table.reshape(groups.count, groups.size) != 0).sum(1).max()) for table in tables)
    if worst > groups.keep:
        where = f"a group of {groups.size}" if isinstance(entries_of(pattern), NM) else f"{groups.size} entries"
        raise AuditError(
            f"Layer {name!r} keeps {worst} of {where} where the pattern {pattern} allows {groups.keep}. "
            "It was pruned to another pattern, or zeros were spread over layers, or something wrote into the weights."
        )


def _check_columns(name: str, matrix: Tensor, pattern: Groups) -> None:
    """`check` for groups of columns: at most the kept number of groups has a nonzero entry."""
    labels, most = pattern.labels(matrix.shape[1]), pattern.kept(matrix.shape[1])
    columns = int(torch.bincount(labels[(matrix != 0).any(0).cpu()]).count_nonzero())
    if columns > most:
        raise AuditError(f"Layer {name!r} keeps {columns} groups of columns where the pattern {pattern} allows {most}.")


def check_together(rows: Sequence[AuditRow], pattern: Unstructured) -> None:
    """Raise AuditError unless layers after an allocation have the zeros that a pattern asks for, in total.

    Raises:
        AuditError: they have fewer; names both counts.
    """
    zeros, weights = sum(row.zeros for row in rows), sum(row.weights for row in rows)
    least = asked_zeros(pattern, (1, weights))
    if zeros < least:
        raise AuditError(
            f"The {len(rows)} pruned layers have {zeros:,} zeros, and {pattern} asks for {least:,} of them."
        )


def asked_zeros(pattern: Pattern, shape: tuple[int, int]) -> int:
    """Number of zeros that a pattern gives in a matrix of a shape."""
    if isinstance(pattern, Groups):
        return pattern.zeros(shape)
    groups = pattern.groups(shape)
    return groups.count * (groups.size - groups.keep)


def _of_model(model: nn.Module) -> Generator[Matrix]:
    require_visible(model)
    require_values(model.named_parameters())
    with folded(model):
        for layer in find_layers(model):
            stored = layer.stored(model)
            yield layer.name, layer.read(model).to(stored.dtype), (layer.kernel,)
        forms = library_class("iobs.inference.modules", "StoredLinear")
        forms += library_class("iobs.inference.gpu", "OffsetLinear")
        for name, module in model.named_modules():
            if isinstance(module, forms):
                yield name, module.weight, (1,)  # type: ignore[attr-defined]


def _of_files(path: Path) -> Generator[Matrix]:
    files = [path] if path.is_file() else weight_files(path)
    if not files:
        raise ModelError(f"{path} holds no .safetensors file{packed_hint(path) or '; give what iobs prune wrote'}.")
    transposed = _kind_of(files[0].parent) in _WITH_CONV1D
    for file in files:
        require_dense(file)
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    tensor = tensors.get_tensor(name)
                    yield from _matrices(name, tensor.T if transposed and _CONV1D.search(name) else tensor)
        except Exception as error:
            raise ModelError(f"{file} cannot be read as safetensors ({error}); it may be truncated.") from error


def _kind_of(folder: Path) -> str | None:
    """The kind of a model of transformers by its configuration; None if the folder says none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _matrices(name: str, tensor: Tensor) -> Iterator[Matrix]:
    """The weight matrices in a stored tensor, by name; none in biases and statistics."""
    wide = tensor.ndim >= 2 and min(len(tensor), tensor[0].numel() if len(tensor) else 0) > 1  # also of any other name
    if not tensor.is_floating_point() or tensor.ndim < 2 or not (wide or name.endswith("weight")):
        return
    if name.endswith("in_proj_weight"):  # of nn.MultiheadAttention
        yield from ((f"{name}.{part}", rows, (1,)) for part, rows in projections(tensor).items())
    else:
        kernel = tensor[0, 0].numel() if tensor.ndim > 2 else 1
        # Three dimensions are those of a convolution of sequences, or of a stack of experts.
        yield name.removesuffix(".weight"), tensor.flatten(1), (1, kernel) if tensor.ndim == 3 else (kernel,)


def audit_layers(
    model: nn.Module, patterns: Mapping[Layer, Pattern], dtype_of: Callable[[Layer], torch.dtype] | None = None
) -> list[AuditRow]:
    """Raise AuditError unless every pruned layer of a model has its pattern; returns their rows.

    Args:
        model: the model.
        patterns: of every pruned layer.
        dtype_of: dtype in which the weights of a layer are stored; None: the dtype in the model.

    Raises:
        AuditError: a layer has fewer zeros than its pattern asks for, or a weight that is not on its grid.
    """
    rows, used, allowed = [], 0.0, 0.0
    with torch.no_grad():
        for layer, pattern in patterns.items():
            dtype = layer.stored(model).dtype if dtype_of is None else dtype_of(layer)
            matrix = layer.read(model).to(dtype)
            row = counted(layer.name, matrix, asked_zeros(pattern, layer.shape))
            row.bits = coded_bits(matrix) if isinstance(pattern, Rate) else stored_bits(pattern, layer.shape)
            rows.append(row)
            check(layer.name, matrix, pattern, (layer.kernel,))  # every group, not only the total
            if isinstance(pattern, Rate):
                if row.bits is None:
                    raise AuditError(f"The weights of layer {layer.name!r} are no integers times a step. {_CHANGED}")
                allowed += pattern.bits * row.weights
                used += row.bits
    if used > _SLACK * allowed + _SIDE_BITS * len(patterns):
        raise AuditError(f"The layers need {used / allowed:.3f} times the bits of their rates. {_CHANGED}")
    return rows


def require_promised(counted_rows: Sequence[AuditRow], promised: Sequence[AuditRow], where: Path) -> None:
    """Raise AuditError unless files have at least the zeros that a report counted.

    Layers are compared by name. Layers with another name in the files (experts in one tensor, tied heads) are compared
    by their total.

    Args:
        counted_rows: rows of `audit` on the files.
        promised: rows of the report.
        where: the directory of the files, for the message.

    Raises:
        AuditError: there are fewer; names the layer and both counts.
    """
    others = {row.name: row.zeros for row in counted_rows}
    missing = 0
    for row in promised:
        zeros = others.pop(row.name, None)
        if zeros is None:
            missing += row.zeros
        elif zeros < row.zeros:
            raise AuditError(
                f"{where} has {zeros:,} zeros in layer {row.name!r}, the report promises {row.zeros:,}; "
                "the weights were changed since."
            )
    if sum(others.values()) < missing:
        raise AuditError(
            f"{where} has fewer zeros than the {missing:,} that the report promises in layers that the files call "
            "otherwise; the weights were changed since."
        )
