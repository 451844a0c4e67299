"""Exponents by a code: every bit comes back, and trained weights take few."""

import zlib

import pytest
import torch

from iobs.core import exponents
from iobs.core.exponents import half_of, words_of

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_comes_back(dtype):
    size = dtype.itemsize
    noise = torch.randint(0, 256, (999 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45]).to(dtype)
    for tensor in (noise.view(dtype), special, special[:0]):
        code, rest = exponents.encode(words_of(tensor))
        back = exponents.decode(code, rest, len(tensor), dtype)
        assert torch.equal(back, words_of(tensor))
        assert len(rest) == len(tensor) * (size - 1)


def test_normal_weights_in_bfloat16_take_eleven_bits():
    weights = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    assert 10.4 < exponents.bits(weights) / len(weights) < 10.9


def test_another_count_and_a_damaged_code_are_errors():
    code, rest = exponents.encode(words_of(torch.randn(100)))
    with pytest.raises(ValueError, match="more bytes"):
        exponents.decode(code, rest, 99, torch.float32)
    with pytest.raises(ValueError, match="is cut"):
        exponents.decode(code[:-3], rest, 100, torch.float32)
    with pytest.raises(zlib.error):
        exponents.decode(b"\0" + code[1:], rest, 100, torch.float32)


def test_vectors_are_rounded_to_the_nearer_of_two_formats_of_16_bits():
    torch.manual_seed(0)
    vector = torch.rand(64) + 0.5
    assert half_of(vector) == torch.float16
    assert half_of(torch.nn.Parameter(vector)) == torch.float16
    assert half_of(vector.bfloat16().float()) == torch.bfloat16  # exact
    assert half_of(1e6 * vector) == torch.bfloat16  # float16 overflows
    assert half_of(1e-8 * vector) == torch.bfloat16  # and underflows
    assert half_of(vector.reshape(8, 8)) == torch.bfloat16  # whose exponents take fewer bits
    assert half_of(1e6 * vector, torch.float16) == torch.float16  # as asked
