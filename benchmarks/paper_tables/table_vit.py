"""Table 1, vision transformers: DeiT at 50 %, up to 100 rounds."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch

from paper_tables.experiment import Experiment, Request, Results, Row
from paper_tables.rounds import STAND_IN, Measured, Settings, data_notes, iterate, settings_for, starred
from paper_tables.vision import Network, on_images, stand_in

SETTINGS = {
    name: Settings(f"timm:deit_{size}_patch16_224", "ImageNet", 128, 0, 0.5, 100, 0.01)
    for name, size in (("DeiT-Tiny", "tiny"), ("DeiT-Small", "small"), ("DeiT-Base", "base"))
}
ITERATIONS = (1, 10, 25, 50, 75, 100)
# Top-1 accuracy in per cent: dense, then after each number of rounds in ITERATIONS.
PUBLISHED = {
    "DeiT-Tiny": (72.08, 62.98, 63.61, 64.01, 64.11, 64.13, 64.05),
    "DeiT-Small": (79.81, 76.07, 76.28, 76.36, 76.50, 76.57, 76.57),
    "DeiT-Base": (81.91, 80.29, 80.30, 80.37, 80.42, 80.46, 80.43),
}
DENSE_PARTS = ("patch*", "head*")  # query, key, value, projection and fully connected layers are pruned
MEASURE = "Top-1 accuracy in per cent; * is the best round by this score"
SAME_SAMPLES = (
    "Each round sees the same 128 samples, the batch size of the paper's appendix; its text says 1,000 calibration "
    "samples, and its Algorithm 2 draws a new batch every round."
)


def run(request: Request) -> Results:
    """Run the three DeiT or the user's network on images, or a small transformer for ten rounds."""
    measured = Measured(request, "table-vit")
    if request.stand_in:
        settings = replace(SETTINGS["DeiT-Tiny"], rounds=request.rounds or 10)
        network = stand_in("vit", request, settings.samples)
        rows, origin = _rows("DeiT-Tiny", settings, network, request, measured)
        notes = [f"Measured on {origin}; published is DeiT-Tiny on ImageNet.", SAME_SAMPLES]
        return Results(MEASURE, rows, notes)
    rows = []
    for name, settings in settings_for(SETTINGS, request).items():
        rows += _rows(name, settings, on_images(settings, request), request, measured)[0]
    return Results(MEASURE, rows, [SAME_SAMPLES, *data_notes(SETTINGS, request, "ImageNet", "images")])


def _rows(
    name: str, settings: Settings, network: Network, request: Request, measured: Measured
) -> tuple[list[Row], str]:
    module, batches, accuracy, origin = network
    from iobs.pruning.network.layers import find_layers

    at = {*ITERATIONS, settings.rounds} if settings.rounds > 10 else set(range(1, settings.rounds + 1))
    dense = [part for part in DENSE_PARTS if any(fnmatch(layer.name, part) for layer in find_layers(module))]
    scores = measured.get(
        origin,
        settings,
        lambda: iterate(
            module,
            batches,
            settings,
            lambda changed: {"accuracy": accuracy(changed)},
            request.say,
            dense,
            at,
            seed=request.seed,
            checkpoint=measured.checkpoint(origin),
        ),
    )
    published = dict(zip((0, *ITERATIONS), PUBLISHED.get(name, ()), strict=False))
    label = name + (STAND_IN if request.stand_in else "")
    found = [
        Row(label, "dense" if index == 0 else f"round {index}", published.get(index), entry["accuracy"])
        for index, entry in enumerate(scores)
        if entry
    ]
    return starred(found, lowest=False), origin


EXPERIMENT = Experiment(
    "table-vit",
    "Table 1",
    "DeiT at 50 %, 100 rounds",
    run,
    "a small vision transformer",
    reads=("model", "data", "eval_data", "rounds", "limit", "resume"),
    stand_in_reads=("rounds", "resume"),
)
