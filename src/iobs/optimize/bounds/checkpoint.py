"""The file from which another process goes on with a proof: the open nodes of a search, and the problem they belong to.

The file is an .npz of plain arrays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iobs.core.files import expanded, replaced
from iobs.errors import CheckpointError, OtherRunError
from iobs.optimize.bounds.convex_tree import ConvexNode, TreeState
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array
from iobs.optimize.refit.newton import Fit

_FORMAT = 2
_EVERY = 120.0  # seconds between two files
_SHARE = 0.05  # most of the time that writing may take
_EQUAL = 1e-10  # relative rounding of f and its gradient on another machine


def identity_of(objective: Objective, **settings: Any) -> dict[str, Array]:
    """Settings of a problem, and f with its slopes at a point of no special kind: they tell problems apart.

    Slopes are relative to the square root of the curvature, so that columns of any unit count alike.

    Args:
        objective: f.
        settings: numbers and arrays.
    """
    d = objective.dimension
    direction = np.random.default_rng(0).uniform(-1.0, 1.0, d) / max(d, 1)
    curvature = objective.hessian_diagonal(np.zeros(d))
    units = np.sqrt(np.where(curvature > 0, curvature, 1.0))
    value, gradient = objective.value_and_gradient(direction / units)  # no margin is far from 0
    measured = {"loss": value, "slopes": gradient / units, "units": units}
    return {name: np.asarray(setting) for name, setting in {**settings, **measured}.items()}


@dataclass(frozen=True)
class SavedProof:
    """A proof as it was when its file was written.

    Attributes:
        state: of the search.
        fit: the best fit known.
        lower: of all coordinates (d,), which the bounds of nodes rest on.
        upper: of all coordinates (d,).
        seconds: of all processes so far.
    """

    state: TreeState
    fit: Fit
    lower: Array
    upper: Array
    seconds: float


class ProofCheckpoint:
    """The file of a proof, to be written every two minutes and at the end.

    Args:
        file: it need not exist.
        identity: of the problem, from `identity_of`.

    Attributes:
        saved: the proof in the file; None without a file.

    Raises:
        OtherRunError: the file is of another problem.
        CheckpointError: it is damaged, or no such file.
    """

    def __init__(self, file: str | Path, identity: Mapping[str, Array]) -> None:
        self.file, self._identity = expanded(file), identity
        self._next = 0.0
        self.saved = self._read() if self.file.exists() else None

    @property
    def due(self) -> bool:
        """Whether it is time to write."""
        return time.perf_counter() >= self._next

    def write(self, proof: SavedProof) -> str:
        """Write a proof; the earlier file stays until the new one is complete. Returns why that failed, or ""."""
        begun = time.perf_counter()
        try:
            with replaced(self.file) as written, written.open("wb") as opened:
                np.savez_compressed(opened, allow_pickle=False, **self._arrays(proof))
        except OSError as error:
            return f"the checkpoint {self.file} cannot be written ({error})"
        now = time.perf_counter()
        self._next = now + max(_EVERY, (now - begun) / _SHARE)
        return ""

    def _arrays(self, proof: SavedProof) -> dict[str, Array]:
        nodes, fit = proof.state.open, proof.fit
        return {f"is_{name}": value for name, value in self._identity.items()} | {
            "format": np.array(_FORMAT),
            "roles": np.array([node.roles for node in nodes], np.int16),
            "bounds": np.array([node.bound for node in nodes]),
            "counts": np.array([(node.places.size, node.prices.size) for node in nodes], np.int64).reshape(-1, 2),
            "places": np.concatenate([[], *(node.places for node in nodes)]).astype(np.int64),
            "values": np.concatenate([[], *(node.values for node in nodes)]),
            "prices": np.concatenate([[], *(node.prices for node in nodes)]),
            "state": np.array([proof.state.nodes, proof.state.dropped, proof.state.margin, proof.seconds, fit.value]),
            "fit": np.stack([fit.theta, fit.gradient]),
            "support": fit.support,
            "limits": np.stack([proof.lower, proof.upper]),
        }

    def _read(self) -> SavedProof:
        try:
            with self.file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                stored = {name: arrays[name] for name in arrays.files}
            known = int(stored["format"]) == _FORMAT
            different = [name for name, value in self._identity.items() if known and not _equal(stored, name, value)]
        except Exception as error:  # damaged and foreign files raise many types
            raise CheckpointError(f"{self.file} is damaged, or no checkpoint of a proof; give another file.") from error
        if not known:
            raise CheckpointError(f"{self.file} was written by another version of iobs; give another file.")
        if different:
            raise OtherRunError(
                f"The checkpoint {self.file} is of another problem: its {' and '.join(different)} differ. Give what it "
                "was started with, or another file."
            )
        ends, ends_of_prices = np.cumsum(stored["counts"], axis=0)[:-1].T
        nodes = zip(
            stored["roles"],
            stored["bounds"].tolist(),
            np.split(stored["places"], ends),
            np.split(stored["values"], ends),
            np.split(stored["prices"], ends_of_prices),
            strict=False,  # without nodes `split` gives one empty array
        )
        visited, dropped, margin, seconds, value = stored["state"].tolist()
        state = TreeState([ConvexNode(*node) for node in nodes], int(visited), dropped, margin)
        fit = Fit(stored["support"], stored["fit"][0], value, stored["fit"][1])
        return SavedProof(state, fit, stored["limits"][0], stored["limits"][1], seconds)


def _equal(stored: Mapping[str, Array], name: str, value: Array) -> bool:
    """Check that a setting is equal, up to rounding; slopes may cancel, and are rounded relative to the largest."""
    kept = stored[f"is_{name}"]
    size = float(np.abs(value).max(initial=0.0)) if name == "slopes" else 0.0
    return kept.shape == value.shape and bool(np.isclose(kept, value, rtol=_EQUAL, atol=_EQUAL * size).all())
