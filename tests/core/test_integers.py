"""Integers times steps: exact products, read back from the weights alone."""

import math

import pytest
import torch

from iobs.core.integers import Integers, short, step_bits


def made(rows, columns, dtype, spread=3.0, seed=0):
    """Integers of a dtype, with steps of its significant bits and factors of the rows."""
    generator = torch.Generator().manual_seed(seed)
    bits = step_bits(dtype)
    steps = short(torch.rand(columns, generator=generator) + 0.1, bits)
    factors = short(torch.exp(torch.randn(rows, generator=generator)), min(bits, 3))
    spreads = spread * torch.exp(torch.randn(columns, generator=generator))
    codes = (torch.randn(rows, columns, generator=generator) * spreads).round()
    return Integers(codes.to(dtype).to(torch.int16), steps, factors)


@pytest.mark.parametrize("spread", [0.2, 3.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_integers_are_read_back_from_the_weights_alone(dtype, spread):
    written = made(200, 64, dtype, spread)
    weight = written.weight(dtype)
    found = Integers.of(weight)
    assert torch.equal(found.weight(dtype), weight)
    assert found.bits() <= 1.1 * written.bits()


@pytest.mark.parametrize(
    "weight",
    [torch.randn(50, 20, generator=torch.Generator().manual_seed(0)), torch.full((3, 3), math.nan), torch.zeros(0, 3)],
    ids=["dense", "NaN", "empty"],
)
def test_other_weights_have_no_integers(weight):
    assert Integers.of(weight) is None


def test_zeros_and_single_columns_are_integers():
    assert Integers.of(torch.zeros(3, 4)).codes.any() == torch.tensor(False)
    assert Integers.of(torch.tensor([[0.75, -1.5, 0.0]])).weight(torch.float32).tolist() == [[0.75, -1.5, 0.0]]


def test_steps_that_follow_weights_are_those_of_least_squares():
    integers = made(40, 8, torch.float32)
    target = integers.weight(torch.float32) * 1.3 + 0.01
    basis = (integers.codes * integers.factors[:, None]).double()
    best = torch.stack([torch.linalg.lstsq(basis[:, j, None], target[:, j, None].double()).solution for j in range(8)])
    assert torch.allclose(integers.towards(target, torch.float32).steps, best.flatten().float(), rtol=2**-8)


def test_a_column_of_one_entry_keeps_a_short_step():
    weight = made(60, 8, torch.float32).weight(torch.float32)
    weight[:, 3] = 0
    weight[7, 3] = 101 * 199 * 2.0**-10  # no number of 8 significant bits: an integer of several
    found = Integers.of(weight)
    assert torch.equal(found.weight(torch.float32), weight)


def test_float8_has_no_integers():
    assert Integers.of(torch.zeros(4, 4, dtype=torch.float8_e4m3fn)) is None


@pytest.mark.parametrize(("seed", "spread"), [(0, 200.0), (2, 20.0)])
def test_small_matrices_are_read_back_in_as_few_bits(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(64, 64, generator=generator) * spread).round().to(torch.int16)
    steps, factors = (short(torch.rand(64, generator=generator) + 0.5, bits) for bits in (8, 3))
    written = Integers(codes, steps, factors)
    assert Integers.of(written.weight(torch.float32)).bits() <= 1.001 * written.bits()


def test_factors_of_rows_are_read_back_where_columns_have_few_entries():
    generator = torch.Generator().manual_seed(0)
    codes = (
        (torch.randn(16, 64, generator=generator) * torch.exp2(torch.randn(64, generator=generator)))
        .round()
        .to(torch.int16)
    )
    factors = short(torch.exp2(torch.randn(16, generator=generator)), 3)
    written = Integers(codes, short(torch.rand(64, generator=generator) + 0.5, 8), factors)
    assert Integers.of(written.weight(torch.float32)).bits() <= 1.05 * written.bits()
