"""Sparse recovery beside abess, skscope, L0Learn's C++ core, scikit-learn and OKRidge: same data, one thread.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/recovery.py [SECTION ...] [--trials N] [--seed S]

Peers that are not installed are left out. Success is the exact support; "f <= truth" says that the objective is no
worse than that of the refitted true support (with noise the truth is often not the minimiser). Designs have AR(1)
columns of unit variance, k non-zeros of size U(0.5, 1.5) with random signs. Times are medians, each the lesser of wall
and processor time, since other work may share the machine. Seeds begin at --seed, which no development run used.
"""

# ruff: noqa: E402  (the number of threads is set before NumPy is loaded)

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
import scipy.sparse as sp
import torch

import iobs
from iobs.optimize.certificate import certify
from iobs.optimize.objectives import LeastSquares, Logistic, Poisson, from_torch
from iobs.optimize.refit import refit

RESULTS = Path(__file__).parent / "results" / "recovery.md"
Solver = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def available(name: str):
    try:
        return importlib.import_module(name)
    except Exception:
        return None


class Report(list):
    """Lines that are on disk as soon as they are known."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def append(self, line: str) -> None:
        super().append(line)
        self.file.write_text("\n".join(self) + "\n")


def clocks():
    return time.perf_counter(), time.process_time()


def since(begun):
    return min(now - then for now, then in zip(clocks(), begun, strict=True))


def problem(seed, n, d, k, rho=0.0, snr=np.inf, kind="linear", amplitude=1.0):
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, d))
    X = noise.copy()
    for j in range(1, d):
        X[:, j] = rho * X[:, j - 1] + np.sqrt(1 - rho**2) * noise[:, j]
    theta = np.zeros(d)
    theta[rng.choice(d, k, replace=False)] = amplitude * rng.uniform(0.5, 1.5, k) * rng.choice([-1, 1], k)
    margin = X @ theta
    if kind == "logistic":
        return X, (rng.random(n) < 1 / (1 + np.exp(-margin))).astype(float), theta
    return X, margin + (rng.standard_normal(n) * np.sqrt(margin.var() / snr) if np.isfinite(snr) else 0.0), theta


def ours(X, y, k):
    return iobs.minimize(LeastSquares(X, y), k).theta


def ours_logistic(X, y, k):
    return iobs.minimize(Logistic(X, y), k).theta


def linear_peers(scope: bool = False) -> dict[str, Solver]:
    peers: dict[str, Solver] = {}
    if abess := available("abess.linear"):
        peers["abess"] = lambda X, y, k: abess.LinearRegression(support_size=k, fit_intercept=False).fit(X, y).coef_
    if games := available("fastsparsegams"):
        peers["L0Learn core"] = lambda X, y, k: _l0learn(games, X, y, k)
    if linear := available("sklearn.linear_model"):
        omp = linear.OrthogonalMatchingPursuit
        peers["scikit-learn OMP"] = lambda X, y, k: omp(n_nonzero_coefs=k, fit_intercept=False).fit(X, y).coef_
    if scope and (skscope := available("skscope")):
        for name in ("ScopeSolver", "GraspSolver"):
            peers[f"skscope {name[:-6]}"] = lambda X, y, k, name=name: _skscope(
                getattr(skscope, name), X, y, k, "linear"
            )
    return peers


def logistic_peers() -> dict[str, Solver]:
    peers: dict[str, Solver] = {}
    if abess := available("abess.linear"):
        peers["abess"] = lambda X, y, k: abess.LogisticRegression(support_size=k, fit_intercept=False).fit(X, y).coef_
    if skscope := available("skscope"):
        peers["skscope Scope"] = lambda X, y, k: _skscope(skscope.ScopeSolver, X, y, k, "logistic")
    return peers


def _l0learn(module, X, y, k):
    model = module.fit(X, y, penalty="L0", algorithm="CDPSI", max_support_size=k, intercept=False, num_lambda=100)
    sizes = np.asarray(model.support_size[0])
    best = int(np.flatnonzero(sizes <= k)[np.argmax(sizes[sizes <= k])])
    values = np.asarray(model.coeffs[0][:, best].todense()).ravel()
    return values[-X.shape[1] :]


def _skscope(solver, X, y, k, kind):
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    Xj, yj = jnp.array(X), jnp.array(y)
    if kind == "linear":
        return np.asarray(solver(X.shape[1], k).solve(lambda t: jnp.sum((yj - Xj @ t) ** 2), jit=True))
    loss = lambda t: jnp.sum(jnp.logaddexp(0.0, Xj @ t) - yj * (Xj @ t))  # noqa: E731
    return np.asarray(solver(X.shape[1], k).solve(loss, jit=True))


def race(title, cells, make, entries, out):
    """One row a cell, one column a solver: success / f <= truth / median ms."""
    names = list(entries)
    out.append(f"\n### {title}\n")
    out.append("| problem (trials) | " + " | ".join(names) + " |")
    out.append("|---" * (len(names) + 1) + "|")
    for label, trials, seed, arguments in cells:
        stats = {name: ([], [], []) for name in names}
        for trial in range(-1, trials):  # the first warms everything up and is not counted
            X, y, truth = problem(seed + trial, **arguments)
            objective, k = make(X, y), arguments["k"]
            goal = refit(objective, np.flatnonzero(truth)).value
            for name, solver in entries.items():
                begun = clocks()
                try:
                    theta = np.asarray(solver(X, y, k)).ravel()
                except Exception as error:
                    print(name, type(error).__name__, str(error)[:100], file=sys.stderr)
                    theta = np.zeros(X.shape[1])
                spent = since(begun)
                support = np.flatnonzero(theta)
                value = refit(objective, support[np.argsort(-np.abs(theta[support]))[:k]]).value
                if trial >= 0:
                    stats[name][0].append(np.array_equal(support, np.flatnonzero(truth)))
                    stats[name][1].append(value <= goal * (1 + 1e-9) + 1e-18 * objective.value(np.zeros_like(theta)))
                    stats[name][2].append(1e3 * spent)
        row = [f"{np.mean(a):.2f} / {np.mean(b):.2f} / {statistics.median(c):.3g} ms" for a, b, c in stats.values()]
        out.append(f"| {label} ({trials}) | " + " | ".join(row) + " |")
        print(out[-1], flush=True)


def section_undersampled(trials, seed, out):
    base = {"n": 200, "d": 500}
    cells = [
        ("k 60", trials, seed, {**base, "k": 60}),
        ("k 70", trials, seed + 1000, {**base, "k": 70}),
        ("k 60, correlation .9", trials, seed + 2000, {**base, "k": 60, "rho": 0.9}),
    ]
    race("n 200, d 500, no noise", cells, LeastSquares, {"iobs": ours, **linear_peers()}, out)
    few = [(label, min(trials, 4), first, arguments) for label, _, first, arguments in cells]
    race(
        "The same beside skscope (its times include compiling, at every call)", few, LeastSquares,
        {"iobs": ours, **{k: v for k, v in linear_peers(True).items() if k.startswith("skscope")}}, out,
    )  # fmt: skip


def section_k80(trials, seed, out):
    cells = [("k 80", 5 * trials, seed + 3000, {"n": 200, "d": 500, "k": 80})]
    race("n 200, d 500, k 80, no noise", cells, LeastSquares, {"iobs": ours, **linear_peers()}, out)


def section_noise(trials, seed, out):
    cells = [("n 1000, d 500, k 25, correlation .9, SNR 5", trials, seed + 4000,
              {"n": 1000, "d": 500, "k": 25, "rho": 0.9, "snr": 5.0}),
             ("n 250, d 500, k 25, correlation .5, SNR 5", trials, seed + 5000,
              {"n": 250, "d": 500, "k": 25, "rho": 0.5, "snr": 5.0})]  # fmt: skip
    race("With noise", cells, LeastSquares, {"iobs": ours, **linear_peers()}, out)


def section_logistic(trials, seed, out):
    cells = [("n 1000, d 500, k 10, correlation .9", trials, seed + 6000,
              {"n": 1000, "d": 500, "k": 10, "rho": 0.9, "kind": "logistic"}),
             ("the same, signal three times as large", trials, seed + 6500,
              {"n": 1000, "d": 500, "k": 10, "rho": 0.9, "kind": "logistic", "amplitude": 3.0}),
             ("n 500, d 500, k 10", trials, seed + 7000,
              {"n": 500, "d": 500, "k": 10, "kind": "logistic"})]  # fmt: skip
    race("Logistic", cells, Logistic, {"iobs": ours_logistic, **logistic_peers()}, out)


def section_wide(trials, seed, out):
    few = max(3, trials // 4)
    cells = [("n 1000, d 10,000, k 50, correlation .5", few, seed + 8000,
              {"n": 1000, "d": 10_000, "k": 50, "rho": 0.5}),
             ("n 1000, d 10,000, k 100, correlation .9", few, seed + 9000,
              {"n": 1000, "d": 10_000, "k": 100, "rho": 0.9})]  # fmt: skip
    peers = {name: solver for name, solver in linear_peers().items() if name != "L0Learn core"}
    race("Wide, no noise", cells, LeastSquares, {"iobs": ours, **peers}, out)


def section_general(trials, seed, out):
    """Soft labels, whose minimiser is the sparse truth: how exactly a general function is minimised."""
    import logging

    logging.disable(logging.WARNING)
    out.append("\n### Any function (soft-label logistic through automatic differentiation), n 500, d 500, k 10\n")
    skscope = available("skscope")
    rows: dict[str, list[tuple[float, float, float]]] = {"iobs from_torch": [], "skscope Scope": []}
    for trial in range(-1, max(5, trials // 4)):
        X, _, truth = problem(seed + 10_000 + trial, 500, 500, 10, 0.5)
        soft = 1 / (1 + np.exp(-X @ truth))
        Xt, yt = torch.from_numpy(X), torch.from_numpy(soft)

        def function(t, Xt=Xt, yt=yt):
            margin = Xt @ t
            return (torch.nn.functional.softplus(margin) - yt * margin).sum()

        entries = {"iobs from_torch": lambda X, y, k, f=function: iobs.minimize(from_torch(f, 500), k).theta}
        if skscope:
            entries["skscope Scope"] = lambda X, y, k: _skscope(skscope.ScopeSolver, X, y, k, "logistic")
        for name, solver in entries.items():
            begun = clocks()
            theta = solver(X, soft, 10)
            spent, wall = since(begun), time.perf_counter() - begun[0]
            if trial >= 0:
                error = float(np.linalg.norm(theta - truth) / np.linalg.norm(truth))
                rows[name].append((error, 1e3 * spent, 1e3 * wall))
    out.append("| solver | worst relative error | median ms | of wall time |\n|---|---|---|---|")
    for name, values in rows.items():
        if values:
            worst, spent, wall = max(v[0] for v in values), *(statistics.median(v[i] for v in values) for i in (1, 2))
            out.append(f"| {name} | {worst:.1e} | {spent:.3g} | {wall:.3g} |")


def section_far(trials, seed, out):
    """Starts of amplitude 10 in every coordinate; success is reaching theta* to 1e-6."""
    out.append("\n### Far starts (amplitude 10), n 200, d 50, k 5, 30 seeds\n")
    out.append("| method | logistic: reached (median steps) | Poisson: reached (median steps) |\n|---|---|---|")
    for method in ("topk_iobs", "iobs", "regularised_newton", "cubic_newton", "auto"):
        cells = []
        for kind in ("logistic", "poisson"):
            reached, steps = 0, []
            for trial in range(30):
                rng = np.random.default_rng(seed + 11_000 + trial)
                X = rng.standard_normal((200, 50)) / (1 if kind == "logistic" else 2)
                truth = np.zeros(50)
                truth[rng.choice(50, 5, replace=False)] = rng.uniform(0.5, 1.5, 5) * rng.choice([-1, 1], 5)
                margin = X @ truth
                model = Logistic(X, 1 / (1 + np.exp(-margin))) if kind == "logistic" else Poisson(X, np.exp(margin))
                start = 10 * rng.standard_normal(50)
                result = iobs.minimize(model, 5, method=method, theta0=start, max_steps=200)
                good = bool(np.abs(result.theta - truth).max() < 1e-6)
                reached += good
                steps += [len(result.history) - 1] if good else []
            cells.append(f"{reached}/30 ({statistics.median(steps):.3g})" if steps else f"{reached}/30")
        out.append(f"| {method} | {cells[0]} | {cells[1]} |")
        print(out[-1], flush=True)


def section_certificate(trials, seed, out):
    """Run OKRidge on the same files with --okridge from its own environment (it needs an old NumPy)."""
    out.append("\n### Certificates (gap of 1/2 norm(y - X theta)^2; in brackets relative to the explained part)\n")
    out.append("| problem | gap | seconds | nodes |\n|---|---|---|---|")
    for n, d, k, rho, limit in ((600, 200, 10, 0.5, 20), (200, 100, 10, 0.5, 20), (3000, 300, 20, 0.5, 20),
                                (600, 500, 10, 0.5, 20), (1000, 900, 10, 0.9, 20)):  # fmt: skip
        X, y, _ = problem(seed + 12_000, n, d, k, rho, 5.0)
        certify(LeastSquares(X[:, :12], y), 3)
        found = certify(LeastSquares(X, y), k, seconds=limit)
        gaps = f"{found.gap:.2g} ({found.gap_explained:.2g})"
        out.append(f"| n {n}, d {d}, k {k}, correlation {rho}, SNR 5 | {gaps} | {found.seconds:.3g} | {found.nodes} |")
        print(out[-1], flush=True)


def section_million(trials, seed, out):
    rng = np.random.default_rng(seed + 13_000)
    n, d, k = 10_000, 1_000_000, 20
    columns = rng.integers(0, d, (n, 100))
    X = sp.csr_array(
        (rng.standard_normal(n * 100), (np.repeat(np.arange(n), 100), columns.ravel())), shape=(n, d)
    ).tocsc()
    counts = np.diff(X.indptr)
    # Signals on columns with at least five entries: those with one entry are copies of each other up to scale.
    chosen = rng.choice(np.flatnonzero(counts >= 5), k, replace=False)
    truth = np.zeros(d)
    truth[chosen] = rng.uniform(0.5, 1.5, k) * rng.choice([-1, 1], k)
    y = X @ truth
    out.append("\n### d = 1,000,000 sparse columns, n 10,000, 100 non-zeros a row, k 20, no noise\n")
    out.append("| solver | support found | seconds | peak resident GB so far |\n|---|---|---|---|")
    entries: dict[str, Solver] = {"iobs": ours}
    if abess := available("abess.linear"):
        model = abess.LinearRegression(support_size=k, fit_intercept=False)
        entries["abess"] = lambda X, y, k: model.fit(X, y).coef_
    for name, solver in entries.items():
        begun = clocks()
        try:
            theta = np.asarray(solver(X, y, k)).ravel()
            found = f"{np.intersect1d(np.flatnonzero(theta), chosen).size}/{k}"
        except Exception as error:
            found = f"failed: {type(error).__name__}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        out.append(f"| {name} | {found} | {since(begun):.3g} | {peak:.2f} |")
        print(out[-1], flush=True)
    out.append("\nscikit-learn's OMP takes no sparse design; dense, this one would need 80 GB.")


SECTIONS = {
    "undersampled": section_undersampled,
    "k80": section_k80,
    "noise": section_noise,
    "logistic": section_logistic,
    "wide": section_wide,
    "general": section_general,
    "far": section_far,
    "certificate": section_certificate,
    "million": section_million,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=900_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = Report(arguments.output)
    for line in (
        "# Sparse recovery",
        "",
        f"`python benchmarks/recovery.py --trials {arguments.trials} --seed {arguments.seed}`, one thread. "
        "Each cell: exact support / objective no worse than the refitted truth / median time.",
    ):
        out.append(line)
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](arguments.trials, arguments.seed, out)


if __name__ == "__main__":
    main()
