"""The table of vision transformers: DeiT at 50 %, up to 100 rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from iobs.errors import DataError
from iobs.paper.registry import Experiment, Request, Results, Row
from iobs.paper.rounds import Measured, Settings, iterate, starred

SETTINGS = {
    name: Settings(f"timm:deit_{size}_patch16_224", "an ImageNet folder", 128, 0, 0.5, 100, 0.01)
    for name, size in (("DeiT-Tiny", "tiny"), ("DeiT-Small", "small"), ("DeiT-Base", "base"))
}
ITERATIONS = (1, 10, 25, 50, 75, 100)
# Top-1 accuracy in per cent: dense, then after so many rounds.
PUBLISHED = {
    "DeiT-Tiny": (72.08, 62.98, 63.61, 64.01, 64.11, 64.13, 64.05),
    "DeiT-Small": (79.81, 76.07, 76.28, 76.36, 76.50, 76.57, 76.57),
    "DeiT-Base": (81.91, 80.29, 80.30, 80.37, 80.42, 80.46, 80.43),
}
DENSE_PARTS = ("patch*", "head*")  # query, key, value, projection and fully connected layers are pruned


def run(request: Request) -> Results:
    """The three DeiT, or a small transformer for ten rounds."""
    if not request.stand_in:
        raise DataError(
            "DeiT needs ImageNet: prune it with `iobs prune timm:deit_tiny_patch16_224 --recipe paper --rounds 100 "
            "--skip 'patch*' --skip 'head*' --data FOLDER`, or run the stand-in with --stand-in."
        )
    from iobs.evaluate import accuracy
    from iobs.paper.vision import stand_in

    settings = replace(SETTINGS["DeiT-Tiny"], rounds=10)
    module, batches, test, origin = stand_in("vit", request, settings.samples)

    def score(network: Any) -> dict[str, float]:
        return {"accuracy": accuracy(network, test)}

    scores = Measured(request, "table-vit").get(
        origin, settings, lambda: iterate(module, batches, settings, score, request.say, DENSE_PARTS)
    )
    published = dict(zip((0, *ITERATIONS), PUBLISHED["DeiT-Tiny"], strict=True))
    rows = [
        Row("DeiT-Tiny / stand-in", "dense" if i == 0 else f"{i} rounds", published.get(i), score_["accuracy"])
        for i, score_ in enumerate(scores)
    ]
    return Results(
        "Top-1 accuracy in per cent; * is the best round",
        starred(rows, lowest=False),
        [f"Measured on {origin}; published is DeiT-Tiny on ImageNet.", "Each round sees the same 128 samples."],
    )


EXPERIMENT = Experiment("table-vit", "Table 1", "DeiT at 50 %, 100 rounds", run, "a small vision transformer")
