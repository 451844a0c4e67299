"""Sparse recovery beside abess, skscope, L0Learn's C++ core, scikit-learn and OKRidge: same data, one thread.

    python benchmarks/recovery.py [SECTION ...] [--quick] [--trials N] [--seed S]

A row for each problem and solver is added to results/recovery.jsonl. Peers that are not installed are left out; OKRidge
needs an old NumPy, so OKRIDGE_PYTHON names its own interpreter.

Success is the exact support. The objective is compared with that of the refitted true support, since with noise the
true support is often not the minimiser. Designs have AR(1) columns of unit variance, k non-zeros of size U(0.5, 1.5)
with random signs. Times are medians, each the lesser of wall and processor time.
"""

# ruff: noqa: E402  (the number of threads is set before NumPy is loaded)

from __future__ import annotations

import importlib
import importlib.metadata
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
import scipy.sparse as sp
import torch
from rows import Rows, parser, stamp

import iobs
from iobs.optimize.bounds.branch_and_bound import certify
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.refit.newton import refit

Solver = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def available(name: str):
    try:
        return importlib.import_module(name)
    except Exception:
        return None


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
    if kind == "Poisson":
        return X, rng.poisson(np.exp(margin)).astype(float), theta
    if kind == "Cox":
        times, censored = rng.exponential(np.exp(-margin)), rng.exponential(2.0, n)
        return X, np.column_stack([np.minimum(times, censored), times <= censored]).astype(float), theta
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
    if kind == "pseudo-Huber":
        loss = lambda t: jnp.sum(jnp.sqrt(1 + (Xj @ t - yj) ** 2) - 1)  # noqa: E731
    else:
        loss = lambda t: jnp.sum(jnp.logaddexp(0.0, Xj @ t) - yj * (Xj @ t))  # noqa: E731
    return np.asarray(solver(X.shape[1], k).solve(loss, jit=True))


def race(section, cells, make, entries, rows):
    """One row a problem and solver: shares of successes, and the median time."""
    for label, trials, seed, arguments in cells:
        names = rows.unmeasured(entries, section=section, problem=label, seed=seed)
        missing = {name: entries[name] for name in names}
        stats = {name: ([], [], []) for name in missing}
        for trial in range(-1, trials if missing else -1):  # the first warms everything up and is not counted
            X, y, truth = problem(seed + trial, **arguments)
            objective, k = make(X, y), arguments["k"]
            goal = refit(objective, np.flatnonzero(truth)).value
            for name, solver in missing.items():
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
                    stats[name][2].append(spent)
        for name, (supports, objectives, seconds) in stats.items():
            found = {"support": float(np.mean(supports)), "objective": float(np.mean(objectives)), "trials": trials}
            times = {"milliseconds": 1e3 * statistics.median(seconds), "processor_seconds": sum(seconds)}
            rows.put({**key_of(section, label, name, seed), **found, **times, **stamped(seed)})


def stamped(seed):
    """Commit, seed, machine, and the versions of the peers."""
    return {**stamp(seed), "peers": versions()}


def key_of(section, label, solver, seed):
    """The fields that tell a row from another."""
    return {"section": section, "problem": label, "solver": solver, "seed": seed}


def undersampled_cells(trials, seed):
    base = {"n": 200, "d": 500}
    return [
        ("k 60", trials, seed, {**base, "k": 60}),
        ("k 70", trials, seed + 1000, {**base, "k": 70}),
        ("k 60, correlation .9", trials, seed + 2000, {**base, "k": 60, "rho": 0.9}),
    ]


def section_undersampled(trials, seed, out):
    race("undersampled", undersampled_cells(trials, seed), LeastSquares, {"iobs": ours, **linear_peers()}, out)


def section_scope(trials, seed, out):
    _beside("scope", "skscope Scope", undersampled_cells(min(trials, 10), seed), out)


def section_grasp(trials, seed, out):
    """GraSP takes ten seconds a call where it fails: three problems there."""
    _beside("grasp", "skscope Grasp", [undersampled_cells(10, seed)[0], undersampled_cells(3, seed)[1]], out)


def _beside(section, name, cells, out):
    peers = linear_peers(True)
    if name in peers:
        race(section, cells, LeastSquares, {"iobs": ours, name: peers[name]}, out)


def section_k80(trials, seed, out):
    cells = [("k 80", 5 * trials, seed + 3000, {"n": 200, "d": 500, "k": 80})]
    race("k80", cells, LeastSquares, {"iobs": ours, **linear_peers()}, out)


def section_noise(trials, seed, out):
    cells = [("n 1000, d 500, k 25, correlation .9, SNR 5", trials, seed + 4000,
              {"n": 1000, "d": 500, "k": 25, "rho": 0.9, "snr": 5.0}),
             ("n 250, d 500, k 25, correlation .5, SNR 5", trials, seed + 5000,
              {"n": 250, "d": 500, "k": 25, "rho": 0.5, "snr": 5.0})]  # fmt: skip
    race("noise", cells, LeastSquares, {"iobs": ours, **linear_peers()}, out)


def section_logistic(trials, seed, out):
    cells = [("n 1000, d 500, k 10, correlation .9", trials, seed + 6000,
              {"n": 1000, "d": 500, "k": 10, "rho": 0.9, "kind": "logistic"}),
             ("the same, signal three times as large", trials, seed + 6500,
              {"n": 1000, "d": 500, "k": 10, "rho": 0.9, "kind": "logistic", "amplitude": 3.0}),
             ("n 500, d 500, k 10", trials, seed + 7000,
              {"n": 500, "d": 500, "k": 10, "kind": "logistic"})]  # fmt: skip
    race("logistic", cells, Logistic, {"iobs": ours_logistic, **logistic_peers()}, out)


def section_wide(trials, seed, out):
    few = max(3, trials // 4)
    cells = [("n 1000, d 10,000, k 50, correlation .5", few, seed + 8000,
              {"n": 1000, "d": 10_000, "k": 50, "rho": 0.5}),
             ("n 1000, d 10,000, k 100, correlation .9", few, seed + 9000,
              {"n": 1000, "d": 10_000, "k": 100, "rho": 0.9})]  # fmt: skip
    peers = {name: solver for name, solver in linear_peers().items() if name != "L0Learn core"}
    race("wide", cells, LeastSquares, {"iobs": ours, **peers}, out)


def section_general(trials, seed, out):
    """Functions whose minimiser is the sparse truth: how exactly a general function is minimised, and how fast."""
    import logging

    logging.disable(logging.WARNING)
    problems = [problem(seed + 10_000 + trial, 500, 500, 10, 0.5) for trial in range(-1, max(5, trials // 2))]
    for kind in ("soft-label logistic", "pseudo-Huber"):
        solvers = [general_solvers(kind, X, X @ truth) for X, _, truth in problems]
        names = out.unmeasured(solvers[0], section="general", problem=kind, seed=seed)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for trial, ((_, _, truth), entries) in enumerate(zip(problems, solvers, strict=True), -1):
            for name in names:
                begun = time.perf_counter(), time.process_time()
                theta = np.asarray(entries[name]()).ravel()
                wall, spent = time.perf_counter() - begun[0], time.process_time() - begun[1]
                if trial >= 0:
                    error = float(np.linalg.norm(theta - truth) / np.linalg.norm(truth))
                    found.setdefault(name, []).append((error, spent, wall))
        for name, values in found.items():
            errors, spent, wall = zip(*values, strict=True)
            times = {"milliseconds": 1e3 * statistics.median(spent), "wall_milliseconds": 1e3 * statistics.median(wall)}
            measured = {"error": max(errors), "trials": len(values), "processor_seconds": sum(spent)}
            out.put({**key_of("general", kind, name, seed), **measured, **times, **stamped(seed)})


def general_solvers(kind, X, margin):
    """The same function in torch and in JAX."""
    Xt, target = torch.from_numpy(X), torch.from_numpy(1 / (1 + np.exp(-margin)) if "logistic" in kind else margin)

    def logistic(t):
        product = Xt @ t
        return (torch.nn.functional.softplus(product) - target * product).sum()

    def huber(t):
        return (torch.sqrt(1 + (Xt @ t - target) ** 2) - 1).sum()

    function = logistic if "logistic" in kind else huber
    solvers = {"iobs from_torch": lambda: iobs.minimize(from_torch(function, X.shape[1]), 10).theta}
    if skscope := available("skscope"):
        solvers["skscope Scope"] = lambda: _skscope(skscope.ScopeSolver, X, target.numpy(), 10, kind)
    return solvers


def section_far(trials, seed, out):
    """Starts of amplitude 10 in every coordinate; success is reaching theta* to 1e-6."""
    for method in ("topk_iobs", "iobs", "regularised_newton", "cubic_newton", "auto"):
        for kind in ("logistic", "Poisson"):
            if out.has(**key_of("far", kind, method, seed)):
                continue
            reached, steps, began = 0, [], time.process_time()
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
            found = {"reached": reached, "trials": 30, "steps": float(statistics.median(steps)) if steps else None}
            seconds = {"processor_seconds": time.process_time() - began}
            out.put({**key_of("far", kind, method, seed), **found, **seconds, **stamped(seed)})


# n, d, k, correlation, how many
CERTIFIED = [(600, 200, 10, 0.5, 10), (200, 100, 10, 0.5, 1), (3000, 300, 20, 0.5, 1), (600, 500, 10, 0.5, 2),
             (1000, 1000, 10, 0.9, 4)]  # fmt: skip


def section_certificate(trials, seed, out):
    """OKRidge needs an old NumPy: name its own interpreter in OKRIDGE_PYTHON."""
    certify(LeastSquares(*problem(seed, 60, 40, 3, 0.5, 1.0)[:2]), 3, seconds=3)
    for n, d, k, rho, count in CERTIFIED:
        for start in range(seed + 12_000, seed + 12_000 + count):
            label = f"n {n}, d {d}, k {k}, correlation {rho}, SNR 5"
            X, y, _ = problem(start, n, d, k, rho, 5.0)
            if not out.has(**key_of("certificate", label, "iobs", start)):
                begun = time.process_time()
                found = certify(LeastSquares(X, y), k, seconds=20)
                gaps = {"gap": found.gap, "relative_gap": found.gap_explained, "nodes": found.nodes}
                times = {"processor_seconds": time.process_time() - begun, "seconds": found.seconds}
                out.put({**key_of("certificate", label, "iobs", start), **gaps, **times, **stamped(start)})
            if "OKRIDGE_PYTHON" in os.environ and not out.has(**key_of("certificate", label, "OKRidge", start)):
                theirs = okridge(X, y, k)
                if theirs is not None:
                    out.put({**key_of("certificate", label, "OKRidge", start), **theirs, **stamped(start)})


OKRIDGE = """
import sys, time, numpy as np
from okridge.tree import BNBTree
data = np.load(sys.argv[1])
tree = BNBTree(X=data["X"], y=data["y"], lambda2=1e-3)
wall, spent = time.perf_counter(), time.process_time()
gap = tree.solve(k=int(data["k"]), gap_tol=1e-4, verbose=False, time_limit=20)[2]
print("RESULT", gap, time.process_time() - spent, time.perf_counter() - wall)
"""


def okridge(X, y, k):
    """Relative gap and times of OKRidge on the same problem, in its own environment; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "problem.npz", X=X, y=y, k=k)
        command = [os.environ["OKRIDGE_PYTHON"], "-c", OKRIDGE, f"{folder}/problem.npz"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        print("OKRidge failed", ran.stderr[-200:], file=sys.stderr)
        return None
    gap, spent, wall = (float(value) for value in lines[0][1:])
    return {"relative_gap": gap, "processor_seconds": spent, "seconds": wall}


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
    entries: dict[str, Solver] = {"iobs": ours}
    if abess := available("abess.linear"):
        model = abess.LinearRegression(support_size=k, fit_intercept=False)
        entries["abess"] = lambda X, y, k: model.fit(X, y).coef_
    label = "d 1,000,000 sparse columns, n 10,000, 100 nonzeros a row, k 20, no noise"
    for name in out.unmeasured(entries, section="million", problem=label, seed=seed):
        solver = entries[name]
        found = within(PATIENCE, lambda solver=solver: np.flatnonzero(np.asarray(solver(X, y, k)).ravel()))
        right = None if found["support"] is None else int(np.intersect1d(found.pop("support"), chosen).size)
        out.put({**key_of("million", label, name, seed), **found, "found": right, "of": k, **stamped(seed)})


PATIENCE = 120  # seconds of processor time that a solver of the million columns may take


def within(patience, solve):
    """The support that `solve` finds in a process of its own, its processor seconds and peak memory.

    The support is None if the process needs more than `patience` seconds of processor time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "support.npy"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (patience, patience))
            np.save(file, solve())
            os._exit(0)
        os.waitpid(child, 0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        support = np.load(file) if file.exists() else None
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"support": support, "processor_seconds": seconds, "peak_gb": after.ru_maxrss / 2**20}


SECTIONS = {
    "undersampled": section_undersampled,
    "scope": section_scope,
    "grasp": section_grasp,
    "k80": section_k80,
    "noise": section_noise,
    "logistic": section_logistic,
    "wide": section_wide,
    "general": section_general,
    "far": section_far,
    "certificate": section_certificate,
    "million": section_million,
}


QUICK = ("undersampled", "k80", "noise", "logistic", "far", "general")


def versions() -> str:
    """The peers that are installed here."""
    names = ("abess", "skscope", "fastsparsegams", "scikit-learn", "skglm", "adelie")
    found = [name for name in names if available(name.replace("scikit-learn", "sklearn"))]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)


def main() -> None:
    options_of = parser(__doc__, data=False)
    options_of.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    options_of.add_argument("--trials", type=int, default=20)
    options_of.add_argument("--seed", type=int, default=1_910_000, help="first seed; none here was used in development")
    options = options_of.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("Peers:", versions())
    rows = Rows("recovery", ("section", "problem", "solver", "seed"), options.again)
    for name in options.sections or (QUICK if options.quick else SECTIONS):
        SECTIONS[name](options.trials, options.seed, rows)


if __name__ == "__main__":
    main()
