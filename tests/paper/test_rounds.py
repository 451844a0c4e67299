"""Rounds of an experiment: order of samples, resuming, stored scores."""

import os
from dataclasses import replace
from shutil import rmtree

import pytest
import torch
from paper_tables import find, llama, table_vit
from paper_tables.rounds import Measured, Settings, iterate
from small_requests import PLAIN, TABLES, run_of

from iobs.errors import DataError


def test_seed_sets_the_order_of_the_samples():
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
    """Simulates the end of the process."""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_iterate_resumes_to_the_same_scores(tmp_path, optimizer):
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
    for die_at in (3, 2):  # in round 2; then, resumed after round 1, in round 3
        with pytest.raises(Killed):
            rounds(tmp_path / "run", die_at)
    again, scored, said = rounds(tmp_path / "run")
    assert again == whole
    assert len(scored) == 2
    assert "rounds up to 2: scores taken from" in said[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run", "scores.json"]
    rmtree(tmp_path / "run" / "run")
    again, scored, said = rounds(tmp_path / "run")
    assert (again, len(scored)) == (whole, 5), "scores without their run are not used"
    (tmp_path / "run" / "scores.json").write_text("[")
    with pytest.raises(DataError, match=r"scores\.json is damaged .* remove"):
        rounds(tmp_path / "run")


@pytest.mark.slow
def test_table_resumes_and_removes_its_checkpoint(tmp_path, monkeypatch):
    import paper_tables.vision as vision

    request = replace(PLAIN, stand_in=True, output=tmp_path, rounds=3, resume=True)
    monkeypatch.setattr(vision, "stand_in_folder", lambda: None)
    find("table-vit").check(request)
    messages = []

    def stop(text):
        messages.append(text)
        if text.startswith("round 2"):
            raise Killed

    with pytest.raises(Killed):
        table_vit.run(replace(request, say=stop))
    (kept,) = tmp_path.glob("table-vit.*.checkpoint")
    table_vit.run(replace(request, say=messages.append))
    assert any(text.startswith(f"rounds up to 2: scores taken from {kept}") for text in messages)
    assert not kept.exists()
    with pytest.raises(DataError, match="give one"):
        find("table-vit").check(replace(request, output=None))


@pytest.mark.parametrize("other", [{"limit": 5}, {"eval_data": ("b",)}, {"seed": 1}])
def test_checkpoint_differs_if_the_scoring_differs(other, tmp_path):
    request = replace(PLAIN, output=tmp_path, resume=True)
    folder = Measured(request, "t").checkpoint("a")
    assert Measured(request, "t").checkpoint("a") == folder
    assert Measured(replace(request, **other), "t").checkpoint("a") != folder


@TABLES
@pytest.mark.parametrize("text", ["", '{"a": [{"mmlu": "x"}]}'])
def test_damaged_scores_raise_before_loading_a_network(module, text, seeds, tmp_path, monkeypatch):
    name = "llama-2.json" if module is llama else f"{module.EXPERIMENT.name}.json"
    (tmp_path / name).write_text(text)
    for loads in ("language_model", "stand_in"):
        if hasattr(module, loads):
            monkeypatch.setattr(module, loads, lambda *arguments: pytest.fail("a network was loaded"))
    with pytest.raises(DataError, match=f"{name} .* is damaged .* remove it"):
        run_of(module)(replace(PLAIN, stand_in=True, output=tmp_path))
    assert not seeds


@pytest.mark.parametrize("option", ["model", "data", "eval_data", "questions"])
@pytest.mark.parametrize("folder", [False, True])
def test_measured_repeats_if_a_file_changed(option, folder, tmp_path):
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
