"""Best columns of a table: which few measurements explain the progress of diabetes, and how sure that is.

    python examples/explain_a_table.py [FOLDER]

It uses data that ship with scikit-learn, writes them as a CSV, and does the same on the command line:

    iobs solve diabetes.csv --target progression -k cv --plot path.png -o model.json --certify 10
    iobs predict model.json diabetes.csv
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

import iobs


def write_csv(file: Path) -> None:
    """The data as a CSV, with the sex as text: a category, coded against its first level."""
    data = load_diabetes(scaled=False)
    sex = data.feature_names.index("sex")
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow([*data.feature_names, "progression"])
        for row, answer in zip(data.data.tolist(), data.target.tolist(), strict=True):
            row[sex] = {1.0: "female", 2.0: "male"}[row[sex]]
            writer.writerow([*row, answer])


def main(folder: Path) -> iobs.SparseRegressor:
    write_csv(folder / "diabetes.csv")

    data = load_diabetes(scaled=False)
    model = iobs.SparseRegressor(k="cv").fit(data.data, data.target)
    print(model.summary())
    print("chosen:", ", ".join(model.get_feature_names_out(data.feature_names)))
    model.plot_path().savefig(folder / "path.png", dpi=130)

    # Choosing within the folds is what the score must include, so the selector goes into the pipeline.
    pipeline = make_pipeline(iobs.SparseRegressor(k="bic"), LinearRegression())
    print(f"R2 on held-out rows: {np.mean(cross_val_score(pipeline, data.data, data.target, cv=5)):.3f}")

    # No other five columns have a smaller squared error; this is a proof, not a search.
    objective = iobs.objectives.LeastSquares(data.data, data.target, intercept=True)
    print(iobs.certify(objective, k=5).message)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
