"""The HTML page of a report and the model card."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from sample_reports import SCORES, make_finetuned, make_report, pictures, shown, words

from iobs import report
from iobs.pruning.report import AllocationRecord
from iobs.report import plots, tables


@pytest.mark.parametrize("layers", [0, 1, 4, 60])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("heldout", [True, False])
def test_page_is_self_contained_and_escaped(layers, rounds, heldout):
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


def test_page_shows_layer_errors_of_the_projection():
    made = make_finetuned()
    page = report.render_page(made)
    assert "Error by layer of round 1, before the fine-tuning of 600 steps" in page
    assert "Time by layer of round 1, before the fine-tuning of 600 steps" in page
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
@pytest.mark.parametrize("weight", [2.0, 0.0])
def test_page_shows_the_allocation(layers, weight):
    made = make_report(layers)
    made.allocation = [
        AllocationRecord(f"layer{i}", (8, 6), [0.75, 0.5, 0.0], [0.4, 0.1, 0.0], [0.4 * weight, 0.1 * weight, 0.0], 0.5)
        for i in range(layers)
    ]
    page = report.render_page(made)
    assert "Where the zeros went" in page
    assert "Where the zeros went" not in report.render_page(make_report(layers))


@pytest.mark.parametrize(
    "steps",
    [
        {"rounds": {"finetune": {"augment": None}}, "finetune": None},
        {"rounds": {"finetune": {"augment": "auto"}}, "finetune": None},
    ],
)
def test_page_says_if_heldout_samples_were_augmented(steps):
    made = make_report()
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
