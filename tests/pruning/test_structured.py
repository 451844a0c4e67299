"""Structured: units are removed from whole networks, and the networks compute what the zeros promised."""

import copy
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import families
import pytest
import torch
from menagerie import Amplifying
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traced_sites import find_sites
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

import iobs
from iobs.core.patterns import parse
from iobs.errors import (
    AuditError,
    CalibrationError,
    LayerSelectionError,
    ModelError,
    NonFiniteError,
    PatternError,
    ProblemError,
)
from iobs.pruning import structured
from iobs.pruning.plan import widths
from iobs.pruning.structure.expected import Expected
from iobs.pruning.structure.units import remove, zero_columns
from iobs.pruning.structured import narrowing
from iobs.pruning.structured_report import StructuredReport, WidthRecord
from iobs.pruning.widths.latency import measure, shares_of
from iobs.report import read_report
from iobs.report.page import render_widths
from iobs.solvers import grouped


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.conv1 = nn.Conv2d(8, inner, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(inner), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(inner, 8, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


@pytest.fixture(autouse=True)
def few_proofs(monkeypatch):
    """Prove the best units of narrow layers alone, which tests of the solvers do for all: it took half of each run."""
    monkeypatch.setattr(grouped, "_PROVABLE", 6)


def network():
    return copy.deepcopy(trained())


@cache
def trained():
    torch.manual_seed(1)
    found = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(12), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found.append(nn.Linear(8, 4))
    with torch.no_grad():
        for _ in range(20):  # running statistics of a trained network
            found(torch.randn(32, 3, 8, 8))
    return found.eval()


def pictures(count=40):
    return list(torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)).split(20))


def llama():
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, vocab_size=48, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def text():
    return [{"input_ids": torch.randint(3, 48, (8, 16), generator=torch.Generator().manual_seed(3))}]


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("one-shot", 0.25),
        ("fast", 0.5),
        pytest.param("one-shot", 0.5, marks=pytest.mark.slow),
        pytest.param("fast", 0.25, marks=pytest.mark.slow),
    ],
)
def test_network_is_narrower_by_the_share_asked(recipe, share):
    model = network()
    dense = sum(value.numel() for value in model.parameters())
    report = iobs.prune(model, pictures(), iobs.Structured(share), recipe)
    widths = [model[number].conv2.in_channels for number in (1, 2)]
    assert [one.after for one in report.widths] == widths
    assert [model[number].bn1.num_features for number in (1, 2)] == widths
    macs = report.costs[0]
    assert 1 - share - 0.09 <= macs.share <= 1 - share  # one channel of the smaller block is 3.6 % of the cost
    assert sum(value.numel() for value in model.parameters()) < dense
    assert model(pictures()[0]).shape == (20, 4)


def test_chain_of_convolutions_is_narrowed_with_biases():
    torch.manual_seed(4)
    layers = [nn.Conv2d(3, 10, 3, bias=False), nn.BatchNorm2d(10), nn.ReLU()]
    layers += [nn.Conv2d(10, 10, 3, groups=10, bias=False), nn.BatchNorm2d(10), nn.ReLU()]
    layers += [nn.Conv2d(10, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)).eval()
    report = iobs.prune(model, pictures(), iobs.Structured(0.4), "fast")
    assert {one.kind for one in report.widths} == {"channels"}
    assert model[3].groups == model[0].out_channels < 10
    assert model[9].in_channels == model[7].num_features < 12
    assert model(pictures()[0]).shape == (20, 6, 4, 4)


class Own(nn.Module):
    """A layer that no class of torch tells."""

    def __init__(self, inputs, outputs, *kernel):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, *kernel) / inputs**0.5)

    def forward(self, x):
        functional = nn.functional
        return functional.conv2d(x, self.weight, stride=2) if x.ndim > 2 else functional.linear(x, self.weight)


@pytest.mark.parametrize(("kernel", "shape", "macs"), [((), (6,), 144), ((3, 3), (6, 29, 29), 184896)])
def test_products_are_counted_without_modules_of_torch(kernel, shape, macs):
    torch.manual_seed(0)
    model = nn.Sequential(Own(6, 16, *kernel), nn.ReLU(), Own(16, 3, *kernel)).eval()
    report = iobs.prune(model, [torch.randn(40, *shape)], "structured:50%", "one-shot")
    assert [(cost.before, cost.after) for cost in report.costs[::2][:2]] == [(macs, macs / 2)] * 2
    assert model[0].weight.shape[0] == model[2].weight.shape[1] == 8


def test_projections_of_attention_are_counted():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), nn.Linear(16, 3)).eval()
    report = iobs.prune(model, [torch.randn(40, 5, 16)], "structured:50%", "one-shot")
    assert report.costs[2].before == 5 * (4 * 16 * 16 + 2 * 16 * 24 + 16 * 3)


class Levels(nn.Module):
    """One convolution of two levels with a batch norm for each, as in RetinaNet and EfficientDet."""

    def __init__(self):
        super().__init__()
        self.up, self.conv = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.norms, self.out = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2)), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        given = torch.relu(self.up(x)), torch.relu(self.up(x[..., ::2, ::2]))
        return sum(
            self.out(norm(self.conv(one)).relu()).mean((2, 3)) for norm, one in zip(self.norms, given, strict=True)
        )


def test_free_bias_of_a_convolution_with_two_batch_norms_is_its_own():
    torch.manual_seed(0)
    model = Levels().eval()
    report = iobs.prune(model, pictures(), "structured:40%", "one-shot")
    assert report.removed > 0
    assert model.conv.bias is not None
    assert all(not bool(norm.running_mean.any()) for norm in model.norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_narrower_network_in_short_floats_is_checked_in_float32(dtype):
    model = network().to(dtype)
    data = [one.to(dtype) for one in pictures()]
    report = iobs.prune(model, data, "structured:40%", "one-shot")
    assert model[1].conv1.weight.dtype == dtype
    assert report.costs[0].share <= 0.6
    expected = Expected.of(model, data[0])
    expected.require(model)
    with torch.no_grad():
        model[1].conv2.weight[:, :1] = 0  # one channel of one layer; a tolerance of the dtype would let it pass
    with pytest.raises(AuditError, match="other outputs"):
        expected.require(model)


def test_small_difference_of_the_narrower_network_is_measured_again_in_float64():
    torch.manual_seed(0)
    narrow, data = Amplifying(3e4).eval(), torch.randn(64, 8)
    wide, (site,) = copy.deepcopy(narrow), find_sites(narrow, data)
    kept = [*range(0, 256, 2)]
    zero_columns(wide, site, kept)
    remove(narrow, [site], {site.name: kept})
    order = torch.randperm(len(kept))  # another order of the sums, since some processors round zeros away alike
    with torch.no_grad():
        for tensor in (narrow.first.weight, narrow.first.bias):
            tensor.copy_(tensor[order].clone())
        narrow.last.weight.copy_(narrow.last.weight[:, order].clone())
    expected = Expected.of(wide, data)
    with pytest.raises(AuditError, match="other outputs"):
        expected.require(narrow)
    expected.require(narrow, wide)
    with torch.no_grad():
        narrow.last.bias += 1e-7
    with pytest.raises(AuditError, match="other outputs"):
        expected.require(narrow, wide)


def test_narrower_network_gets_zeros_on_a_grid():
    model = network()
    iobs.prune(model, pictures(), "structured:40%", "one-shot")
    width = model[2].conv1.out_channels
    report = iobs.prune(model, pictures(), iobs.Unstructured(0.5) & iobs.Grid(4), "one-shot", solver="magnitude")
    assert model[2].conv1.out_channels == width < 16
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
    assert len(model[2].conv2.weight.detach()[0].unique()) <= 2 * 7 + 1  # one scale for a row


@pytest.mark.parametrize("size", [8, 12])
def test_costs_of_samples_of_several_shapes_are_noted(size):
    data = [*pictures(), torch.randn(20, 3, size, size)]
    report = iobs.prune(network(), data, "structured:50%", "one-shot")
    found = [note for note in report.notes if "samples of the first calibration batch" in note]
    assert len(found) == (size != 8)


def test_network_without_units_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softmax(1), nn.Flatten(), nn.LayerNorm(256)).eval()
    with pytest.raises(LayerSelectionError, match="No channels"):
        iobs.prune(model, pictures(), iobs.Structured(0.3))


def test_refit_is_closer_to_dense_than_magnitude():
    dense = network()
    ours, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    iobs.prune(ours, pictures(), "structured:50%", "one-shot")
    iobs.prune(plain, pictures(), "structured:50%", "one-shot", solver="magnitude", target="layer", bias="keep")
    fresh = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        wanted = dense(fresh)
        assert (ours(fresh) - wanted).square().sum() < 0.5 * (plain(fresh) - wanted).square().sum()


def test_layers_that_read_no_units_are_refitted_to_the_dense_outputs():
    dense = network()
    ours, readers, plain = (copy.deepcopy(dense) for _ in range(3))
    iobs.prune(ours, pictures(), "structured:50%", "one-shot")
    iobs.prune(readers, pictures(), "structured:50%", "one-shot", include="*.conv2")
    iobs.prune(plain, pictures(), "structured:50%", "one-shot", target="layer")
    torch.testing.assert_close(ours[0].weight, dense[0].weight)  # nothing before it has changed
    assert not torch.equal(ours[5].weight, dense[5].weight)
    assert torch.equal(readers[5].weight, dense[5].weight)
    assert torch.equal(plain[5].weight, dense[5].weight)
    fresh = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        wanted = dense(fresh)
        assert (ours(fresh) - wanted).square().sum() < (readers(fresh) - wanted).square().sum()


@pytest.mark.parametrize("recipe", ["one-shot", "fast", "best"])
@pytest.mark.parametrize("of", ["macs", "latency"])
def test_nothing_is_measured_or_changed_if_nothing_is_removed(recipe, of, monkeypatch):
    monkeypatch.setattr(widths.Curves, "measured", None)
    monkeypatch.setattr(widths, "measure", None)
    dense = network()
    model = copy.deepcopy(dense)
    report = iobs.prune(model, pictures(), iobs.Structured(0.0, of=of), recipe)
    assert [one.after for one in report.widths] == [12, 16]
    assert any("Nothing is removed" in note for note in report.notes)
    for (name, before), (same, after) in zip(dense.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("dense", "share", "multiple", "kept"),
    [((12, 16), 0.4, 8, [8, 8]), ((12, 48), 0.3, 16, [12, 16])],  # a layer smaller than the multiple keeps its units
)
def test_widths_are_multiples(dense, share, multiple, kept):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *map(Block, dense)).eval()
    report = iobs.prune(model, pictures(), iobs.Structured(share, multiple_of=multiple), "one-shot")
    assert [(width.before, width.after) for width in report.widths] == [*zip(dense, kept, strict=True)][
        -len(report.widths) :
    ]
    assert [model[at].conv1.out_channels for at in (1, 2)] == kept


def test_language_model_has_equal_widths_and_loads_unpatched(tmp_path):
    model = llama()
    report = iobs.prune(model, text(), iobs.Structured(0.4), "fast")
    by_kind = {kind: {one.after for one in report.widths if one.kind == kind} for kind in ("neurons", "heads")}
    assert all(len(after) == 1 for after in by_kind.values())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.intermediate_size == by_kind["neurons"].pop() < 24
    torch.testing.assert_close(again(**text()[0]).logits, model(**text()[0]).logits)


def test_kept_biases_are_those_of_the_model():
    model = llama()
    before = {name for name, _ in model.named_parameters()}
    iobs.prune(model, text(), "structured:30%", "one-shot", solver="magnitude", target="layer", bias="keep")
    assert {name for name, _ in model.named_parameters()} == before
    assert not model.config.attention_bias
    assert not model.config.mlp_bias


def test_fine_tuned_network_is_returned_only_if_held_out_samples_prefer_it():
    model = network()
    step = iobs.FineTune(
        lr=1e-3, optimizer="adam", steps=5, loss="kl", parameters="all", support="fixed", batch_size=20
    )
    report = iobs.prune(model, pictures(), "structured:50%", "fast", finetune=step)
    assert [one.kind for one in report.rounds] == ["projection", "finetune"]
    before, after = (one.loss_heldout for one in report.rounds)
    assert report.best_round == int(after * 1.02 < before)


def test_report_is_read_back(tmp_path):
    report = iobs.prune(network(), pictures(), "structured:30%", "one-shot")
    assert report.refitted == ["0", "1.conv1", "2.conv1", "5"]  # the others read units
    assert "Layers that lost inputs with their units: 2; refitted alone: 4 (0, 1.conv1" in str(report)
    report.save(tmp_path / "report.json")
    again = read_report(str(tmp_path / "report.json"))
    assert isinstance(again, StructuredReport)
    assert again.widths == report.widths
    assert again.costs == report.costs
    assert again.refitted == report.refitted
    assert "channels are left" in str(again)


def test_bars_of_widths_have_one_scale_for_each_kind():
    widths = [WidthRecord("a", "heads", "a", 4, 2, 0.1), WidthRecord("b", "neurons", "b", 200, 50, 0.1)]
    page = render_widths(SimpleNamespace(widths=widths))
    assert page.count("width:100.00%") == 2  # 4 heads are as long as 200 neurons
    assert page.count("width:50.00%") == page.count("width:25.00%") == 1


FAILURES = {  # from the first layer to the last measurement
    "layer": "callbacks.LoggingCallback.on_layer",
    "configure": "structure.config_widths.ConfigWidths.configure",
    "require": "structure.expected.Expected.require",
    "seconds": "structured._seconds",
}
IN_THE_LONG_SET = {(network, "configure"), (llama, "layer"), (llama, "require"), (llama, "seconds")}


@pytest.mark.parametrize(
    ("build", "fails"),
    [
        pytest.param(
            *case, id=f"{case[0].__name__}-{case[1]}", marks=[pytest.mark.slow] if case in IN_THE_LONG_SET else []
        )
        for case in product((network, llama), FAILURES)
    ],
)
def test_failed_run_leaves_the_model_as_it_was(monkeypatch, build, fails):
    model, data = build(), pictures() if build is network else text()
    before, tensors = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    config = copy.deepcopy(model.config.to_dict()) if build is llama else None

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"iobs.pruning.{FAILURES[fails]}", fail)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data, "structured:30%", "one-shot")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value is tensors[name] for name, value in model.named_parameters())
    if build is llama:
        assert model.config.to_dict() == config
        model(**data[0])
    else:
        assert (model[1].conv1.out_channels, model[1].bn1.num_features) == (12, 12)
        model(data[0])


def test_time_that_cannot_be_measured_is_a_note(monkeypatch):
    def fail(*_, **__):
        raise ValueError("no such operator")

    monkeypatch.setattr(structured, "shares_of", fail)
    report = iobs.prune(network(), pictures(), "structured:30%", "one-shot")
    assert "Time not measured: no such operator" in report.notes


@pytest.mark.parametrize("solver", ["flap", "greedy", "osscar", "random", "search", "wanda", "magnitude"])
def test_solvers_of_units_have_names(solver):
    model = network()
    report = iobs.prune(model, pictures(), "structured:30%", "one-shot", solver=solver)
    assert [one.after for one in report.widths] == [model[at].conv1.out_channels for at in (1, 2)]
    assert report.costs[0].share < 0.75


@pytest.mark.parametrize("solver", ["sparsegpt", "gptq", "nettrim", iobs.SparseGPT(), iobs.ADMM()])
def test_solvers_of_zeros_are_refused_before_any_work(solver):
    unread = (pytest.fail("data were read") for _ in range(1))
    with pytest.raises(ProblemError, match=r"does not choose whole units.*flap, greedy, magnitude, osscar"):
        iobs.prune(network(), unread, "structured:30%", "fast", solver=solver)


def test_solvers_of_units_are_refused_without_units():
    unread = (pytest.fail("data were read") for _ in range(1))
    with pytest.raises(ProblemError, match=r"'flap' chooses whole units.*iobs\.Structured"):
        iobs.prune(network(), unread, 0.5, "fast", solver="flap")


@pytest.mark.parametrize("units", ["auto", "blocks"])
def test_callbacks_hear_the_end_once_with_the_narrower_model(units):
    ends = []

    class End(iobs.Callback):
        def on_start(self, model, layers, rounds):
            self.model = model

        def on_end(self, report):
            ends.append((report, sum(value.numel() for value in self.model.parameters())))

    model = llama()
    report = iobs.prune(model, text(), iobs.Structured(0.5, units=units), "one-shot", callbacks=[End()])
    assert ends == [(report, sum(value.numel() for value in model.parameters()))]
    assert report.costs


def test_pattern_is_read_from_its_text():
    pattern = iobs.Structured(0.3, of="latency", multiple_of=8, uniform=False, runtime="onnx")
    assert parse(str(pattern)) == pattern
    assert parse("structured:30%") == iobs.Structured(0.3)


@pytest.mark.parametrize(
    "wrong",
    ["structured:1.2", "structured:30%,of=time", "structured:30%,uniform=0", "structured:30%,width=3", "structured"],
)
def test_wrong_text_is_refused(wrong):
    with pytest.raises(PatternError):
        parse(wrong)


def test_what_does_not_apply_is_refused_before_any_work():
    with pytest.raises(ProblemError, match="rounds"):
        iobs.prune(network(), pictures(), "structured:30%", "fast", rounds=3)
    with pytest.raises(ProblemError, match="no form for whole units"):
        iobs.prune(network(), pictures(), "structured:30%", "paper")
    with pytest.raises(ProblemError, match="Bounds of an allocation"):
        iobs.prune(network(), pictures(), "structured:30%", allocation=iobs.Allocation("fisher", least=0.1))
    with pytest.raises(PatternError, match="A search divides zeros alone"):
        iobs.prune(network(), pictures(), "structured:30%", allocation="search")
    with pytest.raises(LayerSelectionError, match="No channels"):
        iobs.prune(nn.Sequential(nn.Linear(4, 3)), [torch.randn(8, 4)], "structured:30%")
    with pytest.raises(ModelError, match="got the class Linear"):
        iobs.prune(nn.Linear, pictures(), "structured:30%")
    broken = network()
    with torch.no_grad():
        broken[5].bias[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"5\.bias holds NaN"):
        iobs.prune(broken, pictures(), "structured:30%")
    for units in ("auto", "blocks"):
        with pytest.raises(CalibrationError, match="batch 0"):
            iobs.prune(network(), [torch.randn(8, 1, 8, 8)], iobs.Structured(0.3, units=units))
    with pytest.raises(PatternError, match=r"iobs\.prune"):
        iobs.solve(iobs.Quadratic.at(torch.randn(2, 4), torch.eye(4)), iobs.Structured(0.5))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("units", ["auto", "blocks"])
@pytest.mark.parametrize("merged", [False, True])
def test_model_with_adapters_is_refused_before_any_work(units, merged):
    peft = pytest.importorskip("peft")
    base = families.LANGUAGE_MODELS["llama"][0]().eval()
    whole = peft.get_peft_model(base, peft.LoraConfig(target_modules=["down_proj"], r=2))
    if merged:
        whole.merge_adapter()
    before = {name: one.clone() for name, one in whole.named_parameters()}
    unread = (pytest.fail("data were read") for _ in range(1))
    for include in (None, "*o_proj*"):
        with pytest.raises(ModelError, match=r"down_proj.* has an adapter.*iobs\.transformers\.merge_adapters"):
            iobs.prune(whole, unread, iobs.Structured(0.5, units=units), "one-shot", include=include)
    assert all(torch.equal(one, before[name]) for name, one in whole.named_parameters())


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_cost_that_cannot_be_reached_is_refused_before_any_measurement(monkeypatch, recipe):
    monkeypatch.setattr(widths.Curves, "measured", lambda _: pytest.fail("measured"))
    with pytest.raises(PatternError, match="ask for less"):
        iobs.prune(network(), pictures(), "structured:99%", recipe)


def counted_as_operations(monkeypatch):
    """Let operations of a forward pass stand for seconds, so that no test depends on the machine."""

    def clock(calls):
        found = []
        for call in calls:
            with FlopCounterMode(display=False) as counter:
                call()
            found.append(float(counter.get_total_flops()))
        return found

    for module in (widths, structured):
        monkeypatch.setattr(module, "shares_of", partial(shares_of, clock=clock))
    monkeypatch.setattr(widths, "measure", partial(measure, clock=clock))


def test_network_takes_the_share_of_time_asked(monkeypatch):
    counted_as_operations(monkeypatch)
    model = network()
    report = iobs.prune(model, pictures(), iobs.Structured(0.3, of="latency"), "fast")
    seconds = report.costs[-1]
    assert seconds.name == "seconds"
    assert 0.6 < seconds.share <= 0.7
    assert "of one sample in torch" in str(report)
    assert "NOT faster" not in str(report)


def chain_without_biases():
    """Inner layers read units and write others, and get a bias for the run."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    layers += [nn.Conv2d(12, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1, bias=False)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4, bias=False)).eval()


def test_layers_without_biases_that_read_and_write_units_are_timed(monkeypatch):
    counted_as_operations(monkeypatch)
    model = chain_without_biases()
    report = iobs.prune(model, pictures(), iobs.Structured(0.3, of="latency"), "one-shot")
    assert report.costs[-1].share <= 0.71
    with_bias = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert with_bias == ["1.bias", "4.bias", "6.bias", "10.bias"]  # those behind a batch norm are part of its mean


def test_dense_time_is_that_of_the_network_without_the_biases_of_the_run(monkeypatch):
    timed = []

    def seconds(wide, narrow, batch, runtime, samples):
        timed.append([name for name, _ in wide.named_parameters()])
        return 2.0, 1.0

    monkeypatch.setattr(structured, "shares_of", seconds)
    model = network()
    dense = [name for name, _ in model.named_parameters()]
    iobs.prune(model, pictures(), iobs.Structured(0.3), "one-shot")
    assert timed == [dense]


class Mixture(nn.Module):
    """Two experts. Samples choose one by their first value, or the gate sends all of them to the second.

    Noise in place of the outputs of the gate reaches both.
    """

    def __init__(self, gated=False, always=False, width=16):
        super().__init__()
        self.always, self.gate = always, nn.Linear(6, 2) if gated else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6)) for _ in range(2)
        )
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            self.gate.bias.data = torch.tensor([-1.0, 1.0])

    def forward(self, x):
        out, chosen = x.clone(), (x[:, 0] > 0).long() if self.gate is None else self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if self.always or bool((chosen == number).any()):
                out[chosen == number] = expert(x[chosen == number])
        return out


def test_block_that_the_first_sample_does_not_call_keeps_its_units(monkeypatch):
    counted_as_operations(monkeypatch)
    torch.manual_seed(0)
    model, given = Mixture().eval(), torch.randn(80, 6)
    given[:2, 0] = torch.tensor([-1, 1])  # two samples are traced
    report = iobs.prune(model, [given], iobs.Structured(0.3, of="latency"), "one-shot", holdout=0.0)
    assert [one.after for one in report.widths] == [11, 16]
    assert "experts.1.2 keeps all units: the first sample does not call its block" in "\n".join(report.notes)


@pytest.mark.parametrize("order", [1, -1])
def test_expert_that_the_first_batch_does_not_reach_keeps_its_units_with_a_note(order):
    torch.manual_seed(0)
    given = torch.randn(80, 6)
    batches = [given[given[:, 0] < 0], given[given[:, 0] > 0]][::order]
    report = iobs.prune(Mixture().eval(), batches, iobs.Structured(0.3), "fast", holdout=0.0, blocks=None)
    kept = {one.name: one.after for one in report.widths}
    reached, left = ["experts.0.2", "experts.1.2"][::order]
    assert kept[reached] < kept[left] == 16
    assert f"{left}: all units are kept, since no sample of the first calibration batch reaches" in str(report.notes)


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize(("of", "allocation"), [("macs", "uniform"), ("parameters", "fisher")])
def test_expert_without_a_token_keeps_its_units(always, of, allocation):
    torch.manual_seed(0)
    model, given = Mixture(True, always).eval(), torch.randn(40, 6)
    report = iobs.prune(model, [given], iobs.Structured(0.25, of=of), "one-shot", allocation=allocation)
    assert [(one.name, one.after) for one in report.widths] == [("experts.1.2", 12)]
    assert model.experts[0][0].weight.shape == (16, 6)
    assert "experts.0.2: all units are kept, since no calibration sample reaches them." in report.notes
    with pytest.raises(LayerSelectionError, match="No calibration sample reaches a layer that holds units"):
        iobs.prune(Mixture(True, always).eval(), [given], iobs.Structured(0.25), "one-shot", include="experts.0.2")


class MixtureConfig(PreTrainedConfig):
    model_type = "two_experts"

    def __init__(self, width=16, **others):
        self.width = width
        super().__init__(**others)


class ConfiguredMixture(PreTrainedModel):
    """The mixture above, whose configuration has one width for both experts."""

    config_class = MixtureConfig

    def __init__(self, config):
        super().__init__(config)
        self.mixture = Mixture(gated=True, width=config.width)

    def forward(self, x):
        return self.mixture(x)


def test_layers_of_one_width_keep_all_units_if_no_sample_reaches_one_of_them(monkeypatch):
    torch.manual_seed(0)
    model, given = ConfiguredMixture(MixtureConfig()).eval(), torch.randn(40, 6)
    monkeypatch.setattr(narrowing, "run", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(LayerSelectionError, match=r"reaches mixture\.experts\.0\.2, and the configuration has one"):
        iobs.prune(model, [given], iobs.Structured(0.25), "one-shot")


def test_network_that_is_not_faster_is_called_so(monkeypatch):
    monkeypatch.setattr(structured, "shares_of", lambda *_, **__: (1.0, 1.1))
    report = iobs.prune(network(), pictures(), iobs.Structured(0.3), "one-shot")
    assert "NOT faster on this machine: 110.0% of the dense time" in str(report)
    assert 'Choose the widths by time (of="latency")' in str(report)
    report.settings["pattern"] = str(iobs.Structured(0.3, of="latency"))
    assert "Choose the widths by time" not in str(report)  # it was done


def test_time_is_reported_for_the_samples_of_a_call_that_are_asked_for():
    pattern = parse("structured:0.3,batch=4")
    assert pattern == iobs.Structured(0.3, batch=4)
    report = iobs.prune(network(), pictures(), pattern, "one-shot")
    assert "of 4 samples at once in torch" in str(report)
    with pytest.raises(PatternError, match="batch must be a whole number"):
        iobs.Structured(0.3, batch=0)


def test_time_that_cannot_be_reached_is_refused(monkeypatch):
    monkeypatch.setattr(widths, "measure", partial(measure, clock=lambda calls: [1.0] * len(calls)))
    with pytest.raises(PatternError, match=r"At most 0\.0% of this cost"):
        iobs.prune(network(), pictures(), iobs.Structured(0.3, of="latency"), "one-shot")
