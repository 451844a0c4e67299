"""Draw the figures of optimize.md: python docs/make_optimize_plots.py"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot

import iobs
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LeastSquares

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from paper_tables.theory import compare

IMAGES = Path(__file__).parent / "images"


def signal(rng, d, k):
    """A vector (d,) with k entries of size U(0.5, 1.5) and random sign."""
    theta = np.zeros(d)
    theta[rng.choice(d, k, replace=False)] = rng.uniform(0.5, 1.5, k) * rng.choice([-1, 1], k)
    return theta


def family(axis):
    """Plot the distance to the minimiser at every step, on one noiseless regression."""
    rng = np.random.default_rng(1)
    X, truth = rng.standard_normal((256, 128)) / 16, signal(rng, 128, 16)
    for method in ("iht", "accelerated_iht", "stochastic_iobs", "htp", "topk_iobs"):
        distances = [np.linalg.norm(truth)]
        iobs.minimize(
            LeastSquares(X, X @ truth), 64, method=method, max_steps=400, tol=1e-15,
            callback=lambda record, theta, seen=distances: seen.append(np.linalg.norm(theta - truth)),
        )  # fmt: skip
        axis.semilogy(np.maximum(distances, 1e-16), label=method, marker="o" if len(distances) < 12 else None)
    axis.set(xlabel="step", ylabel="distance to the minimiser", title="one curvature each", xlim=(-5, 400))
    axis.legend(fontsize="small")


def rate(axis):
    """Plot quadratic convergence on soft-label logistic regression and the theorem's bounds."""
    rng = np.random.default_rng(2)
    X, truth = rng.standard_normal((400, 40)), signal(rng, 40, 6)
    iterates = [0.5 * truth]
    objective = Logistic(X, 1 / (1 + np.exp(-X @ truth)))
    iobs.minimize(objective, 10, method="iobs", theta0=iterates[0], callback=lambda r, theta: iterates.append(theta))
    steps = [step for step in compare(objective, iterates, truth, 10) if step.before > 1e-13]
    number = np.arange(1, len(steps) + 1)
    axis.semilogy(number, [step.after for step in steps], "o-", label="I-OBS, measured")
    axis.semilogy(number, [step.tight for step in steps], "--", label="bound with (d - k) / (d - k*)")
    axis.semilogy(number, [step.paper for step in steps], ":", label="bound as printed")
    axis.set(xlabel="step", ylabel="distance to the minimiser", title="local rate", ylim=(1e-17, None))
    axis.set_xticks(number)
    axis.legend(fontsize="small")


def recovery(axis):
    """Plot the share of exact recoveries against k, for n = 100 and d = 250."""
    sizes = range(15, 46, 5)
    for method in ("auto", "cosamp", "htp", "omp", "iht"):
        shares = []
        for k in sizes:
            hits = 0
            for trial in range(10):
                rng = np.random.default_rng([3, k, trial])
                X, truth = rng.standard_normal((100, 250)), signal(rng, 250, k)
                found = iobs.minimize(LeastSquares(X, X @ truth), k, method=method, max_steps=200)
                hits += np.array_equal(found.support, np.flatnonzero(truth))
            shares.append(hits / 10)
        axis.plot(sizes, shares, "o-", label=method)
    axis.set(xlabel="k", ylabel="share of exact supports", title="recovery, n 100, d 250, no noise")
    axis.legend(fontsize="small")


def main() -> None:
    """Draw all figures."""
    IMAGES.mkdir(exist_ok=True)
    for draw in (family, rate, recovery):
        figure, axis = pyplot.subplots(figsize=(5.6, 3.8), layout="constrained")
        draw(axis)
        figure.savefig(IMAGES / f"optimize_{draw.__name__}.png", dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
