"""Cox's proportional hazards model on exactly k features."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from iobs.errors import ProblemError
from iobs.optimize.estimators.base import SparseEstimator
from iobs.optimize.estimators.paths import ChosenPath, Observations
from iobs.optimize.estimators.summary import Summary
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.cox import Cox
from iobs.optimize.objectives.design import Array, MatrixLike, VectorLike, as_vector
from iobs.optimize.refit.newton import Fit


def concordance(times: Array, events: Array, hazard: Array, weights: Array | None = None) -> float:
    """Harrell's concordance: the share of comparable pairs in which the earlier event has the larger hazard.

    Args:
        times: (n,) times.
        events: (n,) 1 for an event, 0 for a censored time.
        hazard: (n,) hazards or their logarithms; ties count one half.
        weights: (n,) as counts of samples; ones if not given.

    Returns:
        A number from 0 to 1; NaN without comparable pairs.
    """
    right, pairs = 0.0, 0.0
    weights = np.ones(len(times)) if weights is None else weights
    for i in np.flatnonzero(events == 1):
        later = (times > times[i]) | ((times == times[i]) & (events == 0))
        won = (hazard[i] > hazard[later]) + 0.5 * (hazard[i] == hazard[later])
        right += float(weights[i] * (weights[later] @ won))
        pairs += float(weights[i] * weights[later].sum())
    return right / pairs if pairs else float("nan")


def log_baseline(times: Array, events: Array, weights: Array, margin: Array) -> tuple[Array, Array]:
    """Distinct times of events, ascending, and the log cumulative hazard of a margin of zero at them (Breslow 1972).

    Sums are taken in logarithms: exp of a margin overflows where features are far from zero, such as years.
    """
    order = np.argsort(-times, kind="stable")
    happened = (events == 1) & (weights > 0)
    event_times, first = np.unique(times[happened], return_inverse=True)
    deaths = np.bincount(first, weights[happened], minlength=event_times.size)
    with np.errstate(divide="ignore"):  # a weight of zero
        at_risk = np.logaddexp.accumulate((np.log(weights) + margin)[order])  # of the samples with the largest times
    last = np.searchsorted(-times[order], -event_times, side="right") - 1
    return event_times, np.logaddexp.accumulate(np.log(deaths) - at_risk[last])


def baseline(times: Array, events: Array, weights: Array, margin: Array) -> tuple[Array, Array]:
    """`log_baseline` with the cumulative hazard itself, 0 or infinity where it is no floating-point number."""
    event_times, logs = log_baseline(times, events, weights, margin)
    with np.errstate(over="ignore"):
        return event_times, np.exp(logs)


def _require_times_and_events(y: npt.ArrayLike) -> None:
    """Raise unless y has two columns.

    Raises:
        ProblemError: it has another shape.
    """
    if np.ndim(y) != 2 or np.shape(y)[1] != 2:
        raise ProblemError(f"SparseCox needs y of shape (n, 2), times and events, got {np.shape(y)}.")


@dataclass(eq=False, repr=False, kw_only=True)
class SparseCox(SparseEstimator):
    """Cox's proportional hazards model on exactly k features, for times that may be censored.

    `fit` takes y (n, 2): the time of each sample, and 1 if the event happened then or 0 if the sample was censored. The
    offset is a known part of the logarithm of the hazard.

    Args:
        k: see `SparseRegressor`; the criteria count events, not samples (Volinsky and Raftery 2000), and
            cross-validation takes the partial likelihood of the held-out fold.
        ties: "efron" or "breslow". With "efron" sample weights do not equal repeated rows, which are further ties:
            tied events take their mean weight. With "breslow" they do.
        ridge: weight of 1/2 norm(coef)^2, with coefficients per standard deviation of their features.
        max_k: see `SparseRegressor`, with events as n.
        groups: see `SparseRegressor`.
        forced: see `SparseRegressor`.
        lower: see `SparseRegressor`.
        upper: see `SparseRegressor`.
        cv: see `SparseRegressor`.
        thorough: see `SparseRegressor`.
        certify: see `SparseRegressor`.
        gap: see `SparseRegressor`.
        random_state: seed of every random choice.

    Attributes:
        coef_: (d,) logarithms of hazard ratios, zero outside `support_`.
        support_: sorted indices of the features used.
        k_: the number of features, given or chosen.
        path_: a `PathEntry` for every k that was tried.
        certificate_: the `Certificate` of the k that is used, if asked for.
        standard_errors_: (d,), NaN outside the support; after selection, so too small.
        baseline_times_: distinct times of events in the training data, ascending.
        baseline_hazard_: cumulative hazard of a sample of zeros at these times (Breslow); 0 or infinity where features
            are so far from zero that it is no floating-point number. `predict_survival` does not suffer from that.
    """

    fit_intercept: bool = field(default=True, init=False)  # the baseline hazard takes the constant
    ties: Literal["efron", "breslow"] = "efron"

    _checks: ClassVar[dict[str, bool]] = {"y_numeric": True, "multi_output": True}

    def _observe(
        self, X: MatrixLike, y: npt.ArrayLike, sample_weight: VectorLike | None, offset: VectorLike | None
    ) -> Observations:
        _require_times_and_events(y)
        return super()._observe(X, y, sample_weight, offset)

    def _store(self, data: Observations, path: ChosenPath) -> None:
        super()._store(data, path)
        times, events = data.y.T
        self.baseline_times_, self._log_hazard = log_baseline(times, events, data.weights, data.margin(self.coef_, 0.0))
        with np.errstate(over="ignore"):
            self.baseline_hazard_: Array = np.exp(self._log_hazard)

    def predict(self, X: MatrixLike, *, offset: VectorLike | None = None) -> Array:
        """Logarithms (n,) of the hazards relative to a sample of zeros; larger means an earlier event."""
        margin = self._margin(X)[:, 0]
        return margin if offset is None else margin + as_vector(offset, "offset", margin.size)

    def predict_survival(self, X: MatrixLike, times: VectorLike, *, offset: VectorLike | None = None) -> Array:
        """Probabilities (n, len(times)) that the event has not happened by each time; the offset is as in `predict`."""
        before = np.searchsorted(self.baseline_times_, as_vector(times, "times"), side="right")
        hazard = np.append(-np.inf, self._log_hazard)[before]
        with np.errstate(over="ignore"):  # the probability is zero then
            return np.asarray(np.exp(-np.exp(self.predict(X, offset=offset)[:, None] + hazard)))

    def score(self, X: MatrixLike, y: npt.ArrayLike) -> float:
        """Harrell's concordance: the share of comparable pairs in which the earlier event has the larger hazard."""
        _require_times_and_events(y)
        times, events = np.asarray(y, dtype=np.float64).T
        return concordance(times, events, self.predict(X))

    def summary(self) -> Summary:
        """The table of coefficients of the chosen features, without a constant: the baseline hazard takes it."""
        table = super().summary()
        return replace(table, rows=table.rows[:-1])

    def _objective(self, data: Observations) -> Cox:
        times, events = data.y.T
        return Cox(data.X, times, events, ties=self.ties, **self._loss_options(data))

    def _held_out(self, data: Observations, fit: Fit, objective: Objective) -> float:
        times, events = data.y.T
        if not (events * data.weights).any():
            return 0.0
        margin = data.margin(*objective.split(fit.theta))
        nothing = np.zeros((margin.size, 1))
        held_out = Cox(nothing, times, events, ties=self.ties, sample_weight=data.weights, offset=margin)
        return held_out.value(np.zeros(1))

    def _strata(self, data: Observations) -> Array:
        return data.y[:, 1]

    def _sample_count(self, data: Observations) -> float:
        return float((data.weights * data.y[:, 1]).sum())
