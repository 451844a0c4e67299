"""Hugging Face models inside another module: they are configured, and their heads stay dense, as if they were alone."""

import families
import pytest
import torch
from torch import nn

import iobs


class Classifier(nn.Module):
    """A classifier of the user's own on the last hidden state of a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(16, 5)

    def forward(self, input_ids):
        return self.head(self.body(input_ids).last_hidden_state[:, -1])


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


def built(family):
    torch.manual_seed(0)
    return families.LANGUAGE_MODELS[family][0]().eval()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_a_body_inside_another_module_are_pruned(family):
    body = built(family).model
    body.config._experts_implementation = "grouped_mm"
    report = iobs.prune(Classifier(body), families.language_batches(), 0.5, "one-shot", solver="magnitude")
    pruned = [row.name for row in report.audit]
    assert sum(".experts." in name for name in pruned) == 2 * 2 * 4
    assert body.config._experts_implementation == "grouped_mm"


def test_the_cache_of_an_inner_model_is_off_during_calibration_and_on_afterwards():
    inner, seen = built("llama"), []
    inner.model.layers[0].register_forward_hook(lambda *_: seen.append(inner.config.use_cache))
    iobs.prune(Wrapper(inner), families.language_batches(), 0.5, "one-shot")
    assert inner.config.use_cache
    assert not any(seen)


def test_the_output_head_of_an_inner_model_stays_dense():
    report = iobs.prune(Wrapper(built("llama")), families.language_batches(), 0.5, "one-shot")
    assert report.skipped["inner.lm_head"] == "output head"
