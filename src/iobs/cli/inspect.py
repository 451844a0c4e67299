"""`iobs inspect`: count the zeros in a model directory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console, options

if TYPE_CHECKING:
    from torch import nn

    from iobs.core.patterns import Pattern
    from iobs.pruning.report import AuditRow, Report


@options.command
def inspect(
    directory: options.WrittenDirectory,
    *,
    pattern: str | None = None,
    all_layers: Annotated[bool, typer.Option("--all")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    talk: options.Talk,
) -> None:
    """Audit a model directory: count the zeros of every matrix; fewer zeros than requested are an error.

    The requested zeros are those in report.json, if it exists, and those of --pattern. report.json also names the
    pruned layers. Of a packed directory every sum is checked, and the bytes of its parts are shown.

    Args:
        directory: A directory with safetensors files, or a packed one.
        pattern: Also check this pattern in every pruned layer: 2:4, or 0.5 (after an allocation: over all layers).
        all_layers: Also list matrices without zeros.

    Examples:
        iobs inspect OUT  # count the zeros, and compare them with report.json
        iobs inspect OUT --pattern 2:4 --json  # check a pattern too
    """
    from rich.text import Text

    from iobs.core.patterns import parse

    parsed = None if pattern is None else parse(pattern)

    from iobs.core.formats import percent
    from iobs.errors import listed
    from iobs.models.packed import is_packed
    from iobs.models.packed_files import files_with_codes, unpacked
    from iobs.report import audit_table
    from iobs.report.costs import costs_as_json, costs_lines, costs_of, costs_table

    if not any(directory.glob("*.safetensors")) and (directory / "model").is_dir():
        directory = directory / "model"
    with ExitStack() as stack:
        files = directory
        if is_packed(directory):
            files = stack.enter_context(unpacked(directory))
        result = _audit(directory, files, parsed, trust_remote_code)
    costs = costs_of(directory) if files_with_codes(directory) else None
    rows, sparse, stray = result.rows, result.sparse, result.stray
    zeros, weights = sum(row.zeros for row in sparse), sum(row.weights for row in sparse)
    if talk.as_json:
        layers = [{"layer": row.name, "shape": row.shape, "zeros": row.zeros} for row in rows]
        pruned = [row.name for row in sparse]
        packed = {} if costs is None else {"bytes": costs_as_json(costs)}
        console.print_json(
            {
                "zeros": zeros,
                "weights": weights,
                "pruned": pruned,
                "checked": result.checked,
                "layers": layers,
                **packed,
            }
        )
        return
    out = console.output_console()
    if rows and (sparse or all_layers):
        out.print(audit_table(rows if all_layers else sparse))
    if sparse:
        out.print(f"{percent(zeros / weights, 2)} zeros: {zeros:,} of {weights:,} weights in {len(sparse)} layers")
        for row in stray:
            out.print(f"zeros elsewhere, not counted: {row.name} ({row.zeros:,} of {row.weights:,})")
        dense = [row.name for row in rows if row not in sparse and row not in stray]
        if dense:
            out.print(f"{len(dense)} {'matrix has' if len(dense) == 1 else 'matrices have'} no zero: {listed(dense)}")
    else:
        out.print(f"No zeros in {len(rows)} matrices: this model is dense.")
    for line in result.units:
        out.print(line)
    for line in result.checked:
        out.print(Text.assemble(("✓", "green"), " ", line))
    if costs is not None:
        out.print(costs_table(costs))
        for line in costs_lines(costs):
            out.print(line, soft_wrap=True)


@dataclass
class _InspectResult:
    """Audit rows of all matrices and of the pruned matrices, each check that passed, and counts of units, in words."""

    rows: list[AuditRow]
    sparse: list[AuditRow]
    checked: list[str]
    units: list[str]

    @property
    def stray(self) -> list[AuditRow]:
        """Rows of matrices with zeros that do not count as pruned."""
        names = {row.name for row in self.sparse}
        return [row for row in self.rows if row.zeros and row.name not in names]


def _audit(directory: Path, files: Path, parsed: Pattern | None, trust_remote_code: bool) -> _InspectResult:
    """Count the zeros of the files, and compare them with the pattern and with the directory's report.json.

    Raises:
        AuditError: a layer has fewer zeros than the pattern requires or the report says.
    """
    from iobs import models
    from iobs.core.patterns import Unstructured
    from iobs.models.skeleton import matrices_in_files
    from iobs.pruning.audit import audit, check_together, require_promised
    from iobs.pruning.network.layers import find_layers
    from iobs.pruning.structured_report import StructuredReport

    file, report = _report(directory)
    promised = {row.name for row in report.audit} if report is not None else set()
    checked = []
    if parsed is None:
        rows = audit(files)
        has_promised = promised <= {row.name for row in rows}
    else:
        source: Path | nn.Module = files
        # Without a report, a matrix of the files that is no layer could count as pruned.
        names = matrices_in_files(files) if promised else None
        if names is None:  # load the model: its files do not say whether a matrix is stored transposed
            source = models.load(files, trust_remote_code=trust_remote_code).module
            names = [layer.name for layer in find_layers(source)]
        has_promised = promised <= {*names}
        if report is not None and report.allocation and has_promised and isinstance(parsed, Unstructured):
            rows = audit(source)
            check_together([row for row in rows if row.name in promised], parsed)
            checked.append(f"these layers, among which zeros were spread, satisfy {parsed} together")
        else:
            rows = audit(source, parsed, promised if promised and has_promised else None)
            checked.append(f"every one of these layers satisfies {parsed}")
        if source is files:  # which have another order, and embeddings
            places = {name: place for place, name in enumerate(names)}
            rows = sorted((row for row in rows if row.name in places), key=lambda row: places[row.name])
    if promised and has_promised:
        sparse = [row for row in rows if row.name in promised]
    elif report is not None and parsed is None:
        # The files name some layers otherwise, as experts; what the report left dense, such as an embedding with a
        # row of zeros for padding, is none of them.
        sparse = [row for row in rows if row.name in promised or (row.zeros and row.name not in report.skipped)]
    else:
        sparse = [row for row in rows if (row.zeros if parsed is None else row.asked or row.bits)]
    if report is not None:
        require_promised(rows, report.audit, directory)
    if report is not None and not isinstance(report, StructuredReport):
        checked.append(f"at least the {report.zeros:,} zeros that {file} promises, layer by layer")
    return _InspectResult(rows, sparse, checked, report.counts() if isinstance(report, StructuredReport) else [])


def _report(directory: Path) -> tuple[Path | None, Report | None]:
    """report.json beside the weights, or above a folder named model (iobs demo). Unreadable reports only warn."""
    from iobs.errors import DataError
    from iobs.report import read_report

    for folder in (directory, directory.parent) if directory.resolve().name == "model" else (directory,):
        file = folder / "report.json"
        if file.is_file():
            try:
                return file, read_report(file)
            except DataError as error:
                console.warn(f"{error} The zeros are counted without it.")
    return None, None
