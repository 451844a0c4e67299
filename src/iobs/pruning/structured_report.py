"""A run that removes whole units: its request, its plan, and its report of widths and costs before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iobs.core.formats import plural
from iobs.core.structured import Structured
from iobs.errors import listed
from iobs.pruning.recipe import Recipe
from iobs.pruning.report import JsonObject, Report

SECONDS = "seconds"  # name of the cost that is a measured time
FASTER = 0.98  # a network with a larger share of the dense time is not called faster


@dataclass(frozen=True)
class StructuredRequest:
    """Arguments of `iobs.prune` for a run that removes units; `iobs.prune` describes them."""

    pattern: Structured
    recipe: Recipe
    include: str | Sequence[str] | None = None
    ignore: str | Sequence[str] | None = None
    holdout: float = 0.1
    seed: int = 0
    checkpoint: str | Path | None = None


@dataclass(frozen=True)
class PlannedUnits:
    """Units of one site, or blocks or experts of one list.

    Attributes:
        name: of the site, as in the report.
        kind: "channels", "neurons", "heads", "blocks" or "experts".
        layers: paths of the layers that read the units; none of blocks and experts.
        count: number of units.
        kept: number that stays; None: the run chooses it.
        least: fewest that the run may keep.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    count: int
    kept: int | None
    least: int


@dataclass(frozen=True)
class PlannedCost:
    """One cost of the dense model, and what is left of it.

    Attributes:
        name: "macs" or "parameters".
        before: of the dense model.
        most: upper bound of what is left; None: known after the run.
        where: of which layers.
    """

    name: str
    before: float
    most: float | None
    where: str


@dataclass(frozen=True)
class UnitsPlan:
    """Plan of a run that removes units.

    A run chooses most widths by measurements. What is known before: the units, the cost of the dense model, and the
    share of the cost that is asked. With equal shares of all sites (`allocation="uniform"`) the widths are known too.

    Attributes:
        units: in the order of the forward pass.
        costs: of the dense model.
        notes: what the run would note, such as sites that keep all units.
        seconds: expected time of the run; None if it was not asked for.
    """

    units: tuple[PlannedUnits, ...]
    costs: tuple[PlannedCost, ...]
    notes: tuple[str, ...]
    seconds: float | None = None


@dataclass
class WidthRecord:
    """The units of one site before and after.

    Attributes:
        name: of the site.
        kind: of its units: "channels", "neurons", "heads", "blocks" or "experts".
        reader: path of the layer that reads the units.
        before: number of units of the dense network.
        after: number of units that are left.
        error: relative output error of the reader in the best projection, on the calibration samples.
    """

    name: str
    kind: str
    reader: str
    before: int
    after: int
    error: float


@dataclass
class CostRecord:
    """One cost before and after.

    Attributes:
        name: "macs", "parameters" or "seconds".
        before: of the dense network.
        after: of the narrower network.
        where: what was counted or measured, in a few words.
    """

    name: str
    before: float
    after: float
    where: str

    @property
    def share(self) -> float:
        """Share of the cost that is left."""
        return self.after / self.before if self.before else 1.0


@dataclass(repr=False)
class StructuredReport(Report):
    """The result of a run that removed whole units.

    `audit` is empty, since the narrower matrices hold no zeros.

    Attributes:
        widths: units of every site, in the order of the forward pass.
        costs: of the layers that hold units and of the whole network.
        refitted: names of the layers that lost no inputs: their weights were fitted anew to the dense outputs.
        stays: why units stay that were found, one sentence for each reason.
    """

    widths: list[WidthRecord] = field(default_factory=list)
    costs: list[CostRecord] = field(default_factory=list)
    refitted: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)

    @property
    def removed(self) -> float:
        """Share of all units that were removed."""
        before = sum(width.before for width in self.widths)
        return 1 - sum(width.after for width in self.widths) / max(1, before)

    @classmethod
    def from_dict(cls, values: JsonObject) -> StructuredReport:
        """Rebuild a report from the result of `as_dict`."""
        values = dict(values)
        widths = [WidthRecord(**width) for width in values.pop("widths")]
        costs = [CostRecord(**cost) for cost in values.pop("costs")]
        report = super().from_dict(values)
        assert isinstance(report, StructuredReport)
        report.widths, report.costs = widths, costs
        return report

    def counts(self) -> list[str]:
        """Units that are left, one sentence for each kind."""
        lines = []
        for kind in dict.fromkeys(width.kind for width in self.widths):
            widths = [width for width in self.widths if width.kind == kind]
            before, after = sum(width.before for width in widths), sum(width.after for width in widths)
            where = plural(len(widths), "mixture" if kind == "experts" else "layer")
            lines.append(f"{after:,} of {before:,} {kind} are left{'' if kind == 'blocks' else f' in {where}'}.")
        return lines

    def sentences(self) -> list[str]:
        """Widths and costs in words, one line each."""
        lines = self.counts()
        for cost in self.costs:
            amount = f"{cost.before:.4g} -> {cost.after:.4g}"
            lines.append(f"{cost.name} {cost.where}: {amount} ({cost.share:.1%} left)")
        return [*lines, *self._refits(), *self._not_faster()]

    def _refits(self) -> list[str]:
        """A sentence on the layers that lost inputs, and on those that were refitted alone."""
        if not self.refitted:
            return []
        count, rest = len(self.refitted), len(self.layers) - len(self.refitted)
        shown = listed(self.refitted)
        if not rest:  # whole blocks or experts
            return [f"Refitted layers: {count} ({shown})."]
        return [f"Layers that lost inputs with their units: {rest}; refitted alone: {count} ({shown})."]

    def _not_faster(self) -> list[str]:
        """A sentence where the narrower network takes the time of the dense one."""
        by_time = "of=latency" in str(self.settings.get("pattern", ""))
        advice = "Remove more." if by_time else 'Choose the widths by time (of="latency"), or remove more.'
        return [
            f"The narrower network is NOT faster on this machine: {cost.share:.1%} of the dense time {cost.where}. "
            f"{advice}"
            for cost in self.costs
            if cost.name == SECONDS and cost.share > FASTER
        ]

    def __repr__(self) -> str:
        """One line, which a notebook shows."""
        share = next((f", {cost.share:.1%} of the {cost.name} left" for cost in self.costs), "")
        return f"<iobs.Report: {self.removed:.1%} of the units removed{share}, {self._loss()}>"

    def __str__(self) -> str:
        """Costs, losses, and the widths of all sites."""
        lines = [*self.sentences(), f"{self._loss()}; {self.seconds:.1f} s.", *self._measured()]
        for number, record in enumerate(self.rounds):
            best = " <- best" if number == self.best_round else ""
            name = "one shot" if record.kind == "projection" else f"fine-tuning, {len(record.step_losses)} steps"
            loss = record.loss_calibration if record.loss_heldout is None else record.loss_heldout
            lines.append(f"  {number + 1}. {name}: loss {'-' if loss is None else f'{loss:.4g}'}{best}")
        lines += [f"  {width.before:5} -> {width.after:5} {width.kind}  {width.name}" for width in self.widths]
        return "\n".join([*lines, *self.stays])
