"""The entropy code of integers: a slow reading of its definition, its size, and damage."""

import struct
import zlib

import numpy as np
import pytest
import torch

from iobs.core.integers import Integers, raw_bits
from iobs.core.patterns import NM, Rate
from iobs.core.quadratic import Quadratic
from iobs.errors import ModelError
from iobs.models import entropy_code
from iobs.models.entropy_code import decode, encode, parts
from iobs.solvers import solve


def matrix(rows=60, columns=30, spread=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spreads = spread * torch.exp(torch.randn(columns, generator=generator))
    codes = (torch.randn(rows, columns, generator=generator) * spreads).round().to(torch.int16)
    return Integers(codes, torch.full((columns,), 0.5), torch.ones(rows))


def decoded_slowly(data):
    """The integers of `encode`, symbol by symbol with the formulas of asymmetric numeral systems."""
    rows, columns, count, scale_bytes, class_bytes, words = struct.unpack_from("<6I", data)
    at = 24 + scale_bytes + class_bytes
    side = zlib.decompress(data[24 + scale_bytes : at])
    by_column, by_row = np.frombuffer(side, np.int8, columns), np.frombuffer(side, np.int8, rows, columns)
    read = entropy_code.Tables.read(side[rows + columns :])
    ends = [*read.places[1:].tolist(), len(read.starts)]
    tables = {
        int(entry["number"]): (read.starts[start:end], int(entry["low"]))
        for entry, start, end in zip(read.entries, read.places.tolist(), ends, strict=True)
    }
    stream = iter(np.frombuffer(data, np.uint16, words, at).tolist())
    states = [next(stream) << 16 | next(stream) for _ in range(count)]
    found = []
    for n in range(rows * columns):
        number = max(0, int(by_row[n // columns]) + int(by_column[n % columns]))
        starts, low = tables[number]
        x = states[n % count]
        slot = x % 2**14
        symbol = int(np.searchsorted(starts, slot, "right")) - 1
        x = (int(starts[symbol + 1]) - int(starts[symbol])) * (x // 2**14) + slot - int(starts[symbol])
        x = x if x >= 2**16 else x << 16 | next(stream)
        code = low + symbol
        if bits := raw_bits(number):
            code, x = (code << bits) + x % 2**bits, x >> bits
            x = x if x >= 2**16 else x << 16 | next(stream)
        states[n % count] = x
        found.append(code)
    return torch.tensor(found, dtype=torch.int16).reshape(rows, columns)


@pytest.mark.parametrize("shape", [(60, 30), (1, 1), (1, 50), (50, 1), (200, 100)], ids=str)
@pytest.mark.parametrize("spread", [0.05, 2.0, 300.0])
def test_matrices_come_back(spread, shape):
    integers = matrix(*shape, spread)
    data = encode(integers)
    assert torch.equal(decoded_slowly(data), integers.codes)
    (found,) = decode(data)
    assert torch.equal(found.codes, integers.codes)
    assert torch.equal(found.steps, integers.steps)
    assert torch.equal(found.factors, integers.factors)


@pytest.mark.parametrize(("shape", "share"), [((512, 512), 0.015), ((64, 256), 0.03)], ids=str)
@pytest.mark.parametrize("spread", [0.05, 0.3, 3.0, 100.0])
def test_size_is_the_counted_one(spread, shape, share):
    integers = Integers.of(matrix(*shape, spread).weight(torch.float32))
    data = encode(integers)
    assert 8 * len(data) == pytest.approx(integers.bits(), rel=share)
    entries, bytes_of = parts(data + data)
    assert (entries, sum(bytes_of.values())) == (2 * shape[0] * shape[1], 2 * len(data))


def test_integers_beside_the_zeros_of_a_mask_have_their_counted_size():
    """Kept entries are the larger ones: their frequencies are far from a normal distribution."""
    integers = matrix(256, 256, 3.0)
    integers.codes[integers.codes.abs() < 3] = 0
    data = encode(integers)
    assert 8 * len(data) == pytest.approx(integers.bits(), rel=0.04)  # tables that list many integers
    assert torch.equal(decoded_slowly(data), integers.codes)


@pytest.mark.parametrize("shape", [(32, 64), (64, 172)], ids=str)
@pytest.mark.parametrize("pattern", [Rate(4.0), NM(2, 4) & Rate(2.5)], ids=str)
def test_small_matrices_have_few_classes_and_their_counted_size(shape, pattern):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(shape, generator=generator), torch.randn(400, shape[1], generator=generator).cumsum(1)
    solution = solve(Quadratic.at(weight, inputs.T @ inputs / 400), pattern, damping=0.01)
    integers = Integers.of(solution.weight.float())
    data = encode(integers)
    assert 0.92 < 8 * len(data) / (solution.stats["bits"] * weight.numel()) < 1.03
    assert parts(data)[1]["classes and tables"] < 0.15 * len(data)


def test_damage_is_one_clear_error():
    data = encode(matrix())
    for place in (0, 4, 9, 30, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ModelError, match=r"the layer is (truncated or )?damaged"):
            next(decode(bytes(changed), "the layer"))
    for length in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(ModelError, match="damaged"):
            next(decode(data[:length]))
