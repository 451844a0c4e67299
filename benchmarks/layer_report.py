"""Tables and the Pareto plot of the layer race, from its measured rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rows import Row

ORDER = ["SparseGPT", "ours sparsegpt", "ours admm fast", "ours admm", "ours admm best", "ALPS", "ours obc", "OBC",
         "our L-OBS", "our Net-Trim"]  # fmt: skip
CHOSEN_ON = ["L2.q", "L5.o", "L0.o", "L2.o", "S1024", "S4096x1024"]
"""Problems that the schedules were chosen on (schedules only), and one of other weights under the same Gram matrix; the
others were first seen in this race."""

Cells = dict[tuple[str, str], dict[str, dict]]


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def ratios(cells: Cells, solver: str, peer: str, field: str) -> dict[tuple[str, str], float]:
    return {
        key: rows[solver][field] / rows[peer][field] for key, rows in cells.items() if solver in rows and peer in rows
    }


def cells_of(rows: list[Row]) -> Cells:
    """Rows by (problem, sparsity) and solver."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault((row["problem"], row["cell"]), {})[row["solver"]] = row
    return cells


def tables(rows: list[Row]) -> str:
    """The page of the race."""
    cells = cells_of(rows)
    text = [
        "# The layer race",
        "",
        "`python benchmarks/layer_race.py --peers FOLDER`: real layers of all-MiniLM-L6-v2 and synthetic ones, float32 "
        "problems, damping 0.01, CPU, one thread, one process, interleaved, nonzeros equal to within five. Errors are "
        "relative, under the undamped Gram matrix. Seconds are processor time, least of up to three repeats. "
        f"The ADMM schedules were chosen on {', '.join(CHOSEN_ON)}; every layer is reported. Products of float32 are "
        "computed alike for all solvers, peers too: on processors of AMD by oneDNN.",
        "",
        "![error against time](results/layer_race.png)",
        "",
        *summary(cells),
        *by_group(cells),
        *by_cell(cells),
    ]
    return "\n".join(text) + "\n"


def summary(cells: Cells) -> list[str]:
    lines = ["## Geometric means over all cells both ran in", ""]
    lines += [
        "| solver | error / SparseGPT | error / ALPS (worst cell) | held-out error / ALPS | time / SparseGPT "
        "| time / ALPS | cells |",
        "|---|---|---|---|---|---|---|",
    ]
    for solver in ORDER:
        if not any(solver in rows for rows in cells.values()):
            continue
        against = ratios(cells, solver, "ALPS", "error")
        lines.append(
            f"| {solver} | {geometric_mean(ratios(cells, solver, 'SparseGPT', 'error').values()):.3f} "
            f"| {geometric_mean(against.values()):.4f} ({max(against.values(), default=math.nan):.3f}) "
            f"| {geometric_mean(ratios(cells, solver, 'ALPS', 'held_out').values()):.4f} "
            f"| {geometric_mean(ratios(cells, solver, 'SparseGPT', 'processor_seconds').values()):.3f} "
            f"| {geometric_mean(ratios(cells, solver, 'ALPS', 'processor_seconds').values()):.3f} | {len(against)} |"
        )
    obc = ratios(cells, "ours obc", "OBC", "processor_seconds")
    if obc:
        error = ratios(cells, "ours obc", "OBC", "error")
        lines += ["", f"OBC at 384 columns: {geometric_mean(obc.values()):.4f} of the reference's time at "]
        lines[-1] += f"{geometric_mean(error.values()):.4f} of its error ({len(obc)} cells)."
    same = [rows["ours sparsegpt"].get("same_mask") for rows in cells.values() if "ours sparsegpt" in rows]
    same = [value for value in same if value is not None]
    if same:
        mean, least = sum(same) / len(same), min(same)
        lines += [
            "",
            f"SparseGPT's masks and ours agree in {100 * mean:.4f} % of the entries, least {100 * least:.4f} % ",
        ]
        lines[-1] += f"({len(same)} cells)."
    large = cells.get(("S1024", "0.5"), {}).get("ours obc")
    if large:
        lines += ["", f"A whole 1024 x 1024 layer by exact greedy removal: {large['processor_seconds']:.1f} s."]
    return [*lines, ""]


def by_group(cells: Cells) -> list[str]:
    """Where a mean hides something: chosen on or not, unstructured or 2:4, by layer."""
    groups = {
        "chosen on": [key for key in cells if key[0] in CHOSEN_ON],
        "not chosen on": [key for key in cells if key[0] not in CHOSEN_ON],
        "unstructured": [key for key in cells if ":" not in key[1]],
        "2:4": [key for key in cells if ":" in key[1]],
        **{name: [key for key in cells if key[0] == name] for name in dict.fromkeys(key[0] for key in cells)},
    }
    solvers = ["ours admm fast", "ours admm", "ours admm best"]
    lines = [
        "## By group: error / ALPS, and time / ALPS in brackets; SparseGPT's ratios are to the reference SparseGPT",
        "",
    ]
    lines += ["| group | " + " | ".join(solvers) + " | ours sparsegpt: error, time | fast: error, time / SparseGPT |"]
    lines += ["|" + "---|" * (len(solvers) + 3)]
    for name, keys in groups.items():
        part = {key: cells[key] for key in keys}

        def mean(solver: str, peer: str, field: str, part: Cells = part) -> float:
            return geometric_mean(ratios(part, solver, peer, field).values())

        entries = [f"{mean(s, 'ALPS', 'error'):.4f} ({mean(s, 'ALPS', 'processor_seconds'):.3f})" for s in solvers]
        for solver in ("ours sparsegpt", "ours admm fast"):
            entries.append(
                f"{mean(solver, 'SparseGPT', 'error'):.3f}, {mean(solver, 'SparseGPT', 'processor_seconds'):.3f}"
            )
        lines.append(f"| {name} | " + " | ".join(entries) + " |")
    return [*lines, ""]


def by_cell(cells: Cells) -> list[str]:
    solvers = [solver for solver in ORDER if any(solver in rows for rows in cells.values())]
    lines = ["## Every cell: error x 100 / held-out error x 100 (CPU seconds)", ""]
    lines += ["| layer | sparsity | " + " | ".join(solvers) + " |", "|" + "---|" * (len(solvers) + 2)]
    for (problem, cell), rows in cells.items():
        entries = [
            f"{100 * rows[s]['error']:.3f} / {100 * rows[s]['held_out']:.3f} ({rows[s]['processor_seconds']:.3f})"
            if s in rows
            else "-"
            for s in solvers
        ]
        lines.append(f"| {problem} | {cell} | " + " | ".join(entries) + " |")
    return lines


def plot(rows: list[Row], file: Path) -> None:
    """Error against time, geometric means over the cells that everyone ran in, relative to SparseGPT."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = cells_of(rows)
    everyone = [solver for solver in ORDER if solver not in ("ours obc", "OBC", "our L-OBS", "our Net-Trim")]
    common = {key: rows for key, rows in cells.items() if all(solver in rows for solver in everyone)}
    if not common:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    fields = ("processor_seconds", "error")
    points = {
        solver: [geometric_mean(ratios(common, solver, "SparseGPT", name).values()) for name in fields]
        for solver in everyone
    }
    for solver, (seconds, error) in points.items():
        own = solver.startswith("ours")
        axes.scatter(seconds, error, color="tab:blue" if own else "tab:gray", zorder=3)
        axes.annotate(solver, (seconds, error), xytext=(5, 5), textcoords="offset points")
    budgets = [points[solver] for solver in ("ours admm fast", "ours admm", "ours admm best")]
    axes.plot(*zip(*budgets, strict=True), color="tab:blue")
    axes.set(xscale="log", yscale="log", xlabel="time / SparseGPT", ylabel="error / SparseGPT")
    axes.margins(x=0.2, y=0.08)  # room for the names
    axes.set_title(f"Geometric means over {len(common)} cells, one thread")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(file, dpi=130)
    plt.close(figure)
