"""Layers that only some samples reach."""

import pytest
import torch
from menagerie import Routed, one_rare_sample

import iobs
from iobs.pruning import FineTune
from iobs.pruning.samples.batches import Samples, divide, split


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("target", ["layer", "dense"])
def test_experts_are_pruned_if_few_batches_reach_them(target, always):
    """Some batches reach no sample of an expert, and the dense network routes other samples to it."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(6, 8, generator=generator) for _ in range(30)]
    model = Routed(always)
    with torch.no_grad():
        first = float(model.body(data[0])[:, 0].max())
    assert first <= 1.5, "no sample of the first batch may reach the last expert"
    report = iobs.prune(model, data, iobs.Unstructured(0.5), iobs.Recipe(target="residual"), target=target)
    assert [row.name for row in report.audit] == ["body", "experts.0", "experts.1", "experts.2"]
    assert report.sparsity == 0.5
    assert not any("magnitude" in note for note in report.notes)


def test_expert_that_is_called_without_a_token_is_pruned_by_magnitude():
    model, dense = Routed(always=True), Routed()
    with torch.no_grad():
        model.body.weight[0] = 0  # the last expert needs a first value above 1.5
    report = iobs.prune(model, [torch.randn(20, 8)], iobs.Unstructured(0.5), iobs.Recipe(target="residual"))
    rare = next(one for one in report.best.layers if one.name == "experts.2")
    assert rare.stats["rule"] == "pruned by magnitude: no sample that is calibrated on reaches it"
    kept = model.experts[2].weight != 0
    assert int(kept.sum()) == 16
    assert torch.equal(model.experts[2].weight[kept], dense.experts[2].weight[kept])


def test_layer_keeps_its_zeros_if_a_round_feeds_it_nothing():
    seed = 0
    portions = divide(Samples.of([torch.arange(12.0)[:, None]]), 3, seed)
    model, data = one_rare_sample(int(portions[0].batches[0][0, 0]))
    step = FineTune(lr=1e-3, steps=2, loss="kl", support="dense")
    pattern = iobs.Unstructured(0.5)
    report = iobs.prune(
        model,
        data,
        pattern,
        iobs.Recipe(target="residual"),
        rounds=iobs.Rounds(3, finetune=step, data="fresh"),
        holdout=0.0,
        seed=seed,
    )
    assert not report.skipped
    assert all(len(record.layers) == 2 for record in report.rounds)
    assert [row.zeros for row in report.audit] == [32, 32]
    assert int((model.rare.weight == 0).sum()) == 32
    assert sum("rare: pruned by magnitude" in note for note in report.notes) == 2


@pytest.mark.parametrize("reached", ["calibrated on", "held out"])
def test_heldout_error_is_none_if_no_sample_reaches_a_layer(reached):
    _, heldout = split(Samples.of([torch.arange(12.0)[:, None]]), 0.25, 0)
    held = {int(value) for batch in heldout.batches for value in batch[:, 0]}
    model, data = one_rare_sample(next(place for place in range(12) if (place in held) == (reached == "held out")))
    report = iobs.prune(model, data, iobs.Unstructured(0.5), iobs.Recipe(target="residual"), holdout=0.25)
    common, rare = report.best.layers
    assert common.error_heldout is not None
    assert (rare.error_heldout is None) == (reached == "calibrated on")
    assert ("no sample that is calibrated on reaches it" in rare.stats.get("rule", "")) == (reached == "held out")
