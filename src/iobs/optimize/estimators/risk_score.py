"""Risk scores: a few columns, an integer number of points for each, and the risk of every total."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from iobs.errors import ProblemError, is_a, shown
from iobs.optimize.bounds.scorecards import CardProblem, CardProof, best_cards
from iobs.optimize.estimators.plots import shown_figure
from iobs.optimize.objectives.design import Array, Indices, MatrixLike, VectorLike, few_threads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOTALS = 15  # most totals of a card that are listed one by one
_MOST_POINTS = 10**6


@dataclass(frozen=True)
class Card:
    """A scorecard: prints as a table.

    Attributes:
        columns: indices of the columns that have points (m,).
        points: of these columns (m,).
        scale: log-odds of one point.
        intercept: log-odds of a total of 0.
        loss: the objective: sum of the logistic losses, and half the ridge times the squared coefficients.
        names: of the columns.
        totals: totals that the samples have, the least first; quantiles of them where there are many.
        label: the class whose risk is given.
    """

    columns: Indices
    points: Indices
    scale: float
    intercept: float
    loss: float
    names: tuple[str, ...] = field(repr=False)
    totals: Array = field(repr=False)
    label: str = "1"

    def risk(self, totals: npt.ArrayLike) -> Array:
        """The probability of the second class for totals of points."""
        return np.asarray(expit(self.intercept + self.scale * np.asarray(totals, dtype=np.float64)))

    def __str__(self) -> str:
        width = max([len(name) for name in self.names] + [6])
        lines = [f"{'column':<{width}}  points"]
        order = np.lexsort((self.columns, -np.abs(self.points)))
        lines += [f"{self.names[i]:<{width}}  {self.points[i]:>+6d}" for i in order]
        cells = [
            (f"{total:g}", _percent(risk)) for total, risk in zip(self.totals, self.risk(self.totals), strict=True)
        ]
        sizes = [max(len(part) for part in cell) for cell in cells]
        for name, row in zip(("total", f"risk of {self.label}"), zip(*cells, strict=True), strict=True):
            shown = "  ".join(f"{part:>{size}}" for part, size in zip(row, sizes, strict=True))
            lines.append(f"{name:<{width}}  {shown}")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """A figure of the points and of the risk of every total."""
        figure = shown_figure((8.0, 1.2 + 0.3 * max(5, len(self.names))))
        left, right = figure.subplots(1, 2)
        order = np.lexsort((self.columns, -np.abs(self.points)))[::-1]
        bars = left.barh([self.names[i] for i in order], self.points[order])
        left.bar_label(bars, [f"{self.points[i]:+d}" for i in order], padding=3)
        left.axvline(0, color="0.5", linewidth=0.8)
        left.margins(x=0.2)
        left.set_xlabel("points")
        right.plot(self.totals, 100 * self.risk(self.totals), marker="o")
        right.set_xlabel("total of points")
        right.set_ylabel(f"risk of {self.label} (%)")
        return figure


def _points(name: str, values: int | npt.ArrayLike, sign: int, columns: int) -> Indices:
    """The least or most points of every column, (columns,).

    Raises:
        ProblemError: they are not whole numbers of this sign, or not as many.
    """
    try:
        points = np.broadcast_to(np.asarray(values, dtype=np.float64), (columns,))
    except (TypeError, ValueError):
        points = np.full(columns, math.nan)
    if not ((points == np.round(points)) & (sign * points >= 0) & (np.abs(points) <= _MOST_POINTS)).all():
        side = "at most 0" if sign < 0 else "at least 0"
        raise ProblemError(
            f"{name} must be a whole number, or one for each of the {columns} columns, {side} and of at most "
            f"{_MOST_POINTS:,} points; got {shown(values)}."
        )
    return points.astype(np.int64)


def _percent(risk: float) -> str:
    return f"{risk:.1%}" if 0.001 <= risk <= 0.999 else "<0.1%" if risk < 0.5 else ">99.9%"


@dataclass(eq=False, repr=False, kw_only=True)
class RiskScore(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The best scorecard: integer points for at most k columns, and the logistic model of their sum.

    The card minimises the logistic loss over all columns, all points, and all models of the total, by branch and bound;
    `gap_` is 0 up to rounding if that is proved. The probabilities are those of a logistic regression on the total, so
    that their mean is the share of the class. Columns should have comparable units. Yes-no columns (0 and 1) are the
    usual case: cut a number into ranges first.

    The problem is that of FasterRisk (Liu, Zhong, Li, Seltzer and Rudin 2022), whose multiplier is 1 / scale, with a
    real intercept; RiskSLIM (Ustun and Rudin 2019) has the scale 1.

    Args:
        k: most columns of a card.
        lower: least points of a column, at most 0; 0 for no negative points. A number, or one for every column (d,).
        upper: most points of a column, at least 0.
        scale: largest log-odds of one point. The smaller it is, the quicker is the proof.
        ridge: weight of 1/2 norm(coefficients)^2; a coefficient is points times scale.
        cards: number of best cards to find. All of them are proved: no other card is better than the last.
        gap: relative gap of the loss at which the proof ends.
        seconds: time limit of the search; the gap is reported. Ctrl+C ends it too.
        random_state: seed of the first search.

    Attributes:
        classes_: the two labels.
        points_: (d,) integers, 0 for columns without points.
        support_: sorted columns with points.
        scale_: log-odds of one point.
        intercept_: log-odds of a total of 0.
        card_: the best `Card`.
        cards_: the best cards, the best first.
        gap_: (loss - proved lower bound) / loss of the best card, of at least 0.
        complete_: whether `cards_` are proved to be the best cards.
        message_: the result in words.
    """

    k: int = field(default=5, kw_only=False)
    lower: int | npt.ArrayLike = -5
    upper: int | npt.ArrayLike = 5
    scale: float = 1.0
    ridge: float = 1e-3
    cards: int = 1
    gap: float = 0.0
    seconds: float = 60.0
    random_state: int = 0

    def fit(self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None = None) -> Self:
        """Find the best cards.

        Args:
            X: features (n, d), dense.
            y: labels (n,) of two classes.
            sample_weight: (n,) non-negative.

        Raises:
            ProblemError: invalid settings, or not two classes.
        """
        features, target = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(target)
        self.classes_, numbers = np.unique(target, return_inverse=True)
        if self.classes_.size != 2:
            raise ProblemError(
                "Only binary classification is supported. RiskScore needs two classes, got "
                f"{'only one class' if self.classes_.size == 1 else self.classes_.size}."
            )
        weights = np.asarray(_check_sample_weight(sample_weight, features, dtype=np.float64))
        if (weights < 0).any():
            raise ProblemError(f"sample_weight must not be negative, got {float(weights.min()):g}.")
        some = weights > 0
        if np.unique(numbers[some]).size != 2:
            raise ProblemError("All samples of a class have the weight 0; RiskScore needs both classes.")
        problem = self._problem(features[some], numbers[some].astype(np.float64), weights[some])
        with few_threads(features.size):
            proof = best_cards(problem, self.cards, self.gap, self.seconds, self.random_state)
        self._keep(features, proof)
        return self

    def _problem(self, X: Array, labels: Array, weights: Array) -> CardProblem:
        if not (is_a(Integral, self.k) and self.k >= 1):
            raise ProblemError(f"k must be a whole number of at least 1, got {self.k!r}.")
        if not (is_a(Integral, self.cards) and self.cards >= 1):
            raise ProblemError(f"cards must be a whole number of at least 1, got {self.cards!r}.")
        if not (is_a(Real, self.ridge) and self.ridge >= 0 and math.isfinite(self.ridge)):
            raise ProblemError(f"ridge must be finite and not negative, got {self.ridge!r}.")
        if not (is_a(Real, self.scale) and self.scale > 0 and math.isfinite(self.scale)):
            raise ProblemError(f"scale must be positive and finite, got {self.scale!r}.")
        if not (is_a(Real, self.gap, self.seconds) and self.gap >= 0 and self.seconds >= 0):
            raise ProblemError(
                f"gap and seconds must be numbers of at least 0, got {shown(self.gap)} and {shown(self.seconds)}."
            )
        low, high = _points("lower", self.lower, -1, X.shape[1]), _points("upper", self.upper, 1, X.shape[1])
        varies = np.ptp(X, axis=0) > 0  # the points of a constant column are part of the intercept, without its ridge
        return CardProblem(
            X, labels, weights, float(self.ridge), min(self.k, X.shape[1]), low * varies, high * varies,
            float(self.scale),
        )  # fmt: skip

    def _keep(self, X: Array, proof: CardProof) -> None:
        names = getattr(self, "feature_names_in_", None)
        label = str(self.classes_[1])
        self.cards_ = []
        for columns, card in proof.cards:
            shown = tuple(f"x{j}" if names is None else str(names[j]) for j in columns)
            totals = np.unique(X[:, columns] @ card.points)
            if totals.size > _TOTALS:
                totals = np.quantile(totals, np.linspace(0, 1, _TOTALS), method="nearest")
            self.cards_.append(Card(columns, card.points, card.scale, card.intercept, card.value, shown, totals, label))
        self.card_ = self.cards_[0]
        self.points_ = np.zeros(X.shape[1], dtype=np.int64)
        self.points_[self.card_.columns] = self.card_.points
        self.support_ = self.card_.columns
        self.scale_, self.intercept_ = self.card_.scale, self.card_.intercept
        missing = max(0.0, self.card_.loss - proof.lower) / max(abs(self.card_.loss), 1e-300)
        self.gap_ = missing if missing > 1e-9 else 0.0
        self.complete_ = not proof.reason and self.gap == 0
        what = (
            "proved to be the best" if self.gap_ == 0 else f"not proved: the best loss is at most {self.gap_:.2%} lower"
        )
        count = "the card is" if len(self.cards_) == 1 else f"{len(self.cards_)} cards, the first"
        ended = f"; {proof.reason}" if proof.reason else ""
        self.message_ = f"{count} {what} ({proof.nodes:,} nodes, {proof.seconds:.2f} s{ended})"

    def total(self, X: MatrixLike) -> Array:
        """The totals of points (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(X @ self.points_)

    def decision_function(self, X: MatrixLike) -> Array:
        """Log-odds of the second class (n,)."""
        total = self.total(X)
        return np.asarray(self.intercept_ + self.scale_ * total)

    def predict_proba(self, X: MatrixLike) -> Array:
        """Class probabilities (n, 2)."""
        margin = self.decision_function(X)
        return np.stack([expit(-margin), expit(margin)], axis=1)

    def predict(self, X: MatrixLike) -> npt.NDArray[np.generic]:
        """Predicted labels (n,)."""
        chosen = (self.decision_function(X) > 0).astype(int)
        return np.asarray(self.classes_[chosen])

    def __sklearn_tags__(self) -> Tags:
        """scikit-learn's tags: two classes only."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
