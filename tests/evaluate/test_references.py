"""Perplexity and MMLU accuracy against short references."""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from iobs.cli import app
from iobs.data import Question, open_source, prompt, read_questions
from iobs.evaluate import answer, evaluate
from iobs.models import load


def test_mmlu_prompt_equals_the_original():
    example = Question("high_school_physics", "What falls?", ("up", "down", "left", "right"), 1)
    question = Question("high_school_physics", "What rises? ", ("w", "x", "y", "z"), 0)
    assert prompt(question, [example]) == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "What falls?\nA. up\nB. down\nC. left\nD. right\nAnswer: B\n\n"
        "What rises?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    )


@pytest.mark.slow
def test_mmlu_of_a_small_model_is_at_chance(shared_data):
    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=5, each=12)
    assert all(len(examples) == 5 for examples in questions.examples.values())
    table, cut = answer(load(shared_data / "llama_stories260K"), questions)
    assert len(table) == 6
    assert cut > 0  # five examples do not fit into 512 tokens of this tokenizer
    count = len(questions.test)
    assert abs(table["average"] - 0.25) < 4 * math.sqrt(0.25 * 0.75 / count)


@pytest.mark.slow
def test_mmlu_command_prints_every_subject(shared_data):
    command = ["evaluate", str(shared_data / "llama_stories260K"), "--limit", "1", "--shots", "1"]
    result = CliRunner().invoke(app, [*command, "--questions", str(shared_data / "mmlu" / "mmlu.jsonl.gz"), "--json"])
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert len(table) == 57 + 1
    assert "mmlu.jsonl.gz: high_school_physics" in table
    shares = [share for name, share in table.items() if not name.endswith("average")]
    assert table["mmlu.jsonl.gz: average"] == pytest.approx(sum(shares) / 57)
    assert "of 57 prompts" in result.stderr


@torch.no_grad()
def test_mmlu_sums_the_tokens_of_a_letter(shared_data):
    loaded = load(shared_data / "llama_stories260K")
    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=2, each=5)
    expected = defaultdict(list)
    for question in questions.test:
        likelihoods = []
        for letter in "ABCD":
            text = prompt(question, [])
            before, whole = loaded.tokenizer([text, f"{text} {letter}"])["input_ids"]
            logs = loaded.module(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            likelihoods.append(sum(float(logs[i - 1, whole[i]]) for i in range(len(before), len(whole))))
        expected[question.subject].append(max(range(4), key=likelihoods.__getitem__) == question.answer)
    table, _ = answer(loaded, questions, shots=0)
    assert {subject: table[subject] for subject in expected} == {s: sum(r) / len(r) for s, r in expected.items()}


@pytest.mark.slow
def test_mmlu_agrees_with_lm_eval(shared_data, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    loaded = load(shared_data / "llama_stories260K")
    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=2, each=25)
    subjects = sorted({question.subject for question in questions.test})
    for subject in subjects:
        sets = {"dev": questions.examples[subject], "test": [q for q in questions.test if q.subject == subject]}
        for split, entries in sets.items():
            rows = [{"question": q.question, "choices": q.choices, "answer": q.answer} for q in entries]
            (tmp_path / f"{subject}.{split}.json").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{subject}.yaml").write_text(
            f"task: mine_{subject}\n"
            f"include: {Path(lm_eval.__file__).parent}/tasks/mmlu/default/_default_template_yaml\n"
            "dataset_path: json\ndataset_name: null\n"
            "dataset_kwargs:\n  data_files:\n"
            f"    dev: {tmp_path}/{subject}.dev.json\n    test: {tmp_path}/{subject}.test.json\n"
            "description: 'The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n\n\n'\n"
        )
    found = lm_eval.simple_evaluate(
        HFLM(pretrained=loaded.module, tokenizer=loaded.tokenizer),
        tasks=[f"mine_{subject}" for subject in subjects],
        num_fewshot=5,
        task_manager=TaskManager(include_path=[str(tmp_path)]),
        bootstrap_iters=0,
    )
    table, _ = answer(loaded, questions)
    for subject in subjects:
        theirs = found["results"][f"mine_{subject}"]["acc,none"]
        assert table[subject] == pytest.approx(theirs)


def test_perplexity_of_the_shared_model_equals_a_reference(shared_data):
    loaded = load(shared_data / "llama_stories260K")
    file = shared_data / "tinystories" / "validation.txt"
    tokens = []
    for story in file.read_text(encoding="utf8").split("<|endoftext|>"):
        if story.strip():
            tokens += loaded.tokenizer([story.strip("\n")], verbose=False)["input_ids"][0]
    total = count = 0
    for start in range(0, 16 * 512, 512):
        window = torch.tensor([tokens[start : start + 512]])
        with torch.no_grad():
            logits = loaded.module(window).logits[0, :-1].double().log_softmax(-1)
        total -= float(logits.gather(1, window[0, 1:, None]).sum())
        count += 511
    perplexity = evaluate(loaded, open_source([str(file)], "evaluation", loaded), length=512, limit=16)["perplexity"]
    assert perplexity == pytest.approx(math.exp(total / count), rel=1e-6)
