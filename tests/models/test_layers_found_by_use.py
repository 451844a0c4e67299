"""Real architectures of transformers whose weights no class of a module shows, and models inside other modules."""

import families
import pytest
import torch
from torch import nn
from torch.nn import functional

import iobs
from iobs.errors import CoverageWarning, ModelError
from iobs.pruning.coverage import EXPECTED

hf = families.hf
DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
}
# name -> (configuration, names of layers that must be pruned)
FAMILIES = {
    "dbrx": (
        lambda: hf.DbrxConfig(**DBRX, d_model=16, n_heads=2, n_layers=2, max_seq_len=64, vocab_size=48),
        ["transformer.blocks.0.ffn.experts.mlp.w1.0", "transformer.blocks.1.ffn.experts.mlp.v1.3"],
    ),
    "llama4": (
        lambda: hf.Llama4TextConfig(
            **families.DECODER,
            intermediate_size_mlp=24,
            num_local_experts=4,
            head_dim=8,
            attention_chunk_size=8,
        ),
        ["model.layers.0.feed_forward.experts.gate_up_proj.0", "model.layers.1.feed_forward.experts.down_proj.3"],
    ),
    "xlnet": (
        lambda: hf.XLNetConfig(vocab_size=48, d_model=16, n_layer=2, n_head=2, d_inner=24),
        ["transformer.layer.0.rel_attn.q", "transformer.layer.1.rel_attn.o"],
    ),
    "longcat_flash": (
        lambda: hf.LongcatFlashConfig(
            vocab_size=48,
            hidden_size=16,
            num_layers=1,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_hidden_size=24,
            expert_ffn_hidden_size=12,
            n_routed_experts=4,
            zero_expert_num=1,
            moe_topk=2,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            head_dim=8,
            max_position_embeddings=64,
        ),
        ["model.layers.0.mlp.experts.gate_up_proj.0", "model.layers.0.mlp.experts.down_proj.3"],
    ),
}


def built(name):
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(FAMILIES[name][0]()).eval()


def unexpected(report):
    """Share of the weights that stays dense, without embeddings and heads."""
    found = report.coverage
    expected = sum(entries for kind, entries in found.by_kind.items() if kind in EXPECTED)
    return 1 - found.pruned / (found.weights - expected)


FLOATS = (torch.float32, torch.bfloat16)
# Short floats of one family in the gate.
EVERY = [
    pytest.param(name, dtype, id=f"{name}-dtype{place}", marks=() if name == "xlnet" or not place else pytest.mark.slow)
    for name in FAMILIES
    for place, dtype in enumerate(FLOATS)
]


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_weights_that_no_class_shows_are_pruned(name, dtype):
    model = built(name).to(dtype)
    report = iobs.prune(model, families.language_batches(), 0.5, iobs.Recipe(target="residual"), solver="magnitude")
    rows = {row.name: row.zeros for row in report.audit}
    assert set(FAMILIES[name][1]) <= rows.keys()
    assert unexpected(report) <= 0.05
    assert {row.name: row.zeros for row in iobs.audit(model)}.items() >= rows.items()
    zeros = sum(int((one == 0).sum()) for one in model.parameters() if one.ndim > 1)
    assert zeros >= report.zeros == sum(rows.values())


def test_experts_of_llama4_are_matrices_of_outputs_by_inputs():
    model = built("llama4")
    report = iobs.prune(model, families.language_batches(), "2:4", iobs.Recipe(target="residual"), solver="magnitude")
    shapes = {row.name: row.shape for row in report.audit}
    assert shapes["model.layers.0.feed_forward.experts.gate_up_proj.0"] == (48, 16)
    assert shapes["model.layers.0.feed_forward.experts.down_proj.0"] == (16, 24)
    kept = model.model.layers[0].feed_forward.experts.down_proj != 0  # (experts, inputs, outputs)
    assert bool((kept.mT.reshape(-1, 4).sum(1) <= 2).all())


@pytest.mark.parametrize("wrap", [lambda one: torch.compile(one, backend="eager"), nn.DataParallel])
def test_head_stays_dense_and_experts_are_pruned_in_a_wrapped_model(wrap):
    torch.manual_seed(0)
    inner = families.LANGUAGE_MODELS["mixtral"][0]().eval()
    report = iobs.prune(
        wrap(inner), families.language_batches(), 0.5, iobs.Recipe(target="residual"), solver="magnitude"
    )
    assert unexpected(report) == 0
    assert not bool((inner.lm_head.weight == 0).any())
    assert [reason for name, reason in report.skipped.items() if name.endswith("lm_head")] == ["output head"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_are_not_merged_are_refused_and_merged_ones_pruned():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = families.LANGUAGE_MODELS["llama"][0]().eval()
    whole = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    before = {name: one.clone() for name, one in whole.named_parameters()}
    with pytest.raises(ModelError, match=r"q_proj.*adapter that is not merged.*merge_adapters"):
        iobs.prune(whole, families.language_batches(), 0.5, iobs.Recipe(target="residual"))
    assert all(torch.equal(one, before[name]) for name, one in whole.named_parameters())
    report = iobs.prune(
        whole, families.language_batches(), 0.5, iobs.Recipe(target="residual"), include="*mlp*", solver="magnitude"
    )
    assert all("mlp" in row.name for row in report.audit)
    whole.merge_adapter()
    report = iobs.prune(whole, families.language_batches(), 0.5, iobs.Recipe(target="residual"), solver="magnitude")
    assert [reason for name, reason in report.skipped.items() if name.endswith("lm_head")] == ["output head"]
    whole.unmerge_adapter()
    merged, _ = iobs.transformers.merge_adapters(whole)
    report = iobs.prune(merged, families.language_batches(), 0.5, iobs.Recipe(target="residual"), solver="magnitude")
    assert len(report.audit) == 14
    assert report.skipped["lm_head"] == "output head"


def test_positional_convolution_of_wav2vec2_is_pruned_through_its_weight_norm():
    torch.manual_seed(0)
    sizes = {"conv_dim": [16] * 2, "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
    config = hf.Wav2Vec2Config(
        **{**families.LANGUAGE, **sizes},
        intermediate_size=24,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model = hf.Wav2Vec2ForCTC(config).eval()
    sounds = [{"input_values": torch.randn(2, 800)} for _ in range(2)]
    report = iobs.prune(model, sounds, 0.5, iobs.Recipe(target="residual"), solver="magnitude")
    name = "wav2vec2.encoder.pos_conv_embed.conv"
    convolution = model.get_submodule(name)
    assert {row.name: row.zeros for row in report.audit}[name] == convolution.weight.numel() // 2
    assert int((convolution.weight == 0).sum()) == convolution.weight.numel() // 2
    assert unexpected(report) <= 0.05


def test_streamed_model_says_that_layers_are_found_in_memory_only(tmp_path):
    model = built("dbrx")
    model.save_pretrained(tmp_path / "model")
    families.prune_directory(tmp_path / "model", tmp_path / "out", families.language_batches(), solver="magnitude")
    from iobs.models.streamed import StreamedModel

    selection = StreamedModel.open(tmp_path / "model").select(None, None, False)
    assert "in a run with the whole model in memory" in str(
        selection.skipped["transformer.blocks.0.ffn.experts.mlp.w1"]
    )


PER_ROW = iobs.Unstructured(0.5, per="row")


class Divided(nn.Module):
    """A head whose weight a function changes in every forward pass."""

    def __init__(self, change, transposed=False):
        super().__init__()
        self.body, self.change, self.transposed = nn.Linear(16, 24), change, transposed
        self.weight = nn.Parameter(0.2 * torch.randn(24, 10) if transposed else 0.2 * torch.randn(10, 24))

    def forward(self, x):
        hidden, weight = self.body(x).relu(), self.change(self.weight)
        return hidden @ weight if self.transposed else functional.linear(hidden, weight)


@pytest.mark.parametrize(
    ("change", "transposed"),
    [
        (functional.normalize, False),
        (lambda w: w / w.norm(dim=1, keepdim=True), False),
        (lambda w: w * w.pow(2).sum(1, keepdim=True).rsqrt(), False),
        (lambda w: functional.normalize(w, dim=0), True),
    ],
    ids=["normalize", "norm", "rsqrt", "columns of a transpose"],
)
def test_weights_divided_by_norms_of_rows_are_pruned(change, transposed):
    model = Divided(change, transposed)
    report = iobs.prune(model, [torch.randn(64, 16)], PER_ROW, "one-shot", allocation="uniform")
    assert not report.skipped
    rows = model.weight.T if transposed else model.weight
    assert ((rows == 0).sum(1) == 12).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
        lambda w: functional.normalize(w, dim=0),
        lambda w: w * w,
    ],
    ids=["standardised", "norms of columns", "square"],
)
def test_weights_changed_in_another_way_stay_dense_with_the_reason(change):
    model = Divided(change)
    with pytest.warns(CoverageWarning):
        report = iobs.prune(model, [torch.randn(64, 16)], 0.5, "one-shot")
    assert "before it multiplies" in report.skipped["weight"]
    assert (model.weight != 0).all()
