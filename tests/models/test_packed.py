"""Packed files: sparse tensors stored without their zeros."""

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from menagerie import two_sparse_layers
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.core.grids import stored_bits
from iobs.core.integers import Integers
from iobs.errors import ModelError, NonFiniteError, OutputError, ProblemError
from iobs.models.packed import packed_share
from iobs.models.packed_files import PackedFile, pack, unpack, unpacked_bytes
from iobs.models.packed_tensors import pack_tensor, parts_of, unpack_tensor


def same_bits(a, b):
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize(
    ("zeros", "dtype", "bits"),
    [
        ("", torch.bfloat16, 10.8),
        ("50%", torch.bfloat16, 6.5),
        ("2:4", torch.bfloat16, 6.1),
        ("90%", torch.float32, 3.3),
    ],
    ids=str,
)
def test_exponents_and_masks_take_the_bits_that_they_need(zeros, dtype, bits):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 512, generator=generator).mul_(0.02)
    if zeros == "2:4":
        groups = weight.reshape(-1, 4)
        groups.scatter_(1, groups.abs().topk(2, dim=1, largest=False).indices, 0.0)
    elif zeros:
        weight[torch.rand(512, 512, generator=generator) < int(zeros[:-1]) / 100] = 0
    data = pack_tensor(weight.to(dtype))
    assert 8 * len(data) < bits * weight.numel()
    assert same_bits(unpack_tensor(data, "weight"), weight.to(dtype))
    assert sum(parts_of(data, "weight").values()) == len(data)


def test_masks_of_the_first_version_are_read():
    weight = torch.randn(6, 7).relu()
    words = weight.flatten().view(torch.int32)
    mask = words != 0
    body = np.packbits(mask.numpy(), bitorder="little").tobytes() + words[mask].numpy().tobytes()
    whole = bytearray(pack_tensor(weight)[:19] + body)
    whole[8] = 2  # the form
    data = bytes(whole) + zlib.crc32(whole).to_bytes(4, "little")
    assert same_bits(unpack_tensor(data, "weight"), weight)
    assert sum(parts_of(data, "weight").values()) == len(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_packed_file_restores_every_tensor_bit_for_bit(dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    dense = {
        "sparse": torch.randn(33, 7, generator=generator).to(dtype),
        "special": torch.tensor([0.0, -0.0, float("nan"), float("inf")] * 30, dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.tensor(0.0, dtype=dtype),
        "zeros": torch.zeros(3, 5, 7, dtype=dtype),
        "integers": torch.arange(10),
        "flags": torch.tensor([True, False]),
    }
    dense["sparse"][torch.rand(33, 7, generator=generator) < 0.6] = 0
    (tmp_path / "model").mkdir()
    save_file(dense, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "packed", tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == dense.keys()
    for name, tensor in dense.items():
        assert again[name].dtype == tensor.dtype
        assert same_bits(again[name], tensor), name


def test_floats_of_8_bits_and_the_smallest_numbers_come_back(tmp_path):
    """torch cannot say the signs of floats of 8 bits; steps of integers below those of bfloat16 are no steps."""
    whole = (torch.arange(4096) % 15 - 7.0).reshape(64, 64)
    dense = {f"{power}": torch.ldexp(whole, torch.tensor(power)) for power in (-149, -126)}
    dense |= {f"{dtype}": (whole > 5).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    save_file(dense, tmp_path / "model.safetensors")
    pack(tmp_path / "model.safetensors", tmp_path / "packed.safetensors")
    again = dict(PackedFile(tmp_path / "packed.safetensors").read())
    assert all(again[name].dtype == dense[name].dtype and same_bits(again[name], dense[name]) for name in dense)


def test_packed_half_sparse_bfloat16_is_at_most_57_percent(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    iobs.prune(model, torch.randn(16, 512).bfloat16(), iobs.Unstructured(0.5), "one-shot", solver="magnitude")
    (tmp_path / "model").mkdir()
    save_file({"weight": model.weight.detach()}, tmp_path / "model" / "model.safetensors")
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    assert packed_share(tmp_path / "model", tmp_path / "packed") <= 0.57


def test_load_packed_fills_a_module(tmp_path):
    model, _ = two_sparse_layers()
    iobs.save_packed(model, tmp_path / "packed")
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    assert iobs.load_packed(tmp_path / "packed", into=other) is other
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ModelError, match="does not fit"):
        iobs.load_packed(tmp_path / "packed", into=torch.nn.Sequential(torch.nn.Linear(3, 3)))
    with pytest.raises(ModelError, match="what module"):
        iobs.load_packed(tmp_path / "packed")
    with pytest.raises(OutputError, match="not empty"):
        iobs.save_packed(model, tmp_path / "packed")


def test_load_packed_restores_a_language_model(shared_data, tmp_path):
    from iobs.models import load

    loaded = load(shared_data / "llama_stories260K")
    tokens = torch.arange(3, 35).reshape(1, 32)
    iobs.prune(loaded.module, {"input_ids": tokens}, 0.5, "one-shot", solver="magnitude", holdout=0)
    iobs.save_packed(loaded, tmp_path / "packed")
    again = iobs.load_packed(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, loaded.module(tokens).logits)


def test_load_packed_names_damaged_files(tmp_path):
    model, _ = two_sparse_layers()
    iobs.save_packed(model, tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ModelError, match="cut short"):
        iobs.load_packed(tmp_path / "packed", into=model)
    file.write_bytes(b"nonsense" * 10)
    with pytest.raises(ModelError, match="damaged"):
        iobs.load_packed(tmp_path / "packed", into=model)
    with pytest.raises(ModelError, match="no packed file"):
        iobs.load_packed(tmp_path / "nowhere")


def test_unpack_names_a_missing_shard_and_writes_nothing(tmp_path):
    (tmp_path / "model").mkdir()
    shards = {f"w{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    for name, shard in shards.items():
        save_file({name: torch.eye(16)}, tmp_path / "model" / shard)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    run = ["pack", "--unpack", str(tmp_path / "packed"), "-o", str(tmp_path / "back")]
    assert CliRunner().invoke(app, run).exit_code == 0
    (tmp_path / "packed" / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model-00001-of-00003\.safetensors is missing"):
        unpack(tmp_path / "packed", tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "packed" / index.name).write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        unpack(tmp_path / "packed", tmp_path / "empty")


def test_packed_file_keeps_unsigned_integers(tmp_path):
    """Unsigned integers are packed unchanged; a dtype that torch lacks is named as such, not as damage."""
    (tmp_path / "model").mkdir()
    dense = {"wide": torch.arange(9).to(torch.uint32), "empty": torch.zeros(0, dtype=torch.uint16)}
    save_file(dense, tmp_path / "model" / "model.safetensors")
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "packed", tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert all(again[name].dtype == dense[name].dtype and same_bits(again[name], dense[name]) for name in dense)
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(ModelError, match="F4 numbers, which iobs cannot handle"):
        iobs.save_packed(tmp_path / "model", tmp_path / "other")


def test_pack_accepts_the_current_directory(tmp_path, monkeypatch):
    model, _ = two_sparse_layers()
    (tmp_path / "model" / "folder").mkdir(parents=True)
    (tmp_path / "model" / "folder" / "file").write_text("x")
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path / "model")
    assert CliRunner().invoke(app, ["pack", "."]).exit_code == 0
    assert CliRunner().invoke(app, ["pack", "--unpack", "../model.packed"]).exit_code == 0
    again = load_file(tmp_path / "model.packed.dense" / "model.safetensors")
    assert all(same_bits(again[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "model.packed.dense" / "folder" / "file").is_file()


def test_packing_takes_no_room_in_the_default_temporary_folder(tmp_path, monkeypatch):
    """It is often small, or lies in main memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    model, _ = two_sparse_layers()
    iobs.save_packed(model, tmp_path / "packed")
    iobs.load_packed(tmp_path / "packed", into=copy.deepcopy(model))
    assert [entry.name for entry in tmp_path.iterdir()] == ["packed"]


def test_packing_asks_for_room_first(tmp_path, monkeypatch):
    model, _ = two_sparse_layers()
    iobs.save_packed(model, tmp_path / "packed")
    dense = sum(value.nbytes for value in model.state_dict().values())
    assert unpacked_bytes(tmp_path / "packed") == dense
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=dense - 1))
    with pytest.raises(OutputError, match="Temporary files need"):
        iobs.save_packed(model, tmp_path / "again")
    assert [entry.name for entry in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: torch.compile(one, backend="eager"),
        nn.DataParallel,
        lambda one: nn.Sequential(torch.compile(one[0], backend="eager"), *one[1:]),
    ],
    ids=["compiled", "parallel", "compiled in part"],
)
def test_wrappers_leave_no_mark_in_packed_files(wrap, tmp_path):
    def network():
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    packed, plain = network(), network()
    iobs.save_packed(wrap(packed), tmp_path / "packed")
    wrapped = wrap(network())
    iobs.load_packed(tmp_path / "packed", into=plain)
    iobs.load_packed(tmp_path / "packed", into=wrapped)
    x = torch.randn(3, 16)
    assert torch.equal(plain(x), packed(x))
    assert torch.equal(wrapped(x), packed(x))


def test_complex_tensors_are_named(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].phase = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    with pytest.raises(ModelError, match=r"^0\.phase holds complex64 numbers"):
        iobs.save_packed(model, tmp_path / "packed")
    assert not [*tmp_path.iterdir()]


def test_stacked_experts_and_projections_have_a_code_for_each_matrix(tmp_path):
    def coded(seed):
        generator = torch.Generator().manual_seed(seed)
        codes = (torch.randn(96, 64, generator=generator) * 3).round().to(torch.int16)
        steps = (torch.randint(128, 256, (64,), generator=generator) / 256).float()
        return Integers(codes, steps, torch.ones(96)).weight(torch.float32)

    experts, projections = torch.stack([coded(seed) for seed in range(4)]), torch.cat([coded(9), coded(8), coded(7)])
    tensors = {"experts": experts, "projections": projections}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    assert packed_share(tmp_path / "model", tmp_path / "packed") < 5 / 32
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "packed", tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert all(same_bits(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"version": 1, "sums": {"bias": "a"}, "dtypes": {}}, "no packed file"),
        ({"version": 1, "sums": {}, "dtypes": {"bias": "nn"}}, "no packed file"),
        ({"version": 1, "sums": {"weight": 1}, "dtypes": {}}, "is not there"),
        ({"version": 1, "sums": {}, "dtypes": {}}, "'bias' is truncated or damaged"),
        ({"version": 3, "tensors": "bb", "sums": ""}, "no packed file"),
        ({"version": 3, "tensors": "B", "sums": ""}, "no packed file"),
        ({"version": 3, "tensors": "B", "sums": '"'}, "no packed file"),
        ({"version": 3, "tensors": "z", "sums": ""}, "no packed file"),
        ({"version": 3, "tensors": 1, "sums": ""}, "no packed file"),
        ({"version": 3, "tensors": "b", "sums": ""}, "'bias' is truncated or damaged"),
        ({"version": 3, "tensors": "B", "sums": "", "joined": ""}, "no packed file"),
        (3, "no packed file"),
    ],
)
def test_damaged_metadata_is_one_clear_error(stated, message, tmp_path):
    (tmp_path / "packed").mkdir()
    metadata = {"iobs_packed": json.dumps(stated)}
    save_file({"bias": torch.ones(3)}, tmp_path / "packed" / "model.safetensors", metadata)
    with pytest.raises(ModelError, match=message):
        unpacked_bytes(tmp_path / "packed")


def test_files_of_version_2_are_read(tmp_path):
    """They name tensors in the metadata."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    model[0].weight.data = model[0].weight.data.bfloat16().float().relu()
    state = model.state_dict()
    code = torch.frombuffer(bytearray(pack_tensor(state["0.weight"].bfloat16())), dtype=torch.uint8)
    sums = {name: zlib.crc32(value.numpy().tobytes()) for name, value in state.items() if name != "0.weight"}
    stated = json.dumps({"version": 2, "sums": sums, "dtypes": {"0.weight": "float32"}})
    save_file({**state, "0.weight": code}, tmp_path / "model.safetensors", {"format": "pt", "iobs_packed": stated})
    again = iobs.load_packed(tmp_path, into=nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))).state_dict()
    assert all(same_bits(again[name], value) for name, value in state.items())


def test_small_tensors_that_are_stored_as_they_are_take_few_bytes_of_the_header(tmp_path):
    torch.manual_seed(0)
    tensors = {f"layers.{number}.norm.weight": torch.randn(4) for number in range(100)}
    tensors |= {"count": torch.tensor(3), "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False])}
    tensors |= {"large": torch.randint(-(2**62), 2**62, (2**14,))}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    headers = []
    for config in (False, True):  # transformers reads tensors by their names
        if config:
            (tmp_path / "model" / "config.json").write_text("{}")
        file = iobs.save_packed(tmp_path / "model", tmp_path / f"packed{config}") / "model.safetensors"
        headers.append(int.from_bytes(file.read_bytes()[:8], "little"))
        again = dict(PackedFile(file).read())
        assert again.keys() == tensors.keys()
        assert all(
            same_bits(again[name], value) and again[name].shape == value.shape for name, value in tensors.items()
        )
        assert (
            sum(sum(parts.values()) for parts in PackedFile(file).parts().values())
            == file.stat().st_size - 8 - headers[-1]
        )
    assert headers[0] < 100 * 10
    assert headers[1] < 104 * 90  # dtype, shape, place and sum of each


def test_numbers_of_a_checkpoint_in_bfloat16_take_16_bits_and_come_back_in_32(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(64, 32)
    model.weight.data.copy_(model.weight.data.bfloat16())
    iobs.save_packed(model, tmp_path / "packed")
    assert (tmp_path / "packed" / "model.safetensors").stat().st_size < 2 * 64 * 32 + 400
    again = iobs.load_packed(tmp_path / "packed", into=nn.Embedding(64, 32))
    assert same_bits(again.weight.data, model.weight.data)


def test_the_rest_is_rounded_on_demand(tmp_path):
    torch.manual_seed(0)
    codes = (torch.randn(64, 64) * 3).round().to(torch.int16)
    model = nn.Linear(64, 64)
    model.weight.data = Integers(codes, torch.full((64,), 0.75), torch.ones(64)).weight(torch.float32)
    iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16)
    again = iobs.load_packed(tmp_path / "packed", into=nn.Linear(64, 64))
    assert same_bits(again.weight.data, model.weight.data)
    assert same_bits(again.bias.data, model.bias.data.half().float())  # of a vector the nearer format of 16 bits
    with pytest.raises(ProblemError, match="not both"):
        iobs.save_packed(model, tmp_path / "other", precision="int8", dtype=torch.bfloat16)
    model.bias.data[0] = 1e30
    with pytest.raises(NonFiniteError, match="bias has numbers"):
        iobs.save_packed(model, tmp_path / "other", dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", [iobs.Grid(3), iobs.Unstructured(0.5) & iobs.Grid(4, 32), iobs.Grid(8)], ids=str)
def test_grids_take_mask_codes_and_scales_and_no_more(pattern, dtype, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=False).to(dtype))
    iobs.prune(model, torch.randn(64, 256).to(dtype), pattern, "one-shot", include="*")
    iobs.save_packed(model, tmp_path / "packed")
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size
    assert 8 * (size - 400) <= stored_bits(pattern, (128, 256))
    again = iobs.load_packed(tmp_path / "packed", into=nn.Sequential(nn.Linear(256, 128, bias=False).to(dtype)))
    assert torch.equal(again[0].weight, model[0].weight)


def test_a_matrix_of_zeros_takes_no_bit_for_each_entry(tmp_path):
    layer = nn.Linear(512, 256)
    nn.init.zeros_(layer.weight)
    file = iobs.save_packed(layer, tmp_path / "packed") / "model.safetensors"
    assert file.stat().st_size < layer.bias.nbytes + 1024
    assert torch.equal(iobs.load_packed(tmp_path / "packed", into=nn.Linear(512, 256)).weight, layer.weight)


PEAK = """
import sys, threading, time
import torch
from safetensors.torch import save_file
import iobs
from iobs.core.memory import resident

torch.set_num_threads(1)
folder, matrix = sys.argv[1], torch.randn(3072, 2048).bfloat16()
save_file({"weight": torch.eye(64)}, f"{folder}/small/model.safetensors")
save_file({"weight": eval(sys.argv[2])}, f"{folder}/large/model.safetensors")
size, running = matrix.nbytes, True
del matrix
iobs.save_packed(f"{folder}/small", f"{folder}/first")  # what stays in memory
before = peak = resident()

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
iobs.save_packed(f"{folder}/large", f"{folder}/second")
running = False
thread.join()
print((peak - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory that no file backs")
@pytest.mark.parametrize("weight", ["matrix", "matrix.relu()", "(matrix * 3).round() / 64"])
def test_packing_takes_little_more_memory_than_the_matrix(weight, tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    each_is_given_back = dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    run = [sys.executable, "-c", PEAK, str(tmp_path), weight]
    found = subprocess.run(run, capture_output=True, text=True, check=True, env=each_is_given_back)
    assert float(found.stdout) < 3


def test_a_share_is_of_the_dense_bytes_also_where_the_source_is_packed(tmp_path):
    layer = nn.Linear(512, 256, bias=False)
    nn.init.zeros_(layer.weight)
    packed = iobs.save_packed(layer, tmp_path / "packed")
    assert packed_share(packed, packed) < 0.01
