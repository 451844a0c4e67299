"""The tokens that stay: every text decodes as before, every kept token is still used, the rarest go first."""

import json
from collections import Counter

import pytest
import tokenizers
from small_tokenizers import TEXTS, byte_level, with_bytes

from iobs.errors import ModelError, PatternError
from iobs.vocabulary.reduction import choose
from iobs.vocabulary.spelling import reduced, spelling_of

UNSEEN = "Nówéł \U0001f600 lowest\tthe\n 中x ßlower"


def built(document):
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def counted(tokenizer, texts):
    return Counter(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).tokens)


def removed(document, keep, counts=None):
    """The tokenizer with `keep` tokens."""
    spelling, added = spelling_of(document), {token["content"] for token in document["added_tokens"]}
    counts = counted(built(document), TEXTS) if counts is None else counts
    kept = choose(spelling, counts, added, keep)
    numbers = {token: number for number, token in enumerate(sorted(kept, key=spelling.tokens.__getitem__))}
    return built(reduced(document, spelling, numbers)), numbers


def least(document):
    spelling = spelling_of(document)
    added = {token["content"] for token in document["added_tokens"]}
    return sum(token in added or spelling.must_stay(token) for token in spelling.tokens)


def read_back(tokenizer, text):
    return tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


def test_every_text_decodes_as_before_at_every_size(document):
    before, smallest = built(document), least(document)
    size = before.get_vocab_size()
    assert smallest < size
    for keep in {smallest, (smallest + size) // 2, size - 1}:
        after, numbers = removed(document, keep)
        assert after.get_vocab() == numbers
        assert len(numbers) == keep
        for text in (*TEXTS, UNSEEN):
            assert read_back(after, text) == read_back(before, text)


def test_fewer_than_the_tokens_that_must_stay(document):
    with pytest.raises(PatternError, match="that must stay"):
        removed(document, least(document) - 1)


@pytest.mark.parametrize("make", [byte_level, with_bytes])
def test_every_kept_token_is_built_by_the_merges_that_are_left(make):
    document = json.loads(make().to_str())
    before, size = built(document), len(document["model"]["vocab"])
    after, numbers = removed(document, (least(document) + size) // 2)
    alone = [token for token in numbers if [piece.value for piece in before.model.tokenize(token)] == [token]]
    assert sum(len(token) > 1 for token in alone) > 3
    for token in alone:
        assert [piece.value for piece in after.model.tokenize(token)] == [token]


def test_no_other_choice_of_merged_tokens_lengthens_the_corpus_less():
    document = json.loads(byte_level().to_str())
    size = len(document["model"]["vocab"])

    def length(tokenizer):
        return sum(len(tokenizer.encode(text).ids) for text in TEXTS)

    chosen = length(removed(document, size - 20)[0])
    order = Counter(document["model"]["vocab"])
    assert chosen <= length(removed(document, size - 20, order)[0])  # by id: the oldest merges are thought frequent
    assert chosen <= length(removed(document, size - 20, Counter())[0])


def test_counts_of_removed_tokens_pass_to_their_parts():
    document = json.loads(with_bytes().to_str())
    size = len(document["model"]["vocab"])
    # "lower" is more frequent than any other, and holds "low" and "lo", of which the corpus has none alone.
    _, numbers = removed(document, size - 8, Counter({"lower": 9, "\u2581the": 1}))
    assert {"lower", "low", "er"} <= numbers.keys()
    assert "łów" not in numbers


def test_kinds_that_have_no_pieces_are_refused():
    with pytest.raises(ModelError, match="WordLevel"):
        spelling_of({"model": {"type": "WordLevel", "vocab": {}}})
