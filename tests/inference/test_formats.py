"""Formats of stored matrices: what they hold, what they refuse, and what is checked before a kernel reads them."""

import pytest
import torch

from iobs.errors import ModelError, ProblemError
from iobs.inference.formats import FORMATS, PADDING, StoredMatrix, fitted_levels, require_valid, store

TOLERANCE = {"bf16": 4e-3, "index-bf16": 4e-3, "bitmask-bf16": 4e-3, "int8": 1e-2, "bitmask-int8": 1e-2}


def sparse(rows, columns, sparsity=0.6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[torch.rand(rows, columns, generator=generator) < sparsity] = 0
    return weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 64), (4, 129), (7, 640)])
def test_stored_matrix_is_near_the_weight_and_keeps_its_zeros(name, shape):
    weight = sparse(*shape)
    matrix = store(weight, name)
    require_valid(matrix)
    dense = matrix.to_dense()
    assert dense.shape == weight.shape
    assert not dense[weight == 0].any()
    assert (dense - weight).norm() <= TOLERANCE.get(name, 0.15) * weight.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_the_rows_equals_those_rows_of_the_whole(name):
    matrix = store(sparse(9, 200), name)
    assert torch.equal(matrix.to_dense(2, 7), matrix.to_dense()[2:7])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_by_number_equal_those_rows_of_the_whole(name):
    matrix = store(sparse(9, 200), name)
    numbers = torch.tensor([3, 8, 3, 0])
    assert torch.equal(matrix.rows_of(numbers), matrix.to_dense()[numbers])
    assert matrix.rows_of(numbers[:0]).shape == (0, 200)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_entries_stay_empty(name):
    weight = sparse(4, 130)
    weight[[0, 2, 3]] = 0
    assert not store(weight, name).to_dense()[[0, 2, 3]].any()


def test_bfloat16_weights_are_stored_exactly_denormals_included():
    weight = sparse(3, 70).bfloat16()
    weight[0, 0] = 1e-40
    for name in ("bf16", "bitmask-bf16", "index-bf16"):
        assert torch.equal(store(weight, name).to_dense().bfloat16(), weight)


def test_bytes_at_half_sparsity_are_those_of_the_formats():
    weight = sparse(64, 1024, sparsity=0.5)
    bits = {name: 8 * store(weight, name).bytes / weight.numel() for name in FORMATS}
    assert bits["bitmask-bf16"] == pytest.approx(1 + 16 * 0.5, abs=0.3)
    assert bits["bitmask-int8"] == pytest.approx(1 + 8 * 0.5 + 16 / 128, abs=0.3)
    assert bits["bitmask-int4"] == pytest.approx(1 + 4 * 0.5 + 16 / 128, abs=0.4)


def test_levels_of_values_on_16_points_are_those_points():
    points = torch.tensor([-127, -90, -70, -50, -30, -20, -10, -5, 5, 10, 20, 30, 50, 70, 90, 127])
    values = points.float().repeat(50)[torch.randperm(800, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(fitted_levels(values).long(), points)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value):
    weight = sparse(2, 3)
    weight[1, 1] = value
    with pytest.raises(ProblemError, match="NaN or infinite"):
        store(weight, "bitmask-bf16")


def test_vectors_and_unknown_formats_are_refused():
    with pytest.raises(ProblemError, match="floating matrix"):
        store(torch.zeros(3), "bf16")
    with pytest.raises(ProblemError, match="no format 'int3'"):
        store(torch.zeros(3, 3), "int3")
    with pytest.raises(ProblemError, match="at most 65536 columns"):
        store(torch.zeros(1, 65537), "index-bf16")


def altered(matrix, **changes):
    tensors = {name: tensor.clone() for name, tensor in matrix.tensors.items()}
    return StoredMatrix(matrix.format, matrix.rows, matrix.columns, {**tensors, **changes})


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "int8")])
def test_starts_outside_the_values_are_refused(name):
    matrix = store(sparse(4, 100), name)
    for place, value in ((0, 2), (2, 1 << 40), (4, 0), (1, -64)):
        starts = matrix.tensors["starts"].clone()
        starts[place] = value
        with pytest.raises(ModelError, match="damaged"):
            require_valid(altered(matrix, starts=starts))


@pytest.mark.parametrize("name", ["bitmask-bf16", "bitmask-int8", "bitmask-int4"])
def test_a_mask_with_more_bits_than_values_is_refused(name):
    matrix = store(sparse(4, 100), name)
    with pytest.raises(ModelError, match="mask"):
        require_valid(altered(matrix, mask=torch.full_like(matrix.tensors["mask"], -1)))


def test_columns_outside_the_matrix_are_refused():
    matrix = store(sparse(4, 100), "index-bf16")
    with pytest.raises(ModelError, match="indices"):
        require_valid(altered(matrix, indices=torch.full_like(matrix.tensors["indices"], 100)))


def test_columns_that_do_not_ascend_are_refused():
    matrix = store(torch.ones(2, 40), "index-bf16")
    indices = matrix.tensors["indices"].clone()
    indices[[3, 4]] = indices[[4, 3]]
    with pytest.raises(ModelError, match="indices"):
        require_valid(altered(matrix, indices=indices))


def test_negative_zeros_are_entries_with_a_column():
    """Kernels skip entries of zero bits alone; -0.0 with a column before the last one was written outside of memory."""
    matrix = store(torch.ones(2, 40), "index-bf16")
    indices, values = matrix.tensors["indices"].clone(), matrix.tensors["values"].clone()
    indices[[3, 4]] = indices[[4, 3]]
    values[:-PADDING].view(torch.bfloat16)[4] = -0.0
    with pytest.raises(ModelError, match="indices"):
        require_valid(altered(matrix, indices=indices, values=values))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_are_missing_short_or_of_another_dtype_are_refused(name):
    matrix = store(sparse(4, 100), name)
    for part, tensor in matrix.tensors.items():
        with pytest.raises(ModelError, match="damaged"):
            require_valid(StoredMatrix(name, 4, 100, {key: one for key, one in matrix.tensors.items() if key != part}))
        with pytest.raises(ModelError, match="damaged"):
            require_valid(altered(matrix, **{part: tensor[:-1]}))
        with pytest.raises(ModelError, match="damaged"):
            require_valid(altered(matrix, **{part: tensor.to(torch.float16)}))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [64, 172, 300])
def test_weights_on_a_grid_keep_their_values_in_four_bits(bits, columns):
    """Only the scale of a group is rounded, to bfloat16; also where a group does not reach the largest code."""
    torch.manual_seed(0)
    most = 2 ** (bits - 1) - 1
    codes = torch.randint(-most, most + 1, (9, columns)) * (torch.rand(9, columns) < 0.6)
    codes[1] = codes[1].clamp(-1, 1)
    codes[2] = 0
    steps = (0.01 + torch.rand(9, -(-columns // 128))).half().float()
    weight = codes * steps.repeat_interleave(128, 1)[:, :columns]
    found = store(weight, "bitmask-int4").to_dense()
    assert ((found - weight).abs() <= 2**-8 * weight.abs()).all()
    other = torch.randn(9, columns)
    assert (store(other, "bitmask-int4").to_dense() - other).norm() > 0.01 * other.norm()
