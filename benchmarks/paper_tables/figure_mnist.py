"""Figure 1, right: the image of a digit as the sparse signal, recovered by k-IHT and by Top-k-I-OBS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from iobs.errors import DataError
from paper_tables.experiment import Experiment, Request, Results, Row
from paper_tables.figure_gaussian import FACTOR_NOTE

if TYPE_CHECKING:
    from iobs.optimize.objectives.design import Array

D, N = 784, 1568
STEPS, TRIALS = 4000, 20
SHOWN = 5
CHECKED = (1, 10, 50, 100, 200, 400, STEPS)


def run(request: Request) -> Results:
    """Run 4,000 steps on each of 20 images; measure the relative distance to the image."""
    import numpy as np

    images, source = _images(request.stand_in)
    if len(images) < TRIALS:
        raise DataError(f"{source}: {len(images)} images, {TRIALS} are needed; give the file of all of them.")
    rng = np.random.default_rng(request.seed)
    chosen = images[rng.choice(len(images), TRIALS, replace=False)]
    distances = {name: np.zeros(len(CHECKED)) for name in ("k-IHT", "Top-k-I-OBS")}
    recovered: dict[str, list[Array]] = {name: [] for name in distances}
    for trial, image in enumerate(chosen):
        X = rng.standard_normal((N, D)) / np.sqrt(N)
        for name, method in (("k-IHT", "iht"), ("Top-k-I-OBS", "topk_iobs")):
            seen, early = _recover(X, image, method)
            distances[name] += seen / TRIALS
            recovered[name].append(early)
        request.say(f"image {trial + 1} of {TRIALS}")
    share = float(np.median([_count(image) for image in chosen])) / D
    if request.output is not None:
        _write(request.output, chosen, recovered, distances)
    rows = [
        Row(f"step {step}", name, None, float(value))
        for name, values in distances.items()
        for step, value in zip(CHECKED, values, strict=True)
    ]
    return Results(
        "Relative distance to the image, mean of 20; the paper shows images without numbers and claims a better "
        "recovery by Top-k-I-OBS for a fixed number of steps",
        rows,
        [
            f"Images: {source}. k = 2 k*, {share:.0%} of the pixels in the median; d = {D}, n = {N}; images after "
            "10 steps, clipped to 0...255.",
            "After 4,000 steps both have converged to rounding in these settings: they differ in the early steps.",
            FACTOR_NOTE,
        ],
    )


def _count(image: Array) -> int:
    """k = 2 k*, at most d, where k* is the number of nonzero pixels."""
    import numpy as np

    return min(D, 2 * int(np.count_nonzero(image)))


def _recover(X: Array, image: Array, method: str) -> tuple[Array, Array]:
    """Relative distances to the image at the CHECKED steps, and the image after 10 steps."""
    import numpy as np

    from iobs.optimize.minimize import minimize
    from iobs.optimize.objectives.linear import LeastSquares

    size = float(np.linalg.norm(image))
    distances: list[float] = []
    early = np.zeros(D)

    def watch(record: object, theta: Array) -> None:
        nonlocal early
        distances.append(float(np.linalg.norm(theta - image)) / size)
        if len(distances) <= 10:
            early = theta

    minimize(LeastSquares(X, X @ image), _count(image), method=method, max_steps=STEPS, tol=2e-15, callback=watch)
    return np.array([distances[min(step, len(distances)) - 1] for step in CHECKED]), early


def _images(stand_in: bool) -> tuple[Array, str]:
    """Images (count, 784) and their description: MNIST from a file, or scikit-learn's digits enlarged to 28 x 28.

    Raises:
        DataError: $IOBS_MNIST is not set, or its file holds no MNIST images.
    """
    import numpy as np

    if not stand_in:
        file = os.environ.get("IOBS_MNIST")
        if not file:
            raise DataError(
                "MNIST's images do not come with the package: set IOBS_MNIST to train-images-idx3-ubyte(.gz) or an "
                ".npz with x_train, or run with --stand-in."
            )
        return _read_mnist(Path(file)), f"MNIST training images from {Path(file).name}"
    from sklearn.datasets import load_digits

    small = load_digits().images * (255.0 / 16.0)
    index = (np.arange(28) * 8) // 28
    large = small[:, index][:, :, index]
    # Set faint grey to 0, the background in MNIST: otherwise an enlarged digit is hardly sparse.
    large[large < 64] = 0.0
    return large.reshape(len(large), D), "digits of scikit-learn enlarged to 28 x 28"


def _read_mnist(file: Path) -> Array:
    """Read MNIST images from train-images-idx3-ubyte(.gz), or from an .npz file with x_train or images.

    Raises:
        DataError: the file has neither format.
    """
    import gzip
    import zipfile
    import zlib

    import numpy as np

    try:
        if file.suffix == ".npz":
            # Open the file here, because numpy does not close a damaged file.
            with file.open("rb") as opened, np.load(opened) as archive:
                name = next(name for name in ("x_train", "images", "train_images", "X") if name in archive.files)
                return np.asarray(archive[name], dtype=np.float64).reshape(-1, D)
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if raw[:4] != b"\x00\x00\x08\x03":
            raise ValueError("not an idx3 file of bytes")
        return np.frombuffer(raw, np.uint8, offset=16).astype(np.float64).reshape(-1, D)
    except (OSError, ValueError, StopIteration, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(
            f"Cannot read MNIST from {file} ({error}); give train-images-idx3-ubyte(.gz) or an .npz with x_train."
        ) from error


def _write(folder: Path, chosen: Array, recovered: dict[str, list[Array]], distances: dict[str, Array]) -> None:
    import csv

    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "figure_mnist.csv").open("w", newline="", encoding="utf8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["step", *distances])
        writer.writerows([step, *values] for step, *values in zip(CHECKED, *distances.values(), strict=True))
    rows = {"signal": list(chosen), **{f"{name}, 10 steps": images for name, images in recovered.items()}}
    figure, axes = pyplot.subplots(len(rows), SHOWN, figsize=(1.6 * SHOWN, 1.7 * len(rows)), layout="constrained")
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images[:SHOWN], strict=True):
            axis.imshow(np.clip(image.reshape(28, 28), 0, 255), cmap="gray", vmin=0, vmax=255)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, fontsize=8)
    figure.savefig(folder / "figure_mnist.png", dpi=130)
    pyplot.close(figure)


EXPERIMENT = Experiment(
    name="figure-mnist",
    place="Figure 1 (right)",
    title="recovery of a digit's image",
    run=run,
    stand_in="digits of scikit-learn, 28 x 28",
)
