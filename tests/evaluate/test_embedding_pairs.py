"""An embedding model is scored by the rank correlation of cosines with the labels of pairs of texts."""

import json
import shutil

import pytest
import scipy.stats
import torch
from transformers import AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

from iobs import models
from iobs.cli import app
from iobs.data import open_source
from iobs.errors import DataError, ModelError
from iobs.evaluate import evaluate

ROWS = [("a cat", "the cat", 4.5), ("a cat", "rain falls on the long road", 0.5), ("rain", "rain falls", 3.0)]
ROWS += [("the dog", "a cat", 2.0), ("one", "two, or three", 1.0)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a small encoder with a tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED / name, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=len(AutoTokenizer.from_pretrained(folder)), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def pairs(tmp_path):
    """A table of labelled pairs."""
    file = tmp_path / "pairs.csv"
    file.write_text("first,second,score\n" + "".join(f'"{a}","{b}",{c}\n' for a, b, c in ROWS))
    return file


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_cosines_are_compared_with_labels(pooling, encoder, pairs, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "model")
    if pooling == "cls":
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    loaded = models.load(folder)

    def embedding(text):
        ids = torch.tensor(loaded.tokenizer([text], verbose=False)["input_ids"])
        with torch.no_grad():
            states = loaded.module(ids).last_hidden_state[0]
        return states[0] if pooling == "cls" else states.mean(0)

    cosines = [float(torch.cosine_similarity(embedding(a), embedding(b), 0)) for a, b, _ in ROWS]
    expected = scipy.stats.spearmanr(cosines, [label for *_, label in ROWS]).statistic
    found = evaluate(loaded, open_source([str(pairs)], "evaluation", loaded), batch=3)
    assert found == {"rank correlation": pytest.approx(expected), "labels": 5.0}


def test_command_line_scores_before_and_after(encoder, pairs, tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    scores = json.loads(run("evaluate", encoder, "--data", pairs, "--json"))
    text = tmp_path / "texts.txt"
    text.write_text("the cat and the dog walk on the long road in the rain " * 20)
    options = ("--data", text, "--eval-data", pairs, "--recipe", "one-shot", "--seq-len", 16, "--samples", 8)
    shown = run("prune", encoder, "-o", tmp_path / "out", "--solver", "magnitude", "--ignore", "pooler*", *options)
    assert f"{scores['rank correlation']:.3f}" in shown
    assert "rank correlation" in shown


def test_other_tables_and_models_are_refused(encoder, pairs, tmp_path):
    loaded = models.load(encoder)
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="two columns of text and one of numbers"):
        open_source([str(tmp_path / "wrong.csv")], "evaluation", loaded)
    (tmp_path / "equal.csv").write_text("a,b,c\n" + "x,y,1\n" * 4)
    with pytest.raises(DataError, match=r"All labels .* are equal"):
        evaluate(loaded, open_source([str(tmp_path / "equal.csv")], "evaluation", loaded))
    (tmp_path / "t.txt").write_text("text " * 50)
    with pytest.raises(ModelError, match="two columns of text and one of numbers"):
        evaluate(loaded, open_source([str(tmp_path / "t.txt")], "evaluation", loaded), length=16)
