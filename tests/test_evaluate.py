"""Scores against short references."""

import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from iobs import data, evaluate, models
from iobs.data import ArraySource, BatchSource, TextSource
from iobs.errors import DataError, ModelError, NonFiniteError
from iobs.evaluate import tasks


@pytest.fixture(scope="module")
def embedded():
    return models.load()


@torch.no_grad()
def reference_perplexity(model, tokenizer, documents, length):
    """The convention of perplexities, window by window and token by token, in float64."""
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


def test_the_shared_language_model_scores_as_its_convention_says(shared_data):
    loaded = models.load(shared_data / "llama_stories260K")
    source = data.open_source([str(shared_data / "tinystories" / "validation.txt")], "evaluation", loaded)
    scores = evaluate.evaluate(loaded, source, length=2048)
    assert scores["perplexity"] == pytest.approx(4.644, abs=5e-4)
    assert scores["tokens"] == 240 * 512


def test_accuracy_counts_hits():
    torch.manual_seed(0)
    module, inputs = nn.Linear(5, 3), torch.randn(11, 5)
    targets = torch.randint(3, (11,))
    expected = 100 * (module(inputs).argmax(1) == targets).double().mean().item()
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    assert evaluate.accuracy(module, batches) == pytest.approx(expected)


def test_accuracy_of_models_that_take_mappings():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, pixel_values):
            return SimpleNamespace(logits=self.inner(pixel_values))

    module, inputs = Classifier(), torch.randn(6, 5)
    labels = module.inner(inputs).argmax(1)
    assert evaluate.accuracy(module, [{"pixel_values": inputs, "labels": labels}]) == 100


def test_the_shared_residual_network(shared_data, zoo):
    images, labels = zoo.cifar10("test5000", "resnet20")
    loaded = models.load(f"{shared_data / 'zoo.py'}:resnet20")
    source = ArraySource("test", images[:200], labels[:200])
    expected = zoo.accuracy(zoo.resnet20(), images[:200], labels[:200])
    assert evaluate.evaluate(loaded, source)["accuracy"] == pytest.approx(expected)


def test_nan_is_named(embedded):
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


def test_a_perplexity_beyond_all_numbers_is_infinite():
    class Mistaken(nn.Linear):
        def forward(self, input_ids):
            return torch.tensor([2000.0, 0.0]).expand(*input_ids.shape, 2)

    assert evaluate.perplexity(Mistaken(1, 1), torch.ones(2, 4, dtype=torch.long)) == math.inf


@pytest.mark.parametrize(("batches", "message"), [([torch.ones(1, 2)], "Batch 1 has no targets"), ([], "no batch")])
def test_accuracy_needs_targets(batches, message):
    with pytest.raises(DataError, match=message):
        evaluate.accuracy(nn.Linear(2, 2), batches)


def test_text_needs_a_language_model(tmp_path, embedded):
    encoder = models.LoadedModel(nn.Linear(2, 2), embedded.tokenizer, "here", "other", None, lambda *_: None)
    with pytest.raises(ModelError, match="not a causal language model"):
        evaluate.evaluate(encoder, TextSource("text", lambda: ["text"]))
    with pytest.raises(ModelError, match="no logits"):
        evaluate.output_logits((torch.ones(1),))


def test_ready_batches(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 32, limit=6)
    source = BatchSource("mine", [{"input_ids": windows[:4]}, {"input_ids": windows[4:]}])
    expected = evaluate.perplexity(embedded.module, windows)
    assert evaluate.evaluate(embedded, source)["perplexity"] == pytest.approx(expected, rel=1e-6)
    padded = BatchSource("mine", [{"input_ids": windows, "attention_mask": torch.zeros_like(windows)}])
    with pytest.raises(DataError, match="padding"):
        evaluate.evaluate(embedded, padded)
    with pytest.raises(DataError, match="input_ids"):
        evaluate.evaluate(embedded, BatchSource("mine", [torch.ones(2, 3)]))


def test_tokens_whose_labels_stand_for_none_are_not_scored(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 40, limit=3)
    labels = windows.clone()
    labels[:, 5:30] = evaluate.IGNORED
    labels[2, :38] = evaluate.IGNORED
    batches = [{"input_ids": windows[:1], "labels": labels[:1]}, {"input_ids": windows[1:], "labels": labels[1:]}]
    scores = evaluate.evaluate(embedded, BatchSource("mine", batches), batch=2)
    with torch.no_grad():  # the model's own loss, a mean over what is scored in all windows
        expected = embedded.module(input_ids=windows, labels=labels).loss.exp().item()
    assert scores == {"perplexity": pytest.approx(expected, rel=1e-5), "tokens": 15.0 + 15 + 2}
    none = torch.full_like(windows, evaluate.IGNORED)
    for wrong, message in ((windows.roll(1, 1), "not shifted"), (windows[:, 1:], "not shifted"), (none, "Every label")):
        with pytest.raises(DataError, match=message):
            evaluate.evaluate(embedded, BatchSource("mine", [{"input_ids": windows, "labels": wrong}]))


def test_progress_is_told(embedded):
    windows = data.token_windows(embedded.tokenizer, data.embedded_text("heldout"), 16, limit=5)
    told = []
    evaluate.perplexity(embedded.module, windows, 2, lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]


# ---- lm-eval
@pytest.fixture
def library(monkeypatch):
    """Stands in for lm-eval, which is no part of the tests' installation; tests/scale has one with it."""

    asked = {}

    def run(model, tasks, num_fewshot, limit, bootstrap_iters, task_manager):
        asked.update(model=model, tasks=tasks, shots=num_fewshot, limit=limit)
        if tasks == ["offline"]:
            raise ConnectionError("no network")
        return {"results": {"mmlu": {"alias": "mmlu", "sample_len": 2, "acc,none": 0.25, "acc_stderr,none": 0.01}}}

    made = {name: types.ModuleType(name) for name in ("", ".models", ".models.huggingface", ".tasks")}
    made[""].simple_evaluate = run
    made[".models.huggingface"].HFLM = lambda pretrained, tokenizer: pretrained
    made[".tasks"].TaskManager = lambda: SimpleNamespace(all_tasks=["mmlu", "offline"])
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    tasks._manager.cache_clear()
    yield asked
    tasks._manager.cache_clear()


def test_tasks_without_the_library(embedded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(DataError, match="pip install"):
        evaluate.evaluate_tasks(embedded, ["mmlu"])


def test_tasks_are_flattened_and_failures_named(embedded, library, tmp_path):
    assert evaluate.evaluate_tasks(embedded, ["mmlu"], shots=3, limit=7) == {"mmlu/acc": 0.25}
    assert library == {"model": embedded.module, "tasks": ["mmlu"], "shots": 3, "limit": 7}
    with pytest.raises(DataError, match="lm-eval cannot run offline: ConnectionError: no network"):
        evaluate.evaluate_tasks(embedded, ["offline"])
    with pytest.raises(DataError, match="has no task unknown"):
        evaluate.check_tasks(["mmlu", "unknown"])
    (tmp_path / "mine.yaml").touch()
    evaluate.check_tasks([str(tmp_path / "mine.yaml")])


@pytest.mark.parametrize("targets", [torch.rand(6, 1), torch.eye(6, dtype=torch.int64)])
def test_accuracy_asks_for_classes(targets):
    with pytest.raises(DataError, match="one integer a sample"):
        evaluate.accuracy(nn.Linear(4, 6), [(torch.randn(6, 4), targets)])


def test_accuracy_of_a_column_of_targets():
    network, inputs = nn.Linear(4, 3), torch.randn(6, 4)
    answers = network(inputs).argmax(1)
    assert evaluate.accuracy(network, [(inputs, answers[:, None])]) == 100


def test_accuracy_of_a_single_output_is_of_two_classes():
    network = nn.Linear(4, 1)
    inputs = torch.randn(20, 4)
    answers = (network(inputs)[:, 0] > 0).long()
    assert evaluate.accuracy(network, [(inputs, answers)]) == 100
    assert evaluate.accuracy(network, [(inputs, 1 - answers[:, None])]) == 0
    with pytest.raises(DataError, match="no classes"):
        evaluate.accuracy(network, [(inputs, answers + 1)])


def test_accuracy_of_pixels():
    network = nn.Conv2d(3, 5, 1)
    inputs = torch.randn(4, 3, 6, 6)
    assert evaluate.accuracy(network, [(inputs, network(inputs).argmax(1))]) == 100


def test_real_targets_are_scored_by_their_squared_error(tmp_path):
    network = nn.Linear(4, 2)
    inputs = torch.randn(20, 4)
    data = [(inputs[:15], network(inputs[:15]).detach() + 1), (inputs[15:], network(inputs[15:]).detach())]
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    scores = evaluate.evaluate(loaded, BatchSource("mine", data))
    assert scores == {"mean squared error": pytest.approx(0.75), "samples": 20.0}
    with pytest.raises(DataError, match="one number is needed"):
        evaluate.squared_error(network, [(inputs, torch.randn(20, 3))])


def test_real_labels_of_arrays_are_scored_by_their_squared_error():
    network, inputs = nn.Linear(4, 1), torch.randn(100, 4)
    loaded = models.LoadedModel(network, None, "mine", "other", None, lambda *_: None)
    scores = evaluate.evaluate(loaded, ArraySource("mine", inputs, network(inputs).detach()[:, 0] + 2))
    assert scores == {"mean squared error": pytest.approx(4.0), "samples": 100.0}


def test_a_limit_draws_from_all_classes():
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


def test_a_limit_cuts_ready_batches(embedded):
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


def test_ready_batches_are_made_anew_where_a_size_is_given():
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


# ---- multiple choice
@pytest.mark.parametrize(
    "tokens",
    [
        lambda text: [*map(ord, text), 0],  # an end after every text
        lambda text: [ord(letter) if letter in "Answer: " else 0 for letter in text],  # letters that are unknown
        lambda text: [len(text), *map(ord, text)],
    ],
)
def test_letters_must_follow_a_prompt_and_be_told_apart(tokens):
    def tokenizer(texts, verbose):
        return {"input_ids": [tokens(text) for text in texts]}

    loaded = models.LoadedModel(nn.Linear(1, 1), tokenizer, "mine", "causal-lm", None, lambda *_: None)
    with pytest.raises(ModelError, match="add_eos_token"):
        evaluate.answer(loaded, data.Questions([], {}))


def test_targets_that_stand_for_none_are_not_scored():
    inputs, same = torch.eye(4), nn.Linear(4, 4, bias=False)
    same.weight.data = torch.eye(4)
    targets = torch.tensor([0, 1, 3, evaluate.IGNORED])
    assert evaluate.accuracy(same, [(inputs, targets)]) == pytest.approx(200 / 3)
    with pytest.raises(DataError, match="Every target is -100"):
        evaluate.accuracy(same, [(inputs, torch.full((4,), evaluate.IGNORED))])


def test_data_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"cannot take batch 1, tensors of shape \(2, 5\) float32, \(2,\) int64"):
        evaluate.accuracy(nn.Linear(4, 3), [(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64))])
