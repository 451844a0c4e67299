"""`iobs run`: text from a language model."""

import json
import shutil

import pytest
import torch
from checks import one_error

from iobs import models
from iobs.inference import StoredLinear, decoder


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


@pytest.fixture
def generated(monkeypatch):
    """The calls of `generated` without the model's work: arguments in, chosen tokens out."""
    calls, tokens = [], [403, 404]

    def noted(*arguments):
        calls.append(arguments)
        return iter(tokens)

    monkeypatch.setattr(decoder, "generated", noted)
    noted.calls, noted.tokens = calls, tokens
    return noted


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_packed_file_runs_in_its_own_precision(run, packed, generated, precision):
    """Layers that a file in bfloat16 left dense were rounded to 8 bits."""
    run("run", packed / precision, "The", "--tokens", "2")
    assert generated.calls[0][-1] == precision
    for command in ("run", "bench"):
        arguments = [command, packed / precision, *(["The"] if command == "run" else [])]
        output = run(*arguments, "--precision", "int8", code=2).output
        assert "is packed ready to run, and keeps its own precision" in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_a_packed_file_take_the_threads_of_the_option(run, packed, generated, threads):
    before = torch.get_num_threads()
    try:
        run("run", packed / "int8", "The", "--tokens", "2", "--threads", threads)
    finally:
        torch.set_num_threads(before)
    model, *_, form = generated.calls[0]
    assert {one.threads for one in model.modules() if isinstance(one, StoredLinear)} == {threads}
    assert {one.product.threads for one in model.modules() if isinstance(one, StoredLinear)} == {threads}
    assert (form is None) is (threads > 1)


def test_texts_end_where_generate_ends_them(run, language_model, generated, tmp_path):
    """The configuration of a chat model often names one token, and its generation_config several."""
    shutil.copytree(language_model, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 77]}))
    for directory, ends in ((tmp_path / "model", (2, 77)), (language_model, (2,))):
        run("run", directory, "The", "--tokens", "2", "--precision", "dense")
        assert generated.calls[-1][3] == ends


def test_an_unfinished_character_at_the_end_is_printed(run, language_model, generated):
    """It was held back, with the text before it, for the bytes that follow."""
    tokenizer = models.load(None).require_tokenizer()
    generated.tokens[:] = [tokenizer("cat")["input_ids"][-1], tokenizer.convert_tokens_to_ids("\u00c3")]
    whole = tokenizer.decode(generated.tokens)
    assert whole.endswith("\N{REPLACEMENT CHARACTER}")
    assert whole in run("run", language_model, "The", "--tokens", "2", "--precision", "dense").output
