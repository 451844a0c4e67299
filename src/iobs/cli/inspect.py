"""`iobs inspect`: count what is really zero in a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console

if TYPE_CHECKING:
    from torch import nn

    from iobs.core.patterns import Pattern
    from iobs.prune.record import AuditRow, Report

# A layer with a smaller share of the zeros that a pattern asks for was not pruned to it.
_FEW = 0.1


def inspect(
    directory: Annotated[Path, typer.Argument(help="A directory with safetensors files.")],
    pattern: Annotated[
        str | None, typer.Option(help="Also check this pattern in every layer that was pruned: 2:4, 0.5.")
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all", help="List the dense matrices too.")] = False,
    as_json: console.AsJson = False,
) -> None:
    """Audit a model directory: the zeros of every matrix, counted one by one; fewer than asked is an error.

    What was asked is read from report.json where there is one, which also says which layers were pruned, and from
    --pattern.
    """
    from rich.text import Text

    from iobs.errors import ModelError
    from iobs.report import audit_table
    from iobs.report.numbers import percent

    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; give the one that iobs prune wrote.")
    if not any(directory.glob("*.safetensors")) and (directory / "model").is_dir():
        directory = directory / "model"
    found = _audited(directory, pattern)
    if as_json:
        console.print_json([{"layer": row.name, "shape": row.shape, "zeros": row.zeros} for row in found.rows])
        return
    out = console.output_console()
    rows, sparse = found.rows, found.sparse
    if rows and (sparse or all_layers):
        out.print(audit_table(rows if all_layers else sparse))
    zeros, weights = sum(row.zeros for row in sparse), sum(row.weights for row in sparse)
    if sparse:
        out.print(f"{percent(zeros / weights, 2)} zeros: {zeros:,} of {weights:,} weights in {len(sparse)} layers")
        for row in found.stray:
            out.print(f"zeros elsewhere, not counted: {row.name} ({row.zeros:,} of {row.weights:,})")
        dense = len(rows) - len(sparse) - len(found.stray)
        if dense:
            out.print(f"{dense} {'matrix has' if dense == 1 else 'matrices have'} no zero")
    else:
        out.print(f"No zeros in {len(rows)} matrices: this model is dense.")
    for line in found.checked:
        out.print(Text.assemble(("✓", "green"), " ", line))


@dataclass
class _Findings:
    """Rows of all matrices, of those that count as pruned and of others with zeros; and what was checked of them."""

    rows: list[AuditRow]
    sparse: list[AuditRow]
    stray: list[AuditRow]
    checked: list[str] = field(default_factory=list)


def _audited(directory: Path, pattern: str | None) -> _Findings:
    """Count the zeros, and compare them with the pattern and with the report beside the weights.

    Raises:
        AuditError: a layer has fewer zeros than the pattern asks or the report says.
    """
    from iobs import models
    from iobs.core import patterns
    from iobs.prune.audit import audit, compare

    file, report = _report(directory)
    if pattern is None:
        found = _sorted_by(report, audit(directory))
    else:
        wanted = patterns.parse(pattern)
        # Through the model, since a file does not tell which way round a matrix is multiplied.
        module = models.load(directory).module
        found = _sorted_by(report, audit(module), wanted)
        _check(module, found, wanted, directory)
        found.checked.append(f"every one of these layers satisfies {wanted}")
    if report is not None:
        compare(found.rows, report.audit, directory)
        promised = sum(row.zeros for row in report.audit)
        found.checked.append(f"at least the {promised:,} zeros that {file} promises, layer by layer")
    return found


def _report(directory: Path) -> tuple[Path | None, Report | None]:
    """The report that lies beside the weights, or above a folder `model` as of iobs demo; a foreign one is passed."""
    from iobs.errors import DataError
    from iobs.report import read_report

    for folder in (directory, directory.parent) if directory.resolve().name == "model" else (directory,):
        file = folder / "report.json"
        if file.is_file():
            try:
                return file, read_report(file)
            except DataError as error:
                console.say(f"{error} The zeros are counted without it.")
    return None, None


def _sorted_by(report: Report | None, rows: list[AuditRow], pattern: Pattern | None = None) -> _Findings:
    """The rows that count as pruned: those of the report, else those with zeros.

    Trained weights hold a zero here and there: where a pattern tells how many to expect, layers with far fewer are
    left aside, unless all are like that.
    """
    zeros = [row for row in rows if row.zeros]
    pruned = {row.name for row in report.audit} if report is not None else set()
    if pruned and pruned <= {row.name for row in rows}:
        sparse = [row for row in rows if row.name in pruned]
    elif pattern is not None:
        sparse = [row for row in zeros if row.sparsity >= _FEW * _share(pattern, row)] or zeros
    else:
        sparse = zeros
    names = {row.name for row in sparse}
    return _Findings(rows, sparse, [row for row in zeros if row.name not in names])


def _share(pattern: Pattern, row: AuditRow) -> float:
    """Share of zeros that a pattern asks for; 1 where it does not fit, so that many zeros are needed to be checked."""
    from iobs.errors import PatternError
    from iobs.prune.audit import asked_zeros

    try:
        return asked_zeros(pattern, row.shape) / row.weights
    except PatternError:
        return 1.0


def _check(module: nn.Module, found: _Findings, pattern: Pattern, directory: Path) -> None:
    """Raise where a layer that counts as pruned does not satisfy the pattern, or where there is none.

    Raises:
        AuditError: the layer, or that the model is dense.
    """
    from iobs.errors import AuditError
    from iobs.prune.audit import check
    from iobs.prune.layers import find_layers

    if not found.sparse:
        raise AuditError(f"No layer of {directory} has a zero: the model is dense, and {pattern} holds nowhere.")
    names = {row.name for row in found.sparse}
    for layer in find_layers(module):
        if layer.name in names:
            check(layer.name, layer.read(module), pattern)
