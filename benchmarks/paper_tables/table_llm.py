"""Table 2, language models: OPT-125M and Phi-1.5 at 50 %, three rounds."""

from __future__ import annotations

from paper_tables.experiment import Experiment, Request, Results, Row
from paper_tables.rounds import (
    ONE_TEXT,
    STAND_IN,
    Measured,
    Settings,
    calibration,
    data_notes,
    iterate,
    language_model,
    perplexities,
    settings_for,
    stand_in_settings,
    starred,
)

SETTINGS = {
    "OPT-125M": Settings("facebook/opt-125m", "wikitext2", 128, 2048, 0.5, 3, 0.01),
    "Phi-1.5": Settings("microsoft/phi-1_5", "redpajama", 128, 2048, 0.5, 3, 1e-5),
}
CORPORA = ("wikitext2", "c4")
PUBLISHED_ROUNDS = 3
# Perplexity: dense, SparseGPT (the first projection), I-OBS (3 rounds).
PUBLISHED = {
    ("OPT-125M", "wikitext2"): (27.65, 33.85, 25.20),
    ("OPT-125M", "c4"): (24.61, 32.27, 31.41),
    ("Phi-1.5", "wikitext2"): (21.82, 25.28, 23.94),
    ("Phi-1.5", "c4"): (20.90, 21.13, 20.26),
}


def run(request: Request) -> Results:
    """Run both models, or the model of the user; a small stand-in model runs once with the settings of each."""
    measured, rows = Measured(request, "table-llm"), []
    for name, stated in settings_for(SETTINGS, request).items():
        settings = stand_in_settings(stated, samples=32) if request.stand_in else stated

        label = name + (STAND_IN if request.stand_in else "")

        def compute(settings: Settings = settings, label: str = label) -> list[dict[str, float]]:
            loaded = language_model(settings)
            batches = calibration(loaded, settings, request)
            return iterate(
                loaded.module,
                batches,
                settings,
                lambda module: perplexities(loaded, CORPORA, settings.length, request),
                request.say,
                seed=request.seed,
                checkpoint=measured.checkpoint(label),
            )

        scores = measured.get(label, settings, compute)
        for corpus in CORPORA:
            dense, sparse, best = PUBLISHED.get((name, corpus), (None, None, None))
            methods = [("dense", dense), ("SparseGPT", sparse)]
            methods += [
                (f"I-OBS, round {index}", best if index == PUBLISHED_ROUNDS else None)
                for index in range(2, settings.rounds + 1)
            ]
            found = [
                Row(f"{label}, {corpus}", method, number, entry[corpus])
                for (method, number), entry in zip(methods, scores, strict=False)
            ]
            rows += starred(found, lowest=True)
    return Results("Perplexity, lower is better; * is the best round by this score", rows, _notes(request))


def _notes(request: Request) -> list[str]:
    notes = [
        "The model is held in float32 here: in bfloat16 most steps of these learning rates change no weight.",
        "Each round sees the same samples; Algorithm 2 draws a new batch every round.",
    ]
    if request.stand_in:
        notes += ["Measured on a small model.", ONE_TEXT]
    return notes + data_notes(SETTINGS, request, ", ".join(CORPORA), "windows")


EXPERIMENT = Experiment(
    "table-llm",
    "Table 2",
    "OPT-125M and Phi-1.5 at 50 %, three rounds",
    run,
    "a small model and text",
    reads=("model", "data", "eval_data", "rounds", "limit", "resume"),
    stand_in_reads=("data", "rounds", "limit", "resume"),
)
