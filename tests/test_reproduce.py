"""`iobs reproduce`: options that an experiment would ignore, rows named after the model, the seed that is given."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.errors import DataError
from iobs.paper import Request, experiments, find, llama, table_cbs, table_llm, table_vit
from iobs.paper.registry import OPTIONS
from iobs.paper.rounds import Settings, iterate

PLAIN = Request(stand_in=False, seed=0, output=None, say=lambda text: None)
GIVEN = {
    "model": "gpt2",
    "data": ("a",),
    "eval_data": ("a", "b"),
    "questions": "q.jsonl",
    "rounds": 2,
    "limit": 1,
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
    request = replace(PLAIN, stand_in=stand_in)
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
    assert find("table-vit").stand_in_reads == ("rounds",)
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


@pytest.mark.parametrize("module", [table_llm, table_vit, llama, table_cbs], ids=lambda module: module.__name__)
def test_the_seed_of_the_request_reaches_every_run(module, monkeypatch):
    seeds = []

    def instead(*arguments, seed=0, **settings):
        seeds.append(seed)
        return [{"accuracy": 1.0, "mmlu": 0.25, "wikitext2": 9.0, "c4": 8.0}] * 2

    for name in ("language_model", "calibration", "_mmlu"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *arguments: SimpleNamespace(module=None))
    if hasattr(module, "stand_in"):
        network = (torch.nn.Linear(1, 1), [], lambda changed: 1.0, "a network")
        monkeypatch.setattr(module, "stand_in", lambda *arguments: network)
    if module is table_cbs:
        monkeypatch.setattr(iobs, "prune", instead)
    else:
        monkeypatch.setattr(module, "iterate", instead)
    run = llama.table("Llama-2") if module is llama else module.run
    run(replace(PLAIN, stand_in=True, seed=5))
    assert seeds
    assert set(seeds) == {5}


def test_the_list_as_json():
    result = CliRunner().invoke(app, ["reproduce", "--json"])
    assert [entry["name"] for entry in json.loads(result.stdout)] == [entry.name for entry in experiments()]
