"""Report of a run: tables on a terminal, `report.json`, and `report.html` with embedded figures.

Its import adds these forms to `Report.save`.
"""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

from iobs.core.formats import from_json, paths_without_folders, to_json
from iobs.errors import DataError
from iobs.pruning.report import RENDERERS, Report
from iobs.pruning.structured_report import StructuredReport
from iobs.report.card import render_card as render_card
from iobs.report.page import render_page as render_page
from iobs.report.page import render_summary
from iobs.report.tables import audit_table as audit_table
from iobs.report.tables import layers_table as layers_table
from iobs.report.tables import rounds_table as rounds_table
from iobs.report.tables import scores_table as scores_table
from iobs.report.tables import summary_lines as summary_lines
from iobs.report.tables import widths_table as widths_table


def write_report(report: Report, directory: Path) -> None:
    """Write `report.json` and `report.html` into an existing directory, without absolute paths."""
    for name in ("report.json", "report.html"):
        report.save(directory / name)


def _as_json(report: Report) -> str:
    return to_json(paths_without_folders(report.as_dict())) + "\n"


def _as_csv(report: Report) -> str:
    csv.writer(text := StringIO(), lineterminator="\n").writerows(report.table())
    return text.getvalue()


RENDERERS.update({".json": _as_json, ".csv": _as_csv, ".html": render_page, "summary": render_summary})


def read_report(file: str | Path) -> Report:
    """Read a `report.json`.

    Raises:
        DataError: the file is missing, or is not a report of iobs.
    """
    try:
        values = from_json(Path(file).read_text(encoding="utf8"))
        if not isinstance(values, dict):
            raise TypeError(f"{type(values).__name__} in place of an object")
        kind = StructuredReport if "widths" in values else Report
        return kind.from_dict(values)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not a report of iobs.") from error
