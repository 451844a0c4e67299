import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobs.core.masks import smallest_kept, smallest_kept_by_bits, top_mask
from iobs.core.patterns import NM, Grid, Unstructured, keep_count, parse, share
from iobs.core.structured import Structured
from iobs.errors import PatternError

PATTERNS = [Unstructured(0.5), Unstructured(0.3, per="row"), Unstructured(keep=7), NM(2, 4), NM(1, 8), NM(4, 4)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_top_mask_equals_a_stable_sort_of_each_group(pattern, kind):
    scores = torch.randn(6, 16).abs()
    if kind == "ties":
        scores = (scores * 2).round()
    if kind == "equal":
        scores.fill_(1)
    mask = top_mask(scores, pattern)
    groups = pattern.groups((6, 16))
    table, kept = scores.reshape(groups.count, groups.size), mask.reshape(groups.count, groups.size)
    for row, chosen in zip(table.tolist(), kept.tolist(), strict=True):
        order = sorted(range(groups.size), key=lambda i: (-row[i], i))
        assert [i for i in range(groups.size) if chosen[i]] == sorted(order[: groups.keep])


def test_top_mask_is_exact_if_long_groups_have_ties():
    scores = torch.randint(0, 4, (40, 50)).float()
    mask = top_mask(scores, Unstructured(0.37))
    assert int(mask.sum()) == keep_count(2000, 0.37)
    assert scores[mask].min() >= scores[~mask].max()
    tied = (scores == scores[mask].min()).flatten()
    kept = mask.flatten()[tied]
    assert torch.equal(kept, torch.arange(len(kept)) < kept.sum())  # the lower index wins


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "ties", "tiny", "zeros", "infinite"])
def test_threshold_by_bits_is_that_of_a_selection(dtype, kind):
    scores = torch.randn(3, 200, dtype=torch.float64)
    if kind == "ties":
        scores = (scores * 2).round()
    if kind == "tiny":
        scores *= torch.finfo(dtype).tiny / 3  # subnormal numbers
    if kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    if kind == "infinite":
        scores[:, ::3], scores[:, 1::3] = torch.inf, -torch.inf
    scores = scores.to(dtype)
    for keep in (1, 2, 67, 100, 199, 200):
        wanted = scores.sort(descending=True).values[:, keep - 1 : keep]
        assert torch.equal(smallest_kept_by_bits(scores, keep), wanted)
        assert torch.equal(smallest_kept(scores, keep), wanted)


@given(st.integers(1, 10_000), st.integers(0, 999))
def test_keep_count_rounds_half_up_as_decimal(size, thousandths):
    exact = size * (1000 - thousandths)
    assert keep_count(size, thousandths / 1000) == (exact * 2 + 1000) // 2000


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2:4", NM(2, 4)),
        ("0.5", Unstructured(0.5)),
        ("50%", Unstructured(0.5)),
        ("0", Unstructured(0.0)),
        ("int4+2:4", NM(2, 4) & Grid(4)),
    ],
)
def test_parse_reads_patterns(text, pattern):
    assert parse(text) == pattern


def test_shares_in_percent_are_exact_decimals():
    assert [share(text) for text in ("33.3%", "0.35%", "50 %", "0.3")] == [0.333, 0.0035, 0.5, 0.3]


@pytest.mark.parametrize("text", ["half", "nan", "sNaN", "1e999999999", "4:2", "2:4:8", "1.0", "-0.1", "100%", ""])
def test_parse_raises_if_text_is_not_a_pattern(text):
    with pytest.raises(PatternError):
        parse(text)


def test_pattern_raises_if_impossible():
    for make in (
        lambda: Unstructured(),
        lambda: Unstructured(0.5, keep=3),
        lambda: Unstructured(1.0),
        lambda: Unstructured(float("nan")),
        lambda: Unstructured(keep=-1),
        lambda: Unstructured(0.5, per="column"),
        lambda: Unstructured("0.5"),
        lambda: Unstructured(keep=2.5),
        lambda: NM("2", 4),
        lambda: NM(0, 4),
        lambda: NM(5, 4),
        lambda: NM(2, 4).groups((3, 7)),
        lambda: Unstructured(keep=22).groups((3, 7)),
        lambda: Unstructured(keep=8, per="row").groups((3, 7)),
    ):
        with pytest.raises(PatternError):
            make()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3:2", "0 < keep <= of"),
        ("int40", "bits"),
        ("half", "such as 0.5 or 50%"),
        ("structured:30%,multiple_of=²", "multiple_of must be"),
        ("structured", "says no share"),
        ("2:4+60MB", "takes no zeros besides"),
        ("50%+2:4", "do not combine"),
    ],
)
def test_unreadable_pattern_says_what_is_wrong_with_it(text, reason):
    with pytest.raises(PatternError, match=reason):
        parse(text)


@pytest.mark.parametrize(
    "combined",
    [
        lambda: Structured(0.3) & Grid(4),
        lambda: Grid(4) & Structured(0.3),
        lambda: Structured(0.3) & (Unstructured(0.5) & Grid(4)),
        lambda: Unstructured(0.5) & Structured(0.3),
    ],
)
def test_structured_with_zeros_or_bits_says_to_prune_in_two_runs(combined):
    with pytest.raises(PatternError, match="prune with it alone, then prune the narrower model with"):
        combined()
