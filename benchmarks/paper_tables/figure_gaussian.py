"""Figure 1, left: sparse linear regression with a Gaussian prior, k-IHT against Top-k-I-OBS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paper_tables.experiment import Experiment, Request, Results, Row

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from iobs.optimize.objectives.design import Array

D, K_STAR, N, K = 128, 16, 256, 64
STEPS, TRIALS = 750, 20

FACTOR_NOTE = (
    "The paper states L = norm(y - X theta)^2 and the Hessian X^T X, which is half of the true Hessian. With that mix "
    "the Newton step is theta - 2 (theta - theta*): from 0 the iterates are 0, 2 theta*, 0, ... for ever. Here the "
    "gradient and the Hessian belong to the same function (either factor gives the same iterates), and one undamped "
    "step is exact."
)


def run(request: Request) -> Results:
    """Run 20 trials of 750 steps; measure loss and distance to the signal after every step."""
    import numpy as np

    curves = {name: np.zeros((2, STEPS + 1)) for name in ("k-IHT", "Top-k-I-OBS")}
    needed = {name: [] for name in curves}  # type: dict[str, list[int]]
    never = dict.fromkeys(curves, 0)
    mixed = np.zeros(TRIALS)
    for trial in range(TRIALS):
        X, truth = _problem(np.random.default_rng([request.seed, trial]))
        for name, method in (("k-IHT", "iht"), ("Top-k-I-OBS", "topk_iobs")):
            losses, distances = _curves(X, truth, method)
            curves[name] += np.stack([losses, distances]) / TRIALS
            reached = np.flatnonzero(distances <= 1e-12 * np.linalg.norm(truth))
            needed[name].append(int(reached[0]) if reached.size else STEPS)
            never[name] += not reached.size
        mixed[trial] = _mixed_factors(X, truth)
        request.say(f"trial {trial + 1} of {TRIALS}")
    if request.output is not None:
        write(request.output, "figure_gaussian", curves)
    rows = []
    for name, table in curves.items():
        rows += [Row(f"step {step}", name, None, float(table[1, step])) for step in (1, 10, 100, STEPS)]
        rows.append(Row("steps to 1e-12 (mean)", name, None, float(np.mean(needed[name]))))
    rows.append(Row(f"step {STEPS}", "factors mixed, as printed", None, float(mixed.mean())))
    return Results(
        "Distance to the signal, mean of 20 trials; the paper prints curves without numbers and claims that "
        "Top-k-I-OBS converges faster than k-IHT",
        rows,
        [
            FACTOR_NOTE,
            f"A trial that does not come within 1e-12 of the signal counts as {STEPS} steps in the mean: "
            + ", ".join(f"{count} of {TRIALS} of {name}" for name, count in never.items())
            + ".",
        ],
    )


def _problem(rng: np.random.Generator) -> tuple[Array, Array]:
    import numpy as np

    X = rng.standard_normal((N, D)) / np.sqrt(N)
    truth = np.zeros(D)
    truth[rng.choice(D, K_STAR, replace=False)] = rng.standard_normal(K_STAR)
    return X, truth


def _curves(X: Array, truth: Array, method: str) -> tuple[Array, Array]:
    """norm(y - X theta_t)^2 and norm(theta_t - theta*) for t = 0 ... STEPS, constant after the method has stopped."""
    import numpy as np

    from iobs.optimize.minimize import minimize
    from iobs.optimize.objectives.linear import LeastSquares

    distances = [float(np.linalg.norm(truth))]
    result = minimize(
        LeastSquares(X, X @ truth),
        K,
        method=method,
        max_steps=STEPS,
        tol=0.0,
        callback=lambda record, theta: distances.append(float(np.linalg.norm(theta - truth))),
    )
    losses = [2 * record.loss for record in result.history]
    missing = STEPS + 1 - len(distances)
    return np.array(losses + losses[-1:] * missing), np.array(distances + distances[-1:] * missing)


def _mixed_factors(X: Array, truth: Array) -> float:
    """Distance to the signal after STEPS steps with the gradient of norm(y - X theta)^2 and the "Hessian" X^T X."""
    import numpy as np

    hessian, target = X.T @ X, X.T @ (X @ truth)
    theta = np.zeros(D)
    for _ in range(STEPS):
        moved = theta - np.linalg.solve(hessian, 2 * (hessian @ theta - target))
        theta = np.where(np.abs(moved) >= np.sort(np.abs(moved))[-K], moved, 0.0)
    return float(np.linalg.norm(theta - truth))


def write(folder: Path, name: str, curves: dict[str, Array]) -> None:
    """Write the curves as a CSV file and as a PNG figure."""
    import csv

    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["step", *(f"{method} {what}" for method in curves for what in ("loss", "distance"))])
        steps = next(iter(curves.values())).shape[1]
        writer.writerows([t, *(value for table in curves.values() for value in table[:, t])] for t in range(steps))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, row, label in zip(axes, (0, 1), ("training loss", "distance to the signal"), strict=True):
        for method, table in curves.items():
            axis.semilogy(np.maximum(table[row], 1e-33), label=method)
        axis.set(xlabel="step", ylabel=label)
        axis.legend()
    figure.savefig(folder / f"{name}.png", dpi=130)
    pyplot.close(figure)


EXPERIMENT = Experiment(
    name="figure-gaussian",
    place="Figure 1 (left)",
    title="recovery of a sparse Gaussian signal",
    run=run,
)
