"""Proofs of the best k columns, beside El0ps, OKRidge, l0bnb, SCIP, abess and FasterRisk.

    python benchmarks/proofs.py [--quick] [--limit SECONDS] [--peer-python PYTHON] [--problems NAME ...]

Every solver has one thread and the same time limit, 120 seconds unless `--limit` says another, and ends at a relative
gap of 1e-4. A row for each problem and solver is added to results/proofs.jsonl. The peers run in an environment of
their own, whose interpreter `--peer-python` names: pip install el0ps okridge l0bnb abess fasterrisk pyscipopt. Without
it the rows of iobs alone are measured.

El0ps and l0bnb have no k but a price of a column. It is chosen so that k columns are best: half way between what the
k-th and what the next column save.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rows import Row, Rows, parser, stamp
from sklearn.datasets import load_breast_cancer

import iobs
from iobs.optimize.refit.newton import refit
from iobs.optimize.refit.within import Bounds

Floats = NDArray[np.float64]
KEYS = ("problem", "solver", "limit")
PEERS = ("el0ps", "okridge", "l0bnb", "scip", "abess")
TITLES = {"el0ps": "El0ps", "okridge": "OKRidge", "scip": "SCIP", "fasterrisk": "FasterRisk"}


@dataclass(frozen=True)
class Problem:
    """A problem of the table.

    Attributes:
        name: as in the table.
        loss: "squared", "logistic" or "points" (a risk score).
        n: samples.
        d: columns.
        k: non-zeros.
        ridge: weight of half the squared coefficients.
        limit: largest absolute coefficient; infinite for none. Of a risk score the largest points.
        peers: that can solve it.
        correlation: of neighbouring columns.
        noise: signal-to-noise ratio of the least squares.
    """

    name: str
    loss: str
    n: int
    d: int
    k: int
    ridge: float
    limit: float
    peers: tuple[str, ...]
    correlation: float = 0.9
    noise: float = 5.0

    def data(self) -> tuple[Floats, Floats]:
        """X and y: k coefficients of 1 at equal distances, autoregressive columns of variance 1."""
        if self.loss == "points":
            return patients()
        rng = np.random.default_rng(0)
        X = rng.standard_normal((self.n, self.d))
        for j in range(1, self.d):
            X[:, j] = self.correlation * X[:, j - 1] + np.sqrt(1 - self.correlation**2) * X[:, j]
        truth = np.zeros(self.d)
        truth[np.linspace(0, self.d - 1, self.k).astype(int)] = 1.0
        margin = X @ truth
        if self.loss == "logistic":
            return X, (rng.random(self.n) < 1 / (1 + np.exp(-margin))).astype(float)
        return X, margin + np.sqrt(margin.var() / self.noise) * rng.standard_normal(self.n)

    def objective(self, X: Floats, y: Floats) -> Any:
        """The objective of iobs."""
        kind = iobs.objectives.LeastSquares if self.loss == "squared" else iobs.objectives.Logistic
        return kind(X, y, ridge=self.ridge)


def patients() -> tuple[Floats, Floats]:
    """Breast cancer: 569 patients, 90 columns that say whether a measurement is above one of its quartiles."""
    cancer = load_breast_cancer()
    edges = np.quantile(cancer.data, [0.25, 0.5, 0.75], axis=0)
    above = (cancer.data[:, None, :] > edges).reshape(len(cancer.data), -1)
    return above.astype(np.float64), (cancer.target == 0).astype(np.float64)


SQUARED, LOGISTIC = ("okridge", "l0bnb", "el0ps", "abess"), ("el0ps", "abess")
PROBLEMS = (
    Problem("logistic 1,000 x 100", "logistic", 1000, 100, 10, 1.0, np.inf, LOGISTIC),
    Problem("squares 500 x 100", "squared", 500, 100, 10, 5.0, np.inf, (*SQUARED, "scip"), noise=1.0),
    Problem("squares 1,000 x 1,000, ridge 10", "squared", 1000, 1000, 10, 10.0, np.inf, SQUARED),
    Problem("squares 1,000 x 1,000, within 2", "squared", 1000, 1000, 10, 1.0, 2.0, ("l0bnb", "el0ps", "abess")),
    Problem("squares 1,000 x 1,000, no ridge, within 2", "squared", 1000, 1000, 10, 0.0, 2.0, ()),
    Problem("squares 1,000 x 1,000, no ridge", "squared", 1000, 1000, 10, 0.0, np.inf, ()),
    Problem("logistic 500 x 500, within 2", "logistic", 500, 500, 10, 1.0, 2.0, LOGISTIC),
    Problem("risk score 569 x 90", "points", 569, 90, 5, 1e-3, 5.0, ("fasterrisk",)),
)
QUICK = ("logistic 1,000 x 100", "squares 500 x 100")


def ours(problem: Problem, X: Floats, y: Floats, seconds: float) -> Row:
    """The row of iobs."""
    processor = time.process_time()
    if problem.loss == "points":
        most = int(problem.limit)
        found = iobs.RiskScore(problem.k, lower=-most, upper=most, ridge=problem.ridge, seconds=seconds).fit(X, y)
        nodes = int(found.message_.split("(")[1].split(" nodes")[0].replace(",", ""))
        return {
            "value": found.card_.loss, "gap": found.gap_, "nodes": nodes, "seconds": time.process_time() - processor,
            "processor_seconds": time.process_time() - processor,
        }  # fmt: skip
    bounds = {} if np.isinf(problem.limit) else {"lower": -problem.limit, "upper": problem.limit}
    found = iobs.certify(problem.objective(X, y), problem.k, seconds=seconds, max_nodes=10**9, **bounds)
    return {
        "value": found.upper, "gap": found.gap, "nodes": found.nodes, "seconds": found.seconds,
        "processor_seconds": time.process_time() - processor,
    }  # fmt: skip


def peer(name: str, problem: Problem, X: Floats, y: Floats, options: Any) -> Row:
    """The row of a peer; the value is that of the refit on its support, so that values can be compared."""
    objective = problem.objective(X, y)
    settings: dict[str, Any] = {"points": problem.limit, "limit": problem.limit}
    if problem.loss != "points":
        values = [iobs.minimize(objective, k).loss for k in (problem.k - 1, problem.k, problem.k + 1)]
        settings["price"] = 0.5 * (values[0] - values[2])
        settings["largest"] = float(np.abs(iobs.minimize(objective, problem.k).theta).max())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problem.npz"
        loss = "squared" if problem.loss == "squared" else "logistic"
        np.savez(file, X=X, y=y, k=problem.k, ridge=problem.ridge, loss=loss, **settings)
        script = Path(__file__).with_name("proof_peers.py")
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        done = subprocess.run(
            [options.peer_python, str(script), name, str(file), str(options.limit)],
            capture_output=True, text=True, check=False, env={**os.environ, **single, "PYTHONPATH": ""},
            timeout=5 * options.limit + 600,
        )  # fmt: skip
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200], "processor_seconds": 0.0}
    row = json.loads(done.stdout.strip().splitlines()[-1])
    theta = np.array(row.pop("theta"))
    if problem.loss != "points":
        support, bounds = np.flatnonzero(theta), None
        if np.isfinite(problem.limit):
            bounds = Bounds.of(-problem.limit, problem.limit, problem.d)
        row["value"], row["columns"] = refit(objective, support, theta, bounds=bounds).value, int(support.size)
    return dict(row)


def measure(problem: Problem, rows: Rows, options: Any) -> None:
    """Measure what is missing of a problem."""
    X, y = problem.data()
    runs: dict[str, Callable[[], Row]] = {"iobs": lambda: ours(problem, X, y, options.limit)}
    if options.peer_python:
        for name in problem.peers:
            runs[name] = lambda name=name: peer(name, problem, X, y, options)  # type: ignore[misc]
    for solver, run in runs.items():
        key = {"problem": problem.name, "solver": solver, "limit": options.limit}
        if not rows.has(**key):
            rows.put({**stamp(0), **key, **run()})


def tables(rows: list[Row]) -> str:
    """A row for each problem, solver and time limit, the shortest limit first."""
    text = [
        "# Proofs of the best k columns",
        "",
        "`python benchmarks/proofs.py` (with `--quick`: two problems; `--peer-python` for the peers). One thread. The "
        "gap is (value - proved lower bound) / value; proofs end at 1e-4. Columns have variance 1 and a correlation of "
        ".9 between neighbours, k = 10 (the risk score: 5).",
        "",
        "## Value, gap and time",
        "",
        "| problem | solver | columns | value | gap | nodes | seconds | limit (s) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    sizes = {problem.name: problem.k for problem in PROBLEMS}
    for problem in dict.fromkeys(row["problem"] for row in rows):
        latest = {(row["solver"], row["limit"]): row for row in rows if row["problem"] == problem}
        for row in sorted(latest.values(), key=lambda row: row["limit"]):
            name = TITLES.get(row["solver"], row["solver"])
            if "failed" in row:
                text.append(f"| {problem} | {name} | | failed: {row['failed']} | | | | {row['limit']:g} |")
                continue
            gap = "no proof" if row["gap"] is None else f"{row['gap']:.2g}"
            nodes = "" if row["nodes"] is None else f"{row['nodes']:,}"
            cells = [
                problem, name, row.get("columns", sizes[problem]), f"{row['value']:.6g}", gap, nodes,
                f"{row['processor_seconds']:.1f}", f"{row['limit']:g}",
            ]  # fmt: skip
            text.append(f"| {' | '.join(map(str, cells))} |")
    text += [
        "",
        "El0ps and l0bnb have a price of a column instead of k: their values are of as many columns as they chose, and "
        "lower with more of them. abess and FasterRisk prove nothing; FasterRisk's intercept is an integer. HiGHS "
        "takes no quadratic loss with binary variables. The limit is wall time, the seconds are processor time: other "
        "programs ran beside. Liu and Lodi (arXiv 2605.22188), who prove such problems on a GPU, were not run.",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    """Measure the rows that are missing."""
    options_of = parser(__doc__, data=False)
    options_of.add_argument("--limit", type=float, default=120.0)
    options_of.add_argument("--peer-python", default="")
    options_of.add_argument("--problems", nargs="*", default=[problem.name for problem in PROBLEMS])
    options = options_of.parse_args()
    rows = Rows("proofs", KEYS, options.again)
    for problem in PROBLEMS:
        if problem.name in (QUICK if options.quick else options.problems):
            measure(problem, rows, options)


if __name__ == "__main__":
    main()
