"""Large models, in miniature: runs keep few outputs, gradients and matrices at a time, and refuse what has no room."""

import copy

import pytest
import torch
from menagerie import build
from simulated_gpu import on_gpu
from torch import nn
from torch.overrides import TorchFunctionMode
from traced_sites import traced_sites
from transformers import LlamaConfig, LlamaForCausalLM

import iobs
from iobs.cli.compare import _copied
from iobs.errors import AuditError, CoverageWarning, ModelError, ProblemError
from iobs.pruning import baselines
from iobs.pruning.calibration import row_fisher as row_fisher_module
from iobs.pruning.calibration.row_fisher import row_fisher
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.network.layers import find_layers
from iobs.pruning.plan.widths import Curves
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples
from iobs.pruning.structure import expected, trace
from iobs.pruning.structure.expected import Expected, require_rebuilt
from iobs.pruning.widths.costs import Products

SIZE = {"hidden_size": 16, "vocab_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Text(nn.Module):
    """A language model without attention, which notes the shapes of its batches and if its outputs have a graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 9)
        self.heads = nn.Parameter(torch.randn(9, 9))
        self.shapes, self.graphs = [], []

    def forward(self, input_ids):
        found = self.head(torch.tanh(self.up(self.embed(input_ids)))) @ self.heads
        self.shapes.append(tuple(input_ids.shape))
        self.graphs.append(found.requires_grad)
        return found


def long_text(samples=5):
    return {"input_ids": torch.randint(9, (samples, 1024), generator=torch.Generator().manual_seed(1))}


def text(length=8):
    return {"input_ids": torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize(("tokens", "sizes"), [(1024, [2, 2, 1]), (5000, [1] * 5), (100, [5])])
def test_parts_of_a_batch_have_few_positions_and_all_samples(tokens, sizes):
    batch = {"input_ids": torch.arange(5 * tokens).view(5, tokens), "weight": torch.tensor(1.0)}
    parts = [*batches.pieces(batch)]
    assert [len(part["input_ids"]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    assert sizes != [5] or parts[0] is batch
    pictures = torch.randn(5, 3, 2, 2)
    assert next(batches.pieces(pictures, 1)).shape == (1, 3, 2, 2)
    assert next(batches.pieces(pictures)) is pictures


def test_positions_are_counted_without_gradients_on_parts_of_a_batch():
    model = Text()
    products = {one.path: one.positions for one in Products.count(model, long_text(), ()).products}
    assert products == {"up": 1024, "head": 1024}
    assert {*model.shapes} == {(2, 1024), (1, 1024)}
    assert not any(model.graphs)


def test_narrower_model_is_checked_on_few_samples_and_by_pieces(monkeypatch):
    class Largest(TorchFunctionMode):
        entries = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
                self.entries = max(self.entries, found.numel())
            return found

    monkeypatch.setattr(expected, "_PIECE", 1000)
    model = Text()
    wanted = Expected.of(model, long_text())
    assert model.shapes == [(2, 1024)]
    with Largest() as largest:
        wanted.require(model)
    assert 0 < largest.entries <= 1000
    for change in (lambda value: value[-1].fill_(torch.nan), lambda value: value.mul_(1.1)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            change(other.heads)
        with pytest.raises(AuditError, match="other outputs"):
            wanted.require(other)
    model.heads = nn.Parameter(model.heads[:, :5])
    with pytest.raises(AuditError, match="difference inf"):
        wanted.require(model)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_problems_of_readers_are_dropped_after_their_curves(monkeypatch):
    most = []

    def measured(self):
        found = real(self)
        most.append(len(self.readers))
        return found

    def curve(self, site):
        most.append(len(self.readers))
        return real_curve(self, site)

    real, real_curve = Curves.measured, Curves._curve
    monkeypatch.setattr(Curves, "measured", measured)
    monkeypatch.setattr(Curves, "_curve", curve)
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4))).eval()
    iobs.prune(model, [torch.randn(40, 8)], "structured:25%", "one-shot", allocation="fisher")
    assert most == [1] * 4 + [0]


class Mixture(nn.Module):
    """Neurons between two layers, and experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.experts = nn.Parameter(torch.randn(5, 6, 6))

    def forward(self, x):
        x = self.down(torch.relu(self.up(x)))
        return x + torch.bmm(x[None].expand(2, -1, -1), self.experts[1:3]).sum(0) + x @ self.experts[4]


def test_very_large_parameters_between_layers_are_no_leaves(monkeypatch):
    model, data = Mixture(), torch.randn(3, 6)
    sites = traced_sites(model, data)
    assert "experts" in {one.parameter for one in trace.trace(model, [data]).sources.values()}
    monkeypatch.setattr(trace, "_MOST_ENTRIES", 179)
    assert {one.parameter for one in trace.trace(model, [data]).sources.values()} == {"weight"}
    assert traced_sites(model, data) == sites
    assert [one.name for one in sites] == ["down"]


class Placed(LlamaForCausalLM):
    """A model whose attention depends on the place of its block, which no field of the configuration says."""

    def __init__(self, config):
        super().__init__(config)
        for place, block in enumerate(self.model.layers):
            block.self_attn.scaling *= 1 + 8 * place


class Reading(LlamaForCausalLM):
    """A model whose code reads a number from a tensor, so that it is not built without memory for tensors."""

    def __init__(self, config):
        super().__init__(config)
        self.number = torch.ones(2).sum().item()


def shorter(kind):
    torch.manual_seed(0)
    model = kind(LlamaConfig(**SIZE, **TOKENS, num_hidden_layers=3, intermediate_size=24)).eval()
    for value in model.parameters():
        if value.ndim > 1:
            value.data.mul_(10)
    del model.model.layers[0]
    model.config.num_hidden_layers = 2
    return model


def test_large_model_is_built_from_its_configuration_without_a_copy(monkeypatch):
    monkeypatch.setattr(expected, "_COPY_LIMIT", 0)
    told = Callbacks([])
    with pytest.raises(ModelError, match="depend on their place"):
        require_rebuilt(shorter(Placed), text(), told.on_note)
    model = shorter(LlamaForCausalLM)
    require_rebuilt(model, text(), told.on_note)
    assert told.notes == []
    assert not any(value.is_meta for value in (*model.parameters(), *model.buffers()))
    model.config.intermediate_size = 20
    with pytest.raises(ModelError, match=r"cannot be built from its new configuration: Error.* in loading"):
        require_rebuilt(model, text(), told.on_note)
    require_rebuilt(shorter(Reading), text(), told.on_note)
    assert [one.split(":")[0] for one in told.notes] == [
        "Not checked that Reading can be built from its new configuration"
    ]


class Scaled(nn.Linear):
    """A linear map with weights of 8 bits and one scale."""

    def __init__(self, size):
        super().__init__(size, size)
        self.weight = nn.Parameter(torch.randn(size, size).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.float() * self.weight_scale_inv, self.bias)


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_floats_of_8_bits_are_quantised_and_stay_dense(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Scaled(8), nn.Linear(8, 6), nn.Linear(6, 4)).eval()
    before = model[1].weight.detach().view(torch.uint8).clone()
    with pytest.warns(CoverageWarning, match="quantised weights"):
        report = iobs.prune(model, [torch.randn(30, 6)], 0.5, recipe)
    assert [row.name for row in report.audit] == ["0", "2", "3"]
    assert report.skipped == {"1": "floats of 8 bits or less: float8_e4m3fn"}
    assert torch.equal(model[1].weight.detach().view(torch.uint8), before)


def test_prices_of_rows_are_measured_on_parts_of_a_batch(monkeypatch):
    model, batch = Text(), long_text(4)["input_ids"]
    layers = find_layers(model)
    found = row_fisher(model, layers, [], Samples.of([{"input_ids": batch}]), seed=3)
    assert model.shapes == [(2, 1024)] * 2
    monkeypatch.setattr(row_fisher_module.batches, "pieces", lambda batch: [batch])
    whole = row_fisher(model, layers, [], Samples.of([{"input_ids": batch}]), seed=3)
    for layer in layers:
        torch.testing.assert_close(found.relative(layer), whole.relative(layer), rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", ["chita", "cbs", "woodfisher"])
def test_solvers_of_the_whole_network_refuse_gradients_without_room(solver, monkeypatch):
    model, data = build("perceptron")
    weights, samples = sum(layer.weights for layer in find_layers(model)), sum(map(batches.size, data))
    monkeypatch.setattr(baselines, "gradient_rows", lambda *_: pytest.fail("work before the refusal"))
    monkeypatch.setattr(baselines, "available", lambda: 4 * samples * weights - 1)
    with pytest.raises(ProblemError, match=rf"{samples} samples x {weights:,} weights x 4 bytes are"):
        iobs.prune(model, data, 0.5, iobs.Recipe(solver=solver), holdout=0.0)
    monkeypatch.undo()
    layers, cpu = find_layers(model), torch.device("cpu")
    for room in (0, 4 * samples * weights):  # 0: the system does not say
        monkeypatch.setattr(baselines, "available", lambda room=room: room)
        baselines.require_memory(iobs.Recipe(solver=solver).network_solver, layers, iobs.Rounds(), data, 0.0, cpu)
    baselines.require_memory(None, layers, iobs.Rounds(), data, 0.0, cpu)


def test_compare_keeps_the_dense_weights_in_main_memory(gpu):
    model = on_gpu(nn.Linear(3, 2))
    copies = _copied(model)
    assert {value.device.type for value in model.parameters()} == {"cuda"}
    assert {value.device.type for value in copies.values()} == {"cpu"}
    assert copies.keys() == {"weight", "bias"}
