"""Sections of the HTML page for a network with fewer units: costs, and a picture of the widths before and after."""

from __future__ import annotations

from html import escape

from iobs.pruning.structured_report import StructuredReport, WidthRecord
from iobs.report.numbers import percent, significant


def render_costs(report: StructuredReport) -> str:
    """Cards of the shares that are left of every cost."""
    cards = "".join(
        f"<div><b>{percent(cost.share)}</b><span>{escape(cost.name)} {escape(cost.where)} left: "
        f"{significant(cost.before)} → {significant(cost.after)}</span></div>"
        for cost in report.costs
    )
    return f'<div class="facts">{cards}</div>'


def render_widths(report: StructuredReport) -> str:
    """A bar for every site: the units that are left, of those before."""
    widest = max((one.before for one in report.widths), default=1)
    rows = "".join(_row(one, widest) for one in report.widths)
    return (
        "<section><h2>Widths before and after</h2><table><thead><tr><th>layer</th><th>units</th><th>before</th>"
        f"<th>after</th><th></th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _row(one: WidthRecord, widest: int) -> str:
    before, after = 100 * one.before / widest, 100 * one.after / widest
    bar = (
        f'<svg width="220" height="12" role="img" aria-label="{one.after} of {one.before}">'
        f'<rect width="{before:.2f}%" height="12" fill="var(--zeros)"/>'
        f'<rect width="{after:.2f}%" height="12" fill="var(--kept)"/></svg>'
    )
    cells = (escape(one.name), escape(one.kind), f"{one.before:,}", f"{one.after:,}", bar)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
