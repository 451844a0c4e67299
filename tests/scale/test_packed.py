"""Packed weights come back bit for bit and take little room; zeros survive training and pruning again."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.errors import LayerSelectionError, ModelError, OutputError
from iobs.models.packed import packed_share, unpack


def pruned(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(dtype)
    data = torch.randn(128, 64).to(dtype)
    iobs.prune(model, data, iobs.Unstructured(0.5), solver="sparsegpt")
    return model, data


def same_bits(a, b):
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def zeros(model):
    return {name: value == 0 for name, value in model.named_parameters() if value.ndim > 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_kind_of_tensor_comes_back_bit_for_bit(dtype, tmp_path):
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


def test_half_sparse_bfloat16_takes_at_most_57_per_cent(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    iobs.prune(model, torch.randn(64, 1024).bfloat16(), iobs.Unstructured(0.5), solver="magnitude")
    (tmp_path / "model").mkdir()
    save_file({"weight": model.weight.detach()}, tmp_path / "model" / "model.safetensors")
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    assert packed_share(tmp_path / "model", tmp_path / "packed") <= 0.57


def test_modules_come_back_into_a_module(tmp_path):
    model, _ = pruned()
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


def test_language_models_come_back_whole(shared_data, tmp_path):
    from iobs.models import load

    loaded = load(shared_data / "llama_stories260K")
    tokens = torch.arange(3, 35).reshape(1, 32)
    iobs.prune(loaded.module, {"input_ids": tokens}, iobs.Unstructured(0.5), solver="magnitude", holdout=0)
    iobs.save_packed(loaded, tmp_path / "packed")
    again = iobs.load_packed(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, loaded.module(tokens).logits)


def test_damage_is_a_clear_error(tmp_path):
    model, _ = pruned()
    iobs.save_packed(model, tmp_path / "packed")
    file = tmp_path / "packed" / "model.packed"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ModelError, match="cut short"):
        iobs.load_packed(tmp_path / "packed", into=model)
    file.write_bytes(b"nonsense" * 10)
    with pytest.raises(ModelError, match="damaged"):
        iobs.load_packed(tmp_path / "packed", into=model)
    with pytest.raises(ModelError, match=r"no \.packed file"):
        iobs.load_packed(tmp_path / "nowhere")


def test_a_missing_shard_is_named_before_the_work(tmp_path):
    (tmp_path / "model").mkdir()
    shards = {f"w{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    for name, shard in shards.items():
        save_file({name: torch.eye(16)}, tmp_path / "model" / shard)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    iobs.save_packed(tmp_path / "model", tmp_path / "packed")
    run = ["pack", "--unpack", str(tmp_path / "packed"), "-o", str(tmp_path / "back")]
    assert CliRunner().invoke(app, run).exit_code == 0
    (tmp_path / "packed" / "model-00001-of-00003.packed").unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"lacks 1 packed files, model-00001-of-00003\.packed"):
        unpack(tmp_path / "packed", tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "packed" / index.name).write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        unpack(tmp_path / "packed", tmp_path / "empty")


def test_kinds_of_numbers(tmp_path):
    """Unsigned integers are packed as they are; what torch cannot hold is named, not called damaged."""
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


def test_the_current_directory_can_be_packed(tmp_path, monkeypatch):
    model, _ = pruned()
    (tmp_path / "model" / "folder").mkdir(parents=True)
    (tmp_path / "model" / "folder" / "file").write_text("x")
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path / "model")
    assert CliRunner().invoke(app, ["pack", "."]).exit_code == 0
    assert CliRunner().invoke(app, ["pack", "--unpack", "../model.packed"]).exit_code == 0
    again = load_file(tmp_path / "model.packed.dense" / "model.safetensors")
    assert all(same_bits(again[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "model.packed.dense" / "folder" / "file").is_file()


@pytest.mark.parametrize("wrapped", ["adam", "sgd"])
def test_zeros_survive_fifty_steps(wrapped):
    model, data = pruned()
    before = zeros(model)
    options = {
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }
    optimizer = options[wrapped]()
    handle = iobs.keep_sparse(model, optimizer)
    start = model[0].weight.detach().clone()
    for _ in range(50):
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, start)
    assert all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before))
    handle.remove()
    optimizer.zero_grad()
    (model(data) - data).square().mean().backward()
    optimizer.step()
    assert any((value[mask] != 0).any() for (_, value), mask in _pairs(model, before))


def _pairs(model, masks):
    return [((name, value), masks[name]) for name, value in model.named_parameters() if name in masks]


def test_nothing_to_keep_is_an_error():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(LayerSelectionError, match="no zeros"):
        iobs.keep_sparse(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_zeros_survive_a_line_search_that_sees_only_them():
    model, data = pruned()
    before = zeros(model)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    iobs.keep_sparse(model, optimizer)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        seen.append(all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before)))
        return loss

    optimizer.step(closure)
    assert len(seen) > 2
    assert all(seen)


def test_a_gradient_of_nan_at_a_zero_leaves_it_a_zero():
    model, _ = pruned()
    before = zeros(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iobs.keep_sparse(model, optimizer)
    for (_, value), mask in _pairs(model, before):
        value.grad = torch.where(mask, torch.nan, 0.1)
    optimizer.step()
    assert all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before))


def test_frozen_matrices_and_sparse_gradients_are_kept():
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4, padding_idx=0, sparse=True), torch.nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[:2] = 0
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iobs.keep_sparse(model, optimizer)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    assert not model[0].weight[0].any()
    assert not model[1].weight[:2].any()


def test_a_matrix_that_is_not_trained_yet_is_not_kept():
    model, data = pruned()
    adapter = torch.nn.Linear(model[0].in_features, model[0].in_features, bias=False)
    torch.nn.init.zeros_(adapter.weight)
    whole = torch.nn.Sequential(adapter, *model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"0\.weight: all zeros"):
        handle = iobs.keep_sparse(whole, optimizer)
    assert adapter.weight not in handle.masks
    (whole(data) - data).square().mean().backward()
    optimizer.step()
    assert adapter.weight.any()


@pytest.mark.parametrize("solver", ["magnitude", "wanda", "sparsegpt", "obc", "admm"])
def test_pruning_further_keeps_the_old_zeros(solver):
    model, data = pruned()
    before = zeros(model)
    report = iobs.prune(model, data, iobs.Unstructured(0.7), solver=solver, keep_zeros=True)
    assert report.sparsity == pytest.approx(0.7, abs=1e-3)
    for (_, value), mask in _pairs(model, before):
        assert (value[mask] == 0).all()
