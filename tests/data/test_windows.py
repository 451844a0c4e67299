"""Windows of tokens: cutting, limits, drawing calibration samples."""

import itertools

import pytest
import torch

from iobs import data
from iobs.errors import CalibrationError, DataError


class Characters:
    """A tokenizer of code points that puts 1 before each document, and counts the documents."""

    def __init__(self):
        self.documents = 0

    def __call__(self, text, *, verbose):
        self.documents += len(text)
        return {"input_ids": [[1, *map(ord, document)] for document in text]}


@pytest.mark.parametrize("length", [2, 3, 7])
def test_windows_cut_concatenated_documents_without_overlap(length):
    texts = ["abc", "d", "efghijk"]
    stream = [token for text in texts for token in [1, *map(ord, text)]]
    windows = data.token_windows(Characters(), texts, length)
    count = len(stream) // length
    assert windows.tolist() == [stream[i * length : (i + 1) * length] for i in range(count)]


def test_windows_stop_reading_at_the_limit():
    tokenizer = Characters()
    windows = data.token_windows(tokenizer, ("x" * 9 for _ in itertools.count()), 10, limit=5)
    assert windows.shape == (5, 10)
    assert tokenizer.documents <= 64


def test_windows_refuse_a_text_shorter_than_a_window():
    with pytest.raises(DataError, match="4 tokens, less than one window of 5"):
        data.token_windows(Characters(), ["abc"], 5)
    with pytest.raises(CalibrationError, match="less than one window"):
        data.calibration_windows(Characters(), ["abc"], 1, 5, seed=0)
    with pytest.raises(CalibrationError, match="0 calibration samples"):
        data.calibration_windows(Characters(), ["abc"], 0, 2, seed=0)


def test_calibration_windows_are_drawn_by_seed_without_repeats():
    def draw(seed):
        tokenizer = Characters()
        endless = (chr(100 + i % 1000) * 9 for i in itertools.count())
        batches = data.calibration_windows(tokenizer, endless, 20, 10, seed, batch=8)
        assert tokenizer.documents <= 8 * 20 + 64
        assert [len(batch["input_ids"]) for batch in batches] == [8, 8, 4]
        assert all(batch["labels"] is batch["input_ids"] for batch in batches)
        return torch.cat([batch["input_ids"] for batch in batches])

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    assert len(first.unique(dim=0)) == 20


def test_calibration_windows_use_all_of_a_short_text():
    batches = data.calibration_windows(Characters(), ["abcdefghi"], 128, 5, seed=0, labels=False)
    assert [*batches[0]] == ["input_ids"]
    assert batches[0]["input_ids"].shape == (2, 5)


def test_windows_do_not_exceed_the_context(embedded):
    source = data.open_source([], "calibration", embedded)
    batches = data.calibration_batches(source, embedded, samples=3, length=2048, seed=0)
    assert batches[0]["input_ids"].shape == (3, 256)
