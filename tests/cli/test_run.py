"""`iobs run`: text from a language model."""

import json

import pytest
from checks import one_error

from iobs import models


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "model"
    models.load(None).save(directory)
    return directory


def test_run_continues_a_text_and_reports_its_speed(run, language_model):
    result = run("run", language_model, "The city of", "--tokens", "4", "--precision", "bf16")
    assert "4 tokens" in result.output
    found = json.loads(run("run", language_model, "The city of", "--tokens", "4", "--json", "--quiet").stdout)
    assert found["tokens"] == 4
    assert found["text"]
    assert found["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "int7"), "'int7' is not one of bf16, int8, int4, dense"),
        (("--device", "cuda"), "on the CPU only"),
        (("--tokens", "100000"), "the model reads"),
    ],
)
def test_wrong_options_are_one_error(run, language_model, arguments, message):
    output = run("run", language_model, "The", *arguments, code=2).output
    assert message in " ".join(output.replace("│", " ").split())


def test_a_network_that_is_no_language_model_is_one_error(run, classifier):
    assert "no causal language model" in one_error(run("run", f"{classifier}:net", "The", code=2))
