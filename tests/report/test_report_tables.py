"""Tables and numbers of a report as text."""

import io
import math
import re

import pytest
from rich.console import Console
from sample_reports import SCORES, make_report, shown

from iobs import report
from iobs.core import formats
from iobs.pruning.report import RoundRecord, best_index
from iobs.report import comparisons, plots, tables


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (formats.percent, 0.5, "50.0 %"),
        (formats.significant, None, "–"),
        (formats.significant, 0.0, "0.00"),
        (formats.significant, 0.012345, "0.0123"),
        (formats.significant, 1234.5, "1,234"),
        (formats.significant, 123.4, "123"),
        (formats.significant, 1.5e-7, "1.50e-07"),
        (formats.score, 4.64439, "4.644"),
        (formats.score, 37.6623, "37.66"),
        (formats.score, 122880.0, "122,880"),
        (formats.score, 91.7, "91.70"),
        (formats.score, float("inf"), "inf"),
        (formats.score, 1.5e7 + 0.5, "1.50e+07"),
        (formats.duration, 9.94, "9.9 s"),
        (formats.duration, 245.2, "4 min 05 s"),
        (formats.duration, 7801, "2 h 10 min"),
        (formats.size, 2.5e9, "2.50 GB"),
        (formats.size, 812345678, "812 MB"),
    ],
)
def test_numbers_are_formatted(function, value, expected):
    assert function(value) == expected


def test_best_of_knows_the_direction_of_metrics():
    assert tables.best_of(SCORES, "perplexity") == "I-OBS"
    flipped = {name: {"accuracy": values["perplexity"]} for name, values in SCORES.items()}
    assert tables.best_of(flipped, "accuracy") == "magnitude"
    lm_eval = {name: {"wikitext/bits_per_byte": values["perplexity"]} for name, values in SCORES.items()}
    assert tables.best_of(lm_eval, "wikitext/bits_per_byte") == "I-OBS"
    assert tables.best_of({"dense": {"accuracy": 1.0}, "pruned": {"accuracy": 1.0}}, "accuracy") is None
    assert tables.best_of(SCORES, "seconds") is None


@pytest.mark.parametrize("metric", ["perplexity", "accuracy"])
@pytest.mark.parametrize("first", [math.nan, 5.0])
def test_score_that_is_no_number_is_never_the_best(metric, first):
    other = 5.0 if math.isnan(first) else math.nan
    scores = {"dense": {metric: 3.0}, "one": {metric: first}, "other": {metric: other}}
    assert tables.best_of(scores, metric) == ("other" if math.isnan(first) else "one")
    assert tables.best_of({**scores, "one": {metric: math.nan}, "other": {metric: math.nan}}, metric) is None


def test_short_names_drop_common_parts():
    assert plots._short_names(["a.b.c.x", "a.b.d.x"]) == ["c.x", "d.x"]
    assert plots._short_names(["a.b"]) == ["a.b"]
    assert plots._short_names(["a.b", "a.b"]) == ["b", "b"]
    assert plots._short_names(["a.b.c", "a"]) == ["a.b.c", "a"]


def test_tables_show_layers_rounds_and_scores():
    made = make_report(layers=9, scores=SCORES)
    text = shown(
        report.layers_table(made, limit=3), report.rounds_table(made), report.scores_table(SCORES), *made.notes
    )
    assert "the 3 with the largest errors of 9" in text
    assert text.count("<mlp>") == 3
    assert re.search(r"2 \* +50\.0 % +0\.5000 +1\.500", text)
    assert re.search(r"I-OBS +38\.50 +60\.00", text)
    assert "tokens" not in text
    assert "14,592" in shown(report.scores_table(SCORES, counts=True))
    assert shown(report.audit_table(made.audit)).count("<mlp>") == len(made.audit)


def test_layers_table_shows_a_differing_requested_count():
    made = make_report()
    made.rounds[1].layers[0].zeros = 30
    assert "asked" in shown(report.layers_table(made))
    assert "asked" not in shown(report.layers_table(make_report()))


def test_summary_names_the_best_round():
    made = make_report()
    lines = report.summary_lines(made)
    assert lines[0] == "50.00 % zeros: 96 of 192 weights in 4 layers"
    assert "round 2 of 3" in " ".join(lines)
    made.rounds.append(RoundRecord(3, 0.5, 0.1, 0.1, made.rounds[0].layers, [0.1] * 60, kind="finetune"))
    made.best_round = 3
    assert "fine-tuning of 60 steps" in " ".join(report.summary_lines(made))


@pytest.mark.parametrize(("sign", "finetuned", "best"), [(1, 0.99, 0), (1, 0.97, 1), (-1, 1.01, 0), (-1, 1.03, 1)])
def test_best_index_requires_finetuning_to_gain(sign, finetuned, best):
    projected, last = (RoundRecord(index, 0.5, None, sign * loss, []) for index, loss in enumerate((1.0, finetuned)))
    last.kind = "finetune"
    assert best_index([projected, last], 0.5) == best
    last.kind = "projection"
    assert best_index([projected, last], 0.5) == 1


def test_trials_table_prints_the_best_of_a_pattern_bold():
    trials = [
        comparisons.MethodTrial(name, "0.5", 0.5, "perplexity", score, 2.0)
        for name, score in (("a [/b]", 9.5), ("c", 8.5))
    ]
    console = Console(markup=False, width=100, record=True, file=io.StringIO())
    console.print(comparisons.trials_table(trials, None))
    cells = re.split(r" {2,}|\s*\n\s*", console.export_text(clear=False))
    assert {"a [/b]", "9.500, 2.0 s", "8.500, 2.0 s"} <= {*cells}
    assert "\x1b[1;32m8.500\x1b[0m, 2.0 s" in console.export_text(styles=True)


def test_layers_on_grids_show_their_bits():
    made = make_report()
    assert "bits a weight" not in shown(report.layers_table(made), report.audit_table(made.audit)) + made._rendered(
        ".html"
    )
    made.audit[0].bits = 3 * made.audit[0].weights
    name = made.audit[0].name
    for text in (shown(report.layers_table(made)), shown(report.audit_table(made.audit))):
        assert "bits a weight" in text
        assert re.search(r"3\.00", next(line for line in text.splitlines() if name.split(".")[-1] in line))
    assert "<th>bits a weight" in made._rendered(".html")
