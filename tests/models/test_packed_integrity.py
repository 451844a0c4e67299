"""A packed directory that contradicts itself, or lacks tensors of the module, is an error and never wrong weights."""

import struct
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import iobs
from iobs.errors import ModelError
from iobs.models.packed_files import unpack
from iobs.models.packed_tensors import MARK, parts_of, unpack_tensor


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


def signed(data):
    """Changed bytes of a packed tensor with the sum of them, as a hostile file has."""
    return torch.frombuffer(bytearray(data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))), dtype=torch.uint8)


def changed(place, value):
    """The packed tensor of `half_zero` with some bytes from a place on replaced; its mask begins at byte 28."""

    def change(tensors):
        data = bytearray(tensors["weight"].numpy().tobytes())
        data[place : place + len(value)] = value
        tensors["weight"] = signed(bytes(data))

    return change


def cut(tensors):
    tensors["weight"] = signed(tensors["weight"].numpy().tobytes()[:-8])


def flip(tensors):
    tensors["weight"][40] ^= 1


CHANGES = {
    "a bit flipped": flip,
    "cut": cut,
    "a bit of the mask set": changed(28, b"\xff"),
    "a bit of the mask cleared": changed(29, b"\0"),
    "no mask": changed(19, b"\0"),
    "another size of the code": changed(20, b"\x05"),
    "a huge code": changed(20, b"\xff" * 8),
    "another shape": changed(11, struct.pack("<2I", 16, 8)),
    "a huge shape": changed(11, struct.pack("<2I", 2**31, 2**31)),
    "another dtype": changed(9, b"\x02"),
    "an unknown dtype": changed(9, b"\xee"),
    "an unknown form": changed(8, b"\xee"),
    "another mark": changed(0, b"x"),
    "other dimensions": changed(10, b"\xff"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_tensors_are_one_clear_error(change, tmp_path):
    iobs.save_packed(half_zero(), tmp_path / "packed")
    rewrite(tmp_path / "packed" / "model.safetensors", change)
    (tmp_path / "dense").mkdir()
    with pytest.raises(ModelError, match=r"'weight' is truncated or damaged"):
        unpack(tmp_path / "packed", tmp_path / "dense")


@pytest.mark.parametrize("shape", [(2**20, 2**20), (2**32 - 1,) * 7], ids=str)
@pytest.mark.parametrize("mask", [b"", b"\x01" * 9, struct.pack("<Q", 9) + zlib.compress(b"\0")])
def test_claims_of_huge_shapes_take_no_memory_and_are_one_clear_error(mask, shape):
    code = zlib.compress(b"\0")
    form = 0 if not mask else 1 if len(mask) == 9 else 2
    head = MARK + struct.pack(f"<3B{len(shape)}IBQ", 3, 1, len(shape), *shape, form, len(code))
    data = bytes(signed(head + mask + code + b"\0" * 4).numpy())
    for read in (unpack_tensor, parts_of):
        with pytest.raises(ModelError, match="'weight' is truncated or damaged"):
            read(data, "weight")


def test_a_changed_tensor_without_code_is_one_clear_error_and_no_weight_is_touched(tmp_path):
    model = torch.nn.Sequential(half_zero(), torch.nn.LayerNorm(16))
    iobs.save_packed(model, tmp_path / "packed")
    rewrite(tmp_path / "packed" / "model.safetensors", lambda tensors: tensors["iobs:joined"][9].add_(2))
    other = torch.nn.Sequential(half_zero(), torch.nn.LayerNorm(16))
    before = other[0].weight.clone()
    with pytest.raises(ModelError, match="'iobs:joined' has changed"):
        iobs.load_packed(tmp_path / "packed", into=other)
    assert torch.equal(other[0].weight, before)


def test_readers_of_dense_files_say_that_a_directory_is_packed(tmp_path):
    iobs.save_packed(half_zero(), tmp_path / "packed")
    for read in (iobs.audit, lambda path: iobs.save_packed(path, tmp_path / "twice")):
        with pytest.raises(ModelError, match=r"is packed.*--unpack"):
            read(tmp_path / "packed")
    assert not (tmp_path / "twice").exists()


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


def test_a_module_without_values_is_not_filled(tmp_path):
    packed = iobs.save_packed(torch.nn.Linear(64, 64), tmp_path / "packed")
    with pytest.raises(ModelError, match="on the meta device"):
        iobs.load_packed(packed, into=torch.nn.Linear(64, 64, device="meta"))
