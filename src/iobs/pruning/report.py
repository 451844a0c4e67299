"""Report of a pruning run: plain dataclasses, which convert to JSON and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from iobs.core.files import expanded, replaced
from iobs.core.formats import pandas_module, plural, without_folders
from iobs.errors import OutputError
from iobs.pruning.coverage import Coverage

if TYPE_CHECKING:
    import pandas

JsonObject: TypeAlias = dict[str, Any]  # plain types by name
Scores: TypeAlias = dict[str, float]  # metrics of one model, by name

WORTH = 0.02  # fine-tuning must lower the held-out loss by this share; smaller gains are within noise


@dataclass(frozen=True)
class Sample:
    """One input, and the outputs of the dense and of the pruned model for it.

    Args:
        shown: the input: text, or the address of an image as "data:image/png;base64,...".
        dense: continuation or predicted label of the dense model.
        pruned: the same of the pruned model.
        label: true label, or None.
    """

    shown: str
    dense: str
    pruned: str
    label: str | None = None

    @property
    def is_image(self) -> bool:
        """True if the input is an image."""
        return self.shown.startswith("data:image/")


class ZeroCount:
    """Base of the records of one matrix with its shape and its number of zeros."""

    shape: tuple[int, int]
    zeros: int

    @property
    def weights(self) -> int:
        """Number of entries of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def sparsity(self) -> float:
        """Share of entries that are zero."""
        return self.zeros / self.weights


@dataclass
class LayerRecord(ZeroCount):
    """One pruned matrix in one round.

    Errors are relative output errors ||V X - Y||^2 / ||Y||^2 of the sparse weight V.

    Attributes:
        name: of the layer.
        shape: (rows, columns).
        asked: share of zeros that the pattern asks for.
        zeros: number of zeros in the matrix.
        error_calibration: against the layer's target Y, on the calibration samples.
        error_heldout: the same on the held-out samples; slightly too low, since they damp the correction of drift.
        error_dense: against the output of the dense weight, on the inputs that give the target.
        damping: of the Hessian.
        dead_columns: number of inputs that are always zero.
        inputs: number of input rows; of an expert, number of tokens.
        seconds: of solve and measurement.
        stats: further numbers and notes, by name.
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
    stats: JsonObject = field(default_factory=dict)


@dataclass
class RoundRecord:
    """One round of Algorithm 2: project every layer, measure, take the gradient steps that lead to the next round.

    A record of the kind "finetune" holds the gradient steps after the last round, on the support of a projection.

    Attributes:
        index: position in the report.
        asked: sparsity that the patterns ask for.
        loss_calibration: mean loss on calibration samples, or None.
        loss_heldout: mean loss on held-out samples, or None.
        layers: pruned layers; for "finetune" those of the projection.
        step_losses: loss before each gradient step.
        seconds: of the round.
        kind: "projection" or "finetune".
        parent: for "finetune" the index of the projection.
        scores: metrics of the "dense" and "pruned" model on held-out samples, where the loss compares their outputs.
    """

    index: int
    asked: float
    loss_calibration: float | None = None
    loss_heldout: float | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    kind: Literal["projection", "finetune"] = "projection"
    parent: int | None = None
    scores: dict[str, Scores] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """Share of zeros in all pruned matrices after the projection of this round.

        Solvers of the whole model record no layers; then the share is `asked`.
        """
        if not self.layers:
            return self.asked
        return sum(layer.zeros for layer in self.layers) / sum(layer.weights for layer in self.layers)


@dataclass
class AuditRow(ZeroCount):
    """The zeros of one matrix of the finished model, counted entry by entry.

    Attributes:
        name: of the layer.
        shape: (rows, columns).
        zeros: number of zeros.
        asked: number of zeros that the pattern asks for; 0 without a pattern.
        bits: of the stored matrix, with mask and scales, if its values lie on a grid; otherwise None.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    asked: int
    bits: int | None = None


@dataclass
class AllocationRecord:
    """The sparsity of one layer in an allocation, and the measurements behind it.

    Attributes:
        name: of the layer.
        shape: (rows, columns).
        sparsities: measured sparsities of the layer, pruned alone; the last one is that of the dense layer.
        errors: relative output error of the layer at each of them.
        effects: effect on the model at each of them by the criterion, on a scale on which layers add up.
        chosen: sparsity of the layer.
    """

    name: str
    shape: tuple[int, int]
    sparsities: list[float]
    errors: list[float]
    effects: list[float]
    chosen: float

    def effect(self, sparsity: float) -> float:
        """The effect of this layer on the model at a sparsity, by linear interpolation of the measured effects."""
        points = sorted(zip(self.sparsities, self.effects, strict=True))
        for (low, below), (high, above) in itertools.pairwise(points):
            if sparsity <= high:
                return below + (above - below) * max(0.0, sparsity - low) / (high - low)
        return points[-1][1]


# Forms of a report by suffix, and "summary" for notebooks; `iobs.report` adds them.
COUNTS = ("tokens", "samples", "labels")  # last words of scores that count what others are of
RENDERERS: dict[str, Callable[[Report], str]] = {}


@dataclass(frozen=True)
class ComparisonLoss:
    """The loss that compares the rounds.

    Args:
        name: of the loss. With augmentation its values include several augmented copies of each sample.
        dense: its value for the dense model on the held-out samples, or None.
    """

    name: str
    dense: float | None = None


@dataclass(repr=False)
class Report:
    """The result of a run.

    Attributes:
        settings: recipe, decisions, pattern and samples, in plain types; "command" is the command line, if any.
        loss: the loss that compares the rounds.
        rounds: records of all projections, then of fine-tuning.
        best_round: index in `rounds` of the record whose weights are the result.
        coverage: the share of the model that was pruned, and what stayed dense, with the reasons.
        audit: zeros of every pruned matrix of the result.
        seconds: of the run, of a resumed run with its earlier parts.
        peak_memory_bytes: peak memory of the run.
        scores: metrics by model ("dense", "pruned"). A run adds accuracy or perplexity on the held-out samples, if
            labels or tokens allow it; commands add those on evaluation data.
        notes: decisions and estimates of the run, one sentence each.
        cautions: what to know before the result is used, such as calibration data that are too few.
        allocation: sparsities of layers and their reasons; empty for a uniform allocation.
        samples: inputs with the outputs of both models.
    """

    settings: JsonObject
    loss: ComparisonLoss
    rounds: list[RoundRecord]
    best_round: int
    coverage: Coverage
    audit: list[AuditRow]
    seconds: float
    peak_memory_bytes: int
    scores: dict[str, Scores] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    allocation: list[AllocationRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def loss_name(self) -> str:
        """Name of the loss that compares the rounds."""
        return self.loss.name

    @property
    def dense_loss(self) -> float | None:
        """This loss of the dense model on the held-out samples, or None."""
        return self.loss.dense

    @property
    def skipped(self) -> dict[str, str]:
        """The weight matrices left dense, by name, with the reason."""
        return self.coverage.reasons

    @property
    def best(self) -> RoundRecord:
        """The record (projection or fine-tuning) whose weights are the result."""
        return self.rounds[self.best_round]

    @property
    def sparsity(self) -> float:
        """Share of zeros in the audited matrices."""
        return self.zeros / max(1, self.weights)

    @property
    def zeros(self) -> int:
        """Number of zeros in the audited matrices."""
        return sum(row.zeros for row in self.audit)

    @property
    def weights(self) -> int:
        """Number of entries of the audited matrices."""
        return sum(row.weights for row in self.audit)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the audited matrices per entry, with masks and scales; None unless all of them lie on grids."""
        bits = [row.bits for row in self.audit if row.bits is not None]
        return sum(bits) / self.weights if bits and len(bits) == len(self.audit) else None

    @property
    def layers(self) -> list[LayerRecord]:
        """The layers of the best record."""
        return self.best.layers

    def add_scores(self, scores: dict[str, Scores]) -> None:
        """Add metrics to those of each model; a metric that is there already is replaced."""
        for name, values in scores.items():
            self.scores[name] = {**self.scores.get(name, {}), **values}

    def to_frame(self) -> pandas.DataFrame:
        """The layers of the best record as a table, one row per layer.

        Raises:
            ImportError: pandas is not installed; the message has the command that installs it.
        """
        columns, *rows = self.table()
        return pandas_module().DataFrame(rows, columns=columns).set_index("name")

    def table(self) -> list[list[Any]]:
        """The heading and the rows of `to_frame`, as lists."""
        columns = [each.name for each in fields(LayerRecord) if each.name != "stats"]
        rows = [[*(getattr(layer, name) for name in columns), layer.sparsity] for layer in self.layers]
        return [[*columns, "sparsity"], *rows]

    def save(self, path: str | Path) -> None:
        """Write the report to a file; absolute paths in its texts become names, signs that UTF-8 lacks escapes.

        Args:
            path: ends in ".html" (a page), ".json" (everything, for programs) or ".csv" (the table of `to_frame`).

        Raises:
            OutputError: another ending, or the file cannot be written.
        """
        file = expanded(path)
        if file.suffix.lower() not in (".html", ".json", ".csv"):
            raise OutputError(f"{path}: a report is saved as .html, .json or .csv; give a name that ends so.")
        try:
            with replaced(file) as written:
                written.write_text(self._rendered(file.suffix.lower()), encoding="utf8", errors="backslashreplace")
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror or error}.") from error

    def _repr_html_(self) -> str:
        """The result in a notebook."""
        return self._rendered("summary")

    def _rendered(self, form: str) -> str:
        """The text of the report in one of its forms."""
        if not RENDERERS:
            import_module("iobs.report")  # it stands above this package, and adds its forms when it is imported
        return RENDERERS[form](self)

    def __repr__(self) -> str:
        """One line, which a notebook shows."""
        zeros = f"{self.zeros:,} of {self.weights:,} weights zero ({self.sparsity:.1%})"
        return f"<iobs.Report: {zeros} in {self.coverage.share:.1%} of the weight entries, {self._loss()}>"

    def __str__(self) -> str:
        """The result, the records, and the five layers with the largest errors."""
        layers = plural(len(self.audit), "layer")
        lines = [
            f"{self.zeros:,} of {self.weights:,} weights are zero ({self.sparsity:.2%}) in {layers}.",
            *self.coverage.lines(),
            f"{self._loss()}; {self.seconds:.1f} s.",
            *self._measured(),
        ]
        for number, record in enumerate(self.rounds):
            best = " <- best" if number == self.best_round else ""
            name = "projection" if record.kind == "projection" else f"fine-tuning, {len(record.step_losses)} steps"
            losses = f"calibration {_number(record.loss_calibration)}, held-out {_number(record.loss_heldout)}"
            lines.append(f"  {number + 1}. {name}: {record.sparsity:.1%} zeros, {losses}{best}")
        if worst := sorted(self.layers, key=lambda layer: -layer.error_calibration)[:5]:
            lines.append("Largest layer errors (relative, at the output):")
            lines += [f"  {layer.error_calibration:.4f}  {layer.name}  {layer.sparsity:.1%} zeros" for layer in worst]
        return "\n".join(lines)

    def _measured(self) -> list[str]:
        """Bits of each weight on a grid, and the metrics of the dense and of the last model, one line each."""
        bits = self.bits_per_weight
        counted = [] if bits is None else [f"{bits:.3f} bits a weight, masks, scales and tables counted."]
        return counted + self._compared() + self.cautions

    def _compared(self) -> list[str]:
        if len(self.scores) < 2:
            return []
        before, after = next(iter(self.scores.values())), next(reversed(self.scores.values()))
        return [
            f"{name}: {before[name]:.4g} dense, {after[name]:.4g} pruned{self._in_brackets(name)}"
            for name in before
            if name in after and name.rpartition(" ")[2] not in COUNTS
        ]

    def _in_brackets(self, name: str) -> str:
        text = self.certainty(name)
        return f" ({text})" if text else ""

    def certainty(self, name: str) -> str:
        """The labels behind a score, with 95 % intervals, or the tokens and their text; "" if unknown."""
        part, _, metric = name.rpartition(" ")
        before, after = next(iter(self.scores.values())), next(reversed(self.scores.values()))
        prefix = f"{part} " if part else ""
        labels, tokens = (before.get(f"{prefix}{unit}") for unit in ("labels", "tokens"))
        if metric == "accuracy" and labels:
            ranges = [interval(scores[name] / 100, int(labels)) for scores in (before, after)]
            dense, pruned = (f"{100 * low:.0f} to {100 * high:.0f}" for low, high in ranges)
            return f"{int(labels):,} labels, 95 % intervals {dense} and {pruned}"
        if metric == "correlation" and labels is None and before.get("labels"):
            return f"{int(before['labels']):,} labelled pairs"
        if metric == "perplexity" and tokens and part:
            text = str(self.settings.get("calibration", "the calibration data")).rpartition("/")[
                2
            ]  # of a path, the file
            return f"{int(tokens):,} {'held-out ' if part == 'held-out' else ''}tokens of {text}"
        if metric == "perplexity" and tokens and "evaluation" in self.settings:
            return f"{int(tokens):,} tokens of {without_folders(str(self.settings['evaluation']))}"
        return ""

    def _loss(self) -> str:
        best = self.best
        loss = best.loss_calibration if best.loss_heldout is None else best.loss_heldout
        return self.loss_name if loss is None else f"{self.loss_name} {loss:.4g}"

    def as_dict(self) -> JsonObject:
        """The report in plain types, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonObject) -> Report:
        """Rebuild a report from the result of `as_dict`."""
        values = dict(values)
        values["rounds"] = [
            RoundRecord(**{**entry, "layers": [layer_record(layer) for layer in entry["layers"]]})
            for entry in values["rounds"]
        ]
        values["loss"] = ComparisonLoss(**values["loss"])
        values["coverage"] = Coverage.from_dict(values["coverage"])
        values["samples"] = [Sample(**sample) for sample in values.get("samples", [])]
        values["audit"] = [AuditRow(**{**row, "shape": tuple(row["shape"])}) for row in values["audit"]]
        values["allocation"] = [allocation_record(row) for row in values.get("allocation", [])]
        return cls(**values)


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was observed in `count` cases, by Wilson."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def layer_record(values: JsonObject) -> LayerRecord:
    """Rebuild the record of a layer from plain types."""
    return LayerRecord(**{**values, "shape": tuple(values["shape"])})


def allocation_record(values: JsonObject) -> AllocationRecord:
    """Rebuild an allocation record from plain types."""
    return AllocationRecord(**{**values, "shape": tuple(values["shape"])})


def best_index(records: list[RoundRecord], asked: float) -> int:
    """The index of the best record at the requested sparsity: lowest held-out loss (calibration loss without held-out).

    Fine-tuning must lower the loss by the share `WORTH` to be the best.
    """

    def value(index: int) -> float:
        record = records[index]
        loss = record.loss_calibration if record.loss_heldout is None else record.loss_heldout
        if loss is None:  # not measured, since the whole model was never in memory
            return 0.0
        return loss + WORTH * abs(loss) if record.kind == "finetune" else loss

    eligible = [index for index, record in enumerate(records) if record.asked >= asked - 1e-12]
    return min(eligible, key=value, default=len(records) - 1)
