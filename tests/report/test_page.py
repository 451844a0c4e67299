"""The HTML page of a report and the model card."""

import csv
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from sample_reports import SCORES, make_finetuned, make_report, pictures, shown, words

from iobs import report
from iobs.core.formats import without_folders
from iobs.errors import OutputError
from iobs.pruning.report import Sample
from iobs.report import plots, tables


@pytest.mark.parametrize(
    ("layers", "rounds", "heldout"),  # each value beside each value of the others
    [
        (0, 1, True),
        (0, 3, False),
        (1, 1, False),
        (1, 3, True),
        (4, 1, True),
        (4, 3, False),
        (60, 1, False),
        (60, 3, True),
    ],
)
def test_page_is_self_contained_and_escaped(layers, rounds, heldout):
    made = make_report(layers, rounds, heldout, SCORES if layers == 4 else None, error=0.0 if layers == 1 else 0.01)
    page = report.render_page(made)
    drawn = pictures(page)
    assert len(drawn) == (layers > 0) + (rounds > 1) + (layers == 4)
    for picture in drawn:
        ElementTree.fromstring(picture)
    outside = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"(src|href)=\"?http|url\(|<script", outside)
    assert "mine &amp; yours" in page
    assert "<mlp>" not in outside
    assert "<b>marks</b>" not in page


def test_page_shows_layer_errors_of_the_projection():
    made = make_finetuned()
    page = report.render_page(made)
    assert "Error by layer of round 1, before the fine-tuning of 600 steps" in page
    assert "Layers of round 1, before the fine-tuning of 600 steps" in page
    assert "sparse weight V in round 1, before the fine-tuning of 600 steps" in page
    assert "best round" not in page
    assert "before fine-tuning" in words(plots.error_by_layer(made))
    text = shown(report.layers_table(made), report.rounds_table(made))
    assert "Layers of round 1, before the fine-tuning of 600 steps" in text
    assert re.search(r"600 steps \* .* – +0\.0", text)
    assert tables.mean_error(made.rounds[0]) == pytest.approx(0.01)
    assert tables.mean_error(made.best) is None
    assert "before the fine-tuning" not in report.render_page(make_report())


@pytest.mark.parametrize("layers", [3, 60])
def test_page_shows_where_the_zeros_went_unless_all_layers_are_alike(layers):
    made = make_report(layers, rounds=1)
    assert "Every pruned layer has 50.0 % zeros." in report.render_page(made)
    for number, row in enumerate(made.audit):
        row.name, row.zeros = f"blocks.{number}.{'abc'[number % 3]}", 12 + 12 * (number % 3)
    page = report.render_page(made)
    assert "Share of zeros by kind of layer" in page
    assert ("a" in words(plots.zeros(made))) == (layers == 60)  # bars need several layers of a kind


def test_kinds_of_layers_are_names_without_numbers():
    assert plots.kinds_of(["layers.0.mlp.up", "layers.1.mlp.up", "head"]) == ["up", "up", "head"]
    assert plots.kinds_of(["blocks.0.dw.conv", "blocks.0.pw.conv"]) == ["dw.conv", "pw.conv"]
    assert plots.kinds_of(["0", "2"]) == ["0", "2"]


def test_page_shows_coverage_command_and_samples():
    made = make_report()
    made.settings["command"] = "iobs prune /home/someone/net.py:f -o out"
    made.samples = [
        Sample("Once <upon>", "a time", "a lime"),
        Sample("data:image/png;base64,AA==", "cat", "dog", "cat"),
    ]
    page = report.render_page(made)
    assert "<pre>iobs prune net.py:f -o out</pre>" in page
    assert "88.9 %" in page
    assert "dense: output heads <small>lm_head</small>" in page
    assert "Once &lt;upon&gt;" in page
    assert '<span class="changed">dog</span>' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("Scores") == 0


def test_report_is_shown_in_a_notebook_without_a_page():
    shown = make_report()._repr_html_()
    assert "<html" not in shown
    assert "What was pruned" in shown


@pytest.mark.parametrize("suffix", [".html", ".json", ".csv"])
def test_report_is_saved_by_suffix(tmp_path, suffix):
    made = make_report()
    made.settings["model"] = str(tmp_path / "secret" / "model")
    made.save(tmp_path / f"report{suffix}")
    text = (tmp_path / f"report{suffix}").read_text(encoding="utf8")
    assert str(tmp_path) not in text
    if suffix == ".json":
        assert report.read_report(tmp_path / "report.json").coverage == made.coverage
    if suffix == ".csv":
        heading, first = list(csv.reader(text.splitlines()))[:2]
        assert (heading[:4], first[:4]) == (
            ["name", "shape", "asked", "zeros"],
            ["model.layers.0.<mlp>", "(8, 6)", "0.5", "24"],
        )


def test_data_frame_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'iobs\[tables\]'"):
        make_report().to_frame()


def test_report_is_saved_in_known_forms_only(tmp_path):
    with pytest.raises(OutputError, match=r"saved as \.html, \.json or \.csv"):
        make_report().save(tmp_path / "report.pdf")
    with pytest.raises(OutputError, match="cannot be written"):
        make_report().save(tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/model", "model"),
        ("iobs prune /home/me/m.py:f --data=/x/y.txt -o out", "iobs prune m.py:f --data=y.txt -o out"),
        ("C:\\Users\\me\\model", "model"),
        ("/" + 300 * "=", 300 * "="),  # longer than the name of a file may be
        ("50 / 2 of owner/model, see https://a.b/c", "50 / 2 of owner/model, see https://a.b/c"),
    ],
)
def test_absolute_paths_are_shortened_to_names(text, shown):
    assert without_folders(text) == shown


@pytest.mark.parametrize(
    "steps",
    [
        {"rounds": {"finetune": {"augment": None}}, "finetune": None},
        {"rounds": {"finetune": {"augment": "auto"}}, "finetune": None},
    ],
)
def test_page_says_if_heldout_samples_were_augmented(steps):
    made = make_report(1)
    made.settings["decided"] = steps
    altered = "held-out samples (altered like those of the gradient steps)"
    expected = steps["rounds"]["finetune"]["augment"] is not None
    assert ("held-out samples (altered" in report.render_page(made)) == expected
    assert any(altered in line for line in report.summary_lines(made)) == expected
    if expected:
        page = report.render_page(made)
        assert f"on {altered}; dense" in page
        assert f"lowest loss on {altered} among" in page


def test_card_holds_tags_library_and_scores():
    card = report.render_card(make_report(scores=SCORES), "me/model", "transformers")
    assert card.startswith("---\ntags:\n")
    assert "library_name: transformers" in card
    assert "| I-OBS | 38.50 | 60.00 |" in card
    assert "library_name" not in report.render_card(make_report(), "FILE.py:f", None)
    assert "base_model: me/model" in card
    assert "| pruned layers | 192 | 88.9 % |" in card
    assert "| dense: output heads | 24 | 11.1 % |" in card
    local = report.render_card(make_report(), "/home/me/model", "transformers")
    assert "/home" not in local
    assert "base_model" not in local


def test_card_says_what_gradient_steps_were_taken():
    made = make_report(rounds=1)
    assert "block reconstruction" not in report.render_card(made, "mine", None)
    made.settings["decided"] = {"blocks": {"window": 2, "steps": 100, "network_steps": 1200}}
    card = report.render_card(made, "mine", None)
    assert "at most 100 gradient steps in each window of 2 blocks, then at most 1,200 of the whole network" in card


def test_layers_are_counted_in_whole_numbers():
    axis = plots.zeros.__wrapped__(make_report()).axes[-1]
    assert axis.get_xlabel() == "layer, in the order of the network"
    assert all(tick == round(tick) for tick in axis.get_xticks())
