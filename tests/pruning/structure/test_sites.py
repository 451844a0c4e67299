"""Sites: units of networks whose units are known, and the outputs after their removal."""

import copy

import pytest
import torch
from menagerie import Amplifying
from torch import nn
from torch.nn import functional
from traced_sites import find_sites, traced_sites
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import iobs
from iobs.errors import ModelError
from iobs.pruning.structure import trace
from iobs.pruning.structure.sites import Dependencies, checked_sites
from iobs.pruning.structure.trace import shortened
from iobs.pruning.structure.units import remove

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 48}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"input_ids": torch.arange(3, 35).view(2, 16)}
ROWS = torch.linspace(-1, 1, 4 * 8).view(4, 8).sin()
PICTURES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def llama(heads=4, groups=2):
    config = LlamaConfig(**SMALL, **TOKENS, num_attention_heads=heads, num_key_value_heads=groups)
    return AutoModelForCausalLM.from_config(config).eval()


class Residual(nn.Module):
    """A stem, a block with a depthwise convolution and channel attention, and a classifier."""

    def __init__(self, groups=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6())
        grouped = nn.Conv2d(12, 12, 3, padding=1, groups=groups)
        self.depthwise = nn.Sequential(grouped, nn.BatchNorm2d(12), nn.Hardswish())
        self.squeeze, self.excite = nn.Linear(12, 4), nn.Linear(4, 12)
        self.project = nn.Sequential(nn.Conv2d(12, 8, 1, bias=False), nn.BatchNorm2d(8))
        nn.init.zeros_(self.project[1].weight)
        self.classifier = nn.Linear(8 * 64, 5)

    def forward(self, x):
        x = self.stem(x)
        inner = self.depthwise(self.expand(x))
        gate = self.excite(torch.relu(self.squeeze(inner.mean((2, 3))))).sigmoid()
        return self.classifier((x + self.project(inner * gate[:, :, None, None])).flatten(1))


class Joined(nn.Module):
    """A concatenation of two branches, read by one convolution."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(10), nn.Conv2d(10, 2, 1)

    def forward(self, x):
        return self.last(self.norm(torch.cat([self.left(x).relu(), self.right(x).sigmoid()], 1)))


class Views(nn.Module):
    """Layers that read several views of the same channels side by side."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(32, 6, 1)
        self.ghost, self.last = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(12, 5, 1)
        self.hidden, self.out = nn.Linear(10, 9), nn.Linear(18, 4)

    def forward(self, x):
        x = torch.nn.functional.silu(self.stem(x))
        x = torch.cat([x[..., a::2, b::2] for a in (0, 1) for b in (0, 1)], 1)
        x = self.inner(x).relu()
        x = self.last(torch.cat([x, self.ghost(x).relu()], 1))
        x = self.hidden(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))
        return self.out(torch.cat([x.sin(), x.cos()], 1))


class Split(nn.Module):
    """A layer whose rows are split into halves with layers of their own, and one that is split by a width."""

    def __init__(self):
        super().__init__()
        self.enter, self.own, self.join = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(14, 12, 1)
        self.width, self.norm = 4, nn.BatchNorm2d(12)
        self.parts, self.last = nn.ModuleList(nn.Conv2d(4, 5, 1) for _ in range(3)), nn.Conv2d(15, 4, 1)

    def forward(self, x):
        left, right = self.enter(x).relu().chunk(2, 1)
        x = self.norm(self.join(torch.cat([left, self.own(right).relu()], 1)))
        parts = torch.split(x, self.width, 1)
        return self.last(torch.cat([layer(part).relu() for layer, part in zip(self.parts, parts, strict=True)], 1))


class Selected(nn.Module):
    """Hidden units that a second layer reads without gradients, to choose an output."""

    def __init__(self):
        super().__init__()
        self.first, self.scores, self.last = nn.Linear(8, 12), nn.Linear(12, 5), nn.Linear(12, 4)

    def forward(self, x):
        hidden = self.first(x).relu()
        with torch.no_grad():
            chosen = self.scores(hidden).softmax(-1).argmax(-1, keepdim=True)
        return self.last(hidden) * (1 + chosen)


def summary(sites):
    return {site.name: (site.kind, site.count) for site in sites}


def outputs(model, batch):
    with torch.no_grad():
        output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, torch.Tensor) else output.logits


def without_units(model, sites, kept):
    """A copy whose readers have zero columns for the units that are not kept."""
    model = copy.deepcopy(model)
    for site in sites:
        gone = set(range(site.count)) - set(kept.get(site.name, range(site.count)))
        for reader in site.readers:
            reader.weight.stored(model).data.index_fill_(
                reader.weight.axis, torch.tensor(reader.weight.of(gone)).long(), 0
            )
    return model


@pytest.mark.parametrize(
    ("build", "batch"),
    [(llama, TEXT), (Residual, PICTURES), (Joined, PICTURES), (Views, PICTURES), (Split, PICTURES), (Selected, ROWS)],
)
@pytest.mark.parametrize("inner", [True, False])
def test_removed_units_change_nothing_but_their_own_contribution(build, batch, inner):
    model = build().eval()
    dense = outputs(model, batch)
    sites = find_sites(model, batch, inner)
    assert torch.equal(outputs(model, batch), dense)
    if isinstance(model, Residual):
        nn.init.ones_(model.project[1].weight)
    before = outputs(model, batch)
    kept = {site.name: range(1, site.count, 2) for site in sites}
    expected = outputs(without_units(model, sites, kept), batch)
    remove(model, sites, kept)
    found = outputs(model, batch)
    assert not torch.allclose(found, before, atol=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_units_of_grouped_query_attention_are_key_value_groups():
    sites = find_sites(llama(), TEXT)
    assert [(site.kind, site.count) for site in sites] == [("heads", 2), ("neurons", 24)] * 2
    rows = {one.path.rpartition(".")[2]: one.index[1] for one in sites[0].writers}
    assert rows == {"q_proj": (*range(8, 16),), "k_proj": (4, 5, 6, 7), "v_proj": (4, 5, 6, 7)}
    assert sites[0].columns[1] == (*range(8, 16),)
    assert not sites[0].can_bias


def test_layers_behind_a_norm_share_three_backward_passes(monkeypatch):
    traced, passes = trace.trace(llama(), [TEXT]), []
    touched = Dependencies.touched
    monkeypatch.setattr(Dependencies, "touched", lambda *args: passes.append(1) or touched(*args))
    dependencies = Dependencies(traced)
    readers = [traced.reads[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    units = [dependencies.units(reader) for reader in readers]
    assert len(passes) == 3
    assert units[0] is units[1] is units[2]
    assert units[0].index == ()


def test_layers_that_read_a_tensor_before_and_after_a_write_have_their_own_inputs():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third, self.last = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            hidden = self.first(x)
            before = self.second(hidden)
            hidden += before
            return self.last(self.third(hidden))

    traced = trace.trace(Written(), [ROWS])
    regions = [Dependencies(traced).units(traced.reads[f"{name}.weight"]).labels for name in ("second", "third")]
    assert [len(region) for region in regions] == [1, 2]


def test_units_of_multi_query_attention_are_query_heads():
    sites = find_sites(llama(groups=1), TEXT)
    assert (sites[0].kind, sites[0].count) == ("heads", 4)
    assert [one.path.rpartition(".")[2] for one in sites[0].writers] == ["q_proj"]


def test_fused_queries_keys_and_values_are_cut_per_head():
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=48, n_positions=64, **TOKENS)
    heads = find_sites(AutoModelForCausalLM.from_config(config).eval(), TEXT)[0]
    assert heads.writers[0].index[1] == (*range(8, 16), *range(24, 32), *range(40, 48))
    assert heads.writers[0].axis == 1


def test_channels_pass_depthwise_convolutions_and_channel_attention():
    sites = find_sites(Residual().eval(), PICTURES)
    assert summary(sites) == {"project.0": ("channels", 12), "excite": ("neurons", 4)}
    assert [reader.path for reader in sites[0].readers] == ["project.0", "squeeze"]
    assert {one.path for one in sites[0].writers} == {
        "expand.0", "expand.1", "depthwise.0", "depthwise.1", "excite"
    }  # fmt: skip
    assert sites[0].readers[0].norm == "project.1"


def test_channels_of_grouped_convolutions_under_channel_attention_go_group_by_group():
    """One group of three channels is a unit that two layers read, as in RegNetY."""
    sites = find_sites(Residual(groups=4).eval(), PICTURES)
    assert summary(sites) == {"project.0": ("channels", 4), "excite": ("neurons", 4)}
    assert [len(reader.weight.index[0]) for reader in sites[0].readers] == [3, 3]


def test_residual_stream_is_a_site_on_request():
    sites = find_sites(Residual().eval(), PICTURES, inner=False)
    stream = next(site for site in sites if site.count == 8)
    assert {reader.path for reader in stream.readers} == {"expand.0", "classifier"}
    assert stream.readers[0].columns[1] == (1,) or stream.readers[0].columns[1] == (*range(64, 128),)


def test_branches_of_a_concatenation_are_sites_of_one_reader():
    sites = find_sites(Joined().eval(), PICTURES)
    assert summary(sites) == {"last:left": ("channels", 4), "last:right": ("channels", 6)}
    assert sites[1].columns == tuple((channel,) for channel in range(4, 10))


def test_columns_of_several_views_of_a_channel_are_one_unit():
    sites = find_sites(Views().eval(), PICTURES)
    assert summary(sites) == {
        "inner": ("channels", 8), "last": ("channels", 6), "hidden": ("channels", 5), "out": ("neurons", 9)
    }  # fmt: skip
    assert [site.columns[1] for site in sites] == [(1, 9, 17, 25), (1, 7), (1, 6), (1, 10)]


def test_equal_parts_of_a_layer_lose_units_together():
    found = checked_sites(Split().eval(), [PICTURES], inner=True)
    assert not found.refused
    sites = {site.name: site for site in found.sites}
    assert summary(found.sites) == {
        "own": ("channels", 8), "join:own": ("channels", 6), "parts.0": ("channels", 4),
        "last:parts.0": ("channels", 5), "last:parts.1": ("channels", 5), "last:parts.2": ("channels", 5),
    }  # fmt: skip
    assert {one.key: one.index[1] for one in sites["own"].writers}["enter.weight"] == (1, 9)
    assert {one.path: one.weight.index[1] for one in sites["own"].readers} == {"own": (1,), "join": (1,)}
    assert {one.key: one.index[1] for one in sites["parts.0"].writers}["join.bias"] == (1, 5, 9)
    assert [(one.name, one.each) for one in sites["parts.0"].attributes] == [("width", 1)]


def test_text_beside_pictures_keeps_its_positions():
    text = {"input_ids": torch.arange(64).view(4, 16), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    assert {value.shape for value in shortened(text).values()} == {(2, 8)}
    found = shortened({**text, "pixel_values": torch.zeros(4, 3, 8, 8)})  # tokens of the text stand for patches
    assert {name: value.shape for name, value in found.items()} == {
        "input_ids": (2, 16),
        "attention_mask": (2, 16),
        "pixel_values": (2, 3, 8, 8),
    }


def test_tied_parameters_are_left_alone():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    assert len(find_sites(model, torch.ones(2, 6))) == 2
    model[2].weight = model[0].weight
    assert find_sites(model, torch.ones(2, 6)) == []


class Normed(nn.Module):
    """Two convolutions and the batch norms that take their outputs."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.up = nn.Conv2d(3, 8, 1)
        self.first, self.second = nn.Conv2d(8, 4, 1, bias=False), nn.Conv2d(8, 4, 1, bias=False)
        self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        given = torch.relu(self.up(x))
        y, z = self.first(given), self.second(given)
        small = self.first(given[..., ::2, ::2])
        uses = {
            "one norm": lambda: (self.one(y), self.one(small), self.two(z)),
            "a norm for each level": lambda: (self.one(y), self.two(small), z),
            "also added": lambda: (self.one(y) + y, self.one(small), self.two(z)),
            "also returned": lambda: (self.one(y), small, self.two(z)),
            "also joined": lambda: (self.one(y), torch.cat([small, small]), self.two(z)),
            "a norm of two": lambda: (self.one(y), self.one(small), self.one(z)),
        }
        return uses[self.use]()


@pytest.mark.parametrize(
    ("use", "norms"),
    [
        ("one norm", ["one", "two"]),
        ("a norm for each level", [None, None]),
        ("also added", [None, "two"]),
        ("also returned", [None, "two"]),
        ("also joined", [None, "two"]),
        ("a norm of two", [None, None]),
    ],
)
def test_batch_norm_is_that_of_a_reader_only_if_it_alone_takes_all_outputs(use, norms):
    (site,) = traced_sites(Normed(use).eval(), torch.randn(2, 3, 6, 6))
    assert [one.norm for one in sorted(site.readers, key=lambda one: one.path)] == norms


class Functions(nn.Module):
    """A perceptron of functions of torch, whose arguments are given by name."""

    def __init__(self, second):
        super().__init__()
        self.first, self.last, self.second = nn.Linear(8, 6), nn.Linear(6, 4), second

    def forward(self, x):
        hidden = torch.clamp(input=functional.relu(input=self.first(x)), max=9.0)
        return self.second(hidden, self.last.weight, self.last.bias)


@pytest.mark.parametrize(
    "second",
    [
        lambda x, weight, bias: functional.linear(input=x, weight=weight, bias=bias),
        lambda x, weight, bias: torch.matmul(input=x, other=weight.T) + bias,
        lambda x, weight, bias: torch.mm(mat2=torch.transpose(input=weight, dim0=0, dim1=1), input=x) + bias,
        lambda x, weight, bias: torch.addmm(input=bias, mat1=x, mat2=torch.t(input=weight)),
        lambda x, weight, bias: torch.addmm(bias, x, weight.T),
    ],
)
def test_arguments_of_functions_may_be_given_by_name(second):
    assert summary(find_sites(Functions(second).eval(), torch.ones(2, 8))) == {"last": ("neurons", 6)}


def test_matrices_of_the_model_itself_read_units():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(8, 6), nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return self.first(x).relu() @ self.head

    model = Root().eval()
    sites = find_sites(model, torch.ones(2, 8))
    assert summary(sites) == {"head": ("neurons", 6)}
    remove(model, sites, {"head": [0, 2, 5]})
    assert (model.first.weight.shape, model.head.shape) == ((3, 8), (3, 4))


class BothWays(nn.Module):
    """A matrix that maps rows of 12 to rows of 8 and, transposed, back; the units before it have its columns."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Linear(8, 10)
        self.last = nn.Linear(10, 12)

    def forward(self, x):
        hidden = self.down(self.up(x).relu())
        return self.last(self.middle(hidden).relu()) + (hidden.sin() @ self.down.weight)


def test_a_matrix_that_is_read_along_both_axes_keeps_its_units():
    assert summary(find_sites(BothWays().eval(), ROWS)) == {"last": ("neurons", 10)}


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("only in training mode")


class Refusing(nn.Module):
    """A perceptron with a function between its layers that the search for units cannot pass."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 12), nn.Linear(12, 8), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def small_only(x):
    if float(x.detach().abs().max()) > 1e-3:
        raise ValueError("values above 0.001")
    return x.relu()


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (OwnBackward.apply, r"backward pass .* fails in eval mode \(AssertionError: only in training mode\)"),
        (small_only, r"Refusing does not take noise .* \(ValueError: values above 0.001\)"),
    ],
)
def test_networks_that_cannot_be_traced_are_refused(between, message):
    model = Refusing(between).eval()
    torch.nn.init.zeros_(model.up.weight)
    torch.nn.init.zeros_(model.up.bias)
    with pytest.raises(ModelError, match=rf"Units cannot be found: .*{message}\. Prune entries instead"):
        iobs.prune(model, [ROWS], iobs.Structured(0.25))


class Experts(nn.Module):
    """Eight experts; every token goes to two of them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)) for _ in range(8))

    def forward(self, x):
        found, (values, chosen) = torch.zeros_like(x), self.gate(x).softmax(-1).topk(2, -1)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                found = found.index_add(0, rows, expert(x[rows]) * values[rows, places, None])
        return found


def test_experts_that_few_samples_reach_are_found_or_refused_with_a_reason(monkeypatch):
    torch.manual_seed(1)
    model = Experts().eval()
    data = torch.randn(12, 6)[:3]
    called = {f"experts.{one}.2" for one in model.gate(data).topk(2, -1).indices.unique().tolist()}
    found = checked_sites(model, [data], inner=True)
    assert called <= {one.name for one in found.sites}
    monkeypatch.setattr(trace, "_MOST_PASSES", 1)
    once = checked_sites(model, [data], inner=True)
    missed = {name for name, reason in once.refused.items() if reason.startswith("noise in place of a few samples")}
    assert missed
    assert called <= missed | {one.name for one in once.sites}


def test_network_that_amplifies_rounding_of_float32_loses_units():
    torch.manual_seed(0)
    model = Amplifying(1e5).eval()
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    assert not torch.allclose(wide(ROWS), wide.double()(ROWS.double()).float(), rtol=0, atol=1e-3)
    (site,) = find_sites(model, ROWS)
    kept = [*range(0, 256, 2)]
    remove(narrow, [site], {site.name: kept})
    with torch.no_grad():
        model.last.weight[:, 1::2] = 0
    assert torch.allclose(narrow.double()(ROWS.double()), model.double()(ROWS.double()), rtol=0, atol=1e-7)
