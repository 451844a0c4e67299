"""Inner products of layer inputs: in float32 on a CPU, of 16-bit inputs as they are where a device sums in float32."""

import pytest
import torch

from iobs.pruning.calibration import gram
from iobs.pruning.calibration.gram import Gram
from iobs.pruning.network.layers import Layer


def grams(dtype, count=70, columns=48):
    generator = torch.Generator().manual_seed(0)
    rows, dense = (torch.randn(1, count, columns, generator=generator).to(dtype) for _ in range(2))
    found = Gram.empty(Layer("one", (8, columns)), torch.device("cpu"), True)
    found.add(rows, dense)
    found.finish()
    return found, rows.double()[0], dense.double()[0]


@pytest.fixture
def short(monkeypatch):
    """A device that multiplies 16 bits as they are: records the dtypes of its products."""
    plain, seen = torch.bmm, []

    def product(left, right, out_dtype=None):
        seen.append((left.dtype, right.dtype, out_dtype))
        return plain(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(gram, "sums_in_float32", lambda device, dtype: dtype in (torch.bfloat16, torch.float16))
    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(gram, "_CHUNK", 32)
    monkeypatch.setattr(gram, "STRIPE", 20)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gram_of_short_inputs_is_that_of_their_values(short, dtype):
    found, rows, dense = grams(dtype)
    assert set(short) == {(dtype, dtype, torch.float32)}
    for own, wanted in (
        (found.own, rows.T @ rows),
        (found.cross, dense.T @ rows),
        (found.dense, dense.T @ dense),
    ):
        torch.testing.assert_close(own[0].double(), wanted / len(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_target_outputs_are_multiplied_in_two_terms_of_16_bits(short, dtype):
    rows, weight = torch.randn(1, 70, 48).to(dtype), torch.randn(8, 48).to(dtype)
    outputs = gram.layer_outputs(weight, rows)
    found = Gram.empty(Layer("one", (8, 48)), torch.device("cpu"), True, outputs=True)
    found.add(rows, outputs)
    found.finish()
    assert set(short) == {(dtype, dtype, torch.float32)}
    wanted = weight.double() @ rows[0].double().T
    torch.testing.assert_close(outputs[0].double(), wanted.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.cross[0], wanted @ rows[0].double() / 70, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.outputs, wanted.square().sum() / 70, rtol=1e-5, atol=0.0)


def test_wider_inputs_are_multiplied_in_their_own_dtype(short):
    found, rows, dense = grams(torch.float32)
    assert not short
    torch.testing.assert_close(found.cross[0], dense.T @ rows / len(rows), rtol=1e-5, atol=1e-6)


def test_inputs_of_two_dtypes_are_multiplied_in_float32(short):
    left, right = torch.randn(1, 9, 4), torch.randn(1, 9, 3).bfloat16()
    found = gram.inner(*gram.prepared(left, right))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, left.transpose(1, 2) @ right.float())


def test_a_cpu_multiplies_no_short_inputs():
    assert not gram.sums_in_float32(torch.device("cpu"), torch.bfloat16)
    (found,) = gram.prepared(torch.randn(1, 5, 4).bfloat16())
    assert found.dtype is torch.float32


def test_a_device_that_refuses_such_products_is_told_by_a_trial(monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda *size, **options: torch.zeros(size))  # a CPU has no such product
    gram.sums_in_float32.cache_clear()
    assert not gram.sums_in_float32(torch.device("cuda"), torch.bfloat16)
    gram.sums_in_float32.cache_clear()
