"""What a pruning run writes down: plain dataclasses that turn into JSON and back, and know nothing of plots."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

WORTH = 0.02  # share of the loss: it changes all parameters, and by less a few held-out samples cannot tell


@dataclass
class LayerRecord:
    """One pruned matrix in one round.

    Errors are relative output errors ``||V X - Y||^2 / ||Y||^2`` of the sparse weight V: `error_calibration` and
    `error_heldout` against the layer's target Y on the inputs that it was solved for and on held-out ones
    (which also damp the correction of drift, so that they flatter it a little),
    `error_dense` against the output of the dense network's weight, on the inputs that the target's output is of.
    """

    name: str
    shape: tuple[int, int]
    asked: float
    zeros: int
    error_calibration: float
    error_heldout: float | None
    error_dense: float
    damping: float
    dead_columns: int
    inputs: int
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Number of entries of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def sparsity(self) -> float:
        """Share of entries that are really zero."""
        return self.zeros / self.weights


@dataclass
class RoundRecord:
    """One round of Algorithm 2: project every layer, measure, take the gradient steps that lead to the next round.

    Or, by its `kind`, a polish: gradient steps on the support that round `polished_round` left. It measures no layer;
    its `layers` are that round's, with the zeros that both have, and with errors and seconds of the projection alone.
    """

    index: int
    asked: float
    loss_calibration: float | None
    loss_heldout: float | None
    layers: list[LayerRecord]
    step_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    kind: str = "projection"
    polished_round: int | None = None  # None for a projection, and for a polish in older reports

    @property
    def sparsity(self) -> float:
        """Share of all prunable entries that are really zero after the projection of this round.

        What was asked where a round carries no layers, as the peers' do not.
        """
        if not self.layers:
            return self.asked
        return sum(layer.zeros for layer in self.layers) / sum(layer.weights for layer in self.layers)


@dataclass
class AuditRow:
    """Real zeros of one matrix of the finished model, counted entry by entry."""

    name: str
    shape: tuple[int, int]
    zeros: int
    asked: int

    @property
    def weights(self) -> int:
        """Number of entries of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def sparsity(self) -> float:
        """Share of entries that are really zero."""
        return self.zeros / self.weights


@dataclass
class AllocationRecord:
    """What one layer was allotted and why.

    `errors` are relative output errors of the layer pruned alone to each of `sparsities` (the last is that of the dense
    layer), `effects` what they do to the network by the criterion, on a scale on which layers add up, `chosen` the
    sparsity it got.
    """

    name: str
    shape: tuple[int, int]
    sparsities: list[float]
    errors: list[float]
    effects: list[float]
    chosen: float

    def effect(self, sparsity: float) -> float:
        """What this layer alone does to the network at a sparsity, read off the measured curve."""
        points = sorted(zip(self.sparsities, self.effects, strict=True))
        for (low, below), (high, above) in itertools.pairwise(points):
            if sparsity <= high:
                return below + (above - below) * max(0.0, sparsity - low) / (high - low)
        return points[-1][1]


@dataclass
class Report:
    """The whole story of a run: settings, rounds, the round that won, what was left dense and why, the final audit.

    `loss_name` says what `loss_calibration` and `loss_heldout` of the rounds measure; `dense_loss` is the dense
    network's own value on the held-out samples. Where gradient steps see altered samples these are losses on altered
    copies too, several of each sample. `best_round` is an index of `rounds`, polishes among them. `scores` holds
    whatever the caller measured, by name.
    """

    settings: dict[str, Any]
    loss_name: str
    dense_loss: float | None
    rounds: list[RoundRecord]
    best_round: int
    skipped: dict[str, str]
    audit: list[AuditRow]
    seconds: float
    peak_memory_bytes: int
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    allocation: list[AllocationRecord] = field(default_factory=list)

    @property
    def best(self) -> RoundRecord:
        """The round, or polish, whose weights are the answer."""
        return self.rounds[self.best_round]

    @property
    def sparsity(self) -> float:
        """Share of audited entries that are really zero."""
        return self.zeros / max(1, self.weights)

    @property
    def zeros(self) -> int:
        """Audited entries that are really zero."""
        return sum(row.zeros for row in self.audit)

    @property
    def weights(self) -> int:
        """Audited entries."""
        return sum(row.weights for row in self.audit)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain types, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """Rebuild a report from `as_dict`."""
        values = dict(values)
        values["rounds"] = [
            RoundRecord(**{**entry, "layers": [layer_record(layer) for layer in entry["layers"]]})
            for entry in values["rounds"]
        ]
        values["audit"] = [AuditRow(**{**row, "shape": tuple(row["shape"])}) for row in values["audit"]]
        values["allocation"] = [allocation_record(row) for row in values.get("allocation", [])]
        return cls(**values)


def layer_record(values: dict[str, Any]) -> LayerRecord:
    """Rebuild a layer's record from plain types."""
    return LayerRecord(**{**values, "shape": tuple(values["shape"])})


def allocation_record(values: dict[str, Any]) -> AllocationRecord:
    """Rebuild what a layer was allotted from plain types."""
    return AllocationRecord(**{**values, "shape": tuple(values["shape"])})


def best_index(records: list[RoundRecord], asked: float) -> int:
    """Among rounds at the asked sparsity, the one with the least held-out loss (calibration loss without held-out).

    A polish must gain `WORTH` of it.
    """

    def value(index: int) -> float:
        record = records[index]
        loss = record.loss_calibration if record.loss_heldout is None else record.loss_heldout
        assert loss is not None
        return loss + WORTH * abs(loss) if record.kind == "polish" else loss

    eligible = [index for index, record in enumerate(records) if record.asked >= asked - 1e-12]
    return min(eligible, key=value, default=len(records) - 1)
