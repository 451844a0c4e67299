"""A proof that was stopped, interrupted or killed goes on from its file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import iobs
from iobs.errors import CheckpointError, OtherRunError, ProblemError
from iobs.optimize.bounds import checkpoint as checkpoints
from iobs.optimize.bounds import convex_tree
from iobs.optimize.methods.best_known import Exact
from iobs.optimize.objectives import Cox, LeastSquares, Logistic
from iobs.optimize.objectives.tabled import Multinomial

_K = 4
_HARD = """
import numpy as np
from iobs.optimize.objectives import Logistic
rng = np.random.default_rng(1)
X = rng.standard_normal((60, 60)) + rng.standard_normal((60, 1))
objective = Logistic(X, X[:, :8].sum(axis=1) + rng.standard_normal(60) > 0, ridge=0.1)
"""


def _objective(family, flipped=0):
    """40 samples of 16 columns with a common part, whose proof takes some hundred nodes."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 16)) + 0.7 * rng.standard_normal((40, 1))
    margin = X[:, :_K].sum(axis=1) + 3 * rng.standard_normal(40)
    labels = margin > 0
    labels[:flipped] = ~labels[:flipped]
    if family == "cox":
        return Cox(X, np.exp(-0.5 * margin), rng.random(40) < 0.8, ridge=0.5)
    if family == "multinomial":
        return Multinomial(X, np.digitize(margin, [-1, 1]), 3, ridge=10.0)
    if family == "least squares":
        return LeastSquares(X, margin, ridge=0.5, intercept=True)
    return Logistic(X, labels, ridge=0.5, intercept=True)


def _column(changed=False):
    """A problem one of whose columns has a tiny unit, with another such column if that is changed."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 16))
    labels = X[:, :_K].sum(axis=1) + rng.standard_normal(40) > 0
    units, ridge = np.append(1e-12, np.ones(15)), np.append(1e-24, np.ones(15))
    if changed:
        X[:, 0] = rng.standard_normal(40)
    return Logistic(X * units, labels, ridge=ridge)


def _forced(column):
    return Logistic(np.eye(16) + 0.1, np.arange(16) % 2, ridge=1.0, forced=[column])


def _certify(objective, checkpoint, **options):
    return iobs.certify(objective, _K, checkpoint=checkpoint, **{"seconds": 60, **options})


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ("logistic", {}),
        ("logistic", {"lower": -1.0, "upper": 1.0}),
        ("cox", {}),
        ("multinomial", {}),
        ("least squares", {}),
    ],
)
def test_a_stopped_proof_goes_on_to_the_proof_of_one_run(family, limits, tmp_path):
    objective = _objective(family)
    whole = _certify(objective, tmp_path / "whole.npz", **limits)
    assert whole.closed
    assert whole.nodes > 8
    lower = -np.inf
    for _ in range(4):
        part = _certify(objective, tmp_path / "part.npz", max_nodes=whole.nodes // 4, **limits)
        assert part.lower >= lower
        lower = part.lower
    with np.load(tmp_path / "part.npz") as stored:
        seconds = stored["state"][3]
    rest = _certify(objective, tmp_path / "part.npz", **limits)
    assert (rest.lower, rest.upper, rest.nodes) == (whole.lower, whole.upper, whole.nodes)
    assert rest.fit.support.tolist() == whole.fit.support.tolist()
    assert rest.message.split(" (")[0] == whole.message.split(" (")[0]
    assert rest.seconds > seconds > 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part.npz", "whole.npz"]


def test_a_proof_goes_on_where_open_nodes_filled_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(convex_tree, "_STORED_BYTES", 5_000)
    objective = _objective("logistic")
    whole = _certify(objective, None)
    for _ in range(200):
        part = _certify(objective, tmp_path / "part.npz", max_nodes=10)
        if part.closed:
            break
    assert part.upper == whole.upper
    assert part.closed
    assert part.lower <= whole.upper


def test_an_interrupted_proof_goes_on(tmp_path, monkeypatch):
    objective = _objective("logistic")
    whole = _certify(objective, tmp_path / "whole.npz")
    visit = convex_tree.ConvexTree._visit

    def interrupted(tree, node):
        if tree.nodes == 30:
            raise KeyboardInterrupt
        return visit(tree, node)

    with monkeypatch.context() as patched:
        patched.setattr(convex_tree.ConvexTree, "_visit", interrupted)
        part = _certify(objective, tmp_path / "part.npz")
    assert "interrupted" in part.message
    rest = _certify(objective, tmp_path / "part.npz")
    assert (rest.lower, rest.upper, rest.nodes) == (whole.lower, whole.upper, whole.nodes)


def test_a_killed_proof_loses_what_came_after_the_last_file(tmp_path):
    file = tmp_path / "proof.npz"
    script = _HARD + (
        "import iobs\nfrom iobs.optimize.bounds import checkpoint\ncheckpoint._EVERY = 0.1\n"
        f"iobs.certify(objective, 8, seconds=100, checkpoint={str(file)!r})\n"
    )
    names: dict = {}
    exec(_HARD, names)
    iobs.certify(names["objective"], 8, max_nodes=1)  # compiled
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    try:
        begun, written = time.time(), 0
        while written < 3 and time.time() < begun + 100:
            first = file.stat().st_mtime_ns if file.exists() else 0
            time.sleep(0.02)
            written += file.exists() and file.stat().st_mtime_ns != first
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before = iobs.certify(names["objective"], 8, checkpoint=file, max_nodes=0)
    assert before.nodes > 0
    assert np.isfinite(before.lower)
    after = iobs.certify(names["objective"], 8, checkpoint=file, max_nodes=20)
    assert after.nodes == before.nodes + 20
    assert after.lower >= before.lower


def test_a_checkpoint_of_another_problem_is_refused(tmp_path):
    file = tmp_path / "proof.npz"
    objective = _objective("logistic")
    limits = {"lower": -1.0, "upper": 1.0}
    _certify(objective, file, max_nodes=5, **limits)
    kept = file.read_bytes()
    others = {
        "k": lambda: iobs.certify(objective, 3, checkpoint=file, **limits),
        "loss and slopes": lambda: _certify(_objective("logistic", flipped=1), file, **limits),
        "upper": lambda: _certify(objective, file, lower=-1.0, upper=2.0),
        "lower and upper": lambda: _certify(objective, file),
        "gap": lambda: _certify(objective, file, gap=1e-3, **limits),
    }
    for name, other in others.items():
        with pytest.raises(OtherRunError, match=f"its {name} differ"):
            other()
    with pytest.raises(OtherRunError, match="is of another problem"):
        _certify(_objective("least squares"), file, **limits)
    assert file.read_bytes() == kept


def test_a_checkpoint_of_other_bounds_columns_or_forced_features_is_refused_at_any_unit(tmp_path):
    large = np.append(1e-5, np.full(15, 1e6))
    other = np.append(3e-5, np.full(15, 1e6))
    cases = {
        "upper": (_objective("logistic"), _objective("logistic"), {"upper": large}, {"upper": other}),
        "slopes": (_column(), _column(changed=True), {}, {}),
        "forced": (_forced(0), _forced(1), {}, {}),
    }
    for name, (first, second, limits, changed) in cases.items():
        _certify(first, tmp_path / f"{name}.npz", max_nodes=1, **limits)
        with pytest.raises(OtherRunError, match=f"its .*{name}.* differ"):
            _certify(second, tmp_path / f"{name}.npz", max_nodes=1, **changed)


def test_a_damaged_checkpoint_is_refused_or_changes_nothing(tmp_path):
    objective, file = _objective("logistic"), tmp_path / "proof.npz"
    part = _certify(objective, file, max_nodes=20)
    whole = file.read_bytes()
    for place in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        file.write_bytes(damaged)
        try:
            found = _certify(objective, file, max_nodes=0)
        except CheckpointError:
            continue
        assert (found.lower, found.upper, found.nodes) == (part.lower, part.upper, part.nodes)


def test_files_that_are_no_checkpoint_are_refused(tmp_path, monkeypatch):
    objective = _objective("logistic")
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="no checkpoint of a proof"):
        _certify(objective, file)
    assert file.read_text() == "mine"
    np.savez(tmp_path / "other.npz", X=np.zeros(3))
    np.savez(tmp_path / "bare.npz", format=checkpoints._FORMAT)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("other.npz", "bare.npz", "array.npy", "."):
        with pytest.raises(CheckpointError, match="no checkpoint of a proof"):
            _certify(objective, tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be written"):
        _certify(objective, tmp_path / "nowhere" / "proof.npz")
    file = tmp_path / "proof.npz"
    _certify(objective, file, max_nodes=5)
    monkeypatch.setattr(checkpoints, "_FORMAT", 99)
    with pytest.raises(CheckpointError, match="another version"):
        _certify(objective, file)


def test_a_full_disk_ends_the_proof_with_the_gap_so_far(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_EVERY", 0.0)
    monkeypatch.setattr(checkpoints, "_SHARE", 1e6)
    write = np.savez_compressed

    def filled(file, **arrays):
        if arrays["state"][0] == 20:
            raise OSError("No space left on device")
        write(file, **arrays)

    monkeypatch.setattr(np, "savez_compressed", filled)
    found = _certify(_objective("logistic"), tmp_path / "proof.npz")
    assert not found.closed
    assert "cannot be written (No space" in found.message
    assert found.nodes == 20


def test_a_problem_that_the_relaxation_does_not_bound_has_no_checkpoint(tmp_path, rng):
    X = rng.standard_normal((10, 20))
    with pytest.raises(ProblemError, match="Give a ridge"):
        _certify(LeastSquares(X, X[:, 0]), tmp_path / "proof.npz")


@pytest.mark.parametrize("limits", [{}, {"lower": -1.0, "upper": 1.0}])
def test_the_exact_method_goes_on(limits, tmp_path):
    objective, file = _objective("logistic"), tmp_path / "proof.npz"
    part = iobs.certify(objective, _K, gap=0.0, max_nodes=30, checkpoint=file, **limits)
    result = iobs.minimize(objective, _K, method=Exact(checkpoint=file), **limits)
    assert "a global minimiser" in result.message
    assert result.loss == pytest.approx(part.upper, rel=1e-6)
    assert f"({iobs.certify(objective, _K, gap=0.0, **limits).nodes} nodes" in result.message
