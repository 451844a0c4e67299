"""Reports: numbers as people read them, tables, the page, JSON and back."""

import base64
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest
from rich.console import Console

from iobs import report
from iobs.errors import DataError
from iobs.prune.record import AllocationRecord, AuditRow, LayerRecord, Report, RoundRecord, best_index
from iobs.report import curves, numbers, plots, tables


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
        settings={"model": "mine & yours", "solver": "admm", "rounds": rounds, "pattern": "unstructured 0.5 per layer"},
        loss_name="KL to the dense model",
        dense_loss=0.0 if heldout else None,
        rounds=records,
        best_round=min(1, rounds - 1),
        skipped={"lm_head": "output head"},
        audit=[AuditRow(f"model.layers.{i}.<mlp>", (8, 6), 24, 24) for i in range(layers)],
        seconds=75.2,
        peak_memory_bytes=812_345_678,
        scores=scores or {},
        notes=["a note with <b>marks</b>"],
    )


def make_polished(rounds=1, layers=4, **options):
    """Two polishes after the projections, as recipe="best" has them; the first wins."""
    made = make_report(layers, rounds, **options)
    for index, steps in ((rounds, 600), (rounds + 1, 60)):
        losses = [0.1] * steps
        made.rounds.append(
            RoundRecord(index, 0.5, 0.1, 0.1, made.rounds[0].layers, losses, kind="polish", polished_round=0)
        )
    made.best_round = rounds
    return made


SCORES = {
    "dense": {"perplexity": 37.66, "tokens": 14592.0},
    "magnitude": {"perplexity": 47.2, "seconds": 1.0, "tokens": 14592.0},
    "I-OBS": {"perplexity": 38.5, "seconds": 60.0, "tokens": 14592.0},
}


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (numbers.percent, 0.5, "50.0 %"),
        (numbers.significant, None, "–"),
        (numbers.significant, 0.0, "0.00"),
        (numbers.significant, 0.012345, "0.0123"),
        (numbers.significant, 1234.5, "1,234"),
        (numbers.significant, 123.4, "123"),
        (numbers.significant, 1.5e-7, "1.50e-07"),
        (numbers.score, 4.64439, "4.644"),
        (numbers.score, 37.6623, "37.66"),
        (numbers.score, 122880.0, "122,880"),
        (numbers.score, 91.7, "91.70"),
        (numbers.score, float("inf"), "inf"),
        (numbers.score, 1.5e7 + 0.5, "1.50e+07"),
        (numbers.duration, 9.94, "9.9 s"),
        (numbers.duration, 245.2, "4 min 05 s"),
        (numbers.duration, 7801, "2 h 10 min"),
        (numbers.size, 2.5e9, "2.50 GB"),
        (numbers.size, 812345678, "812 MB"),
    ],
)
def test_numbers(function, value, expected):
    assert function(value) == expected


def test_metrics_have_a_direction():
    assert tables.best_of(SCORES, "perplexity") == "I-OBS"
    flipped = {name: {"accuracy": values["perplexity"]} for name, values in SCORES.items()}
    assert tables.best_of(flipped, "accuracy") == "magnitude"
    assert tables.best_of({"dense": {"accuracy": 1.0}, "pruned": {"accuracy": 1.0}}, "accuracy") is None
    assert tables.best_of(SCORES, "seconds") is None


def pictures(page):
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]


@pytest.mark.parametrize("layers", [0, 1, 4, 60])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("heldout", [True, False])
def test_the_page_is_self_contained_and_escaped(layers, rounds, heldout):
    made = make_report(layers, rounds, heldout, SCORES if layers == 4 else None, error=0.0 if layers == 1 else 0.01)
    page = report.render_page(made)
    drawn = pictures(page)
    assert len(drawn) == 3 * (layers > 0) + (rounds > 1) + (layers == 4)
    for picture in drawn:
        ElementTree.fromstring(picture)
    outside = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"(src|href)=\"?http|url\(|<script", outside)
    assert "mine &amp; yours" in page
    assert "<mlp>" not in outside
    assert "<b>marks</b>" not in page


def test_pictures_are_the_same_every_time():
    made = make_report(scores=SCORES)
    assert plots.rounds(made) == plots.rounds(made)


TEX = r"$\frac_$"  # what matplotlib would take for TeX, and cannot parse


def words(picture):
    """The texts that matplotlib drew, each of which it leaves in a comment."""
    return re.findall(r"<!-- (.*?) -->", picture)


def test_dollars_in_names_are_no_tex(tmp_path):
    made = make_report(scores={f"{name}{TEX}": {TEX: 0.5} for name in "abc"})
    made.loss_name = TEX
    made.allocation = [
        AllocationRecord(f"{TEX}{i}", (8, 6), [0.5, 0.0], [0.1, 0.0], [2.0**i / 10, 0.0], 0.5) for i in range(3)
    ]
    for record in made.rounds:
        for number, layer in enumerate(record.layers):
            layer.name = f"{TEX}{number}"
    with mpl.rc_context({"text.usetex": True, "axes.formatter.use_mathtext": True}):  # as a user's matplotlibrc may be
        report.write_report(made, tmp_path)
    drawn = pictures((tmp_path / "report.html").read_text(encoding="utf8"))
    assert len(drawn) == 6
    assert sum(any(TEX in word for word in words(picture)) for picture in drawn) == 6
    trials = [curves.Trial(TEX, "0.5", sparsity, TEX, 9.5, 2.0) for sparsity in (0.5, 0.6)]
    assert TEX in words(curves.trials_figure(trials, 8.5))


def test_patterns_stand_beside_the_line_of_sparsities():
    trials = [
        curves.Trial("fast", pattern, sparsity, "perplexity", score, 2.0)
        for pattern, sparsity, score in (("0.5", 0.5, 9.5), ("2:4", 0.5, 12.0), ("0.7", 0.7, 20.0))
    ]
    assert "2:4" in words(curves.trials_figure(trials, 8.5))


def test_numbers_on_logarithmic_axes_are_plain_text():
    made = make_report()
    made.best.layers[0].error_dense = 1e-3
    drawn = words(plots.error_by_layer(made))
    assert {"0.001", "0.01"} <= {*drawn}
    assert not any("$" in word for word in drawn)


def test_a_picture_that_cannot_be_drawn_costs_no_weights(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("no room")

    monkeypatch.setattr(plots, "_short_names", broken)
    with pytest.warns(UserWarning, match="could not be drawn: no room"):
        report.write_report(make_report(), tmp_path)
    drawn = pictures((tmp_path / "report.html").read_text(encoding="utf8"))
    assert len(drawn) == 4
    assert sum("could not be drawn" in picture for picture in drawn) == 3
    for picture in drawn:
        ElementTree.fromstring(picture)


@pytest.mark.parametrize("rounds", [1, 3, 40])
def test_polishes_are_no_rounds_in_the_picture(rounds):
    drawn = words(plots.rounds(make_polished(rounds)))
    assert drawn.count("polish") == 2
    assert {"of 600", "of 60"} <= {*drawn}
    assert str(rounds + 1) not in drawn
    assert "1" in drawn


def test_a_polish_claims_no_layer_errors_of_its_own():
    made = make_polished()
    page = report.render_page(made)
    assert "Error by layer of round 1, before the polish of 600 steps" in page
    assert "Time by layer of round 1, before the polish of 600 steps" in page
    assert "Layers of round 1, before the polish of 600 steps" in page
    assert "sparse weight V in round 1, before the polish of 600 steps" in page
    assert "best round" not in page
    assert "before the polish" in words(plots.error_by_layer(made))
    text = shown(report.layers_table(made), report.rounds_table(made))
    assert "Layers of round 1, before the polish of 600 steps" in text
    assert re.search(r"600 steps \* .* – +0\.0", text)
    assert tables.mean_error(made.rounds[0]) == pytest.approx(0.01)
    assert tables.mean_error(made.best) is None
    assert "before the polish" not in report.render_page(make_report())


def test_reports_from_before_polishes_named_their_round_are_read(tmp_path):
    made = make_polished()
    values = made.as_dict()
    for entry in values["rounds"]:
        del entry["polished_round"]
    (tmp_path / "report.json").write_text(json.dumps(values), encoding="utf8")
    read = report.read_report(tmp_path / "report.json")
    assert read.best.layers == made.best.layers
    assert "Layers of the projection, before the polish of 600 steps" in report.render_page(read)


def test_layer_names_lose_what_they_share():
    assert plots._short_names(["a.b.c.x", "a.b.d.x"]) == ["c.x", "d.x"]
    assert plots._short_names(["a.b"]) == ["a.b"]
    assert plots._short_names(["a.b", "a.b"]) == ["b", "b"]
    assert plots._short_names(["a.b.c", "a"]) == ["a.b.c", "a"]


def test_json_and_back(tmp_path):
    made = make_report(scores=SCORES)
    report.write_report(made, tmp_path)
    assert report.read_report(tmp_path / "report.json") == made
    assert (tmp_path / "report.html").read_text(encoding="utf8").startswith("<!doctype html>")


def test_numbers_that_json_lacks_go_as_strings_and_come_back(tmp_path):
    made = make_report(scores={"validation": {"perplexity": math.inf, "kl": -math.inf}})
    report.write_report(made, tmp_path)
    text = (tmp_path / "report.json").read_text(encoding="utf8")
    assert "Infinity" in json.loads(text, parse_constant=pytest.fail)["scores"]["validation"]["perplexity"]
    assert report.read_report(tmp_path / "report.json") == made
    (back,) = numbers.from_json(numbers.to_json([math.nan]))
    assert math.isnan(back)


@pytest.mark.parametrize("content", ["{", "[]", '{"rounds": []}', None])
def test_what_is_no_report(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(DataError, match=r"report\.json"):
        report.read_report(tmp_path / "report.json")


def shown(*tables_):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for table in tables_:
            console.print(table)
    return console.export_text()


def test_tables():
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


def test_a_difference_between_asked_and_got_is_shown():
    made = make_report()
    made.rounds[1].layers[0].zeros = 30
    assert "asked" in shown(report.layers_table(made))
    assert "asked" not in shown(report.layers_table(make_report()))


@pytest.mark.parametrize("layers", [3, 60])
@pytest.mark.parametrize("weight", [2.0, 0.0])
def test_the_page_shows_where_the_zeros_went(layers, weight):
    made = make_report(layers)
    made.allocation = [
        AllocationRecord(f"layer{i}", (8, 6), [0.75, 0.5, 0.0], [0.4, 0.1, 0.0], [0.4 * weight, 0.1 * weight, 0.0], 0.5)
        for i in range(layers)
    ]
    page = report.render_page(made)
    assert "Where the zeros went" in page
    assert "Where the zeros went" not in report.render_page(make_report(layers))


def test_effects_are_read_off_the_curve():
    record = AllocationRecord("a", (8, 6), [0.75, 0.5, 0.0], [0.4, 0.1, 0.0], [0.8, 0.2, 0.0], 0.5)
    assert [record.effect(share) for share in (0.0, 0.25, 0.5, 0.6, 0.75, 0.9)] == pytest.approx(
        [0.0, 0.1, 0.2, 0.44, 0.8, 0.8]
    )


@pytest.mark.parametrize("steps", [{"step": {"augment": None}}, {"step": {"augment": "auto"}, "polish": None}])
def test_samples_that_networks_are_judged_by_may_be_altered(steps):
    made = make_report()
    made.settings |= steps
    altered = "held-out samples (altered like those of the gradient steps)"
    expected = steps["step"]["augment"] is not None
    assert ("held-out samples (altered" in report.render_page(made)) == expected
    assert any(altered in line for line in report.summary_lines(made)) == expected
    if expected:
        page = report.render_page(made)
        assert f"on {altered}; dense" in page
        assert f"lowest loss on {altered} among" in page


def test_summary_names_the_round_that_won():
    made = make_report()
    lines = report.summary_lines(made)
    assert lines[0] == "50.00 % zeros: 96 of 192 weights in 4 layers"
    assert "round 2 of 3" in " ".join(lines)
    made.rounds.append(RoundRecord(3, 0.5, 0.1, 0.1, made.rounds[0].layers, [0.1] * 60, kind="polish"))
    made.best_round = 3
    assert "polish of 60 steps" in " ".join(report.summary_lines(made))


def test_card():
    card = report.render_card(make_report(scores=SCORES), "me/model", "transformers")
    assert card.startswith("---\ntags:\n")
    assert "library_name: transformers" in card
    assert "| I-OBS | 38.50 | 60.00 |" in card
    assert "library_name" not in report.render_card(make_report(), "FILE.py:f", None)


@pytest.mark.parametrize(("sign", "polished", "best"), [(1, 0.99, 0), (1, 0.97, 1), (-1, 1.01, 0), (-1, 1.03, 1)])
def test_a_polish_must_be_worth_it(sign, polished, best):
    projected, polish = (RoundRecord(index, 0.5, None, sign * loss, []) for index, loss in enumerate((1.0, polished)))
    polish.kind = "polish"
    assert best_index([projected, polish], 0.5) == best
    polish.kind = "projection"
    assert best_index([projected, polish], 0.5) == 1


def test_the_best_of_each_pattern_is_bold():
    trials = [curves.Trial(name, "0.5", 0.5, "perplexity", score, 2.0) for name, score in (("a [/b]", 9.5), ("c", 8.5))]
    console = Console(markup=False, width=100, record=True, file=io.StringIO())
    console.print(curves.trials_table(trials, None))
    assert {"a [/b]", "9.500, 2.0 s", "8.500, 2.0 s"} <= {*re.split(r" *[│\n] *", console.export_text(clear=False))}
    assert "\x1b[1;32m8.500\x1b[0m, 2.0 s" in console.export_text(styles=True)
