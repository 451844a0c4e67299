"""Every supported family is pruned by one call; counts are exact and saved models give the same outputs."""

import families
import pytest
import torch
from families import MODELS, build
from safetensors.torch import load_model, save_model

import iobs
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.gram import EXPERT_TOKENS, Gram, statistics_of
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.selection import select
from iobs.pruning.samples.batches import Samples, forward, split
from iobs.pruning.samples.outputs import logits

# Families whose blocks must be run one by one; for other families calibration runs the whole network.
CHAINED = ("opt", "llama", "mistral", "qwen2", "qwen3", "gemma3", "phi", "phi3", "gpt2", "gpt_neox", "falcon")
CHAINED += ("mixtral", "qwen3_moe", "vit", "deit", "timm_vit", "timm_deit", "timm_swin", "timm_convnext", "timm_resnet")


def outputs(model, batch):
    with torch.no_grad():
        return logits(forward(model, batch))


CHOICES = {
    "float32-unstructured": (torch.float32, iobs.Unstructured(0.5)),
    "bfloat16-2:4": (torch.bfloat16, iobs.NM(2, 4)),
    "bfloat16-unstructured": (torch.bfloat16, iobs.Unstructured(0.5)),
    "float32-2:4": (torch.float32, iobs.NM(2, 4)),
}
# Each family once in the gate, by turns with the first two choices; all of them in the long set.
EVERY = [
    pytest.param(name, *choice, id=f"{name}-{label}", marks=() if number == family % 2 else pytest.mark.slow)
    for family, name in enumerate(MODELS)
    for number, (label, choice) in enumerate(CHOICES.items())
]


@pytest.mark.parametrize(("name", "dtype", "pattern"), EVERY)
def test_prune_covers_every_family(name, dtype, pattern, tmp_path):
    model, data = build(name, dtype)
    report = iobs.prune(model, data, pattern, iobs.Recipe(target="residual"), solver="sparsegpt")
    assert len(report.audit) == len(report.best.layers) == MODELS[name][1]
    assert all(row.zeros >= row.asked > 0 for row in report.audit)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    save_model(model, str(tmp_path / "model.safetensors"))
    again = build(name, dtype)[0]
    load_model(again, str(tmp_path / "model.safetensors"))
    assert torch.equal(outputs(again, data[0]), outputs(model, data[0]))


@pytest.mark.parametrize("name", CHAINED)
def test_exact_chain_finds_the_blocks_of_a_family(name):
    model, data = build(name)
    if name in families.LANGUAGE_MODELS:
        model.config.use_cache = False
    fit, _ = split(Samples.of(data), 0.0, 0)
    layers = select(model).layers
    chain = exact_chain(model, fit.batches, layers)
    assert len(chain) >= 2
    for layer in layers:  # other layers may only be a patch embedding or a classifier
        assert any(layer.path.startswith(block.path) for block in chain) or len(layer.path.split(".")) < 4


@pytest.mark.parametrize("name", MODELS)
def test_select_lists_every_matrix_or_a_reason(name):
    model, _ = build(name)
    selection = select(model)
    found = {id(model.get_parameter(layer.key)): layer.name for layer in find_layers(model)}
    named = {layer.name for layer in selection.layers} | set(selection.skipped)
    for full, value in model.named_parameters():
        if value.squeeze().ndim >= 2:  # a tied weight has two names and is listed under one
            assert found.get(id(value), full.removesuffix(".weight")) in named
    assert all(selection.skipped.values())


def test_weights_tied_to_an_embedding_stay_tied_and_dense():
    model, data = build("gpt2")
    iobs.prune(model, data, 0.5, iobs.Recipe(target="residual"), solver="magnitude")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.lm_head.weight != 0).all()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_gram_of_an_expert_holds_its_routed_tokens(name):
    model, data = build(name)
    model.config.use_cache = False
    fit, _ = split(Samples.of(data), 0.0, 0)
    layers = tuple(layer for layer in select(model).layers if layer.expert is not None)
    experts = model.model.layers[0].mlp.experts
    routed = []

    def keep(module, args):
        routed.append((args[0].double(), args[1]))

    with experts.register_forward_pre_hook(keep), torch.no_grad():
        for batch in data:
            model(**batch)
    found = {}
    sweep = Sweep(model, fit, Samples(), layers, exact_chain(model, fit.batches, layers))
    for group in sweep.groups():
        found[group.layers[0].name] = group.statistics()
    for expert in range(4):
        rows = torch.cat([hidden[(index == expert).any(1)] for hidden, index in routed])
        statistics = found[f"model.layers.0.mlp.experts.gate_up_proj.{expert}"]
        assert statistics.tokens == len(rows)
        if len(rows) >= EXPERT_TOKENS:
            assert statistics.calibration.own[0].allclose(rows.T @ rows / len(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "by_size"), [(15, True), (16, False)])
def test_expert_with_fewer_than_16_tokens_has_no_hessian(tokens, by_size):
    found = statistics_of(*(Gram(torch.eye(4).double()[None], count=tokens) for _ in range(2)), routed=True)
    assert (found.rule == f"pruned by magnitude: {tokens} tokens were routed to it") is by_size


@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.5), pytest.param(iobs.NM(2, 4), marks=pytest.mark.slow)], ids=str
)
def test_expert_without_tokens_is_pruned_by_magnitude(pattern):
    model, data = build("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # all router logits are equal, so two experts get every token
    down = model.model.layers[0].mlp.experts.down_proj
    before = down.detach().clone()
    report = iobs.prune(model, data, pattern, iobs.Recipe(target="residual"), holdout=0.0)
    counts = [entry.inputs for entry in report.best.layers if "layers.0.mlp.experts.down_proj" in entry.name]
    assert sorted(counts)[:2] == [0, 0] < sorted(counts)[2:]
    starved = counts.index(0)
    assert any(f"experts.down_proj.{starved}: pruned by magnitude: 0 tokens" in note for note in report.notes)
    kept = down[starved] != 0
    assert torch.allclose(down[starved][kept], before[starved][kept])
    assert all(row.zeros >= row.asked for row in report.audit)


def test_experts_are_pruned_in_any_implementation():
    model, data = build("mixtral")
    model.config._experts_implementation = "grouped_mm"  # the default of transformers
    report = iobs.prune(model, data, 0.5, iobs.Recipe(target="residual"), solver="sparsegpt")
    assert sum("experts" in row.name for row in report.audit) == 2 * 2 * 4  # blocks, matrices, experts
    assert model.config._experts_implementation == "grouped_mm"


def test_encoder_padding_does_not_mask_decoder_tokens():
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens, mask = torch.randint(2, 40, (6, 8)), torch.ones(6, 8, dtype=torch.int64)
    mask[:, 3:] = 0
    data = [{"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens}]
    layers = tuple(layer for layer in select(model).layers if "decoder" in layer.name)
    found = {}
    sweep = Sweep(model, Samples.of(data), Samples(), layers, [])
    for group in sweep.groups():
        found[group.layers[0].name] = group.statistics().calibration.count
    assert found["decoder.block.0.layer.0.SelfAttention.q"] == 48
