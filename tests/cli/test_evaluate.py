"""`iobs evaluate`: missing data and libraries are found before the model is scored."""

import json
import sys

import pytest
from checks import one_error

from iobs.errors import ModelError


def test_evaluate_checks_questions_and_libraries_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr("iobs.evaluate.evaluate", lambda *_, **__: pytest.fail("the model was scored"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "a.txt").write_text("some text")
    text = ("evaluate", "--data", tmp_path / "a.txt")
    assert "none.jsonl" in one_error(run(*text, "--questions", tmp_path / "none.jsonl", code=2))
    assert "pip install" in one_error(run(*text, "--tasks", "mmlu", code=2))
    assert "name at least one" in run(*text, "--tasks", " ,", code=2).stderr


def test_evaluate_checks_answer_letters_first(run, tmp_path, monkeypatch):
    def confused(_):
        raise ModelError("no letters")

    monkeypatch.setattr("iobs.evaluate.evaluate", lambda *_, **__: pytest.fail("the model was scored"))
    monkeypatch.setattr("iobs.evaluate.tasks.letter_tokens", confused)
    question = {"split": "test", "subject": "s", "question": "q", "choices": [*"abcd"], "answer": 0}
    (tmp_path / "a.jsonl").write_text(json.dumps(question))
    (tmp_path / "a.txt").write_text("some text")
    options = ("--data", tmp_path / "a.txt", "--questions", tmp_path / "a.jsonl")
    assert "no letters" in one_error(run("evaluate", *options, code=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shots", 3), "examples come before questions"),
        (("--batch-size", 3, "--tasks", "mmlu"), "questions are asked one by one"),
    ],
)
def test_evaluate_refuses_options_without_effect(run, options, message):
    assert message in run("evaluate", *options, code=2).output.replace("\n", " ")


def test_cut_prompts_are_reported_with_quiet_too(run, tmp_path, monkeypatch):
    """The shares are then those of other prompts."""
    monkeypatch.setattr("iobs.evaluate.answer", lambda *_, **__: ({"all": 0.5}, 1))
    monkeypatch.setattr("iobs.evaluate.tasks.letter_tokens", lambda _: None)
    question = {"split": "test", "subject": "s", "question": "q", "choices": [*"abcd"], "answer": 0}
    (tmp_path / "a.jsonl").write_text(json.dumps(question))
    assert "1 of 1 prompts were longer" in run("evaluate", "--questions", tmp_path / "a.jsonl", "--quiet").stderr
