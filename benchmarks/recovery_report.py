"""Tables of recovery.py, from its rows."""

from __future__ import annotations

from rows import Row

RACES = {
    "undersampled": "n 200, d 500, no noise",
    "scope": "The same beside skscope Scope (its times include compiling, at every call)",
    "grasp": "The same beside skscope Grasp (its times include compiling, at every call)",
    "k80": "n 200, d 500, k 80, no noise",
    "noise": "With noise",
    "logistic": "Logistic",
    "wide": "Wide, no noise",
}


def tables(rows: list[Row]) -> str:
    """A table a section."""
    lines = [
        "# Sparse recovery",
        "",
        "`python benchmarks/recovery.py` (with `--quick`: without the slow sections), one thread. A cell of a race: "
        "share of trials with the exact support / share with an objective no worse than that of the refitted true "
        "support / median time (the lesser of wall and processor time). With noise the true support is often not the "
        "minimiser: read both. The first seed is in each row; none was used in development. Peers that were not "
        "installed have no column. L0Learn's core (fastsparsegams) is penalised, so the largest support of at most k "
        "on its path is taken. scikit-learn's OMP takes no sparse design.",
    ]
    for section, title in RACES.items():
        lines += table(section, title, rows, race_cell)
    lines += table("general", "Any function by automatic differentiation, n 500, d 500, k 10", rows, general_cell)
    lines += table("far", "Far starts (amplitude 10), n 200, d 50, k 5, 30 seeds", rows, far_cell)
    lines += certificates([row for row in rows if row["section"] == "certificate"])
    lines += table("million", "A million sparse columns", rows, million_cell)
    return "\n".join(lines) + "\n"


def table(section: str, title: str, rows: list[Row], cell) -> list[str]:
    """Problems by solvers; no lines if the section was not run."""
    own = [row for row in rows if row["section"] == section]
    if not own:
        return []
    solvers, problems = (list(dict.fromkeys(row[name] for row in own)) for name in ("solver", "problem"))
    lines = ["", f"## {title}", "", f"| problem | {' | '.join(solvers)} |", "|---" * (len(solvers) + 1) + "|"]
    for problem in problems:
        found = {row["solver"]: row for row in own if row["problem"] == problem}
        cells = [cell(found[solver]) if solver in found else "" for solver in solvers]
        trials = f" ({max(row['trials'] for row in found.values())})" if "trials" in own[0] else ""
        lines.append(f"| {problem}{trials} | {' | '.join(cells)} |")
    return lines


def race_cell(row: Row) -> str:
    """Successes and time."""
    return f"{row['support']:.2f} / {row['objective']:.2f} / {row['milliseconds']:.3g} ms"


def general_cell(row: Row) -> str:
    """Error and times."""
    return f"worst error {row['error']:.1e}, {row['milliseconds']:.3g} ms"


def far_cell(row: Row) -> str:
    """Reached starts and steps."""
    steps = "" if row["steps"] is None else f", median of {row['steps']:.3g} steps"
    return f"{row['reached']} of {row['trials']}{steps}"


def million_cell(row: Row) -> str:
    """Support and time."""
    if row["found"] is None:
        return f"not finished after {row['processor_seconds']:.0f} s"
    return f"{row['found']} of {row['of']}, {row['processor_seconds']:.3g} s, {row['peak_gb']:.2f} GB at most"


def certificates(rows: list[Row]) -> list[str]:
    """Gaps, ours beside OKRidge."""
    if not rows:
        return []
    lines = [
        "",
        "## Certificates",
        "",
        "Gap of 1/2 norm(y - X theta)^2, in brackets relative to the explained part; at most 20 s. OKRidge (ridge "
        "1e-3, asked for 1e-4) reports the relative gap.",
        "",
        "| problem | seed | gap | processor seconds | nodes | OKRidge: relative gap | processor seconds |",
        "|---" * 7 + "|",
    ]
    for row in (row for row in rows if row["solver"] == "iobs"):
        theirs = [one for one in rows if one["solver"] != "iobs" and one["seed"] == row["seed"]]
        theirs = [one for one in theirs if one["problem"] == row["problem"]]
        cells = [row["problem"], str(row["seed"]), f"{row['gap']:.2g} ({row['relative_gap']:.2g})"]
        cells += [f"{row['processor_seconds']:.3g}", str(row["nodes"])]
        cells += [f"{theirs[0]['relative_gap']:.2g}", f"{theirs[0]['processor_seconds']:.3g}"] if theirs else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
