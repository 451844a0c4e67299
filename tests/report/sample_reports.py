"""Invented reports for the tests of tables, figures and pages."""

import base64
import re

from rich.console import Console

from iobs.pruning.coverage import Coverage, DenseWeight
from iobs.pruning.report import AuditRow, ComparisonLoss, LayerRecord, Report, RoundRecord


def make_report(layers=4, rounds=3, heldout=True, scores=None, error=0.01):
    def layer(round_index, index):
        return LayerRecord(
            name=f"model.layers.{index}.<mlp>",
            shape=(8, 6),
            asked=0.5,
            zeros=24,
            error_calibration=error * (index + 1) / (round_index + 1),
            error_heldout=2 * error if heldout else None,
            error_dense=error * (round_index + 1),
            damping=0.01,
            dead_columns=0,
            inputs=100,
            seconds=0.25,
        )

    records = [
        RoundRecord(
            index,
            0.5,
            1.0 / (index + 1),
            (2.0, 1.5, 1.75, 3.0)[index % 4] if heldout else None,
            [layer(index, i) for i in range(layers)],
            [0.1],
            1.5,
        )
        for index in range(rounds)
    ]
    return Report(
        settings={"model": "mine & yours", "recipe": {"solver": "admm"}, "pattern": "unstructured 0.5 per layer"},
        loss=ComparisonLoss("KL to the dense model", 0.0 if heldout else None),
        rounds=records,
        best_round=min(1, rounds - 1),
        coverage=Coverage(
            parameters=48 * layers + 30,
            weights=48 * layers + 24,
            pruned=48 * layers,
            zeros=24 * layers,
            dense=(DenseWeight("lm_head", "output head", "output head", 24),),
        ),
        audit=[AuditRow(f"model.layers.{i}.<mlp>", (8, 6), 24, 24) for i in range(layers)],
        seconds=75.2,
        peak_memory_bytes=812_345_678,
        scores=scores or {},
        notes=["a note with <b>marks</b>"],
    )


def make_finetuned(rounds=1, layers=4, **options):
    """Two fine-tunings after the projections, as in recipe="best"; the first is the best round."""
    made = make_report(layers, rounds, **options)
    for index, steps in ((rounds, 600), (rounds + 1, 60)):
        losses = [0.1] * steps
        made.rounds.append(RoundRecord(index, 0.5, 0.1, 0.1, made.rounds[0].layers, losses, kind="finetune", parent=0))
    made.best_round = rounds
    return made


SCORES = {
    "dense": {"perplexity": 37.66, "tokens": 14592.0},
    "magnitude": {"perplexity": 47.2, "seconds": 1.0, "tokens": 14592.0},
    "I-OBS": {"perplexity": 38.5, "seconds": 60.0, "tokens": 14592.0},
}


def pictures(page):
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]


def words(picture):
    """The texts of a matplotlib SVG, which stores each text in a comment."""
    return re.findall(r"<!-- (.*?) -->", picture)


def shown(*tables_):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for table in tables_:
            console.print(table)
    return console.export_text()
