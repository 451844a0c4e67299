"""Stored form of weights on a grid: codes and scales come back from the weights, and bits are counted by hand."""

import pytest
import torch

import iobs
from iobs.core.grids import codes_and_scales, in_16_bits, over_columns, snapped, stored_bits
from iobs.errors import PatternError

GRIDS = [iobs.Grid(2, 8), iobs.Grid(3, 5), iobs.Grid(4, 16), iobs.Grid(8, 32)]


def drawn(grid, size=0.01, rows=7, columns=32):
    generator = torch.Generator().manual_seed(grid.bits)
    codes = torch.randint(-grid.levels, grid.levels + 1, (rows, columns), generator=generator)
    codes[0], codes[1, : grid.group] = 0, 2
    scales = size * torch.rand(rows, grid.scales(columns), generator=generator) + size / 10
    return codes, scales


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("size", [0.01, 1e-7])  # scales near 1e-7 are below the normal numbers of float16
def test_codes_and_scales_come_back_from_float32_weights(grid, size):
    codes, scales = drawn(grid, size)
    weight = snapped(codes * over_columns(scales, grid, 32), scales, grid, torch.float32)
    found, steps = codes_and_scales(weight, grid)
    assert torch.equal(found * over_columns(steps, grid, 32), weight)
    half = torch.float16 if size == 0.01 else torch.bfloat16
    assert torch.equal(steps.to(half).float(), steps)
    assert found.abs().max() <= grid.levels


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pruned", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_products_are_on_the_grid(grid, stored, pruned):
    codes, scales = drawn(grid)
    weight = snapped(codes * over_columns(scales, grid, 32), scales, grid, pruned).to(stored)
    if pruned not in (torch.float32, stored):
        return  # a model is not written in another 16-bit dtype than it was pruned in
    found, steps = codes_and_scales(weight, grid)
    assert torch.equal((found * over_columns(steps, grid, 32)).to(stored), weight)


def test_weights_off_the_grid_are_named():
    grid = iobs.Grid(4, 16)
    codes, scales = drawn(grid)
    weight = snapped(codes * over_columns(scales, grid, 32), scales, grid, torch.float32)
    weight[3, 17] *= 1.01
    with pytest.raises(PatternError, match=r"row 3, columns 16 to 31, are not on the grid int4/16"):
        codes_and_scales(weight, grid)
    codes_and_scales(weight[:3], grid)


def test_scales_have_16_bits():
    usual, tiny = torch.tensor([0.1, 0.3]), torch.tensor([0.1, 1e-6])
    assert torch.equal(in_16_bits(usual, torch.float32), usual.half().float())
    assert torch.equal(in_16_bits(tiny, torch.float32), tiny.bfloat16().float())
    assert torch.equal(in_16_bits(usual, torch.bfloat16), usual.bfloat16().float())


def test_a_grid_combines_with_one_pattern_in_either_order():
    grid = iobs.Grid(4)
    for pattern in (iobs.Unstructured(0.5), iobs.NM(2, 4)):
        assert grid & pattern == pattern & grid
    for other in (grid, iobs.NM(2, 4) & grid):
        with pytest.raises(PatternError, match="one Unstructured or NM"):
            grid & other


def test_stored_bits_count_values_mask_and_scales():
    shape = (6, 20)
    assert stored_bits(iobs.Unstructured(0.5), shape) is None
    assert stored_bits(iobs.Grid(4), shape) == 120 * 4 + 6 * 16
    assert stored_bits(iobs.Grid(3, 8), shape) == 120 * 3 + 6 * 3 * 16
    assert stored_bits(iobs.Unstructured(keep=50) & iobs.Grid(4), shape) == 50 * 4 + 120 + 6 * 16
    assert stored_bits(iobs.NM(2, 4) & iobs.Grid(8, 10), shape) == 60 * 8 + 120 + 12 * 16
    assert stored_bits(iobs.Unstructured(0.0) & iobs.Grid(4), shape) == stored_bits(iobs.Grid(4), shape)


def test_codes_of_a_group_wider_than_the_matrix():
    scales = torch.tensor([[0.5], [0.25]])
    codes = torch.tensor([[7, -3, 0], [1, 7, 2]])
    found = codes_and_scales(codes * scales, iobs.Grid(4, 2**40))
    assert torch.equal(found[0], codes.to(torch.int8))
    assert torch.equal(found[1], scales)
