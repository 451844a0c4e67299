"""Files whose tensors are not those of the module: experts one by one, other names, as hub checkpoints have them."""

import shutil

import families
import pytest
import torch
from families import prune_directory
from safetensors.torch import load_file, save_file

import iobs
from iobs.errors import ModelError
from iobs.models import load
from iobs.models.directory import ConversionRule, Directory
from iobs.models.skeleton import skeleton
from iobs.pruning.recipe import BlockFit

OPTIONS = {"solver": "sparsegpt"}
NAME = "model.safetensors"


def streamed(folder, data, dtype=torch.bfloat16, **options):
    return prune_directory(folder / "model", folder / "out", data, iobs.Unstructured(0.5), arithmetic=dtype, **options)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("mixtral", None),
        ("qwen3_moe", None),
        ("mixtral", BlockFit(masks=2, steps=2, between=1, lr=1e-2, network_steps=2, network_lr=1e-3)),
    ],
)
def test_streamed_mixture_equals_pruning_in_memory_with_the_tensors_of_its_files(name, blocks, tmp_path):
    dtype = torch.bfloat16 if blocks is None else torch.float32  # steps of a mixture differ by rounding in 16 bits
    families.saved(name, tmp_path / "model", dtype)
    data, options = families.language_batches(count=2), {**OPTIONS, "blocks": blocks, "holdout": 0.25}
    report = streamed(tmp_path, data, dtype, **options)
    model = load(tmp_path / "model", dtype=dtype).module
    whole = iobs.prune(
        model, data, 0.5, iobs.Recipe(target="residual"), include=[row.name for row in report.audit], **options
    )
    model.save_pretrained(tmp_path / "whole")
    before, expected, found = (load_file(tmp_path / one / NAME) for one in ("model", "whole", "out"))
    assert any(".experts.0." in key for key in found)
    assert before.keys() == expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert (report.zeros, [row.zeros for row in report.audit]) == (whole.zeros, [row.zeros for row in whole.audit])


def test_experts_in_several_shards_become_one_tensor(tmp_path):
    families.saved("mixtral", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "model")
    load(tmp_path / "model").module.to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="4KB")
    (tmp_path / "model" / NAME).unlink()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    data = families.language_batches()
    streamed(tmp_path, data, **OPTIONS)
    prune_directory(
        tmp_path / "whole", tmp_path / "one", data, iobs.Unstructured(0.5), arithmetic=torch.bfloat16, **OPTIONS
    )
    shards = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    found = {name: value for shard in shards.values() for name, value in shard.items()}
    expected = load_file(tmp_path / "one" / NAME)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for file, tensors in shards.items():
        assert tensors.keys() == load_file(tmp_path / "model" / file).keys()


def test_files_that_lack_the_prefix_of_the_module_keep_their_names(tmp_path):
    families.saved("gpt2", tmp_path / "model")
    data, file = families.language_batches(), tmp_path / "model" / NAME
    prune_directory(
        tmp_path / "model", tmp_path / "usual", data, iobs.Unstructured(0.5), arithmetic=torch.bfloat16, **OPTIONS
    )
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    streamed(tmp_path, data, **OPTIONS)
    expected, found = load_file(tmp_path / "usual" / NAME), load_file(tmp_path / "out" / NAME)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name.removeprefix("transformer.")], value) for name, value in expected.items())


def test_expert_that_is_left_out_keeps_its_bits(tmp_path):
    families.saved("mixtral", tmp_path / "model")
    names = {"include": "*.experts.*", "ignore": "*layers.0.*_proj.2"}
    report = streamed(tmp_path, families.language_batches(), **names, **OPTIONS)
    assert len(report.audit) == 2 * 2 * 4 - 2
    before, found = load_file(tmp_path / "model" / NAME), load_file(tmp_path / "out" / NAME)
    same = {name for name, value in before.items() if torch.equal(found[name], value)}
    experts = {name for name in before if ".experts." in name}
    assert experts & same == {name for name in experts if ".layers.0." in name and ".experts.2." in name}
    assert before.keys() - experts <= same
    zeros = sum(int((found[name] == 0).sum()) for name in experts)
    assert zeros >= sum(row.zeros for row in report.audit)


def test_names_of_the_files_are_read_and_written_through_the_conversion(tmp_path):
    model = families.saved("mixtral", tmp_path / "model")
    directory = Directory(tmp_path / "model")
    stored = load_file(tmp_path / "model" / NAME)
    directory.use_names_of(skeleton(tmp_path / "model"))
    state = model.state_dict()
    assert directory.entries.keys() == state.keys()
    assert all(entry.shape == tuple(state[name].shape) for name, entry in directory.entries.items())
    read = dict(directory.read([*state]))
    assert all(torch.equal(read[name], value) for name, value in state.items())
    one = "model.layers.1.mlp.experts.down_proj"
    written = {name: tensor for name, tensor, _ in directory.write([one], {one: read[one] * 2})}
    assert written.keys() == {f"model.layers.1.block_sparse_moe.experts.{number}.w2.weight" for number in range(4)}
    assert all(torch.equal(value, stored[name] * 2) for name, value in written.items())
    same = {name: tensor for name, tensor, _ in directory.write([one], {})}
    assert same.keys() == written.keys()
    assert all(torch.equal(value, stored[name]) for name, value in same.items())


@pytest.mark.parametrize("broken", [lambda found: {}, lambda found: {name: one * 0 for name, one in found.items()}])
def test_conversion_without_a_way_back_is_refused_before_any_work(broken, tmp_path, monkeypatch):
    families.saved("mixtral", tmp_path / "model")
    convert = ConversionRule.__call__

    def call(rule, tensors):
        found = convert(rule, tensors)
        return broken(found) if len(found) > 1 else found  # from the module to experts

    monkeypatch.setattr(ConversionRule, "__call__", call)
    with pytest.raises(ModelError, match=r"experts\.0\.w. *\.weight is converted .* in memory") as error:
        streamed(tmp_path, families.language_batches(), **OPTIONS)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def changed_files(folder, change):
    file = folder / "model" / NAME
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("lost", ["experts.2.w1.", "experts.2.", "experts.3."])
def test_expert_that_the_files_lack_is_named_as_missing(lost, tmp_path):
    families.saved("mixtral", tmp_path / "model")
    gone = f"1.block_sparse_moe.{lost}"
    changed_files(tmp_path, lambda found: {name: one for name, one in found.items() if gone not in name})
    with pytest.raises(
        ModelError, match=r"layers\.1\..*\.0\.w.*do not make up model\.layers\.1\.mlp.*complete the files"
    ):
        streamed(tmp_path, families.language_batches(), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "own", "spare"),
    [
        ("gpt2", "transformer.wte.weight", "wte.weight"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
    ],
)
def test_second_tensor_for_one_place_is_written_unchanged(name, own, spare, tmp_path):
    families.saved(name, tmp_path / "model")

    def doubled(found):
        value = found.pop(own, None)
        value = found.pop(spare) if value is None else value
        return found | {own: value, spare: value.clone()}

    changed_files(tmp_path, doubled)
    with pytest.warns(UserWarning, match=f"1 tensors that .* has no place for, {spare}"):
        streamed(tmp_path, families.language_batches(), **OPTIONS)
    before, found = load_file(tmp_path / "model" / NAME), load_file(tmp_path / "out" / NAME)
    assert before.keys() == found.keys()
    assert torch.equal(found[spare], before[spare])


def test_mixture_without_the_prefix_of_its_module_keeps_its_names(tmp_path):
    families.saved("mixtral", tmp_path / "model")
    data = families.language_batches()
    streamed(tmp_path, data, **OPTIONS)
    expected = load_file(tmp_path / "out" / NAME)
    (tmp_path / "out").rename(tmp_path / "usual")
    changed_files(tmp_path, lambda found: {name.removeprefix("model."): one for name, one in found.items()})
    streamed(tmp_path, data, **OPTIONS)
    found = load_file(tmp_path / "out" / NAME)
    assert found.keys() == {name.removeprefix("model.") for name in expected}
    assert all(torch.equal(found[name.removeprefix("model.")], value) for name, value in expected.items())


def test_expert_left_out_keeps_its_bits_in_narrower_arithmetic(tmp_path):
    families.saved("mixtral", tmp_path / "model", torch.float32)
    names = {"include": "*.experts.*", "ignore": "*_proj.2"}
    streamed(tmp_path, families.language_batches(), torch.bfloat16, **names, **OPTIONS)
    before, found = load_file(tmp_path / "model" / NAME), load_file(tmp_path / "out" / NAME)
    assert all(torch.equal(found[name], value) for name, value in before.items() if ".experts.2." in name)
    assert not any(torch.equal(found[name], value) for name, value in before.items() if ".experts.1." in name)
