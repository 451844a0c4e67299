"""Count real zeros, entry by entry, in a model or in the files of one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from iobs.core.patterns import NM, Pattern, Unstructured
from iobs.errors import AuditError, ModelError, PatternError
from iobs.prune.layers import Layer, find_layers, projections
from iobs.prune.record import AuditRow

# A layer with a smaller share of the zeros that a pattern asks for was not pruned to it.
_FEW = 0.1


def audit(
    source: nn.Module | str | Path, pattern: Pattern | None = None, layers: Collection[str] | None = None
) -> list[AuditRow]:
    """What is really zero in every weight matrix of a model, or of a directory of safetensors files.

    Args:
        source: a network, or a directory (or one file) of safetensors, whose matrices are read as (outputs, inputs).
        pattern: if given, it is checked in every layer that was pruned, of which there must be one. After an
            allocation (recipes "fast" and "best") a share holds for all of them together, and not for each.
        layers: names of the layers that were pruned; by default those with at least a tenth of the zeros that the
            pattern asks for, as trained weights hold a zero here and there.

    Returns:
        One row a matrix, with the exact count of zeros; `asked` is positive in those that were checked.

    Raises:
        AuditError: a layer has fewer zeros than the pattern asks, or an N:M group keeps too many; no layer was pruned.
        ModelError: the directory holds no safetensors file, or one is damaged.
        PatternError: the pattern does not fit a layer that was pruned.
    """
    matrices = _of_model(source) if isinstance(source, nn.Module) else _of_files(Path(source))
    rows, checked = [], False
    for name, matrix in matrices:
        row = counted(name, matrix)
        if pattern is not None and (_has_many(row, pattern) if layers is None else name in layers):
            check(name, matrix, pattern)
            row.asked, checked = asked_zeros(pattern, row.shape), True
        rows.append(row)
    if pattern is not None and not checked:
        most = max(rows, key=lambda row: row.sparsity, default=None)
        raise AuditError(
            f"No layer has a tenth of the zeros that {pattern} asks for; {most.name!r} has most, {most.zeros:,} of "
            f"{most.weights:,}. The model was not pruned to it, or something wrote into the weights afterwards."
            if most and most.zeros
            else f"No layer has a zero: the model is dense, and {pattern} holds nowhere."
        )
    return rows


def _has_many(row: AuditRow, pattern: Pattern) -> bool:
    """Whether a layer was pruned, to this pattern or to another: its zeros are too many to be there by chance."""
    try:
        return row.sparsity >= _FEW * asked_zeros(pattern, row.shape) / row.weights
    except PatternError:  # which the layer gets to hear where most of it is zero
        return row.sparsity >= 0.5


def counted(name: str, matrix: Tensor, asked: int = 0) -> AuditRow:
    """One row: the real zeros of a matrix (rows, columns), entry by entry."""
    return AuditRow(name, (matrix.shape[0], matrix.shape[1]), int((matrix == 0).sum()), asked)


def check(name: str, matrix: Tensor, pattern: Pattern) -> None:
    """Raise where a matrix (rows, columns) does not have the zeros that a pattern asks for.

    Raises:
        AuditError: names the layer and both counts.
    """
    shape = (matrix.shape[0], matrix.shape[1])
    groups = pattern.groups(shape)
    kept = (matrix.reshape(groups.count, groups.size) != 0).sum(1)
    worst = int(kept.max())
    if worst > groups.keep:
        where = f"a group of {groups.size}" if isinstance(pattern, NM) else f"{groups.size} entries"
        raise AuditError(
            f"Layer {name!r} keeps {worst} of {where} where the pattern {pattern} allows {groups.keep}. "
            "It was pruned to another pattern, or zeros were spread over layers, or something wrote into the weights."
        )


def check_together(rows: Sequence[AuditRow], pattern: Unstructured) -> None:
    """Raise where layers among which zeros were spread have fewer of them, in all, than a pattern asks for.

    Raises:
        AuditError: with both counts.
    """
    zeros, weights = sum(row.zeros for row in rows), sum(row.weights for row in rows)
    asked = asked_zeros(pattern, (1, weights))
    if zeros < asked:
        raise AuditError(
            f"The {len(rows)} pruned layers have {zeros:,} zeros, and {pattern} asks for {asked:,} of them."
        )


def asked_zeros(pattern: Pattern, shape: tuple[int, int]) -> int:
    """How many zeros a pattern makes in a matrix of that shape."""
    groups = pattern.groups(shape)
    return groups.count * (groups.size - groups.keep)


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for layer in find_layers(model):
        yield layer.name, layer.read(model)


def packed_hint(directory: Path) -> str:
    """What to do where weights are missed because they are packed; empty where they are not."""
    return "; it is packed: run iobs pack --unpack first" if [*directory.glob("*.packed")] else ""


def weight_index(directory: Path) -> Path | None:
    """The index that names a directory's shards; None where one file holds all, which comes first."""
    index = directory / "model.safetensors.index.json"
    return index if index.is_file() and not (directory / "model.safetensors").is_file() else None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that are a directory's weights, by the rule of transformers.

    model.safetensors if there is one, else the shards that the index names, else, for networks that have neither,
    every .safetensors file. Others that lie there, of an earlier run or another format, are not meant.

    Raises:
        ModelError: the index is damaged, names a file that is missing, or one outside the directory.
    """
    whole, index = directory / "model.safetensors", weight_index(directory)
    if whole.is_file():
        return [whole]
    if index is None:
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged; copy it again.") from error
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}, which lies outside {directory}; do not trust these files.")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        what = packed_hint(directory) or ", though the index of weights names it; copy it again"
        raise ModelError(f"{directory / missing[0]} is missing{what}.")
    return [directory / name for name in names]


def _of_files(path: Path) -> Iterator[tuple[str, Tensor]]:
    files = [path] if path.is_file() else weight_files(path)
    if not files:
        raise ModelError(f"{path} holds no .safetensors file{packed_hint(path) or '; give what iobs prune wrote'}.")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield from _matrices(name, tensors.get_tensor(name))
        except Exception as error:
            raise ModelError(f"{file} cannot be read as safetensors ({error}); it may be truncated.") from error


def _matrices(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weight matrices in a stored tensor; none where it is a bias, a statistic or the like."""
    stacked = tensor.ndim == 3 and len(tensor) > 1  # the experts of a layer, in one tensor
    if not tensor.is_floating_point() or tensor.ndim < 2 or not (name.endswith("weight") or stacked):
        return
    if name.endswith("in_proj_weight"):  # of nn.MultiheadAttention
        yield from ((f"{name}.{part}", rows) for part, rows in projections(tensor).items())
    else:
        yield name.removesuffix(".weight"), tensor.flatten(1)


def audit_layers(model: nn.Module, patterns: Mapping[Layer, Pattern]) -> list[AuditRow]:
    """Check every pruned layer of a model against the pattern that it was asked for.

    Raises:
        AuditError: less than asked.
    """
    rows = []
    with torch.no_grad():
        for layer, pattern in patterns.items():
            matrix = layer.read(model)
            rows.append(counted(layer.name, matrix, asked_zeros(pattern, layer.shape)))
            check(layer.name, matrix, pattern)  # every group of it, not only their sum
    return rows


def require_promised(found: Sequence[AuditRow], promised: Sequence[AuditRow], where: Path) -> None:
    """Raise where there are fewer zeros than were counted before.

    Layers are compared by name; those of another name in the files (experts stored in one, tied heads) by their sum.

    Args:
        found: rows of `audit` now.
        promised: rows of a report.
        where: the directory that `found` is of, for the message.

    Raises:
        AuditError: names the layer and both counts.
    """
    others = {row.name: row.zeros for row in found}
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
