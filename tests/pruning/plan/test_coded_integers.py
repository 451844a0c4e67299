"""A rate for a whole network: its division among layers, recipes, and the file that keeps it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import iobs
from iobs.core.integers import least_bits
from iobs.core.patterns import Rate, parse
from iobs.errors import AuditError, PatternError, ProblemError
from iobs.pruning.plan.rates import divided

BITS = 4.0


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 32))


def batches():
    generator = torch.Generator().manual_seed(1)
    return list((torch.randn(256, 32, generator=generator) @ torch.randn(32, 32, generator=generator)).split(32))


def error(model, dense):
    inputs = torch.cat(batches())
    with torch.no_grad():
        return float((model(inputs) - dense(inputs)).norm() / dense(inputs).norm())


def test_division_has_one_error_for_all_layers_and_the_asked_average():
    shapes = {"small": (64, 256), "large": (512, 256)}
    octaves = {"small": torch.full((1, 256), 3.0), "large": torch.full((1, 256), 1.0)}
    bits = divided(Rate(3.0), shapes, octaves)
    average = sum(bits[name] * rows * columns for name, (rows, columns) in shapes.items()) / (576 * 256)
    assert average == pytest.approx(3.0, abs=1e-6)
    of_integers = {name: bits[name] - least_bits(shape) for name, shape in shapes.items()}
    assert of_integers["small"] - of_integers["large"] == pytest.approx(2.0, abs=0.05)  # two octaves are two bits


def test_division_names_the_least_rate():
    with pytest.raises(PatternError, match="alone need"):
        divided(Rate(0.5), {"narrow": (4, 256)}, {"narrow": torch.zeros(1, 256)})


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_recipes_keep_the_bits_and_the_file_has_them(recipe, tmp_path):
    model, dense = network(), network()
    report = iobs.prune(model, batches(), iobs.Rate(BITS), recipe)
    assert report.bits_per_weight <= 1.01 * BITS
    assert error(model, dense) < 0.1
    iobs.audit(model, iobs.Rate(BITS))
    with pytest.raises(AuditError, match="more than"):
        iobs.audit(model, iobs.Rate(BITS / 2))
    iobs.save_packed(model, tmp_path / "packed")
    vectors = sum(4 * value.numel() for name, value in model.named_parameters() if name.endswith("bias"))
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size - vectors
    assert 8 * size <= 1.15 * BITS * sum(row.weights for row in report.audit)  # names and heads of small matrices count
    again = iobs.load_packed(tmp_path / "packed", into=network())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_bits_that_are_divided_beat_equal_bits():
    errors = {}
    for allocation in ("uniform", "auto"):
        model = network()
        iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", allocation=allocation)
        errors[allocation] = error(model, network())
    assert errors["auto"] < errors["uniform"]


def test_convolutions_and_weights_of_16_bits(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.Flatten(), nn.Linear(768, 16))
    model = model.to(torch.bfloat16)
    images = torch.randn(64, 8, 8, 8).to(torch.bfloat16)
    report = iobs.prune(model, list(images.split(16)), iobs.Rate(BITS), "one-shot")
    assert report.bits_per_weight <= 1.01 * BITS
    iobs.audit(model, iobs.Rate(BITS))


def test_rates_as_text_and_in_rules():
    assert parse("rate:2.5") == Rate(2.5)
    assert parse(str(Rate(2.5))) == Rate(2.5)
    with pytest.raises(PatternError, match=r"rate:3\.0"):
        parse("rate:much")
    model = network()
    rules = [iobs.Rule("2", pattern="rate:6"), iobs.Rule("4", dense=True)]
    report = iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", rules=rules)
    assert {row.name: round(row.bits / row.weights) for row in report.audit} == {"0": 4, "2": 6}


def test_settings_that_no_rate_takes_are_refused_before_any_work():
    for changes in ({"solver": "sparsegpt"}, {"refine": "refit"}):
        model = network()
        with pytest.raises(ProblemError, match="successive rounding alone"):
            iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", **changes)


def test_a_model_of_16_bits_that_is_computed_in_32_keeps_its_integers(tmp_path):
    from iobs import models

    loaded = models.load()  # stored in float16
    tokens = torch.randint(1, 500, (8, 64), generator=torch.Generator().manual_seed(0))
    iobs.prune(
        loaded.module,
        [{"input_ids": tokens}],
        iobs.Rate(BITS),
        "one-shot",
        include="model.layers.0.mlp.*",
        allocation="uniform",
    )
    weight = loaded.module.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    loaded.write(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"], weight)


def test_layers_that_no_rate_fits_are_refused_before_any_work():
    grouped = nn.Sequential(nn.Conv2d(16, 32, 3, groups=2))
    with pytest.raises(ProblemError, match="has 2 groups"):
        iobs.prune(grouped, [torch.randn(4, 16, 8, 8)], iobs.Rate(BITS), "one-shot")
    narrow = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 1))
    with pytest.raises(PatternError, match="leave it dense by iobs"):
        iobs.prune(narrow, batches(), iobs.Rate(BITS), "one-shot")
    with pytest.raises(PatternError, match="or give more"):
        iobs.prune(network(), batches(), iobs.Rate(0.5), "one-shot", allocation="uniform")


def test_inputs_that_are_always_zero_end_no_division():
    model = nn.Sequential(nn.Linear(32, 96), nn.Threshold(1e9, 0.0), nn.Linear(96, 96))
    report = iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot")
    assert report.bits_per_weight <= 1.01 * BITS
