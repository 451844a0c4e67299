"""A packed directory that contradicts itself, or lacks tensors of the module, is an error and never wrong weights."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import iobs
from iobs.errors import ModelError
from iobs.models.packed_files import unpack


def half_zero(size=16):
    layer = torch.nn.Linear(size, size, bias=False)
    with torch.no_grad():
        layer.weight[:, : size // 2] = 0
    return layer


def rewrite(file, change):
    """Write a packed file again with its tensors changed by `change(tensors)`."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a mapping
        metadata = opened.metadata()
    change(tensors)
    save_file(tensors, file, metadata)


def clear_bit(tensors):
    mask = tensors["weight:mask"]
    byte = int((mask != 0).nonzero()[0])
    mask[byte] = mask[byte] & (mask[byte] - 1)


def set_bit(tensors):
    mask = tensors["weight:mask"]
    byte = int((mask == 0).nonzero()[0])
    mask[byte] = 1


def drop_value(tensors):
    tensors["weight:values"] = tensors["weight:values"][:-1].clone()


def keep_one_value(tensors):
    # One value would be broadcast into every place of the mask.
    tensors["weight:values"] = tensors["weight:values"][:1].clone()


@pytest.mark.parametrize("change", [clear_bit, set_bit, drop_value, keep_one_value])
def test_unpack_raises_if_mask_and_values_disagree(change, tmp_path):
    iobs.save_packed(half_zero(), tmp_path / "packed")
    rewrite(tmp_path / "packed" / "model.packed", change)
    (tmp_path / "dense").mkdir()
    with pytest.raises(ModelError, match=r"mask and the values of 'weight' do not agree"):
        unpack(tmp_path / "packed", tmp_path / "dense")


@pytest.mark.parametrize(
    "shapes",
    [
        "[1]",
        '{"weight": 5}',
        '{"weight": [-16, -16]}',
        '{"weight": [16, 32]}',
        '{"weight": [1099511627776]}',
        '{"x": [4]}',
    ],
)
def test_unpack_refuses_shapes_that_the_masks_do_not_have(shapes, tmp_path):
    """No room is taken for a shape before its mask is found."""
    iobs.save_packed(half_zero(), tmp_path / "packed")
    file = tmp_path / "packed" / "model.packed"
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a mapping
    save_file(tensors, file, {"iobs_shapes": shapes})
    (tmp_path / "dense").mkdir()
    with pytest.raises(ModelError, match=r"model\.packed is damaged \(shape, mask and values"):
        unpack(tmp_path / "packed", tmp_path / "dense")
    assert not [*(tmp_path / "dense").iterdir()]


@pytest.mark.parametrize("part", ["mask", "values"])
def test_unpack_refuses_a_tensor_without_mask_or_values(part, tmp_path):
    iobs.save_packed(half_zero(), tmp_path / "packed")
    rewrite(tmp_path / "packed" / "model.packed", lambda tensors: tensors.pop(f"weight:{part}"))
    (tmp_path / "dense").mkdir()
    with pytest.raises(ModelError, match="mask and values of 'weight'"):
        unpack(tmp_path / "packed", tmp_path / "dense")


def test_damaged_weights_are_not_packed(tmp_path):
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    save_file({"weight": torch.eye(16)}, file)
    file.write_bytes(file.read_bytes().replace(b"[16,16]", b"[16,17]"))
    with pytest.raises(ModelError, match="is damaged"):
        iobs.save_packed(file.parent, tmp_path / "packed")


def test_load_packed_raises_if_module_has_more_weights(tmp_path):
    small = torch.nn.Sequential(half_zero())
    iobs.save_packed(small, tmp_path / "packed")
    large = torch.nn.Sequential(half_zero(), half_zero())
    with pytest.raises(ModelError, match=r"lack 1 weights of the module, 1\.weight the first"):
        iobs.load_packed(tmp_path / "packed", into=large)


def test_load_packed_raises_if_file_lacks_a_buffer(tmp_path):
    iobs.save_packed(torch.nn.Sequential(half_zero()), tmp_path / "packed")
    module = torch.nn.Sequential(half_zero())
    module.register_buffer("scale", torch.ones(3))
    with pytest.raises(ModelError, match=r"lack 1 weights of the module, scale the first"):
        iobs.load_packed(tmp_path / "packed", into=module)
