"""Blocks and experts that are removed: the model is loaded by its class as it is, and gives the same outputs."""

import copy
import math
from collections import OrderedDict
from functools import partial
from itertools import combinations, product

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DeepseekV3Config,
    GPT2Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import iobs
from iobs.errors import LayerSelectionError, ModelError, PatternError, ProblemError
from iobs.pruning.recipe import STRUCTURED
from iobs.pruning.store import Store
from iobs.pruning.structured import parts, plan_structured
from iobs.pruning.structured.parts import Blocks, Experts
from iobs.pruning.structured_report import StructuredRequest
from iobs.report import read_report

SIZE = {"hidden_size": 16, "vocab_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {**SIZE, **TOKENS, "num_hidden_layers": 2, "intermediate_size": 12}
INNER = {**MIXTURE, "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": lambda: MixtralConfig(**MIXTURE, num_local_experts=6, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**INNER, shared_expert_intermediate_size=20),
    "qwen3_moe": lambda: Qwen3MoeConfig(**INNER, head_dim=4),
    "olmoe": lambda: OlmoeConfig(**MIXTURE, num_experts=6, num_experts_per_tok=2),
    # The matrix of its router lies in a module of its own.
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**MIXTURE, num_experts=6, moe_topk=2, head_dim=4),
}


def built(config):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config).eval()
    for value in model.parameters():  # otherwise blocks of a new network change their input very little
        if value.ndim > 1:
            value.data.mul_(4)
    return model


def llama(blocks=5, **others):
    return built(LlamaConfig(**SIZE, **TOKENS, **others, num_hidden_layers=blocks, intermediate_size=24))


def text(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 48, (8, 16), generator=generator)} for _ in range(3)]


def gap(model, dense):
    with torch.no_grad():
        logits, expected = (torch.cat([each(**batch).logits for batch in text(9)]) for each in (model, dense))
        return float((logits - expected).square().mean())


def require_loaded(model, path):
    """Require that the class of a model loads it unpatched, with the same outputs; return the loaded model."""
    model.save_pretrained(path)
    loaded = type(model).from_pretrained(path).eval()
    torch.testing.assert_close(loaded(**text()[0])[0], model(**text()[0])[0])
    return loaded


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def require_equal(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("recipe", ["one-shot", "best"])
def test_fewer_blocks_are_loaded_unpatched(tmp_path, recipe):
    model = llama()
    steps = {} if recipe == "one-shot" else {
        "finetune": iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all", support="fixed")
    }  # fmt: skip
    report = iobs.prune(model, text(), iobs.Structured(0.4, units="blocks"), recipe, **steps)
    assert [(one.kind, one.before, one.after) for one in report.widths] == [("blocks", 5, 3)]
    assert model.config.num_hidden_layers == len(model.model.layers) == 3
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2]
    assert report.costs[0].share < 0.8
    again = require_loaded(model, tmp_path)
    generated = [one.generate(text()[0]["input_ids"][:2], max_new_tokens=4, do_sample=False) for one in (again, model)]
    assert torch.equal(*generated)
    report.save(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json").widths == report.widths


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_blocks_of_a_model_of_short_floats_are_removed(tmp_path, whole):
    """`from_pretrained` leaves the frequencies of positions in float32, and `Module.to` casts them."""
    llama(3, head_dim=16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model = model.to(torch.bfloat16) if whole else model
    assert model.model.rotary_emb.inv_freq.dtype == (torch.bfloat16 if whole else torch.float32)
    generator = torch.Generator().manual_seed(0)
    long = [{"input_ids": torch.randint(3, 48, (2, 256), generator=generator)} for _ in range(2)]
    report = iobs.prune(model, long, iobs.Structured(0.34, units="blocks"), "one-shot", holdout=0.0)
    assert [one.after for one in report.widths] == [2]


def test_router_that_divides_experts_into_groups_is_refused_with_the_reason():
    sizes = {**INNER, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 4}
    del sizes["num_experts"]
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    model = built(DeepseekV3Config(**sizes, **groups, qk_rope_head_dim=4, qk_nope_head_dim=4))
    before = state(model)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp does not compute with 7 experts"):
        iobs.prune(model, text(), iobs.Structured(0.25, units="experts"), "one-shot")
    require_equal(model, before)


def test_refit_after_a_removed_block_is_closer_to_the_dense_model():
    dense = llama()
    for layer in (dense.model.layers[4].self_attn.o_proj, dense.model.layers[4].mlp.down_proj):
        layer.weight.data.mul_(3)  # not the last block, since nothing follows it
    model = copy.deepcopy(dense)
    report = iobs.prune(model, text(), iobs.Structured(0.2, units="blocks"), "one-shot")
    assert "layers: 4." not in " ".join(report.notes)
    candidates = []
    for gone in range(5):
        plain = copy.deepcopy(dense)
        with Blocks.find(plain, text()).without({"model.layers": [gone]}):
            candidates.append(gap(plain, dense))
    assert gap(model, dense) < min(candidates)


@pytest.mark.parametrize("units", ["blocks", "experts"])
def test_dense_score_is_that_of_the_dense_model(units):
    model = llama(3) if units == "blocks" else built(MIXTURES["mixtral"]())
    dense, seen = copy.deepcopy(model), []

    class Watch(iobs.Callback):
        def on_start(self, model, layers, rounds):
            seen.append(model(**text()[0]).logits.detach())

    report = iobs.prune(model, text(), iobs.Structured(0.4, units=units), "one-shot", holdout=0.0, callbacks=[Watch()])
    torch.testing.assert_close(seen[0], dense(**text()[0]).logits)
    losses = [dense(**one, labels=one["input_ids"]).loss.item() for one in text()]
    assert report.scores["dense"]["calibration perplexity"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert report.scores["pruned"] != report.scores["dense"]


@pytest.mark.parametrize(("units", "share"), [("blocks", 0.4), ("experts", 0.5)])
def test_plan_says_what_a_run_removes(units, share):
    model = llama(3) if units == "blocks" else built(MIXTURES["olmoe"]())
    before = state(model)
    pattern = iobs.Structured(share, units=units)
    plan = plan_structured(Store(model), text(), StructuredRequest(pattern, STRUCTURED["one-shot"]), timed=True)
    require_equal(model, before)
    assert plan.seconds > 0
    report = iobs.prune(model, text(), pattern, "one-shot")
    assert [(one.name, one.count, one.kept) for one in plan.units] == [
        (one.name, one.before, one.after) for one in report.widths
    ]
    (cost,) = (one for one in report.costs if one.name == "parameters")
    assert [(one.before, one.most) for one in plan.costs] == [(cost.before, cost.after)]


def test_least_harmful_block_is_removed_first():
    """The third block adds almost nothing."""
    model = llama()
    block = model.model.layers[2]
    for layer in (block.self_attn.o_proj, block.mlp.down_proj):
        layer.weight.data.mul_(1e-4)
    report = iobs.prune(model, text(), iobs.Structured(0.2, units="blocks"), "one-shot")
    assert any("layers: 2." in note for note in report.notes)
    assert block not in [*model.model.layers]


def mixture_after_a_dense_block():
    return built(Qwen3MoeConfig(**{**INNER, "num_hidden_layers": 3}, head_dim=4, mlp_only_layers=[0]))


def test_a_block_that_the_class_needs_at_its_place_stays():
    parts = Blocks.find(mixture_after_a_dense_block(), text())
    assert parts.choose(2, iter([0.0, 1.0, 2.0]).__next__) == {"model.layers": [1]}  # not the first, which is dense


def test_blocks_that_the_class_cannot_lose_are_refused_before_the_refit(monkeypatch):
    narrower = Blocks._shorter_config
    monkeypatch.setattr(
        Blocks, "_shorter_config", lambda self, gone: narrower(self, [0]) if 2 not in gone else object()
    )
    damages = iter([0.0, 1.0, 2.0, 0.0, 1.0])
    monkeypatch.setattr("iobs.pruning.structured.parts._damage_of", lambda *_: damages.__next__)
    monkeypatch.setattr("iobs.pruning.structured.parts.run", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.setattr(Blocks, "_can_lose", lambda *_: False)
    with pytest.raises(ModelError, match="cannot be built with 2 blocks"):
        iobs.prune(mixture_after_a_dense_block(), text(), iobs.Structured(0.34, units="blocks"), "one-shot")


def test_blocks_of_an_own_network_are_removed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(*(Residual(8) for _ in range(4))), nn.Linear(8, 3)).eval()
    dense = copy.deepcopy(model)
    data = list(torch.randn(120, 6, generator=torch.Generator().manual_seed(1)).split(40))
    report = iobs.prune(model, data, "structured:25%,units=blocks", "one-shot")
    assert len(model[1]) == 3
    assert report.widths[0].name == "1"
    with torch.no_grad():
        wanted = dense(data[0])
        assert float((model(data[0]) - wanted).square().mean()) < 0.5 * float((wanted - wanted.mean(0)).square().mean())


def test_blocks_are_removed_before_entries_are_pruned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(*(Residual(8) for _ in range(4))), nn.Linear(8, 3)).eval()
    data = list(torch.randn(120, 6, generator=torch.Generator().manual_seed(1)).split(40))
    iobs.prune(model, data, 0.5, "one-shot")
    notes = iobs.prune(model, data, "structured:25%,units=blocks", "one-shot").notes
    assert any("hold values now. Remove units first" in note for note in notes)


def test_parts_with_names_are_no_blocks():
    torch.manual_seed(0)
    head = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), last=nn.Linear(8, 8)))
    model = nn.Sequential(nn.Sequential(*(Residual(8) for _ in range(4))), head).eval()
    assert Blocks.find(model, [torch.randn(40, 8)]).counts == {"": 2}  # the larger of two lists
    model = nn.Sequential(model[0], nn.ReLU(), head, nn.Linear(8, 3)).eval()
    iobs.prune(model, [torch.randn(40, 8)], "structured:25%,units=blocks", "one-shot")
    assert (len(model[0]), len(model[2])) == (3, 2)


BERT = BertConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24, vocab_size=48)
GPT2 = GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=48, n_positions=64, **TOKENS)


@pytest.mark.parametrize("build", [lambda: built(GPT2), lambda: BertModel(BERT).eval()], ids=["gpt2", "bert"])
def test_blocks_of_conv1d_and_blocks_that_end_in_a_norm_are_removed(build, tmp_path):
    torch.manual_seed(0)
    model = build()
    iobs.prune(model, text(), iobs.Structured(0.25, units="blocks"), "one-shot")
    assert model.config.num_hidden_layers == 3
    assert len(Blocks.find(require_loaded(model, tmp_path), text()).rests) == 3


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("qwen3_moe", "olmoe") else []) for name in MIXTURES],
)
def test_fewer_experts_are_loaded_unpatched(name, tmp_path):
    model = built(MIXTURES[name]())
    dense = copy.deepcopy(model)
    report = iobs.prune(model, text(), iobs.Structured(0.34, units="experts"), "one-shot")
    assert [(one.kind, one.before, one.after) for one in report.widths] == [("experts", 6, 4)] * 2
    assert all(0 < one.error < 1 for one in report.widths)
    assert report.costs[0].share < 1
    again = require_loaded(model, tmp_path)
    assert {vars(again.config).get(field) for field in ("num_experts", "num_local_experts")} - {None} == {4}
    assert not torch.allclose(model(**text()[0]).logits, dense(**text()[0]).logits, atol=1e-3)


def test_one_expert_is_chosen_as_brute_force_does():
    model = built(MIXTURES["mixtral"]())
    parts = Experts.find(model, text())
    path = next(iter(parts.counts))
    module, given = model.get_submodule(path), parts.inputs[path]
    with torch.no_grad():
        dense = module(given)
        errors = {}
        for (gone,) in combinations(range(6), 1):
            logits = given[:, 0] @ module.gate.weight.T
            logits[:, gone] = -torch.inf
            values, index = logits.softmax(-1).topk(2)
            values = values / values.sum(-1, keepdim=True)
            found = module.experts(given[:, 0], index, values)
            errors[gone] = float((found - dense[:, 0]).double().square().sum())
    chosen = parts.choose(5, lambda: 0.0)[path]
    assert chosen == [min(errors, key=errors.get)]
    assert parts.errors[path] == pytest.approx(min(errors.values()) / float(dense.double().square().sum()), rel=1e-4)


def test_costs_of_texts_of_several_lengths_are_noted():
    data = [*text(), {"input_ids": text()[0]["input_ids"][:, :12]}]
    report = iobs.prune(llama(3), data, iobs.Structured(0.3, units="blocks"), "one-shot")
    assert any("samples of the first calibration batch" in note for note in report.notes)


def test_the_number_of_shared_experts_is_kept_if_it_equals_the_number_of_the_others():
    model = built(MIXTURES["mixtral"]())
    mixture = model.get_submodule(next(iter(Experts.find(model, text()).counts)))
    mixture.num_shared_experts, mixture.num_routed_experts = 6, 6
    parts = Experts.find(model, text())
    with parts.without({path: [1, 2] for path in parts.counts}):
        assert (mixture.num_shared_experts, mixture.num_routed_experts) == (6, 4)


PLACES = ("parts.Expected.of", "parts.require_rebuilt", "_seconds")  # before `finish` and after it
IN_THE_LONG_SET = {("blocks", "parts.Expected.of"), ("experts", "parts.require_rebuilt")}


@pytest.mark.parametrize(
    ("units", "fails"),
    [
        pytest.param(*case, id="-".join(case), marks=[pytest.mark.slow] if case in IN_THE_LONG_SET else [])
        for case in product(("blocks", "experts"), PLACES)
    ],
)
def test_a_failed_run_leaves_the_model_as_it_was(monkeypatch, units, fails):
    model = llama(3) if units == "blocks" else built(MIXTURES["mixtral"]())
    before, dense = state(model), model(**text()[0]).logits

    def fail(*_):
        raise KeyboardInterrupt

    config = model.config.to_dict()
    monkeypatch.setattr(f"iobs.pruning.structured.{fails}", fail)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, text(), iobs.Structured(0.4, units=units), "one-shot")
    require_equal(model, before)
    assert model.config.to_dict() == config
    assert torch.equal(model(**text()[0]).logits, dense)


@pytest.mark.parametrize(
    ("build", "units", "share", "error", "message"),
    [
        (llama, "blocks", 0.05, PatternError, "less than a half of one"),
        (lambda: built(MIXTURES["mixtral"]()), "experts", 0.9, PatternError, "2 are needed"),
        (llama, "experts", 0.3, LayerSelectionError, "No experts"),
        (lambda: nn.Linear(3, 3), "experts", 0.3, ModelError, "Experts are removed from models of transformers"),
        (lambda: nn.Linear(3, 3), "blocks", 0.3, LayerSelectionError, "No blocks"),
    ],
)
def test_impossible_requests_are_refused(build, units, share, error, message):
    model = build()
    data = [torch.ones(2, 3)] if isinstance(model, nn.Linear) else text()
    with pytest.raises(error, match=message):
        iobs.prune(model, data, iobs.Structured(share, units=units))


def test_settings_of_widths_are_refused_for_blocks():
    with pytest.raises(ProblemError, match="leave out include"):
        iobs.prune(llama(), text(), iobs.Structured(0.3, units="blocks"), include="*")
    for changes in ({"of": "latency"}, {"of": "parameters"}, {"multiple_of": 8}, {"uniform": True}):
        with pytest.raises(PatternError, match="leave out `of`"):
            iobs.Structured(0.3, units="blocks", **changes)
    with pytest.raises(PatternError, match="units must be"):
        iobs.Structured(0.3, units="layers")


def test_experts_of_a_mixture_that_no_sample_reaches_are_not_judged(monkeypatch):
    model = built(MIXTURES["mixtral"]())
    layer = model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda hidden, **kwargs: hidden)
    monkeypatch.setattr(Experts, "choose", lambda *_: pytest.fail("work was done"))
    with pytest.raises(LayerSelectionError, match=r"No calibration sample calls the mixture model\.layers\.1\.mlp"):
        iobs.prune(model, text(), iobs.Structured(0.34, units="experts"), "one-shot")


def test_an_interrupted_choice_leaves_all_experts(monkeypatch):
    model = built(MIXTURES["mixtral"]())
    before = state(model)
    outputs, calls = parts._output, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return outputs(*args)

    monkeypatch.setattr(parts, "_output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, text(), iobs.Structured(0.4, units="experts"), "one-shot")
    require_equal(model, before)


def test_the_input_of_a_mixture_stays_as_it_is():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    given = torch.ones(2, 1, 3)
    assert float(parts._output(InPlace(), given).sum()) == 12
    assert float(given.sum()) == 6


def test_blocks_with_a_forward_of_their_own_are_removed():
    model = llama()
    for block in model.model.layers:  # as hooks of accelerate set it
        block.forward = partial(type(block).forward, block)
    report = iobs.prune(model, text(), iobs.Structured(0.4, units="blocks"), "one-shot")
    assert report.widths[0].after == len(model.model.layers) == 3
    assert all("forward" in vars(block) for block in model.model.layers)


def test_experts_are_judged_without_padding():
    model, (batch, *_) = built(MIXTURES["mixtral"]()), text()
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 12:] = 0
    short = Experts.find(model, [{"input_ids": batch["input_ids"][:, :12]}])
    padded = Experts.find(model, [{**batch, "attention_mask": mask}])
    for path, given in short.inputs.items():
        torch.testing.assert_close(padded.inputs[path], given)


def test_frozen_experts_stay_frozen():
    model = built(MIXTURES["mixtral"]())
    for layer in model.model.layers:
        layer.requires_grad_(False)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    iobs.prune(model, text(), iobs.Structured(0.34, units="experts"), "one-shot")
    assert [name for name, value in model.named_parameters() if value.requires_grad] == trained


class Counted(Residual):
    """A block that returns a number beside its hidden state."""

    def forward(self, x):
        return super().forward(x), x.square().mean()


class Summed(nn.Module):
    """A network that adds up the numbers of all blocks, or reads the one of its first block."""

    def __init__(self, every):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Counted(8) for _ in range(4)), nn.Linear(8, 3)
        self.every = every

    def forward(self, x):
        numbers = []
        for block in self.blocks:
            x, number = block(x)
            numbers.append(number)
        return self.last(x) + (sum(numbers) if self.every else 2 * numbers[0])


def test_blocks_with_results_that_the_network_computes_with_stay():
    torch.manual_seed(0)
    data = [torch.randn(40, 8)]
    with pytest.raises(ModelError, match="fails if a block of blocks only passes on its hidden state"):
        iobs.prune(Summed(True).eval(), data, iobs.Structured(0.25, units="blocks"), "one-shot")
    model = Summed(False).eval()
    first = model.blocks[0]
    iobs.prune(model, data, iobs.Structured(0.75, units="blocks"), "one-shot")
    assert [*model.blocks] == [first]
