"""Notes and row names: stand-ins, other data, settings that differ from the paper, published numbers."""

import json
from dataclasses import replace

import pytest
from paper_tables import llama, table_cbs, table_llm, table_vit
from reproduce import app
from small_requests import PLAIN, TABLES, run_of
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("model", "label", "published"),
    [
        (None, "Llama-2", [0.4584, 0.3878, 0.3950]),
        ("/models/Llama-2-7b-hf", "Llama-2", [0.4584, 0.3878, 0.3950]),
        ("gpt2", "gpt2", [None] * 3),
    ],
)
def test_published_numbers_appear_only_for_their_own_model(model, label, published, monkeypatch):
    scores = [{"mmlu": 0.25 + 0.01 * index, "wikitext2": 9.0, "c4": 8.0} for index in range(3)]
    monkeypatch.setattr(llama, "scores_of", lambda name, request: (scores, []))
    rows = llama.table("Llama-2")(replace(PLAIN, model=model, rounds=2)).rows
    assert [(row.setting, row.published) for row in rows] == [(label, value) for value in published]
    rows = llama.figure("Llama-2", "figure-llama2")(replace(PLAIN, model=model, rounds=2)).rows
    assert {row.setting for row in rows} == {f"{label}, wikitext2", f"{label}, c4"}


def test_published_numbers_appear_at_their_own_round(seeds, monkeypatch):
    monkeypatch.setattr(table_llm, "iterate", lambda *_, **__: [{"wikitext2": 9.0, "c4": 8.0}] * 6)
    rows = table_llm.run(replace(PLAIN, rounds=5)).rows
    own = {row.method: row.published for row in rows if row.setting == "OPT-125M, wikitext2"}
    assert [own.get(f"I-OBS, round {index}") for index in range(2, 6)] == [None, 25.2, None, None]


OWN = {
    table_llm: {"data": ("mine.txt",), "eval_data": ("a.txt", "b.txt"), "limit": 5},
    llama: {"data": ("mine.txt",), "eval_data": ("a.txt", "b.txt"), "limit": 5},
    table_vit: {"data": ("train",), "eval_data": ("held",), "limit": 5},
    table_cbs: {"model": "m", "data": ("train",), "eval_data": ("held",), "limit": 5},
}


DATA_NOTES = {
    table_llm: "Calibrated on mine.txt, scored on a.txt, b.txt, 5 windows at most; the published figures are "
    "calibrated on wikitext2, redpajama and scored on all of wikitext2, c4.",
    llama: "Calibrated on mine.txt, scored on a.txt, b.txt, 5 windows (and questions of a subject) at most; the "
    "published figures are calibrated on redpajama and scored on all of wikitext2, c4.",
    table_vit: "Calibrated on train, scored on held, 5 images at most; the published figures are calibrated on "
    "ImageNet and scored on all of ImageNet.",
    table_cbs: "Calibrated on train, scored on held, 5 images at most; the published figures are calibrated on "
    "ImageNet and scored on all of ImageNet.",
}


@TABLES
def test_notes_name_the_data_of_the_user(module, seeds):
    assert DATA_NOTES[module] in run_of(module)(replace(PLAIN, **OWN[module])).notes
    if module is not table_cbs:  # table_cbs has no default network
        assert not any("Calibrated on" in note for note in run_of(module)(PLAIN).notes)


def test_stand_in_of_llama_is_labelled_as_such(seeds, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.delenv("IOBS_SHARED_DATA", raising=False)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: drawn.append(figure))
    request = replace(PLAIN, stand_in=True, output=tmp_path)
    results = llama.figure("Llama-2", "figure-llama2")(request)
    assert {row.setting for row in results.rows} == {"Llama-2 (stand-in), wikitext2", "Llama-2 (stand-in), c4"}
    assert any("Both corpora are one text" in note for note in results.notes)
    (figure,) = drawn
    for axes, corpus in zip(figure.axes, ("wikitext2", "c4"), strict=True):
        assert axes.get_title() == f"Llama-2 (stand-in), {corpus}"
        assert "dense" in [text.get_text() for text in axes.get_legend().get_texts()]
        assert all(tick == int(tick) for tick in axes.get_xticks())
    results = llama.table("Llama-2")(request)
    assert {row.setting for row in results.rows} == {"Llama-2 (stand-in)"}
    assert results.rows[0].published == 0.4584
    assert "made questions" in results.measure
    assert any("made questions" in note and "published shares are on all of MMLU" in note for note in results.notes)
    assert "MMLU" in llama.table("Llama-2")(PLAIN).measure


def test_notes_name_settings_that_differ_from_the_paper(seeds):
    note = " ".join(table_cbs.run(replace(PLAIN, stand_in=True)).notes)
    assert 'solver="admm" with budget="fast"' in note
    assert "solves with SparseGPT" in note
    assert "400 calibration samples are our choice" in note
    for stand_in in (True, False):
        note = " ".join(table_vit.run(replace(PLAIN, stand_in=stand_in)).notes)
        assert "1,000 calibration samples" in note
        assert "Algorithm 2 draws a new batch every round" in note
    assert "Algorithm 2 draws a new batch every round" in " ".join(table_llm.run(PLAIN).notes)


def test_json_contains_notes_and_the_stand_in_flag(seeds):
    result = CliRunner().invoke(app, ["table-vit", "--stand-in", "--json"])
    values = json.loads(result.stdout)
    assert values["stand_in"] is True
    assert table_vit.SAME_SAMPLES in values["notes"]
    assert values["rows"][0]["published"] == 72.08
    result = CliRunner().invoke(app, ["table-llm", "--json"])
    assert json.loads(result.stdout)["stand_in"] is False
