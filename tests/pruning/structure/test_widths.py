"""Widths: narrower models of transformers are saved, loaded by `from_pretrained`, and refused where they cannot be."""

import copy

import pytest
import torch
from families import MODELS, build
from traced_sites import find_sites
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Dinov2Config,
    Dinov2Model,
    PvtConfig,
    PvtModel,
    RegNetConfig,
    RegNetForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import iobs
from iobs.errors import LayerSelectionError, ModelError
from iobs.pruning.recipe import STRUCTURED, BlockFit
from iobs.pruning.store import Store
from iobs.pruning.structure.config_widths import Field, built_shapes, shapes_of, widths_of
from iobs.pruning.structure.units import Reader, Site, Slices, remove
from iobs.pruning.structured import plan_structured
from iobs.pruning.structured_report import StructuredRequest
from iobs.pruning.widths.knapsack import choices_of

ALL = {"neurons": 2, "heads": 2}
LOADABLE = {
    "opt": {"neurons": 2},
    "llama": ALL,
    "mistral": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "gemma3": ALL,
    "phi": ALL,
    "phi3": ALL,
    "mixtral": {"heads": 2},
    "gpt2": {"neurons": 2},
    "gpt_neox": {"neurons": 2},
    "bloom": {},
    "falcon": {"neurons": 2},
    "vit": ALL,
}


def parts(name):
    model, data = build(name)
    sites = find_sites(model, data[0])
    return model, data[0], sites, widths_of(model, sites)


def half(sites, widths, seed=0):
    """Random halves of the units, equal numbers in one group."""
    generator = torch.Generator().manual_seed(seed)
    known = {site.name: site for site in sites}
    names = [name for group in widths.groups for name in group.sites]
    return {
        name: sorted(torch.randperm(known[name].count, generator=generator)[: known[name].count // 2].tolist())
        for name in names
    }


LONG = {"opt", "mistral", "qwen2", "qwen3", "gemma3", "phi", "falcon"}  # built like others that are in the gate


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in LOADABLE]
)
def test_narrower_models_are_loaded_unpatched(name, tmp_path):
    model, batch, sites, widths = parts(name)
    kept = half(sites, widths)
    found = [site.kind for site in sites if site.name in kept]
    assert {kind: found.count(kind) for kind in found} == LOADABLE[name]
    biased = [site for site in sites if site.name in kept and widths.bias(site)]
    remove(model, sites, kept, {site.reader: torch.linspace(-1, 1, 16) for site in biased})
    widths.configure(model, {name: len(units) for name, units in kept.items()}, [site.name for site in biased])
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


def test_a_decoder_keeps_the_fields_of_its_own_configuration():
    config = SwitchTransformersConfig(
        vocab_size=48, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2, num_decoder_layers=2, num_experts=2
    )
    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(config).eval()
    text = torch.arange(3, 35).view(2, 16)
    batch = {"input_ids": text, "decoder_input_ids": text[:, :6]}
    sites = find_sites(model, batch)
    widths = widths_of(model, sites)
    kept = half(sites, widths)
    remove(model, sites, kept)
    with torch.no_grad():
        before = model(**batch).logits
        widths.configure(model, {name: len(units) for name, units in kept.items()})
        assert torch.equal(model(**batch).logits, before)
    assert [model.decoder.config.is_decoder, model.encoder.config.is_decoder, model.config.is_decoder] == [1, 0, 0]
    assert {part.config.d_ff for part in (model, model.encoder, model.decoder)} == {12}


def test_every_refusal_has_a_reason():
    _, _, sites, widths = parts("gpt2")
    heads = next(site.name for site in sites if site.kind == "heads")
    assert "no field of GPT2Config" in widths.refused[heads]


def test_layers_of_one_field_keep_equal_numbers():
    model, _, sites, widths = parts("llama")
    first, second = (site.name for site in sites if site.kind == "neurons")
    before = model.config.to_dict()
    for counts in ({first: 12}, {first: 12, second: 10}):
        narrow = copy.deepcopy(model)
        remove(narrow, sites, {name: range(count) for name, count in counts.items()})
        with pytest.raises(ModelError, match="cannot have the shape of"):
            widths.configure(narrow, counts)
    assert model.config.to_dict() == before


def test_a_bias_that_the_class_cannot_have_is_refused():
    model, _, sites, widths = parts("mistral")
    assert not any(widths.bias(site) for site in sites)
    site = next(site for site in sites if site.kind == "neurons")
    remove(model, sites, {}, {site.reader: torch.ones(16)})
    with pytest.raises(ModelError, match=r"cannot have the shape of .*bias, \(16,\): .*no such parameter"):
        widths.configure(model, {}, [site.name])


def test_models_without_configuration_have_free_widths():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    sites = find_sites(model, torch.ones(2, 4))
    widths = widths_of(model, sites)
    assert [group.sites for group in widths.groups] == [("2",)]
    assert widths.configure(model, {"2": 3}) == {}


def test_every_family_is_listed():
    others = {"qwen3_moe", "mamba", "mamba2", "deit"}
    assert {name for name in MODELS if not name.startswith("timm")} == set(LOADABLE) | others


def test_narrower_model_is_pruned_further(tmp_path):
    model, batch, sites, widths = parts("llama")
    kept = half(sites, widths)
    remove(model, sites, kept)
    widths.configure(model, {name: len(units) for name, units in kept.items()})
    recipe = iobs.Recipe.preset("fast").but(solver="sparsegpt", blocks=BlockFit(steps=2, lr=1e-3))
    report = iobs.prune(model, [batch], 0.5, recipe)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)


@pytest.fixture
def five_heads(monkeypatch):
    """A Llama of 5 heads whose class, as in some versions of transformers, loads divisors of the hidden size alone."""

    def divisors_alone(model, config):
        if config.hidden_size % config.num_attention_heads:
            raise ModelError("the hidden size is no multiple of the number of heads")
        return built_shapes(model, config)

    monkeypatch.setattr("iobs.pruning.structure.config_widths.built_shapes", divisors_alone)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=40,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=12,
        num_hidden_layers=1,
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_numbers_of_heads_that_the_configuration_refuses_are_not_offered(five_heads):
    data = [{"input_ids": torch.randint(0, 32, (4, 8))} for _ in range(4)]
    sites = find_sites(five_heads, data[0])
    heads = next(site.name for site in sites if site.kind == "heads")
    assert widths_of(five_heads, sites).offered() == {heads: (1, 2, 4, 5)}  # divisors of the hidden size, and all heads
    notes = iobs.prune(five_heads, data, iobs.Structured(0.2), "one-shot").notes
    assert any("o_proj: of 5 units the class loads 1, 2, 4 or all. With uniform=False" in note for note in notes)


@pytest.mark.parametrize("ratio", [2.0, 3.5, 4.0])
@pytest.mark.parametrize("hidden", [96, 768])
def test_ratio_of_every_width_gives_that_width(hidden, ratio):
    count = int(hidden * ratio)
    one = Field("", "mlp_ratio", ratio / count)
    assert all(int(hidden * one.value(units)) == units for units in range(1, count + 1))
    assert one.value(hidden) == 1.0


def vision(kind):
    torch.manual_seed(0)
    if kind == "dinov2":  # a ratio that must be a whole number
        config = Dinov2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, mlp_ratio=4
        )
        return Dinov2Model(config).eval()
    sizes = {"hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "sequence_reduction_ratios": [2, 1]}
    config = PvtConfig(
        image_size=16,
        depths=[1, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_encoder_blocks=2,
        mlp_ratios=[4, 2],
        **sizes,
    )
    return PvtModel(config).eval()


@pytest.mark.parametrize(
    ("kind", "field", "after"), [("dinov2", "mlp_ratio", 3), ("pvt", "mlp_ratios", [3, 1])], ids=["dinov2", "pvt"]
)
def test_whole_ratios_load_the_widths_they_give(kind, field, after, tmp_path):
    model, batch = vision(kind), {"pixel_values": torch.randn(2, 3, 16, 16)}
    sites = [site for site in find_sites(model, batch) if site.kind == "neurons"]
    widths = widths_of(model, sites)
    offered = widths.offered()
    sizes = (16, 16) if kind == "dinov2" else (16, 32)
    expected = {site.name: tuple(range(size, site.count + 1, size)) for site, size in zip(sites, sizes, strict=True)}
    assert offered == expected
    kept = {name: range(counts[-2]) for name, counts in offered.items()}
    remove(model, sites, kept)
    widths.configure(model, {name: len(units) for name, units in kept.items()})
    assert getattr(model.config, field) == after
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path).eval()(**batch).last_hidden_state, model(**batch).last_hidden_state
    )


def test_offered_widths_are_multiples_where_asked():
    model, batch = vision("dinov2"), {"pixel_values": torch.randn(2, 3, 16, 16)}
    sites = [site for site in find_sites(model, batch) if site.kind == "neurons"]
    (choice, _) = choices_of(sites, iobs.Structured(0.5, multiple_of=32), (), None, widths_of(model, sites).offered())
    assert choice.widths == (32, 64)


def test_widths_of_sites_that_keep_equal_numbers_are_multiples_for_each_of_them():
    eight = Slices("", "weight", 1, tuple(tuple(range(8 * unit, 8 * unit + 8)) for unit in range(16)))
    one = Slices("", "weight", 1, tuple((unit,) for unit in range(16)))
    sites = [Site(name, "channels", (Reader(own),), ()) for name, own in (("grouped", eight), ("plain", one))]
    asked = iobs.Structured(0.5, multiple_of=8, uniform=True)
    (choice,) = choices_of(sites, asked, [("grouped", "plain")], None)
    assert choice.widths == (8, 16)
    (choice,) = choices_of(sites, asked, [("grouped", "plain")], None, {"grouped": (1, 8, 12, 16)})
    assert choice.widths == (8, 16)


def refused(model, batch, error, message, monkeypatch):
    """Check that a plan and a run are refused before any work."""
    monkeypatch.setattr("iobs.pruning.structured.narrowing.run", lambda *_, **__: pytest.fail("work was done"))
    request = StructuredRequest(iobs.Structured(0.25), STRUCTURED["one-shot"])
    with pytest.raises(error, match=message):
        plan_structured(Store(model), [batch], request)
    with pytest.raises(error, match=message):
        iobs.prune(model, [batch], iobs.Structured(0.25), "one-shot")


def test_a_width_that_follows_only_for_one_unit_less_is_refused_before_any_work(monkeypatch):
    config = RegNetConfig(embedding_size=16, hidden_sizes=[32, 48], depths=[1, 1], groups_width=16, layer_type="y")
    model = RegNetForImageClassification(config).eval()
    message = r"also changes regnet\S+attention\S+\)\. With uniform=False it is pruned"  # a quarter of the channels
    refused(model, {"pixel_values": torch.randn(2, 3, 16, 16)}, LayerSelectionError, message, monkeypatch)


def test_a_number_of_units_that_makes_a_shortcut_needless_is_not_offered():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[6, 12], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config).eval()
    sites = find_sites(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    (offered,) = widths_of(model, sites).offered().values()
    assert offered == (1, 2, 3, 4, 5, 7, 8)  # with 6 the first block has no convolution beside it


@pytest.mark.parametrize("after_the_trial", [False, True])
def test_widths_that_the_class_cannot_have_together_are_refused(monkeypatch, after_the_trial):
    """Before any work; or, if the class takes the widths of the trial alone, when the widths are chosen."""
    model, data = build("llama")
    dense = model.config.num_attention_heads, model.config.intermediate_size
    taken = []

    def one_alone(model, config):
        heads, neurons = config.num_attention_heads, config.intermediate_size
        if heads < dense[0] and neurons < dense[1]:
            if after_the_trial and not taken:
                taken.append((heads, neurons))
            if (heads, neurons) not in taken:
                raise ModelError("fewer heads take all neurons")
        return built_shapes(model, config)

    monkeypatch.setattr("iobs.pruning.structure.config_widths.built_shapes", one_alone)
    message = "cannot be built from the narrower configuration: fewer heads take all neurons"
    if not after_the_trial:
        return refused(model, data[0], ModelError, message, monkeypatch)
    with pytest.raises(ModelError, match=f"{message}.*ask for a slightly larger share"):
        iobs.prune(model, data[:1], iobs.Structured(0.6), "one-shot", holdout=0)
    return None


def test_infinite_values_of_a_configuration_are_read_again():
    """Hybrids of attention and Mamba limit time steps to (0, inf), which transformers writes in its own form."""
    config = BambaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
    )
    with torch.device("meta"):
        model = BambaForCausalLM(config)
    assert config.time_step_limit[1] == float("inf")
    assert built_shapes(model, config) == shapes_of(model)
