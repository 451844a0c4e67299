"""A fitted regression as plain JSON, and its predictions for new tables; nothing in the file is ever executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.special import expit, softmax

from iobs.data.encoding import ColumnCoding, Missing, Problems, encoded, is_missing
from iobs.data.tables import read_columns
from iobs.errors import DataError, ModelError
from iobs.optimize.objectives.design import Array
from iobs.optimize.objectives.families import FAMILIES

_SURVIVAL = ("event_times", "cumulative_hazard")
FORMAT = "iobs regression 1"
Predictions: TypeAlias = "list[str | float | None]"  # None: a value of the row is missing
LOSSES = ("squared", "logistic", *FAMILIES, "cox")


@dataclass(frozen=True)
class Fitted:
    """A generalised linear model on named columns of a table.

    Attributes:
        target: name of the column that it predicts.
        loss: one of `LOSSES`.
        classes: of a text target, else empty.
        codings: how the columns of a table become columns of the design; only of columns that are used.
        coefficients: (1, d), or (C, d) for C > 2 classes, over the design of `codings`, then `products`.
        constants: (1,) or (C,).
        offset: name of the column that is added to the linear predictor; "" without one.
        exposure: whether the logarithm of that column is added.
        survival: of Cox's model the times of events, ascending, and the cumulative hazard of a linear predictor of 0.
        products: positions in the design of `codings` of the two columns of every interaction.
        means: of the training data, of the columns of the design of `codings`; empty in old files.
    """

    target: str
    loss: str
    classes: tuple[str, ...]
    codings: tuple[ColumnCoding, ...]
    coefficients: Array
    constants: Array
    offset: str = ""
    exposure: bool = False
    survival: tuple[Array, Array] | None = None
    products: tuple[tuple[int, int], ...] = ()
    means: tuple[float, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """The model as plain values for JSON."""
        codings = [{"name": each.name, "levels": list(each.levels), "fill": each.fill} for each in self.codings]
        return {
            "format": FORMAT,
            "target": self.target,
            "loss": self.loss,
            "classes": list(self.classes),
            "codings": codings,
            "design": [name for coding in self.codings for name in coding.names],
            "coefficients": self.coefficients.tolist(),
            "constants": self.constants.tolist(),
            "means": list(self.means),
            **({"offset": self.offset, "exposure": self.exposure} if self.offset else {}),
            **({"products": [list(pair) for pair in self.products]} if self.products else {}),
            **{name: steps.tolist() for name, steps in zip(_SURVIVAL, self.survival or (), strict=False)},
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Fitted:
        """The model of plain values.

        Raises:
            ModelError: the values are not those of a model, or of another format.
        """
        if plain.get("format") != FORMAT:
            raise ModelError(f"The file holds no model of format {FORMAT!r}; write one with iobs solve ... -o MODEL.")
        try:
            codings = tuple(
                ColumnCoding(
                    str(each["name"]),
                    tuple(str(level) for level in each["levels"]),
                    None if each["fill"] is None else float(each["fill"]),
                )
                for each in plain["codings"]
            )
            classes = tuple(str(name) for name in plain["classes"])
            coefficients = np.array(plain["coefficients"], dtype=np.float64)
            constants = np.array(plain["constants"], dtype=np.float64)
            offset = str(plain.get("offset", "")), bool(plain.get("exposure", False))
            loss = str(plain["loss"])
            products = tuple((int(first), int(second)) for first, second in plain.get("products", []))
            steps = [np.array(plain[name], dtype=np.float64) for name in _SURVIVAL] if loss == "cox" else []
            survival = (steps[0], steps[1]) if steps else None
            means = tuple(float(mean) for mean in plain.get("means", []))
            terms = coefficients, constants
            model = cls(str(plain["target"]), loss, classes, codings, *terms, *offset, survival, products, means)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"The model is damaged ({error!r}); write it again with iobs solve ... -o MODEL."
            ) from None
        design_width = sum(len(coding.names) for coding in codings)
        width = design_width + len(products)
        if any(not 0 <= place < design_width for pair in products for place in pair):
            raise ModelError("The model is damaged: a product has no columns; write it again.")
        finite = np.isfinite(coefficients).all() and np.isfinite(constants).all()
        fits = coefficients.shape == (constants.size, width) and len(means) in (0, design_width)
        if not fits or not finite or model.loss not in LOSSES:
            raise ModelError("The model is damaged: its coefficients do not fit its columns; write it again.")
        if classes and len(classes) != max(2, constants.size):
            raise ModelError("The model is damaged: its coefficients do not fit its classes; write it again.")
        if steps and not steps[0].shape == steps[1].shape == (steps[0].size,):
            raise ModelError("The model is damaged: its hazard does not fit its times; write it again.")
        return model

    @classmethod
    def load(cls, file: Path) -> Fitted:
        """The model that `iobs solve -o` wrote to a file, or to model.json in a folder.

        Raises:
            ModelError: no such file, or not a model.
        """
        file = file / "model.json" if file.is_dir() else file
        try:
            plain = json.loads(file.read_text(encoding="utf8"))
        except OSError as error:
            raise ModelError(f"Cannot read {file}: {error.strerror}.") from None
        except ValueError:
            raise ModelError(f"{file} is not JSON; give the file that iobs solve ... -o wrote.") from None
        if not isinstance(plain, dict):
            raise ModelError(f"{file} holds no model; give the file that iobs solve ... -o wrote.")
        return cls.of_plain(plain["model"] if isinstance(plain.get("model"), dict) else plain)

    def design(self, file: Path, missing: Missing = "error") -> Array:
        """The design matrix (n, d) of a new table; other columns are ignored, and the target may be absent.

        Args:
            file: the table.
            missing: of values that were never missing in the training data. "error" refuses them. "drop" makes their
                rows NaN. "mean" puts the means of the training data, of a category the shares of its levels.

        Raises:
            DataError: a column is absent, or holds what the model does not know; one error has all problems.
            NonFiniteError: values are missing, and `missing` is "error".
            ModelError: the model is of an old file without means, and `missing` is "mean".
        """
        columns = read_columns(file, [coding.name for coding in self.codings if coding.levels])
        rows = len(next(iter(columns.values())))
        if rows == 0:
            raise DataError(f"{file} has no rows.")
        problems = Problems(str(file), new=True)
        absent = [coding.name for coding in self.codings if coding.name not in columns]
        for name in absent:
            problems.add(f"there is no column {name!r}, which the model uses.")
        there = [coding for coding in self.codings if coding.name in columns]
        gaps = {}
        for coding in there if missing != "error" else []:
            values = columns[coding.name]
            gone = is_missing(values)
            if gone.any() and not coding.takes_gaps:
                gaps[coding.name] = gone
                columns[coding.name] = np.where(gone, coding.levels[0] if coding.levels else 0.0, values)
        matrix = encoded(there, columns, problems)[0] if there else np.zeros((rows, 0))
        problems.raise_if_any()
        if gaps and missing == "mean" and not self.means:
            raise ModelError("The model has no means to put in place of missing values; write it again.")
        start = 0
        for coding in self.codings:
            part = slice(start, start + len(coding.names))
            start = part.stop
            if coding.name in gaps:
                matrix[gaps[coding.name], part] = self.means[part] if missing == "mean" else np.nan
        for gone in gaps.values() if missing == "drop" else []:  # also where a category of one level has no column
            matrix[gone] = np.nan
        return np.column_stack([matrix, *(matrix[:, first] * matrix[:, second] for first, second in self.products)])

    def _known(self, file: Path, missing: Missing) -> Array:
        """The known part of the linear predictor (n,) or (1,); NaN where it is missing and `missing` is "drop".

        Raises:
            DataError: the column of the offset is absent, is no column of numbers, or an exposure is not positive.
        """
        if not self.offset:
            return np.zeros(1)
        values = read_columns(file).get(self.offset)
        numbers = None if values is None or values.dtype.kind not in "fiub" else values.astype(np.float64)
        if numbers is None or not (np.isfinite(numbers) | ((missing == "drop") & np.isnan(numbers))).all():
            raise DataError(f"{file} needs a column {self.offset!r} of finite numbers: the model's offset.")
        if self.exposure and (numbers <= 0).any():
            raise DataError(f"The exposure {self.offset!r} of {file} must be positive.")
        return np.log(numbers) if self.exposure else numbers

    def predict(self, file: Path, missing: Missing = "error") -> dict[str, Predictions]:
        """Predictions for the rows of a table: the target, and for classes the probability of each.

        Args:
            file: the table.
            missing: as `design`; "drop" predicts None for rows with missing values.

        Raises:
            DataError: as `design`.
            NonFiniteError: as `design`.
            ModelError: as `design`.
        """
        design = self.design(file, missing)
        margins = design @ self.coefficients.T + self.constants + self._known(file, missing)[:, None]
        lost = np.isnan(margins.sum(axis=1) + design.sum(axis=1))
        predictions = self._of_margins(np.where(np.isnan(margins), 0.0, margins))
        answers: dict[str, Predictions] = {name: [*values] for name, values in predictions.items()}
        for values in answers.values():
            for row in np.flatnonzero(lost).tolist():
                values[row] = None
        return answers

    def _of_margins(self, margins: Array) -> dict[str, list[str] | list[float]]:
        """Predictions for linear predictors (n, 1) or (n, C)."""
        if self.loss == "squared":
            return {self.target: margins[:, 0].tolist()}
        if self.survival is not None:
            return self._survival(margins[:, 0], *self.survival)
        if self.loss != "logistic":
            return {self.target: np.exp(np.minimum(margins[:, 0], 700.0)).tolist()}
        single = margins.shape[1] == 1
        shares = np.column_stack([expit(-margins), expit(margins)]) if single else softmax(margins, axis=1)
        classes = self.classes or ("0", "1")
        predictions: dict[str, list[str] | list[float]] = {
            self.target: [classes[number] for number in shares.argmax(axis=1).tolist()]
        }
        return predictions | {f"probability of {name}": shares[:, j].tolist() for j, name in enumerate(classes)}

    def _survival(self, margins: Array, times: Array, hazard: Array) -> dict[str, list[str] | list[float]]:
        """The log hazard ratio against a row at the means, and the time at which half would have had the event."""
        needed = np.log(2.0) * np.exp(np.clip(-margins, -700.0, 700.0))
        place = np.searchsorted(hazard, needed)
        median = np.append(times, np.inf)[place]  # infinite where the data end before
        return {"log hazard ratio": margins.tolist(), f"median {self.target}": median.tolist()}
