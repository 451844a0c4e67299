"""`iobs reproduce`: options that an experiment would ignore, rows named after the model, the seed that is given."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.errors import DataError, OutputError
from iobs.paper import Request, experiments, figure_gaussian, find, llama, table_cbs, table_llm, table_vit
from iobs.paper.registry import OPTIONS
from iobs.paper.rounds import Measured, Settings, iterate

PLAIN = Request(stand_in=False, seed=0, output=None, say=lambda text: None)
GIVEN = {
    "model": "gpt2",
    "data": ("a",),
    "eval_data": ("a", "b"),
    "questions": "q.jsonl",
    "rounds": 2,
    "limit": 1,
    "resume": True,
}


def test_options_that_are_not_read_are_refused_at_once_in_one_message():
    command = ["reproduce", "figure-gaussian", "--model", "none", "--rounds", "3", "--limit", "1", "--data", "none.txt"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    text = " ".join(result.stderr.split())
    assert "figure-gaussian does not read --model, --data, --rounds, --limit; leave them out" in text
    assert "trial" not in text


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("entry", experiments(), ids=lambda entry: entry.name)
def test_an_experiment_takes_what_it_names_and_nothing_else(entry, stand_in):
    request = replace(PLAIN, stand_in=stand_in, output=Path("folder"))
    entry.check(request)
    for option in OPTIONS:
        one = replace(request, **{option: GIVEN[option]})
        if option in (entry.stand_in_reads if stand_in else entry.reads):
            entry.check(one)
        else:
            with pytest.raises(DataError, match=f"does not read --{option.replace('_', '-')}; leave it out"):
                entry.check(one)


def test_the_options_of_the_networks_tables_are_those_of_the_help():
    assert find("table-cbs").reads == ("model", "data", "eval_data", "limit")
    assert find("table-vit").stand_in_reads == ("rounds", "resume")
    assert set(find("table-llama2").reads) == set(OPTIONS)
    assert "model" not in find("table-llm").stand_in_reads


@pytest.mark.parametrize(
    ("model", "label", "published"),
    [
        (None, "Llama-2", [0.4584, 0.3878, 0.3950]),
        ("/models/Llama-2-7b-hf", "Llama-2", [0.4584, 0.3878, 0.3950]),
        ("gpt2", "gpt2", [None] * 3),
    ],
)
def test_published_figures_stand_beside_their_own_model_alone(model, label, published, monkeypatch):
    scores = [{"mmlu": 0.25 + 0.01 * index, "wikitext2": 9.0, "c4": 8.0} for index in range(3)]
    monkeypatch.setattr(llama, "scores_of", lambda name, request: (scores, []))
    rows = llama.table("Llama-2")(replace(PLAIN, model=model, rounds=2)).rows
    assert [(row.setting, row.published) for row in rows] == [(label, value) for value in published]
    rows = llama.figure("Llama-2", "figure-llama2")(replace(PLAIN, model=model, rounds=2)).rows
    assert {row.setting for row in rows} == {f"{label}, wikitext2", f"{label}, c4"}


def test_rounds_beyond_the_papers_are_shown(monkeypatch):
    monkeypatch.setattr(llama, "scores_of", lambda name, request: ([{"mmlu": 0.25}] * 13, []))
    rows = llama.table("Llama-2")(replace(PLAIN, rounds=12)).rows
    assert len(rows) == 13
    assert rows[-1].published is None


def test_the_seed_draws_the_order_of_the_samples():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(32, 6, generator=generator), torch.arange(32) % 3
    settings = Settings("m", "d", 32, 0, 0.5, 2, 0.5, batch_size=4)

    def weights(**seed):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        iterate(network, [(inputs, labels)], settings, lambda module: {}, lambda text: None, **seed)
        return network[0].weight.detach().clone()

    assert torch.equal(weights(), weights(seed=0))
    assert not torch.equal(weights(), weights(seed=7))


class Killed(Exception):
    """Stands in for whatever ends a process."""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rounds_go_on_where_they_stopped(tmp_path, optimizer):
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(32, 6, generator=generator), torch.arange(32) % 3
    settings = Settings("m", "d", 32, 0, 0.5, 4, 0.05, optimizer, batch_size=8)

    def rounds(checkpoint=None, die_at=None):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        scored, said = [], []

        def score(module):
            scored.append(torch.nn.functional.cross_entropy(module(inputs), labels).item())
            if len(scored) == die_at:
                raise Killed
            return {"loss": scored[-1]}

        return iterate(network, [(inputs, labels)], settings, score, said.append, checkpoint=checkpoint), scored, said

    whole, _, _ = rounds()
    assert len({scores["loss"] for scores in whole}) == 5
    for die_at in (3, 2):  # in round 2, and, resumed with its first score, in round 3
        with pytest.raises(Killed):
            rounds(tmp_path / "run", die_at)
    again, scored, said = rounds(tmp_path / "run")
    assert again == whole
    assert len(scored) == 2
    assert "rounds up to 2: taken from" in said[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["round 4", "rounds"]


def test_a_table_that_was_stopped_goes_on_and_leaves_no_checkpoint(tmp_path, monkeypatch):
    import iobs.paper.vision as vision

    request = replace(PLAIN, stand_in=True, output=tmp_path, rounds=3, resume=True)
    monkeypatch.setattr(vision, "stand_in_folder", lambda: None)
    find("table-vit").check(request)
    told = []

    def stop(text):
        told.append(text)
        if text.startswith("round 2"):
            raise Killed

    with pytest.raises(Killed):
        table_vit.run(replace(request, say=stop))
    (kept,) = tmp_path.glob("table-vit.*.checkpoint")
    table_vit.run(replace(request, say=told.append))
    assert any(text.startswith(f"rounds up to 1: taken from {kept}") for text in told)
    assert not kept.exists()
    with pytest.raises(DataError, match="give one"):
        find("table-vit").check(replace(request, output=None))


@pytest.mark.parametrize("other", [{"limit": 5}, {"eval_data": ("b",)}, {"seed": 1}])
def test_rounds_that_were_scored_otherwise_are_not_gone_on_with(other, tmp_path):
    request = replace(PLAIN, output=tmp_path, resume=True)
    folder = Measured(request, "t").checkpoint("a")
    assert Measured(request, "t").checkpoint("a") == folder
    assert Measured(replace(request, **other), "t").checkpoint("a") != folder


def test_a_published_figure_stands_at_its_own_round(seeds, monkeypatch):
    monkeypatch.setattr(table_llm, "iterate", lambda *_, **__: [{"wikitext2": 9.0, "c4": 8.0}] * 6)
    rows = table_llm.run(replace(PLAIN, rounds=5)).rows
    own = {row.method: row.published for row in rows if row.setting == "OPT-125M, wikitext2"}
    assert [own.get(f"I-OBS, round {index}") for index in range(2, 6)] == [None, 25.2, None, None]


TABLES = pytest.mark.parametrize("module", [table_llm, table_vit, llama, table_cbs], ids=lambda module: module.__name__)


def _run(module):
    return llama.table("Llama-2") if module is llama else module.run


@pytest.fixture
def seeds(monkeypatch):
    """Tables without networks: every run gives two rounds of made scores, and its seed is put here."""
    seeds = []

    def instead(*arguments, seed=0, **settings):
        seeds.append(seed)
        return [{"accuracy": 1.0, "mmlu": 0.25, "wikitext2": 9.0, "c4": 8.0}] * 2

    network = (torch.nn.Linear(1, 1), [], lambda changed: 1.0, "a network")
    for module in (table_llm, table_vit, llama, table_cbs):
        for name in ("language_model", "calibration", "_mmlu"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *arguments: SimpleNamespace(module=None))
        for name in ("stand_in", "on_pictures"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *arguments: network)
        if hasattr(module, "iterate"):
            monkeypatch.setattr(module, "iterate", instead)
    monkeypatch.setattr(iobs, "prune", instead)
    return seeds


@TABLES
def test_the_seed_of_the_request_reaches_every_run(module, seeds):
    _run(module)(replace(PLAIN, stand_in=True, seed=5))
    assert seeds
    assert set(seeds) == {5}


def test_the_list_as_json():
    result = CliRunner().invoke(app, ["reproduce", "--json"])
    assert [entry["name"] for entry in json.loads(result.stdout)] == [entry.name for entry in experiments()]


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/self"])
def test_an_output_that_takes_no_files_is_found_before_any_work(place, tmp_path):
    (tmp_path / "file").write_text("x")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "out"}.get(place, Path(place))
    if place == "/proc/self" and not folder.is_dir():
        pytest.skip("this system has no /proc")
    result = CliRunner().invoke(app, ["reproduce", "figure-gaussian", "-o", str(folder)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    text = " ".join(result.stderr.split())
    assert f"{folder} cannot be the folder of the results" in text
    assert "choose another output directory" in text
    assert "trial" not in text


def test_an_output_is_made_and_nothing_else_is_left_there(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_gaussian, "TRIALS", 1)
    monkeypatch.setattr(figure_gaussian, "STEPS", 100)
    result = CliRunner().invoke(app, ["reproduce", "figure-gaussian", "-o", str(tmp_path / "a" / "b")])
    assert result.exit_code == 0, result.output
    assert {entry.name for entry in (tmp_path / "a" / "b").iterdir()} == {"figure_gaussian.csv", "figure_gaussian.png"}


@TABLES
@pytest.mark.parametrize("text", ["", '{"a": [', "[]", '{"a": [1]}', '{"a": [{"mmlu": "x"}]}'])
def test_damaged_scores_are_found_before_any_work(module, text, seeds, tmp_path, monkeypatch):
    name = "llama-2.json" if module is llama else f"{module.EXPERIMENT.name}.json"
    (tmp_path / name).write_text(text)
    for loads in ("language_model", "stand_in"):
        if hasattr(module, loads):
            monkeypatch.setattr(module, loads, lambda *arguments: pytest.fail("a network was loaded"))
    with pytest.raises(DataError, match=f"{name} .* is damaged .* remove it"):
        _run(module)(replace(PLAIN, stand_in=True, output=tmp_path))
    assert not seeds


def test_scores_that_cannot_be_kept_are_an_error_of_the_output(tmp_path):
    (tmp_path / "out").write_text("x")
    measured = Measured(replace(PLAIN, output=tmp_path / "out"), "t")
    with pytest.raises(OutputError, match=r"t\.json could not be written"):
        measured.get("a", Settings("m", "d", 1, 1, 0.5, 1, 0.1), lambda: [{"x": 1.0}])


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
    table_vit: "Calibrated on train, scored on held, 5 pictures at most; the published figures are calibrated on "
    "ImageNet and scored on all of ImageNet.",
    table_cbs: "Calibrated on train, scored on held, 5 pictures at most; the published figures are calibrated on "
    "ImageNet and scored on all of ImageNet.",
}


@TABLES
def test_figures_on_other_data_say_so(module, seeds):
    assert DATA_NOTES[module] in _run(module)(replace(PLAIN, **OWN[module])).notes
    if module is not table_cbs:  # which takes no network of its own
        assert not any("Calibrated on" in note for note in _run(module)(PLAIN).notes)


def test_the_note_on_data_names_what_was_left_to_the_paper(seeds):
    model = "/models/opt-125m"
    (note,) = (note for note in table_llm.run(replace(PLAIN, limit=1, model=model)).notes if "Calibrated" in note)
    assert note == (
        "Calibrated on wikitext2, scored on wikitext2, c4, 1 windows at most; the published figures are calibrated on "
        "wikitext2 and scored on all of wikitext2, c4."
    )
    (note,) = (n for n in table_llm.run(replace(PLAIN, limit=1, stand_in=True)).notes if "Calibrated" in n)
    assert note.startswith("Calibrated on the stand-in's own data, scored on the stand-in's own data, 1 windows")


def test_the_stand_in_of_llama_does_not_pass_for_llama(seeds, tmp_path, monkeypatch):
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


@TABLES
def test_the_rows_of_a_stand_in_are_called_so(module, seeds):
    settings = {row.setting for row in _run(module)(replace(PLAIN, stand_in=True)).rows}
    if module is not table_cbs:  # whose rows are sparsities
        assert all("(stand-in)" in setting for setting in settings)


def test_settings_that_differ_from_the_papers_are_said(seeds):
    note = " ".join(table_cbs.run(replace(PLAIN, stand_in=True)).notes)
    assert 'solver="admm" with budget="fast"' in note
    assert "solves with SparseGPT" in note
    assert "400 calibration samples are our choice" in note
    for stand_in in (True, False):
        note = " ".join(table_vit.run(replace(PLAIN, stand_in=stand_in)).notes)
        assert "1,000 calibration samples" in note
        assert "Algorithm 2 draws a new batch every round" in note
    assert "Algorithm 2 draws a new batch every round" in " ".join(table_llm.run(PLAIN).notes)


def test_json_holds_the_notes_and_whether_it_is_a_stand_in(seeds):
    result = CliRunner().invoke(app, ["reproduce", "table-vit", "--stand-in", "--json"])
    values = json.loads(result.stdout)
    assert values["stand_in"] is True
    assert table_vit.SAME_SAMPLES in values["notes"]
    assert values["rows"][0]["published"] == 72.08
    result = CliRunner().invoke(app, ["reproduce", "table-llm", "--json"])
    assert json.loads(result.stdout)["stand_in"] is False


@pytest.mark.parametrize("name", ["cut.gz", "spoilt.gz", "cut.npz", "empty.npz"])
def test_damaged_pictures_are_one_line(name, tmp_path, monkeypatch):
    packed = gzip.compress(b"\x00\x00\x08\x03" + bytes(12) + np.random.default_rng(0).bytes(784 * 20))
    np.savez(tmp_path / "whole.npz", x_train=np.zeros((20, 28, 28), np.uint8))
    contents = {
        "cut.gz": packed[:-2000],
        "spoilt.gz": packed[:10] + b"\xff" * 50 + packed[60:],
        "cut.npz": (tmp_path / "whole.npz").read_bytes()[:-30],
        "empty.npz": b"",
    }
    (tmp_path / name).write_bytes(contents[name])
    monkeypatch.setenv("IOBS_MNIST", str(tmp_path / name))
    result = CliRunner().invoke(app, ["reproduce", "figure-mnist"])
    assert result.exit_code == 1
    assert f"Cannot read MNIST from {tmp_path / name}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["model", "data", "eval_data", "questions"])
@pytest.mark.parametrize("folder", [False, True])
def test_scores_of_a_file_that_was_changed_are_measured_anew(option, folder, tmp_path):
    place = tmp_path / "mine"
    file = place / "deep" / "file" if folder else place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("before")
    given = {"model": str(place), "questions": place}.get(option, (str(place),))
    request = replace(PLAIN, output=tmp_path / "out", **{option: given})
    settings = Settings("m", "d", 1, 1, 0.5, 1, 0.1)
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 1.0}]) == [{"x": 1.0}]
    assert Measured(request, "t").get("a", settings, lambda: pytest.fail("measured again")) == [{"x": 1.0}]
    file.write_text("and after")
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 2.0}]) == [{"x": 2.0}]
    os.utime(file, (1, 1))
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 3.0}]) == [{"x": 3.0}]


def test_scores_of_a_function_whose_file_was_changed_are_measured_anew(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def net(): ...")
    request = replace(PLAIN, output=tmp_path / "out", model=f"{file}:net")
    settings = Settings("m", "d", 1, 1, 0.5, 1, 0.1)
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 1.0}]) == [{"x": 1.0}]
    file.write_text("def net(): return 1")
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 2.0}]) == [{"x": 2.0}]


def test_trials_that_never_arrive_are_counted_in_a_note(monkeypatch):
    monkeypatch.setattr(figure_gaussian, "TRIALS", 2)
    monkeypatch.setattr(figure_gaussian, "STEPS", 100)
    note = find("figure-gaussian").run(PLAIN).notes[1]
    assert "counts as 100 steps in the mean: 2 of 2 of k-IHT, 0 of 2 of Top-k-I-OBS." in note
