"""Directories that block by block pruning refuses or covers in part: layouts, missing and additional tensors."""

import json

import families
import pytest
import torch
from families import prune_directory
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

import iobs
from iobs.errors import LayerSelectionError, ModelError, NonFiniteError, ProblemError
from iobs.models import load
from iobs.models.streamed import StreamedModel, StreamedStore
from iobs.pruning.recipe import BlockFit

OPTIONS = {"solver": "sparsegpt"}


def test_unpruned_tensors_are_copied_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    model = families.LANGUAGE_MODELS["llama"][0]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # initial norms are 1, which every dtype represents exactly
    model.save_pretrained(tmp_path / "model")
    narrow = {"": torch.bfloat16, "norm": torch.float32, "k_proj": torch.float32}
    before = families.converted(tmp_path / "model" / "model.safetensors", narrow)
    arguments = tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5)
    report = prune_directory(*arguments, ignore="*.k_proj", arithmetic=torch.bfloat16, **OPTIONS)
    pruned = {f"{row.name}.weight" for row in report.audit}
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]) == (name not in pruned), name


def test_float32_buffer_of_a_block_is_loaded_as_it_is_stored(tmp_path):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**families.DECODER, **sizes, first_k_dense_replace=0)).bfloat16()
    gate = model.model.layers[0].mlp.gate
    gate.e_score_correction_bias = torch.full((4,), 1 + 2**-12)  # 1 in bfloat16
    model.save_pretrained(tmp_path / "model")
    streamed = StreamedModel.open(tmp_path / "model", arithmetic=torch.bfloat16)
    for _ in range(2):
        streamed.load(streamed.blocks[0])
        found = streamed.module.model.layers[0].mlp.gate
        assert torch.equal(found.e_score_correction_bias, gate.e_score_correction_bias)
        assert found.weight.dtype == torch.bfloat16
        streamed.drop(streamed.blocks[0])


def test_settings_for_the_whole_network_are_refused(tmp_path):
    families.saved("llama", tmp_path / "model")
    arguments = tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4)
    settings = {"rounds": 3, "allocation": "search", "batch_norm": "update", "target": "model", "inputs": "dense"}
    settings |= {"finetune": iobs.FineTune(), "solver": "chita"}
    for name, value in settings.items():
        with pytest.raises(ProblemError, match=f"^{name}: not with one block in memory"):
            prune_directory(*arguments, **{"target": "layer", name: value})
    with pytest.raises(ProblemError, match=r"^rounds: not with one block in memory"):
        prune_directory(*arguments, rounds=iobs.Rounds(data="fresh"))
    with pytest.raises(ProblemError, match=r"^blocks\.sampled: not with one block in memory"):
        prune_directory(*arguments, blocks=BlockFit(sampled=1))
    for recipe in (  # without a fine-tuning, network steps take the place of nothing
        iobs.Recipe.preset("best").but(finetune=None),
        iobs.Recipe.preset("fast").but(blocks=BlockFit(network_steps=2), rounds=3),
    ):
        with (
            pytest.raises(ProblemError, match=r"^rounds: not with one block in memory"),
            StreamedStore.open(*arguments[:2]) as store,
        ):
            iobs.prune(store, arguments[2], 0.5, recipe)
    assert not (tmp_path / "out").exists()


def test_store_refuses_a_second_run(tmp_path):
    families.saved("llama", tmp_path / "model")
    data = families.language_batches()

    def twice():
        with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
            stores.append(store)
            for sparsity in (0.5, 0.6):
                reports.append(
                    iobs.prune(store, data, sparsity, iobs.Recipe(target="residual"), holdout=0.0, **OPTIONS)
                )

    stores, reports = [], []
    with pytest.raises(ProblemError, match="takes one run"):
        twice()
    assert len(reports) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ProblemError, match="takes one run"):
        iobs.prune(stores[0], data, 0.5, iobs.Recipe(target="residual"))


def test_layer_with_a_nonfinite_weight_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(StreamedStore, "enter", lambda *_: pytest.fail("the run has begun"))
    model = families.saved("llama", tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NonFiniteError, match=r"weight of layer 'model\.layers\.1\.mlp\.up_proj'"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))
    assert not (tmp_path / "out").exists()


def test_shards_outside_the_index_are_not_copied(tmp_path):
    model = families.saved("llama", tmp_path / "model")
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


def test_unknown_architecture_raises_a_one_line_error(tmp_path):
    families.saved("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "t5", "architectures": None}))
    with pytest.raises(ModelError) as raised:
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.NM(2, 4))
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 400


def test_layers_outside_the_blocks_are_refused_or_skipped(tmp_path):
    families.saved("llama", tmp_path / "model")
    batches = families.language_batches()
    with pytest.raises(LayerSelectionError, match="lm_head is outside"):
        prune_directory(tmp_path / "model", tmp_path / "out", batches, iobs.NM(2, 4), include="lm_head")
    assert not (tmp_path / "out").exists()
    chosen = ["lm_head", "*.mlp.up_proj"]
    report = prune_directory(tmp_path / "model", tmp_path / "out", batches, iobs.NM(2, 4), include=chosen)
    assert report.skipped["lm_head"] == "outside the blocks"


def test_tensors_the_network_lacks_are_copied(tmp_path):
    families.saved("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    save_file({**load_file(file), **buffer}, file, {"format": "pt"})
    arguments = families.language_batches(), iobs.Unstructured(0.5)
    with pytest.warns(UserWarning, match="1 tensors that LlamaForCausalLM has no place for"):
        prune_directory(tmp_path / "model", tmp_path / "out", *arguments, **OPTIONS)
    name, value = buffer.popitem()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], value)


def test_missing_head_is_refused_if_it_is_not_tied(tmp_path):
    families.saved("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, lm_head\.weight"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
def test_weights_are_tied_as_in_memory(stored, tmp_path):
    """A head that was trained apart stays apart, though the configuration ties it."""
    families.saved("llama", tmp_path / "model", torch.float32)
    config, file = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    gone = {name for kind, name in names.items() if stored not in (kind, "both")}
    save_file({name: value for name, value in load_file(file).items() if name not in gone}, file, {"format": "pt"})
    expected, found = load(tmp_path / "model").module, StreamedModel.open(tmp_path / "model").module
    for name in names.values():
        assert torch.equal(found.get_parameter(name), expected.get_parameter(name))
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == (stored != "both")


def test_tensor_names_of_another_layout_are_refused(tmp_path):
    families.saved("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"otherwise .*\(embed_out\.weight\).*in memory"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))


def test_blocks_with_several_outputs_give_the_result_of_pruning_in_memory(tmp_path):
    config = families.hf.RwkvConfig(vocab_size=48, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    model, data = families.hf.AutoModelForCausalLM.from_config(config).eval(), families.language_batches()
    model.save_pretrained(tmp_path / "model")
    report = prune_directory(tmp_path / "model", tmp_path / "out", data, iobs.Unstructured(0.5), **OPTIONS)
    inside = [row.name for row in report.audit]
    iobs.prune(model, data, 0.5, iobs.Recipe(target="residual"), include=inside, holdout=0.0, **OPTIONS)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in model.named_parameters() if name in after)


def test_blocks_that_share_parameters_are_refused(tmp_path):
    sizes = {**families.DECODER, "num_key_value_heads": 2, "attention_hidden_size": 32, "attention_head_dim": 16}
    mixers = {"n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    config = families.hf.ZambaConfig(**sizes, **mixers, layers_block_type=["hybrid", "hybrid"])
    families.hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"blocks model\.layers\.0 and model\.layers\.1 share .*in memory"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))
    assert not (tmp_path / "out").exists()


def test_blocks_between_which_the_model_computes_are_refused(tmp_path):
    sizes = {"vocab_size": 48, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2}
    config = families.hf.RwkvConfig(**sizes, rescale_every=1)  # halves the hidden state after every block
    families.hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="do not pass one hidden state"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), iobs.Unstructured(0.5))
    assert not (tmp_path / "out").exists()


def test_blocks_that_run_in_cycles_are_refused_before_any_work(tmp_path, monkeypatch):
    config = families.hf.HrmTextConfig(**families.DECODER, head_dim=8, H_cycles=2, L_cycles=2)
    families.hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(StreamedStore, "state", lambda store: pytest.fail("the files are read"))
    options = {"checkpoint": tmp_path / "checkpoint"}
    with pytest.raises(ModelError, match=r"calls model\.\w+\.layers\.0 more than once .*in memory"):
        prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), 0.5, **options)
    assert not (tmp_path / "out").exists()


def test_allocation_is_the_same_with_one_block_in_memory(tmp_path):
    model = families.saved("llama", tmp_path / "model", torch.float32)
    data = families.language_batches()
    options = {"allocation": "fisher", "holdout": 0.0, **OPTIONS}
    report = prune_directory(
        tmp_path / "model", tmp_path / "out", data, iobs.Unstructured(0.6), arithmetic=torch.float32, **options
    )
    inside = [row.name for row in report.audit]
    expected = iobs.prune(
        model, data, iobs.Unstructured(0.6), iobs.Recipe(target="residual"), include=inside, **options
    )
    assert [row.chosen for row in report.allocation] == [row.chosen for row in expected.allocation]
    assert [row.effects for row in report.allocation] == [row.effects for row in expected.allocation]
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[f"{name}.weight"], model.get_parameter(f"{name}.weight")) for name in inside)


def test_weights_outside_the_blocks_are_freed_during_the_run(tmp_path, monkeypatch):
    """On a GPU they would take two gigabytes beside a block of an 8-billion-parameter model."""

    def left(store, stage):
        leave(store, stage)
        alive.append([name for name, storage in outside.items() if not storage.expired()])

    families.saved("llama", tmp_path / "model")
    leave, alive = StreamedStore.leave, []
    monkeypatch.setattr(StreamedStore, "leave", left)
    with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
        loaded = {name: one for name, one in store.model.named_parameters() if not one.is_meta}
        outside = {name: StorageWeakRef(one.untyped_storage()) for name, one in loaded.items()}
        del loaded
        iobs.prune(store, families.language_batches(), 0.5, iobs.Recipe(target="residual"), holdout=0.0, **OPTIONS)
    assert len(outside) == 3
    assert len(alive) > 2
    assert not any(alive)
