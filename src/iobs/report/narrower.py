"""Sections of the HTML page for a network with fewer units: costs, and a figure of the widths before and after."""

from __future__ import annotations

from html import escape

from iobs.pruning.structured_report import StructuredReport, WidthRecord
from iobs.report.numbers import percent, significant


def render_costs(report: StructuredReport) -> str:
    """Cards of the shares that are left of every cost."""
    cards = "".join(
        f"<div><b>{percent(cost.share)}</b><span>of the {escape(cost.name)} {escape(cost.where)} are left: "
        f"{significant(cost.before)} → {significant(cost.after)}</span></div>"
        for cost in report.costs
    )
    return f'<div class="facts">{cards}</div>'


def render_widths(report: StructuredReport) -> str:
    """A bar for every site: the units that are left, of those before. Bars of one kind of units have one scale."""
    widest: dict[str, int] = {}
    for one in report.widths:
        widest[one.kind] = max(one.before, widest.get(one.kind, 1))
    rows = "".join(_row(one, widest[one.kind]) for one in report.widths)
    headings = "".join(f"<th>{name}</th>" for name in ("layer", "units", "before", "after", ""))
    legend = "".join(
        f'<li><i style="background:var(--{colour})"></i>{text}</li>'
        for colour, text in (("kept", "units that are left"), ("zeros", "removed units"))
    )
    return (
        f'<section><h2>Widths before and after</h2><ul class="legend">{legend}</ul><div class="scroll"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(one: WidthRecord, widest: int) -> str:
    before, after = 100 * one.before / widest, 100 * one.after / max(1, one.before)
    bar = (
        f'<div role="img" aria-label="{one.after} of {one.before}" style="width:13rem">'
        f'<div style="width:{before:.2f}%;background:var(--zeros)">'
        f'<div style="width:{after:.2f}%;height:.75rem;background:var(--kept)"></div></div></div>'
    )
    cells = (escape(one.name), escape(one.kind), f"{one.before:,}", f"{one.after:,}", bar)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
