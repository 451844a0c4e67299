"""`iobs inspect`: count what is really zero in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console

if TYPE_CHECKING:
    from iobs.prune.record import AuditRow


def inspect(
    directory: Annotated[Path, typer.Argument(help="A directory with safetensors files.")],
    pattern: Annotated[
        str | None, typer.Option(help="Also check this pattern in every layer that has zeros: 2:4, 0.5.")
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all", help="List the dense matrices too.")] = False,
    as_json: console.AsJson = False,
) -> None:
    """Audit a model directory: the zeros of every matrix, counted one by one; fewer than asked is an error.

    What was asked is read from report.json where there is one, and from --pattern.
    """
    from iobs.errors import ModelError
    from iobs.report import audit_table
    from iobs.report.numbers import percent

    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory; give the one that iobs prune wrote.")
    if not any(directory.glob("*.safetensors")) and (directory / "model").is_dir():
        directory = directory / "model"
    rows, checked = _audited(directory, pattern)
    if as_json:
        console.print_json([{"layer": row.name, "shape": row.shape, "zeros": row.zeros} for row in rows])
        return
    out = console.output_console()
    sparse = [row for row in rows if row.zeros]
    if rows and (sparse or all_layers):
        out.print(audit_table(rows if all_layers else sparse))
    zeros, weights = sum(row.zeros for row in sparse), sum(row.weights for row in sparse)
    if sparse:
        dense = len(rows) - len(sparse)
        out.print(f"{percent(zeros / weights, 2)} zeros: {zeros:,} of {weights:,} weights in {len(sparse)} layers")
        if dense:
            out.print(f"{dense} {'matrix has' if dense == 1 else 'matrices have'} no zero")
    else:
        out.print(f"No zeros in {len(rows)} matrices: this model is dense.")
    for line in checked:
        out.print(f"[green]✓[/] {line}")


def _audited(directory: Path, pattern: str | None) -> tuple[list[AuditRow], list[str]]:
    """The audit's rows, and what was checked on the way."""
    from iobs import models
    from iobs.core import patterns
    from iobs.prune.audit import audit

    checked: list[str] = []
    if pattern is None:
        rows = audit(directory)
    else:
        wanted = patterns.parse(pattern)
        # Through the model, since a file does not tell which way round a matrix is multiplied.
        rows = audit(models.load(directory).module, wanted)
        checked.append(f"every layer with zeros satisfies {wanted}")
    return rows, checked + _against_report(directory, rows)


def _against_report(directory: Path, rows: list[AuditRow]) -> list[str]:
    """Compare with the report that lies beside the weights.

    Raises:
        AuditError: a layer has fewer zeros than the report says.
    """
    from iobs.prune.audit import compare
    from iobs.report import read_report

    files = [file for file in (directory / "report.json", directory.parent / "report.json") if file.is_file()]
    if not files:
        return []
    promised = read_report(files[0]).audit
    compare(rows, promised, directory)
    return [f"at least the {sum(row.zeros for row in promised):,} zeros that {files[0]} promises, layer by layer"]
