"""Table 5, the comparison with CBS: MobileNetV1 pruned in one shot to 30 to 80 %."""

from __future__ import annotations

import copy
from dataclasses import replace

from iobs.errors import DataError
from paper_tables.experiment import Experiment, Request, Results, Row
from paper_tables.rounds import Measured, Settings, data_notes
from paper_tables.vision import Network, on_images, stand_in

SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# Top-1 accuracy in per cent.
DENSE = 71.95
PUBLISHED = {
    "I-OBS": (71.6, 71.3, 70.6, 68.4, 60.7, 27.9),
    "CBS": (71.88, 71.45, 70.21, 66.37, 55.11, 16.38),
}
SETTINGS = [Settings("MobileNetV1 1.0 of STR", "ImageNet", 400, 0, sparsity, 1, 0.01) for sparsity in SPARSITIES]


def run(request: Request) -> Results:
    """Run one projection at each sparsity; depthwise convolutions stay dense."""
    measured = Measured(request, "table-cbs")
    if request.stand_in:
        network = stand_in("mobilenet", request, SETTINGS[0].samples)
    elif request.model is None:
        raise DataError(
            "The MobileNetV1 of STR is in no library: give yours with --model FILE.py:function (or any other network, "
            "as timm:NAME), and images with --data and --eval-data; or run the stand-in with --stand-in."
        )
    else:
        network = on_images(replace(SETTINGS[0], model=request.model), request)
    rows, origin = _rows(network, request, measured)
    notes = [
        f"Measured on {origin}; published is MobileNetV1 1.0 on all of ImageNet. Compare drops, not values.",
        "Depthwise convolutions stay dense and uncounted, as in the paper; its number of rounds is not stated.",
        'The paper\'s I-OBS solves with SparseGPT, a row of its own here. The row ADMM is solver="admm" with '
        f'budget="fast". {SETTINGS[0].samples} calibration samples are our choice, the paper states no number.',
        *data_notes({"MobileNetV1": SETTINGS[0]}, request, "ImageNet", "images"),
    ]
    return Results("Top-1 accuracy in per cent", rows, notes)


def _rows(network: Network, request: Request, measured: Measured) -> tuple[list[Row], str]:
    from iobs import ADMM, Recipe, prune

    module, batches, accuracy, origin = network
    dense = measured.get(f"dense {origin}", SETTINGS[0], lambda: [{"accuracy": accuracy(module)}])
    rows = [Row("0 %", "dense", DENSE, dense[0]["accuracy"])]
    for index, settings in enumerate(SETTINGS):
        scores = {}
        for method, solver in (("ADMM, this library", "admm"), ("SparseGPT", "sparsegpt")):

            def compute(solver: str = solver, settings: Settings = settings) -> list[dict[str, float]]:
                changed = copy.deepcopy(module)
                prune(
                    changed,
                    batches,
                    settings.sparsity,
                    Recipe(solver=ADMM("fast") if solver == "admm" else solver),
                    holdout=0.0,
                    seed=request.seed,
                )
                return [{"accuracy": accuracy(changed)}]

            scores[method] = measured.get(f"{method} {origin}", settings, compute)[0]["accuracy"]
            request.say(f"{settings.sparsity:.0%}, {method}: {scores[method]:.2f}")
        setting = f"{settings.sparsity:.0%}"
        rows += [Row(setting, method, PUBLISHED[method][index], None) for method in PUBLISHED]
        rows += [Row(setting, method, None, score) for method, score in scores.items()]
    return rows, origin


EXPERIMENT = Experiment(
    "table-cbs",
    "Table 5",
    "MobileNetV1 at 30 to 80 %, beside CBS",
    run,
    "a small convolutional network",
    reads=("model", "data", "eval_data", "limit"),
)
