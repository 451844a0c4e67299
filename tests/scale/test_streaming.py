"""Block by block from files to files gives what pruning in memory gives; hostile directories leave nothing behind."""

import json
import shutil
import sys
from types import SimpleNamespace

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app
from iobs.errors import (
    DistributedError,
    LayerSelectionError,
    ModelError,
    NonFiniteError,
    OutputError,
    ProblemError,
)
from iobs.models import load
from iobs.models.streaming import prune_directory
from iobs.prune import distributed, memory
from iobs.prune.block_walk import reserve, spilled_to
from iobs.prune.progress import Quiet
from iobs.report import read_report

OPTIONS = {"solver": "sparsegpt", "holdout": 0.0}
NAMES = ("opt", "llama", "qwen3", "gemma3", "phi3", "gpt2", "bloom", "falcon", "mamba")


def directory(name, folder, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = families.LANGUAGE_MODELS[name][0]().to(dtype).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_block_by_block_equals_in_memory(name, tmp_path):
    directory(name, tmp_path / "model")
    model, data = load(tmp_path / "model").module, families.language_batches()
    same = {**OPTIONS, "arithmetic": torch.bfloat16}  # as the network in memory computes, whatever the processor
    report = prune_directory(tmp_path / "model", tmp_path / "out", data, iobs.Unstructured(0.5), **same)
    whole = iobs.prune(model, data, iobs.Unstructured(0.5), **OPTIONS)
    model.save_pretrained(tmp_path / "whole")
    assert [row.zeros for row in report.audit] == [row.zeros for row in whole.audit]
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not list(tmp_path.glob(".*"))


def test_held_out_samples_and_old_zeros_block_by_block(tmp_path):
    directory("llama", tmp_path / "model")
    data = families.language_batches()
    one = prune_directory(tmp_path / "model", tmp_path / "one", data, iobs.Unstructured(0.4), holdout=0.25)
    assert all(entry.error_heldout is not None for entry in one.best.layers)
    further = {"keep_zeros": True, "solver": "magnitude", "refine": "refit"}
    prune_directory(tmp_path / "one", tmp_path / "two", data, iobs.Unstructured(0.6), **further)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in (f"{row.name}.weight" for row in one.audit):
        assert not after[name][before[name] == 0].any()
        assert (after[name] == 0).sum() > (before[name] == 0).sum()


def test_blocks_may_be_computed_in_another_dtype_than_they_are_stored_in(tmp_path):
    directory("llama", tmp_path / "model")
    arguments = families.language_batches(), iobs.Unstructured(0.5)
    reports = {}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        reports[dtype] = prune_directory(tmp_path / "model", out, *arguments, arithmetic=dtype, **OPTIONS)
        tensors = load_file(out / "model.safetensors")
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
        for row in reports[dtype].audit:
            assert row.zeros == row.asked == int((tensors[f"{row.name}.weight"] == 0).sum())
    for ours, theirs in zip(*(report.best.layers for report in reports.values()), strict=True):
        assert ours.error_calibration == pytest.approx(theirs.error_calibration, rel=0.15)


def converted(file, dtypes):
    """Store the tensors whose name holds a word in another dtype; the last word counts."""
    stored = load_file(file)
    tensors = dict(stored)
    for word, dtype in dtypes.items():
        tensors |= {name: tensor.to(dtype) for name, tensor in stored.items() if word in name}
    save_file(tensors, file, {"format": "pt"})
    return tensors


def test_what_is_not_pruned_is_copied_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    model = families.LANGUAGE_MODELS["llama"][0]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # norms are made as ones, which no dtype rounds
    model.save_pretrained(tmp_path / "model")
    narrow = {"": torch.bfloat16, "norm": torch.float32, "k_proj": torch.float32}
    before = converted(tmp_path / "model" / "model.safetensors", narrow)
    arguments = tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5)
    report = prune_directory(*arguments, skip="*.k_proj", arithmetic=torch.bfloat16, **OPTIONS)
    pruned = {f"{row.name}.weight" for row in report.audit}
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]) == (name not in pruned), name


def test_blocks_are_computed_in_the_widest_dtype_of_what_is_pruned(tmp_path):
    directory("llama", tmp_path / "model", torch.float32)
    file = tmp_path / "model" / "model.safetensors"
    before = converted(file, {"embed": torch.bfloat16})
    arguments = tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5)
    report = prune_directory(*arguments, solver="magnitude")
    assert report.settings["arithmetic"] == "torch.float32"
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in after.items():
        assert torch.equal(tensor, torch.where(tensor == 0, 0, before[name])), name
    shutil.rmtree(tmp_path / "out")
    converted(file, {"up_proj": torch.float8_e4m3fn})
    with pytest.raises(ModelError, match=r"up_proj\.weight is quantised"):
        prune_directory(*arguments)


def test_a_checkpoint_ends_in_the_same_bits(tmp_path):
    directory("llama", tmp_path / "model")
    data = families.language_batches()

    class Stop(Exception):
        pass

    class StopsAtNinth(Quiet):
        seen = 0

        def layer(self, *_):
            self.seen += 1
            if self.seen == 9:
                raise Stop

    arguments = (data, iobs.Unstructured(0.5))
    prune_directory(tmp_path / "model", tmp_path / "undisturbed", *arguments, **OPTIONS)
    with pytest.raises(Stop):
        prune_directory(
            tmp_path / "model",
            tmp_path / "out",
            *arguments,
            checkpoint=tmp_path / "run",
            progress=StopsAtNinth(),
            **OPTIONS,
        )
    assert not (tmp_path / "out").exists()
    prune_directory(tmp_path / "model", tmp_path / "out", *arguments, checkpoint=tmp_path / "run", **OPTIONS)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "out"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_plan_comes_before_the_work(tmp_path):
    directory("llama", tmp_path / "model")
    told = []

    def announce(plan):
        told.append(plan)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_directory(
            tmp_path / "model",
            tmp_path / "out",
            families.language_batches(),
            iobs.Unstructured(0.5),
            announce=announce,
            **OPTIONS,
        )
    assert told[0].layers == 14
    assert told[0].peak_bytes > told[0].model_bytes > 0
    assert not (tmp_path / "out").exists()


def test_what_needs_the_whole_network_is_refused(tmp_path):
    directory("llama", tmp_path / "model")
    arguments = tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4)
    for setting in ({"rounds": 3}, {"allocation": "kl"}, {"batch_norm": "update"}, {"data": "fresh"}):
        with pytest.raises(ProblemError, match=f"{next(iter(setting))}: not with one block in memory"):
            prune_directory(*arguments, **setting)
    assert not (tmp_path / "out").exists()


def test_a_layer_whose_weight_is_not_finite_is_named(tmp_path):
    model = directory("llama", tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NonFiniteError, match=r"weight of layer 'model\.layers\.1\.mlp\.up_proj'"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))
    assert not (tmp_path / "out").exists()


def test_the_c_library_is_as_it_was_afterwards(tmp_path):
    directory("llama", tmp_path / "model")
    before = memory._thresholds
    prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))
    assert memory._thresholds == before


def test_one_process_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "current", lambda: distributed.Ranks(1, 2))
    with pytest.raises(DistributedError, match="one process"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))


def test_a_disk_without_room_is_found_before_the_work(tmp_path, monkeypatch):
    directory("llama", tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))

    class NoWork(Quiet):
        def begin(self, *_):
            pytest.fail("the work has begun")

    with pytest.raises(OutputError, match="MB left"):
        prune_directory(
            tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4), progress=NoWork()
        )


def test_the_output_appears_with_all_that_belongs_into_it(tmp_path):
    directory("llama", tmp_path / "model")
    (tmp_path / "model" / "templates").mkdir()
    (tmp_path / "model" / "templates" / "tool.jinja").write_text("x")

    def complete(report, folder):
        assert report.zeros > 0
        assert not (tmp_path / "out").exists()
        (folder / "README.md").write_text("mine")

    batches = families.language_batches()
    prune_directory(tmp_path / "model", tmp_path / "out", batches, iobs.NM(2, 4), complete=complete, **OPTIONS)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert (tmp_path / "out" / "templates" / "tool.jinja").is_file()
    assert not list((tmp_path / "out").glob("tmp*"))


def test_shards_that_the_index_does_not_name_stay_behind(tmp_path):
    model = directory("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="5KB")
    stale = tmp_path / "model" / "model-00099-of-00099.safetensors"
    save_file({"model.norm.weight": torch.zeros(16)}, stale)
    save_file({"other": torch.zeros(1)}, tmp_path / "model" / "consolidated.safetensors")
    prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4), **OPTIONS)
    written = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert written == {file.name for file in (tmp_path / "model").glob("*-of-*.safetensors")} - {stale.name}
    norm = load(tmp_path / "out").module.state_dict()["model.norm.weight"]
    assert torch.equal(norm, model.state_dict()["model.norm.weight"])


def test_an_unknown_architecture_is_one_line(tmp_path):
    directory("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "t5", "architectures": None}))
    with pytest.raises(ModelError) as raised:
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 400


def test_low_memory_from_the_command_line(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    options = ["--low-memory", "--data", str(text), "--samples", "8", "--seq-len", "32", "--solver", "sparsegpt"]

    def run(*more):
        return CliRunner().invoke(app, ["prune", str(models.EMBEDDED), "-o", str(tmp_path / "out"), *options, *more])

    planned = run("--dry-run")
    assert "Predicted peak memory" in planned.output
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
        assert "MB left" in run("--dry-run").stderr
    assert run("--rounds", "3").exit_code == 2
    assert not (tmp_path / "out").exists()
    done = run("--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "Predicted peak memory" in done.stderr  # it appears beside the bar
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "report.json", "README.md"} <= names
    assert read_report(tmp_path / "out" / "report.json").settings["arithmetic"] == "torch.float32"
    assert "50.00 % zeros" in CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "text.txt"]


def test_layers_outside_the_blocks_are_named(tmp_path):
    directory("llama", tmp_path / "model")
    batches = families.language_batches()
    with pytest.raises(LayerSelectionError, match="lm_head is outside"):
        prune_directory(tmp_path / "model", tmp_path / "out", batches, iobs.NM(2, 4), include="lm_head")
    assert not (tmp_path / "out").exists()
    chosen = ["lm_head", "*.mlp.up_proj"]
    report = prune_directory(tmp_path / "model", tmp_path / "out", batches, iobs.NM(2, 4), include=chosen)
    assert report.skipped["lm_head"] == "outside the blocks"


def test_tensors_without_a_place_are_copied(tmp_path):
    directory("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    save_file({**load_file(file), **buffer}, file, {"format": "pt"})
    arguments = families.language_batches(), iobs.Unstructured(0.5)
    with pytest.warns(UserWarning, match="1 tensors that LlamaForCausalLM has no place for"):
        prune_directory(tmp_path / "model", tmp_path / "out", *arguments, **OPTIONS)
    name, value = buffer.popitem()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], value)


def test_a_head_that_is_tied_to_nothing_is_missed(tmp_path):
    directory("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, lm_head\.weight"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))


def test_names_of_another_layout_are_told_even_where_a_head_could_be_tied(tmp_path):
    directory("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"otherwise .*\(embed_out\.weight\).*in memory"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))


def test_blocks_that_hand_on_more_than_their_hidden_state_are_one_clear_error(tmp_path):
    config = families.hf.RwkvConfig(vocab_size=48, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    families.hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"block by block .*ValueError: too many values.*in memory"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reserves room for a file")
def test_activations_have_their_room_on_the_disk(tmp_path):
    kept = spilled_to(tmp_path)(0, torch.randn(1000, 64))
    assert (tmp_path / "0.hidden").stat().st_blocks * 512 >= kept.numel() * 4
    with pytest.raises(OSError, match=r"File too large|No space left"):
        reserve(tmp_path / "1.hidden", 2**62)
