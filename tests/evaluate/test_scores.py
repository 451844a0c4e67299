"""Perplexity, accuracy and squared error of a model on evaluation data."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from iobs import data, evaluate, models
from iobs.data import ArraySource, BatchSource, TextSource
from iobs.errors import DataError, ModelError, NonFiniteError
from iobs.evaluate import tasks


@torch.no_grad()
def reference_perplexity(model, tokenizer, documents, length):
    """Perplexity by definition: window by window, token by token, in float64."""
    tokens = [token for text in documents for token in tokenizer(text, verbose=False)["input_ids"]]
    total, count = 0.0, 0
    for start in range(0, len(tokens) - length + 1, length):
        window = torch.tensor(tokens[start : start + length])
        scores = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        for position in range(1, length):
            total -= scores[position - 1, window[position]].item()
            count += 1
    return math.exp(total / count)


def test_perplexity_equals_the_reference(embedded):
    documents = [text[:900] for text in data.embedded_text("heldout")[:4]]
    windows = data.token_windows(embedded.tokenizer, documents, 64)
    expected = reference_perplexity(embedded.module, embedded.tokenizer, documents, 64)
    for batch in (3, 100):
        assert evaluate.perplexity(embedded.module, windows, batch) == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_count_all_tokens_and_all_bytes(embedded):
    texts = [text[:300] + "\u00e9" for text in data.embedded_text("heldout")[:3]]
    tokens = [number for text in texts for number in embedded.tokenizer(text)["input_ids"]]
    assert len(tokens) % 64  # the last window is shorter, and counts too
    parts = [torch.tensor([tokens[start : start + 64]]) for start in range(0, len(tokens), 64)]
    nats = sum(math.log(evaluate.perplexity(embedded.module, part)) * (part.numel() - 1) for part in parts)
    mean = nats / (len(tokens) - len(parts))
    expected = mean / math.log(2) * len(tokens) / sum(len(text.encode()) for text in texts)
    for batch in (1, 3):
        assert evaluate.bits_per_byte(embedded, texts, 64, batch) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError, match="1 token"):
        evaluate.bits_per_byte(embedded, [""], 64)


def test_scores_take_no_cache_and_the_scores_of_the_last_positions(embedded, monkeypatch):
    """A cache of 65B weights takes 10 GB for one batch, and scores of all positions as much as all letters."""
    windows, shapes, caches = torch.randint(100, (2, 16)), [], []

    def seen(module, args, output):
        shapes.append(tuple(output.logits.shape[:2]))
        caches.append(output.past_key_values)

    handle = embedded.module.register_forward_hook(seen)
    monkeypatch.setattr(embedded.module.config, "use_cache", True)
    evaluate.perplexity(embedded.module, windows)
    with torch.no_grad():
        tasks._likelihoods(embedded, [3, 4, 5, 6, 7], [(1, 2), (1, 3)])
    handle.remove()
    assert shapes == [(2, 16), (1, 2)]
    assert caches == [None, None]
    assert embedded.module.config.use_cache


@pytest.mark.slow
def test_perplexity_of_the_shared_model_is_the_known_value(shared_data):
    loaded = models.load(shared_data / "llama_stories260K")
    source = data.open_source([str(shared_data / "tinystories" / "validation.txt")], "evaluation", loaded)
    scores = evaluate.evaluate(loaded, source, length=2048)
    assert scores["perplexity"] == pytest.approx(4.644, abs=5e-4)
    assert scores["tokens"] == 240 * 512


def test_accuracy_counts_correct_predictions():
    torch.manual_seed(0)
    module, inputs = nn.Linear(5, 3), torch.randn(11, 5)
    targets = torch.randint(3, (11,))
    expected = 100 * (module(inputs).argmax(1) == targets).double().mean().item()
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    assert evaluate.accuracy(module, batches) == pytest.approx(expected)


def test_accuracy_accepts_batches_that_are_mappings():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, pixel_values):
            return SimpleNamespace(logits=self.inner(pixel_values))

    module, inputs = Classifier(), torch.randn(6, 5)
    labels = module.inner(inputs).argmax(1)
    assert evaluate.accuracy(module, [{"pixel_values": inputs, "labels": labels}]) == 100


def test_accuracy_of_the_shared_resnet_is_the_known_value(shared_data, zoo):
    images, labels = zoo.cifar10("test5000", "resnet20")
    loaded = models.load(f"{shared_data / 'zoo.py'}:resnet20")
    source = ArraySource("test", images[:200], labels[:200])
    expected = zoo.accuracy(zoo.resnet20(), images[:200], labels[:200])
    assert evaluate.evaluate(loaded, source)["accuracy"] == pytest.approx(expected)


def test_scores_name_the_batch_of_nan(embedded):
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.fill_(float("nan"))
    good = nn.Linear(2, 2)
    batches = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))]
    evaluate.accuracy(good, batches)
    with pytest.raises(NonFiniteError, match="batch 1"):
        evaluate.accuracy(module, batches)

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input_ids):
            return SimpleNamespace(logits=torch.full((*input_ids.shape, 9), float("nan")))

    with pytest.raises(NonFiniteError, match="windows 0 to 1"):
        evaluate.perplexity(Broken(), torch.ones(2, 4, dtype=torch.long))


def test_perplexity_that_overflows_is_infinite():
    class Mistaken(nn.Linear):
        def forward(self, input_ids):
            return torch.tensor([2000.0, 0.0]).expand(*input_ids.shape, 2)

    assert evaluate.perplexity(Mistaken(1, 1), torch.ones(2, 4, dtype=torch.long)) == math.inf


@pytest.mark.parametrize(("batches", "message"), [([torch.ones(1, 2)], "Batch 1 has no targets"), ([], "no batch")])
def test_accuracy_needs_targets(batches, message):
    with pytest.raises(DataError, match=message):
        evaluate.accuracy(nn.Linear(2, 2), batches)


def test_evaluate_of_text_needs_a_language_model(tmp_path, embedded):
    encoder = models.LoadedModel(nn.Linear(2, 2), embedded.tokenizer, "here", "other", None, lambda *_: None)
    with pytest.raises(ModelError, match="not a causal language model"):
        evaluate.evaluate(encoder, TextSource("text", lambda: ["text"]))
    with pytest.raises(ModelError, match="no logits"):
        evaluate.output_logits((torch.ones(1),))


def test_perplexity_reports_progress(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 16, limit=5)
    found = []
    evaluate.perplexity(embedded.module, windows, 2, lambda done, total: found.append((done, total)))
    assert found == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize("targets", [torch.rand(6, 1), torch.eye(6, dtype=torch.int64)])
def test_accuracy_refuses_targets_that_are_not_classes(targets):
    with pytest.raises(DataError, match="one integer a sample"):
        evaluate.accuracy(nn.Linear(4, 6), [(torch.randn(6, 4), targets)])


def test_accuracy_accepts_a_column_of_targets():
    network, inputs = nn.Linear(4, 3), torch.randn(6, 4)
    answers = network(inputs).argmax(1)
    assert evaluate.accuracy(network, [(inputs, answers[:, None])]) == 100


def test_accuracy_of_a_single_output_has_two_classes():
    network = nn.Linear(4, 1)
    inputs = torch.randn(20, 4)
    answers = (network(inputs)[:, 0] > 0).long()
    assert evaluate.accuracy(network, [(inputs, answers)]) == 100
    assert evaluate.accuracy(network, [(inputs, 1 - answers[:, None])]) == 0
    with pytest.raises(DataError, match="no classes"):
        evaluate.accuracy(network, [(inputs, answers + 1)])


def test_accuracy_averages_over_pixels():
    network = nn.Conv2d(3, 5, 1)
    inputs = torch.randn(4, 3, 6, 6)
    assert evaluate.accuracy(network, [(inputs, network(inputs).argmax(1))]) == 100


def test_real_targets_are_scored_by_squared_error(tmp_path):
    network = nn.Linear(4, 2)
    inputs = torch.randn(20, 4)
    data = [(inputs[:15], network(inputs[:15]).detach() + 1), (inputs[15:], network(inputs[15:]).detach())]
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    scores = evaluate.evaluate(loaded, BatchSource("mine", data))
    assert scores == {"mean squared error": pytest.approx(0.75), "samples": 20.0}
    with pytest.raises(DataError, match="one number is needed"):
        evaluate.squared_error(network, [(inputs, torch.randn(20, 3))])


def test_real_labels_of_arrays_are_scored_by_squared_error():
    network, inputs = nn.Linear(4, 1), torch.randn(100, 4)
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    scores = evaluate.evaluate(loaded, ArraySource("mine", inputs, network(inputs).detach()[:, 0] + 2))
    assert scores == {"mean squared error": pytest.approx(4.0), "samples": 100.0}


def test_accuracy_names_the_batch_that_does_not_fit():
    with pytest.raises(DataError, match=r"cannot take batch 1, tensors of shape \(2, 5\) float32, \(2,\) int64"):
        evaluate.accuracy(nn.Linear(4, 3), [(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64))])
