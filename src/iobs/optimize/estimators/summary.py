"""The table of coefficients of a fitted estimator: prints as text, and as HTML in notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iobs.core.formats import pandas_module

if TYPE_CHECKING:
    import pandas

AFTER_SELECTION = (
    "Standard errors are those of a fit on columns known beforehand. These columns were chosen by the same data, "
    "so the errors are too small."
)


@dataclass(frozen=True)
class Row:
    """A coefficient.

    Attributes:
        name: of the feature; "(intercept)" for the constant.
        coefficient: in the units of the feature.
        error: standard error after selection (too small); NaN if unknown.
        label: the class or the response that the coefficient belongs to, if there are several; else "".
    """

    name: str
    coefficient: float
    error: float
    label: str = ""

    @property
    def z(self) -> float:
        """The coefficient in standard errors; NaN if the error is unknown."""
        return self.coefficient / self.error if self.error > 0 else math.nan


@dataclass(frozen=True)
class Summary:
    """A table of coefficients; `str` and notebooks show it.

    Attributes:
        title: what was fitted, in one line.
        rows: the coefficients, the intercept last.
        note: what the standard errors leave out.
        outputs: name of what the labels of the rows are, "class" or "response".
    """

    title: str
    rows: tuple[Row, ...]
    note: str = AFTER_SELECTION
    outputs: str = "class"

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The heading and the rows as text."""
        labelled = any(row.label for row in self.rows)
        heading = [*([self.outputs] if labelled else []), "feature", "coefficient", "standard error", "z"]
        body = [
            [
                *([row.label] if labelled else []),
                row.name,
                _number(row.coefficient, 5),
                _number(row.error, 2),
                f"{row.z:.1f}" if math.isfinite(row.z) else "–",
            ]
            for row in self.rows
        ]
        return heading, body

    def __str__(self) -> str:
        heading, body = self.cells()
        texts = len(heading) - 3
        widths = [max(len(line[j]) for line in [heading, *body]) for j in range(len(heading))]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if j < texts else cell.rjust(width)
                for j, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(padded).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self.title, rule, line(heading), rule, *map(line, body), rule, self.note])

    def _repr_html_(self) -> str:
        heading, body = self.cells()
        texts = len(heading) - 3
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)

        def line(cells: Sequence[str]) -> str:
            sides = ["left" if j < texts else "right" for j in range(len(cells))]
            return "".join(
                f'<td style="text-align:{side}">{html.escape(cell)}</td>'
                for side, cell in zip(sides, cells, strict=True)
            )

        lines = "".join(f"<tr>{line(cells)}</tr>" for cells in body)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{lines}</tbody></table><p><small>{html.escape(self.note)}</small></p>"
        )

    def to_frame(self) -> pandas.DataFrame:
        """The table as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed; the message has the command that installs it.
        """
        columns = {
            self.outputs: [row.label for row in self.rows],
            "feature": [row.name for row in self.rows],
            "coefficient": [row.coefficient for row in self.rows],
            "standard_error": [row.error for row in self.rows],
            "z": [row.z for row in self.rows],
        }
        frame = pandas_module().DataFrame(columns)
        return frame if any(row.label for row in self.rows) else frame.drop(columns=self.outputs)


def _number(value: float, digits: int) -> str:
    """Significant digits, without an exponent for values that a person reads at a glance: 240, not 2.4e+02."""
    text = f"{value:#.{digits}g}" if math.isfinite(value) else "–"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e7 else text.rstrip(".")
