"""Layers that add to a residual match the dense sum: the drift of the residual is part of their target."""

import copy

import pytest
import torch
from families import LANGUAGE_MODELS, PICTURE_MODELS, language_batches, picture_batches
from menagerie import for_each_group
from torch import nn

import iobs
from iobs.errors import ProblemError
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.selection import select
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples


class PostNorm(nn.Module):
    """An encoder block that normalises the sum, with biases and dropout, as in BERT."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(width)

    def forward(self, hidden):
        return self.norm(self.drop(self.down(torch.tanh(self.up(hidden)))) + hidden)


class ByKeyword(nn.Module):
    """A residual block that passes the input of its last layer by name."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, hidden):
        return self.norm(self.down(input=torch.tanh(self.up(hidden))) + hidden)


class Bottleneck(nn.Module):
    """A residual block of convolutions, whose batch norm scales the output before the addition."""

    def __init__(self, width=6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        nn.init.uniform_(self.norm.weight, 0.5, 2)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x):
        out = self.norm(self.conv2(torch.relu(self.conv1(x))))
        out += x
        return torch.relu(out)


def encoder():
    return nn.Sequential(*(PostNorm() for _ in range(2)), nn.Linear(8, 3)).eval(), [torch.randn(6, 5, 8)] * 2


def by_keyword():
    return nn.Sequential(*(ByKeyword() for _ in range(2)), nn.Linear(8, 3)).eval(), [torch.randn(6, 5, 8)] * 2


def residual_network():
    return nn.Sequential(*(Bottleneck() for _ in range(2)), nn.Conv2d(6, 2, 1)).eval(), [torch.randn(3, 6, 5, 5)] * 2


def language(name):
    def build():
        model = LANGUAGE_MODELS[name][0]().eval()
        model.config.use_cache = False  # a cache would grow whenever a block runs
        return model, language_batches(count=2)

    return build


def pictures(name):
    return lambda: (PICTURE_MODELS[name][0]().eval(), picture_batches(name, count=2))


# Builder, and for each layer by the end of its name the module whose input or output is the sum that it adds to.
CASES = {
    "llama": (language("llama"), {"o_proj": "in ../post_attention_layernorm", "down_proj": "out .."}),
    "gpt2": (language("gpt2"), {"attn.c_proj": "in ../ln_2", "mlp.c_proj": "out .."}),
    "neox": (language("gpt_neox"), {"dense_4h_to_h": "out .."}),
    "vit": (pictures("timm_vit"), {"attn.proj": "in ../norm2", "mlp.fc2": "out .."}),
    "encoder": (encoder, {"down": "in norm"}),
    "keyword": (by_keyword, {"down": "in norm"}),
    "convolutions": (residual_network, {"conv2": "sum"}),
}


def recorded(model, path, data, side):
    """Inputs or outputs of a module on all batches."""
    kept = []

    def hook(module, args, kwargs, output):
        value = (*args, *kwargs.values())[0] if side == "in" else output
        kept.append((value[0] if isinstance(value, tuple) else value).clone())

    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        for batch in data:
            batches.forward(model, batch)
    handle.remove()
    return torch.cat(kept)


def residual_of(model, layer, place, data):
    """Slow reference: the sum minus the layer's output, in the scale of the output; (count, rows)."""
    block = layer.path.rsplit(".", 2)[0] if ".." in place else layer.path.rpartition(".")[0]
    if place == "sum":
        norm = model.get_submodule(f"{block}.norm")
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        return (recorded(model, block, data, "in") / scale[:, None, None]).movedim(1, -1).flatten(0, 2)
    side, path = place.split()
    module = f"{block}.{path.removeprefix('../')}" if path != ".." else block
    found = recorded(model, module, data, side) - recorded(model, layer.path, data, "out")
    return found.flatten(0, 1)


def rows_of(model, layer, data):
    value = recorded(model, layer.path, data, "in")
    if value.ndim == 4:
        return nn.functional.unfold(value, 3, padding=1).transpose(1, 2).flatten(0, 1)
    return value.flatten(0, 1)


@pytest.mark.parametrize("name", CASES)
def test_target_outputs_of_the_residual_equal_the_slow_reference(name):
    torch.manual_seed(0)
    build, places = CASES[name]
    model, data = build()
    reference = copy.deepcopy(model)
    layers = select(model).layers
    sweep = Sweep(
        model, Samples.of(data), Samples(), layers, exact_chain(model, data, layers), reference,
        moments=Moments(means=True, drift=True),
    )  # fmt: skip
    seen = []

    def visit(group, statistics):
        layer, gram = group[0], statistics.calibration
        place = next((place for end, place in places.items() if layer.name.endswith(end)), None)
        if place is not None:
            drift = residual_of(reference, layer, place, data) - residual_of(model, layer, place, data)
            own, dense = rows_of(model, layer, data), rows_of(reference, layer, data)
            target = dense @ layer.read(reference).T + drift
            assert gram.dense is None
            for found, expected in (
                (gram.cross[0], target.T @ own / len(own)),
                (gram.outputs, target.square().sum() / len(own)),
                (gram.means.own[0], own.mean(0)),
                (gram.means.dense[0], target.mean(0)),
            ):
                largest = float(expected.detach().abs().max())
                torch.testing.assert_close(found, expected.detach().double(), rtol=1e-3, atol=1e-7 + 1e-3 * largest)
            seen.append(layer)
        else:
            assert gram.outputs is None
        for one in group:
            one.write(model, one.read(model) * 0.7)

    for_each_group(sweep, visit)
    assert len(seen) == 2 * len(places)


def pruned(model, data, first, include, **changes):
    """Prune one layer to half and solve the others without zeros, so that their solution is a regression."""
    recipe = iobs.Recipe(target="residual", damping=0.0, rules=(iobs.Rule(first, pattern="50%"),)).but(**changes)
    return iobs.prune(model, data, 0.0, recipe, holdout=0, include=include)


@pytest.mark.parametrize("bias", ["auto", "keep"])
def test_layer_is_the_regression_of_the_dense_sum_on_its_inputs(bias):
    torch.manual_seed(0)
    model, data = encoder()
    reference = copy.deepcopy(model)
    pruned(model, data, "0.up", include=["0.*"], bias=bias)
    layer = next(layer for layer in find_layers(model) if layer.name == "0.down")
    # The residual of the first block is its input, which has not drifted; that of the pruned model is the same.
    wanted = recorded(reference, "0.down", data, "out").flatten(0, 1).double()
    rows = rows_of(model, layer, data).double()
    if bias == "keep":
        wanted -= model.get_parameter("0.down.bias").double()
        assert torch.equal(model.get_parameter("0.down.bias"), reference.get_parameter("0.down.bias"))
    else:
        rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    solution = torch.linalg.lstsq(rows, wanted).solution
    found = rows[:, :16] @ layer.read(model).double().T
    if bias == "auto":
        found = found + model.get_parameter("0.down.bias").double()
    torch.testing.assert_close(found, rows @ solution, rtol=1e-3, atol=1e-3)


def test_residual_target_restores_the_dense_sum_if_the_weights_can():
    """A wide layer behind a drifted residual can absorb the drift that its inputs determine."""
    torch.manual_seed(0)
    model, data = residual_network()
    errors = {}
    for target in ("dense", "residual"):
        one = copy.deepcopy(model)
        report = iobs.prune(one, data, 0.0, iobs.Recipe(target=target, rules=(iobs.Rule("0.conv*", pattern="60%"),)))
        dense, found = (recorded(net, "1", data, "out") for net in (model, one))
        errors[target] = float((dense - found).square().mean())
        assert report.audit
    assert errors["residual"] < errors["dense"]


def test_failed_run_restores_refitted_biases(monkeypatch):
    model, data = encoder()
    before = copy.deepcopy(model.state_dict())

    class Stop(iobs.Callback):
        def on_round(self, record):
            assert not torch.equal(model[0].down.bias, before["0.down.bias"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data, 0.5, "one-shot", target="residual", callbacks=[Stop()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_resumed_run_has_the_same_biases(tmp_path):
    torch.manual_seed(0)
    model, data = encoder()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    iobs.prune(first, data, 0.5, "one-shot", target="residual", checkpoint=tmp_path)
    iobs.prune(second, data, 0.5, "one-shot", target="residual", checkpoint=tmp_path)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first[0].down.bias, model[0].down.bias)


def test_frozen_and_shared_biases_are_kept():
    torch.manual_seed(0)
    model, data = encoder()
    model[1].down.bias = model[0].down.bias
    model[0].up.bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    iobs.prune(model, data, 0.5, "one-shot", target="residual")
    kept = [name for name, value in model.state_dict().items() if name.endswith("bias") and value.equal(before[name])]
    assert {"0.up.bias", "0.down.bias", "1.down.bias"} <= set(kept)
    assert "1.up.bias" not in kept


def test_residual_target_with_dense_inputs_is_refused():
    with pytest.raises(ProblemError, match="corrects the drift"):
        iobs.Recipe(target="residual", inputs="dense")
