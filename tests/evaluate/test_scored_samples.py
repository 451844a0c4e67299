"""Samples that are scored: limits, given batches, ignored targets."""

import pytest
import torch
from torch import nn

from iobs import data, evaluate, models
from iobs.data import ArraySource, BatchSource
from iobs.errors import DataError


def test_evaluate_scores_given_batches_of_windows(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 32, limit=6)
    source = BatchSource("mine", [{"input_ids": windows[:4]}, {"input_ids": windows[4:]}])
    expected = evaluate.perplexity(embedded.module, windows)
    assert evaluate.evaluate(embedded, source)["perplexity"] == pytest.approx(expected, rel=1e-6)
    padded = BatchSource("mine", [{"input_ids": windows, "attention_mask": torch.zeros_like(windows)}])
    with pytest.raises(DataError, match="padding"):
        evaluate.evaluate(embedded, padded)
    with pytest.raises(DataError, match="input_ids"):
        evaluate.evaluate(embedded, BatchSource("mine", [torch.ones(2, 3)]))


def test_evaluate_ignores_tokens_with_ignored_labels(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 40, limit=3)
    labels = windows.clone()
    labels[:, 5:30] = evaluate.IGNORED
    labels[2, :38] = evaluate.IGNORED
    batches = [{"input_ids": windows[:1], "labels": labels[:1]}, {"input_ids": windows[1:], "labels": labels[1:]}]
    scores = evaluate.evaluate(embedded, BatchSource("mine", batches), batch=2)
    with torch.no_grad():  # the loss of the model: a mean over the scored tokens of all windows
        expected = embedded.module(input_ids=windows, labels=labels).loss.exp().item()
    assert scores == {"perplexity": pytest.approx(expected, rel=1e-5), "tokens": 15.0 + 15 + 2}
    none = torch.full_like(windows, evaluate.IGNORED)
    for wrong, message in ((windows.roll(1, 1), "not shifted"), (windows[:, 1:], "not shifted"), (none, "Every label")):
        with pytest.raises(DataError, match=message):
            evaluate.evaluate(embedded, BatchSource("mine", [{"input_ids": windows, "labels": wrong}]))


def test_limit_draws_from_all_classes():
    targets = torch.arange(4).repeat_interleave(25)
    seen = []

    class Network(nn.Linear):
        def forward(self, values):
            seen.extend(values[:, 0].tolist())
            return super().forward(values)

    loaded = models.LoadedModel(Network(1, 4), None, "mine", "other", None, lambda *_: None)
    source = ArraySource("mine", targets[:, None].float(), targets)
    assert evaluate.evaluate(loaded, source, limit=20)["samples"] == 20
    assert set(seen) == {0.0, 1.0, 2.0, 3.0}
    first = [*seen]
    seen.clear()
    evaluate.evaluate(loaded, source, limit=20)
    assert seen == first


def test_limit_cuts_given_batches(embedded):
    network, inputs = nn.Linear(4, 1), torch.randn(12, 4)
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    right = network(inputs).detach()
    batches = [(inputs[:5], right[:5]), (inputs[5:], torch.cat([right[5:7], right[7:] + 1]))]
    source = BatchSource("mine", batches)
    assert evaluate.evaluate(loaded, source, limit=7) == {"mean squared error": pytest.approx(0.0), "samples": 7.0}
    whole = {"mean squared error": pytest.approx(5 / 12), "samples": 12.0}
    assert evaluate.evaluate(loaded, source, limit=99) == whole
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 16, limit=6)
    assert evaluate.evaluate(embedded, BatchSource("mine", [{"input_ids": windows}]), limit=2)["tokens"] == 32


def test_batch_size_regroups_given_batches():
    seen = []

    class Network(nn.Linear):
        def forward(self, values):
            seen.append(len(values))
            return super().forward(values)

    network, inputs = Network(4, 3), torch.randn(12, 4)
    targets = network(inputs).argmax(1)
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    source = BatchSource("mine", [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])])
    for batch, sizes in ((None, [5, 7]), (4, [4, 4, 4]), (20, [12])):
        seen.clear()
        assert evaluate.evaluate(loaded, source, batch=batch) == {"accuracy": 100.0, "samples": 12.0}
        assert seen == sizes
    with pytest.raises(DataError, match="no batch"):
        evaluate.evaluate(loaded, BatchSource("mine", []), batch=4)
    pixels = [(torch.randn(2, 3, side, side), torch.zeros(2, dtype=torch.long)) for side in (4, 6)]
    with pytest.raises(DataError, match="leave the batch size out"):
        evaluate.evaluate(loaded, BatchSource("mine", pixels), batch=2)


def test_accuracy_ignores_ignored_targets():
    inputs, same = torch.eye(4), nn.Linear(4, 4, bias=False)
    same.weight.data = torch.eye(4)
    targets = torch.tensor([0, 1, 3, evaluate.IGNORED])
    assert evaluate.accuracy(same, [(inputs, targets)]) == pytest.approx(200 / 3)
    with pytest.raises(DataError, match="Every target is -100"):
        evaluate.accuracy(same, [(inputs, torch.full((4,), evaluate.IGNORED))])
