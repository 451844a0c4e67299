"""The embedded text and its splits."""

import itertools
import sys

import pytest

from iobs import data
from iobs.data.text import percentile
from iobs.errors import DataError


def test_embedded_splits_share_no_paragraph():
    parts = {split: data.embedded_text(split) for split in ("heldout", "calibration", "train")}
    paragraphs = {
        split: {" ".join(p.split()) for document in texts for p in document.split("\n\n") if len(p) >= 60}
        for split, texts in parts.items()
    }
    for first, second in itertools.combinations(paragraphs.values(), 2):
        assert not {p for p in first & second if len(p) >= 40}
    assert all(sum(map(len, texts)) > 40_000 for texts in parts.values())


def test_embedded_split_follows_the_hash_of_the_name():
    assert (percentile("assert"), percentile("string-methods")) == (46, 10)
    with pytest.raises(DataError, match="no split 'test'"):
        data.embedded_text("test")


def test_embedded_text_needs_the_help_topics(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(DataError, match="pydoc_data"):
        data.embedded_text("train")
