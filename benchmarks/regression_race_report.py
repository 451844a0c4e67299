"""Table of regression_race.py, from its rows."""

from __future__ import annotations

from rows import Row


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md: shares of successes and times."""
    names = list(dict.fromkeys(row["solver"] for row in rows))
    lines = [
        "# Sparse regression, small to wide",
        "",
        "`python benchmarks/regression_race.py`, one thread. A cell: share of trials with the exact support / share "
        "with an objective no worse than that of the refitted true support / median time (the lesser of wall and "
        "processor time) / that time divided by the time of iobs: above 1 iobs is faster. Correlation .5 and a "
        "signal-to-noise ratio of 5 if not said otherwise; families with n 500, d 100, k 10. Solvers with a penalty "
        "(L0Learn core, skglm, adelie) do not aim at k: the largest support of at most k on their path is taken.",
        "",
        f"Peers: {'; '.join(dict.fromkeys(row['peers'] for row in rows))}.",
        "",
        f"| problem (trials) | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        found = {row["solver"]: row for row in rows if row["problem"] == problem}
        unit = found["iobs"]["milliseconds"] if "iobs" in found else float("nan")
        cells = [
            f"{found[name]['support']:.2f} / {found[name]['objective']:.2f} / {found[name]['milliseconds']:.3g} ms / "
            f"{found[name]['milliseconds'] / unit:.2g}"
            if name in found
            else ""
            for name in names
        ]
        lines.append(f"| {problem} ({max(row['trials'] for row in found.values())}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
