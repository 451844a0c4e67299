"""MACKO files: read back entry by entry by a slow reader, and computed with in torch."""

import copy

import pytest
import torch

import iobs
from iobs.errors import ModelError
from iobs.exports.to_macko import packed


def read(values, counts, starts, rows, columns):
    """The matrix of five tensors, one stored entry after the other."""
    found = torch.zeros(int(rows), int(columns), dtype=torch.float16)
    for row in range(int(rows)):
        column = -1
        for place in range(int(starts[row]), int(starts[row + 1])):
            pair = int(counts[place // 2])
            column += 1 + (pair & 15 if place % 2 == 0 else pair >> 4)
            found[row, column] = values[place]
    return found


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 33), (7, 200)])
def test_slow_reader_finds_the_matrix(shape, share):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).half()
    weight[torch.rand(shape, generator=generator) < share] = 0
    parts = packed(weight)
    assert torch.equal(read(*parts), weight)
    assert [one.dtype for one in parts] == [torch.float16, torch.uint8, *[torch.int32] * 3]
    assert len(parts[0]) % 8 == 0
    assert len(parts[1]) == len(parts[0]) // 2


@pytest.mark.parametrize(("zeros", "stored"), [(15, 1), (16, 2), (17, 2), (31, 2), (32, 3)])
def test_long_distances_are_bridged_by_stored_zeros(zeros, stored):
    weight = torch.zeros(2, 40, dtype=torch.float16)
    weight[1, zeros] = 3
    parts = packed(weight)
    assert parts[2].tolist() == [0, 0, stored]
    assert torch.equal(read(*parts), weight)


def test_llama_computes_the_logits_of_its_float16_weights(half_sparse, tokens, tmp_path):
    found = iobs.export(half_sparse, tmp_path / "out", "macko")
    assert found.zeros == found.kept_zeros > 100_000
    stored = torch.load(tmp_path / "out" / "macko_model.pt", weights_only=True)
    names = {one.name.removesuffix("weight") for one in found.matrices}
    assert len(names) == 35
    state = {name: one for name, one in stored.items() if name.rpartition(".")[2][:2] != "c_"}
    for name in names:
        state[f"{name}weight"] = read(*(stored[f"{name}c_{place}"] for place in range(5)))
    again, rounded = copy.deepcopy(half_sparse.module), copy.deepcopy(half_sparse.module)
    again.load_state_dict(state)
    for one in rounded.parameters():  # not the buffers: the angles of positions are in no file
        one.data = one.data.half().float()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, rounded(tokens).logits)
    assert (tmp_path / "out" / "config.json").exists()


def test_other_models_and_large_weights_are_refused(half_sparse, tmp_path):
    with pytest.raises(ModelError, match="self_attn"):
        iobs.export(torch.nn.Linear(4, 4), tmp_path / "out", "macko")
    other = copy.deepcopy(half_sparse.module)
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(ModelError, match="too large"):
        iobs.export(other, tmp_path / "out", "macko")
    assert not (tmp_path / "out").exists()
