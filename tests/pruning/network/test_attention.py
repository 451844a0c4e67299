"""The projections of nn.MultiheadAttention are pruned, although one function of torch multiplies by all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import iobs
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.network.modes import evaluating
from iobs.pruning.recipe import BlockFit

WIDTH = 16


class Encoder(nn.Module):
    """A small classifier of sequences with torch's own encoder."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)
        self.batch_first = batch_first

    def forward(self, value: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(value).mean(1))
        return self.head(self.encoder(value.transpose(0, 1)).mean(0))


class Cross(nn.Module):
    """Queries from learnt tokens, keys and values from the input, whose width may differ."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(5, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=width, vdim=width, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, value: Tensor) -> Tensor:
        queries = self.tokens.expand(len(value), -1, -1)
        return self.head(self.attention(queries, value, value, need_weights=False)[0].mean(1))


def correlated(samples: int, positions: int, width: int = WIDTH) -> Tensor:
    """Inputs with correlated channels."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    return torch.randn(samples, positions, width, generator=generator) @ mix


def inputs_of(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """The input of each layer, by layer name."""
    found: dict[str, Tensor] = {}

    def note(layer: Layer, module: nn.Module, fed: Tensor) -> None:
        found[layer.name] = fed

    with evaluating(model), torch.no_grad(), captured_inputs(model, find_layers(model), note):
        model(value)
    return found


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_captures_the_inputs_of_projections(batch_first: bool) -> None:
    torch.manual_seed(0)
    model, value = Encoder(batch_first=batch_first), correlated(4, 6)
    fed = inputs_of(model, value)
    assert set(fed) == {layer.name for layer in find_layers(model)}
    name = "encoder.layers.0.self_attn"
    queries, keys, values = (fed[f"{name}.in_proj_weight.{one}"] for one in ("q", "k", "v"))
    assert queries is keys is values  # they share one Gram matrix
    assert torch.equal(queries, value)
    attention = model.encoder.layers[0].self_attn
    q, k, v = nn.functional.linear(value, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v)]
    expected = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    assert torch.allclose(fed[f"{name}.out_proj"], expected, atol=1e-6)


@pytest.mark.parametrize("width", [WIDTH, 10])
def test_cross_attention_captures_separate_inputs(width: int) -> None:
    torch.manual_seed(0)
    model, value = Cross(width), correlated(4, 6, width)
    fed = inputs_of(model, value)
    names = [f"attention.in_proj_weight.{one}" for one in ("q", "k", "v")]
    if width != WIDTH:
        names = [f"attention.{one}_proj_weight" for one in ("q", "k", "v")]
    queries, keys, values = (fed[name] for name in names)
    assert torch.equal(queries, model.tokens.expand(4, -1, -1))
    assert torch.equal(keys, value)
    assert keys is values


FAST, BEST, PAPER = (iobs.Recipe.preset(name) for name in ("fast", "best", "paper"))
# The presets with few steps and without a search.
FEW = BlockFit(masks=2, between=1, steps=2, lr=1e-3)
RECIPES = {
    "fast": FAST.but(blocks=FEW, allocation="fisher"),
    "best": BEST.but(blocks=replace(FEW, network_steps=2, network_lr=1e-4), allocation="fisher"),
    "paper": PAPER,
}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=[] if name == "paper" else [pytest.mark.slow])
        for name, recipe in RECIPES.items()
    ],
)
def test_prune_covers_a_whole_transformer_encoder(recipe: iobs.Recipe) -> None:
    torch.manual_seed(0)
    model = Encoder()
    value = correlated(60, 6)
    data = [(value, model.eval()(value).argmax(1))]
    before = torch.backends.mha.get_fastpath_enabled()
    report = iobs.prune(model, data, iobs.Unstructured(0.5), recipe, ignore="head", finetune=None)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert not any("in_proj" in name or "out_proj" in name for name in report.skipped)
    assert len(report.audit) == 2 * (3 + 1 + 2)
    zeros = int((model.encoder.layers[0].self_attn.in_proj_weight == 0).sum())
    assert zeros == sum(row.zeros for row in report.audit if ".0.self_attn.in_proj" in row.name)


@pytest.mark.parametrize(("make", "width"), [(Encoder, WIDTH), (lambda: Cross(WIDTH), WIDTH), (lambda: Cross(10), 10)])
def test_admm_beats_magnitude_in_every_attention_projection(make: Callable[[], nn.Module], width: int) -> None:
    value, reports = correlated(64, 6, width), {}
    for solver in ("magnitude", "admm"):
        torch.manual_seed(0)
        model = make()
        data = [value[:32], value[32:]]
        reports[solver] = iobs.prune(
            model, data, iobs.Unstructured(0.6), iobs.Recipe(solver=solver, inputs="dense"), ignore="head", holdout=0.0
        )
    for ours, theirs in zip(reports["admm"].rounds[0].layers, reports["magnitude"].rounds[0].layers, strict=True):
        if "proj" in ours.name:
            assert ours.error_calibration < theirs.error_calibration, ours.name


def test_audit_of_files_equals_the_report_for_attention(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Encoder()
    report = iobs.prune(model, [correlated(40, 6)], iobs.Unstructured(0.7), iobs.Recipe(), ignore="head")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = {row.name: row.zeros for row in iobs.audit(tmp_path, iobs.Unstructured(0.7)) if row.zeros}
    assert found == {row.name: row.zeros for row in report.audit}


@pytest.mark.parametrize("network_steps", [0, 3])
def test_reconstruction_leaves_projections_that_stay_dense_as_they_are(network_steps):
    torch.manual_seed(0)
    model = Encoder().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit = BlockFit(masks=2, between=2, steps=3, lr=1e-2, network_steps=network_steps, network_lr=1e-2)
    data = [torch.randn(8, 5, WIDTH) for _ in range(4)]
    iobs.prune(model, data, 0.5, iobs.Recipe(target="residual", blocks=fit), ignore="*.v")
    after = model.state_dict()
    for place in range(2):
        name = f"encoder.layers.{place}.self_attn.in_proj_weight"
        (queries, keys, values), (_, _, dense) = after[name].chunk(3), before[name].chunk(3)
        assert torch.equal(values, dense)
        assert int((queries == 0).sum()) == int((keys == 0).sum()) == WIDTH**2 // 2
        assert not torch.equal(
            after[f"encoder.layers.{place}.norm1.weight"], before[f"encoder.layers.{place}.norm1.weight"]
        )
