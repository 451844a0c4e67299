"""Tasks of lm-eval and answers to multiple choice questions by letter."""

import sys
import types
from types import SimpleNamespace

import pytest
from torch import nn

from iobs import data, evaluate, models
from iobs.errors import DataError, ModelError
from iobs.evaluate import tasks


@pytest.fixture
def library(monkeypatch):
    """A substitute for lm-eval, which the tests do not install; test_mmlu_agrees_with_lm_eval uses the real one."""

    asked = {}

    def run(model, tasks, num_fewshot, limit, bootstrap_iters, task_manager):
        asked.update(model=model, tasks=tasks, shots=num_fewshot, limit=limit)
        if tasks == ["offline"]:
            raise ConnectionError("no network")
        if tasks == ["gsm8k"]:
            filters = {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
            return {"results": {"gsm8k": {**filters, "exact_match_stderr,strict-match": 0.01}}}
        return {"results": {"mmlu": {"alias": "mmlu", "sample_len": 2, "acc,none": 0.25, "acc_stderr,none": 0.01}}}

    made = {name: types.ModuleType(name) for name in ("", ".models", ".models.huggingface", ".tasks")}
    made[""].simple_evaluate = run
    made[".models.huggingface"].HFLM = lambda pretrained, tokenizer: pretrained
    made[".tasks"].TaskManager = lambda: SimpleNamespace(all_tasks=["mmlu", "gsm8k", "offline"])
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    tasks._manager.cache_clear()
    yield asked
    tasks._manager.cache_clear()


def test_evaluate_tasks_needs_lm_eval(embedded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(DataError, match="pip install"):
        evaluate.evaluate_tasks(embedded, ["mmlu"])


def test_evaluate_tasks_flattens_scores_and_names_failures(embedded, library, tmp_path):
    assert evaluate.evaluate_tasks(embedded, ["mmlu"], shots=3, limit=7) == {"mmlu/acc": 0.25}
    assert library == {"model": embedded.module, "tasks": ["mmlu"], "shots": 3, "limit": 7}
    with pytest.raises(DataError, match="lm-eval cannot run offline: ConnectionError: no network"):
        evaluate.evaluate_tasks(embedded, ["offline"])
    with pytest.raises(DataError, match="has no task unknown"):
        evaluate.check_tasks(["mmlu", "unknown"])
    (tmp_path / "mine.yaml").touch()
    evaluate.check_tasks([str(tmp_path / "mine.yaml")])


def test_every_filter_of_the_answers_has_its_score(embedded, library):
    found = evaluate.evaluate_tasks(embedded, ["gsm8k"])
    assert found == {"gsm8k/exact_match, strict-match": 0.25, "gsm8k/exact_match, flexible-extract": 0.5}


@pytest.mark.parametrize(
    "tokens",
    [
        lambda text: [*map(ord, text), 0],  # appends an end token to every text
        lambda text: [
            ord(letter) if letter in "Answer: " else 0 for letter in text
        ],  # maps the answer letters to the unknown token
        lambda text: [len(text), *map(ord, text)],
    ],
)
def test_answer_needs_distinct_letter_tokens(tokens):
    def tokenizer(texts, verbose):
        return {"input_ids": [tokens(text) for text in texts]}

    loaded = models.LoadedModel(nn.Linear(1, 1), tokenizer, "mine", "causal-lm", None, lambda *_: None)
    with pytest.raises(ModelError, match="add_eos_token"):
        evaluate.answer(loaded, data.Questions([], {}))
