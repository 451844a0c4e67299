"""Choice of the tokens that stay: those that a corpus uses most, counted with the tokens that they spell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush

from iobs.errors import PatternError
from iobs.vocabulary.spelling import Spelling


def choose(spelling: Spelling, counts: Mapping[str, int], fixed: Collection[str], keep: int) -> set[str]:
    """Choose the tokens of a vocabulary that stay.

    The rarest token is removed first, and its count goes to the tokens that spell it from then on. A removal lengthens
    the corpus by the count of the token. With byte-pair encoding every token is at least as frequent as those built
    from it, so no other choice lengthens the corpus less. Of equally rare tokens the one of largest id goes first: ids
    mostly are in the order of frequency in the corpus of the tokenizer.

    Args:
        spelling: the tokens.
        counts: number of times that the corpus has each token; 0 for those that are missing.
        fixed: tokens that stay for other reasons than `Spelling.must_stay`.
        keep: number of tokens that stay, `fixed` included.

    Raises:
        PatternError: more tokens than `keep` must stay.
    """
    kept, counted = set(spelling.tokens), Counter(counts)
    free = [token for token in spelling.tokens if token not in fixed and not spelling.must_stay(token)]
    parts = {token: spelling.parts(token) for token in spelling.tokens}
    uses = Counter(part for of_token in parts.values() for part in set(of_token))
    heap = [(counted[token], -spelling.tokens[token], token) for token in free if not uses[token]]
    heapify(heap)
    removable = set(free)
    while len(kept) > keep:
        if not heap:
            raise PatternError(
                f"{keep:,} tokens are fewer than the {len(kept):,} that must stay: special tokens, and single bytes or "
                "characters. Keep more."
            )
        count, order, token = heappop(heap)
        if count != counted[token]:  # it spells a token that was removed meanwhile
            heappush(heap, (counted[token], order, token))
            continue
        kept.remove(token)
        for part in parts[token] or spelling.spelled(token, kept):
            counted[part] += count
        for part in set(parts[token]):
            uses[part] -= 1
            if not uses[part] and part in removable:
                heappush(heap, (counted[part], -spelling.tokens[part], part))
    return kept
