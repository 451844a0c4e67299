"""Scores of a run come from the passes of its loss, and are those of the dense and the pruned model."""

import copy

import families
import pytest

import iobs
from iobs.pruning.calibration.losses import metric
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples, split


@pytest.mark.parametrize("recipe", ["one-shot", "paper"])
def test_scores_are_those_of_both_models_on_the_heldout_samples(recipe):
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    dense, data = copy.deepcopy(model), families.language_batches()
    report = iobs.prune(model, data, 0.5, recipe, holdout=0.3)
    _, heldout = split(Samples.of(batches.collect(data)), 0.3, 0)
    for name, one in (("dense", dense), ("pruned", model)):
        expected = {f"held-out {key}": value for key, value in metric(one, heldout).items()}
        assert expected
        assert report.scores[name] == pytest.approx(expected)
    if recipe == "one-shot":
        assert report.best.scores["pruned"]["perplexity"] == report.scores["pruned"]["held-out perplexity"]
