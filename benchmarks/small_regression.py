"""Race on small regressions: `iobs.SparseRegressor` against abess, in the same process on the same data.

    pip install abess
    OMP_NUM_THREADS=1 python benchmarks/small_regression.py

Times are processor seconds of one thread (median of `--repeats` fits after one warm-up, in turns), so that other
programs on the machine disturb them less; short fits are repeated for two seconds. Both choose from the same sizes
0 ... n / (2 log n), at most 50. Each problem also compares the answers: the loss of our fit divided by that of abess,
refitted on its support without a ridge, for the given k.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from rows import Row, Rows, commit, machine

SHAPES = [(200, 50), (500, 100), (1000, 100), (1000, 500), (2000, 200), (5000, 50), (5000, 1000)]
K, CORRELATION, SIGNAL_TO_NOISE = 10, 0.5, 5.0
LEAST_SECONDS = 2.0  # of both on one problem


def problem(n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An AR(1) design and a target with K effects of size 0.5 to 1.5."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    for j in range(1, d):
        X[:, j] = CORRELATION * X[:, j - 1] + math.sqrt(1 - CORRELATION**2) * X[:, j]
    effects = np.zeros(d)
    effects[rng.choice(d, K, replace=False)] = rng.choice([-1, 1], K) * rng.uniform(0.5, 1.5, K)
    signal = X @ effects
    return X, signal + rng.standard_normal(n) * signal.std() / math.sqrt(SIGNAL_TO_NOISE)


def seconds(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median processor seconds of each run, in turns; short runs are repeated for two seconds."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    while len(times[0]) < repeats or sum(map(sum, times)) < LEAST_SECONDS:
        for run, spent in zip(runs, times, strict=True):
            begun = time.process_time()
            run()
            spent.append(time.process_time() - begun)
    return [float(np.median(spent)) for spent in times]


def loss(X: np.ndarray, y: np.ndarray, support: np.ndarray) -> float:
    design = np.column_stack([X[:, support], np.ones(len(y))])
    return float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum())


def race(n: int, d: int, seed: int, repeats: int) -> list[dict[str, object]]:
    from abess import LinearRegression

    from iobs import SparseRegressor

    X, y = problem(n, d, seed)
    sizes = range(0, min(50, int(n / (2 * math.log(n))), d) + 1)
    pairs = {
        f"k = {K}": (lambda: SparseRegressor(K).fit(X, y), lambda: LinearRegression(support_size=K).fit(X, y)),
        "ebic": (lambda: SparseRegressor("ebic").fit(X, y), lambda: LinearRegression(support_size=sizes).fit(X, y)),
        "cv": (lambda: SparseRegressor("cv").fit(X, y), lambda: LinearRegression(support_size=sizes, cv=5).fit(X, y)),
    }
    rows = []
    for name, (ours, theirs) in pairs.items():
        mine, other = seconds((ours, theirs), repeats)
        row: dict[str, object] = {"n": n, "d": d, "choice": name, "processor_seconds": mine, "abess_s": other}
        row["ratio"] = mine / other
        if name.startswith("k"):
            row["loss_ratio"] = loss(X, y, ours().support_) / loss(X, y, np.flatnonzero(theirs().coef_))
        rows.append(row)
    return rows


def tables(every: list[Row]) -> str:
    """The section of RESULTS.md: ratios of processor time."""
    choices = list(dict.fromkeys(row["choice"] for row in every))
    text = [
        "# Small regressions",
        "",
        "Made by `python benchmarks/small_regression.py` (needs `pip install abess`): processor time of "
        "`iobs.SparseRegressor` divided by that of abess, one thread, one seed, median of the repeats. Less than 1 "
        "means that ours is faster. The times are of a machine with other work. On the smallest problem both are "
        "mostly calls from Python.",
        "",
        "| rows, columns | " + " | ".join(choices) + " |",
        "|---" * (1 + len(choices)) + "|",
    ]
    for n, d in dict.fromkeys((row["n"], row["d"]) for row in every):
        found = {row["choice"]: row["ratio"] for row in every if (row["n"], row["d"]) == (n, d)}
        cells = [f"{found[choice]:.2f}" if choice in found else "" for choice in choices]
        text.append(f"| {n:,}, {d:,} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    given = parser.parse_args()
    rows = Rows("small_regression", ("n", "d", "choice", "seed"), given.again)
    common = {"commit": commit(), "seed": given.seed, "machine": machine()}
    for n, d in SHAPES:
        if not rows.has(n=n, d=d, choice="cv", seed=given.seed):
            for row in race(n, d, given.seed, given.repeats):
                rows.put({**common, **row})


if __name__ == "__main__":
    main()
