"""Bytes of Grams and solves in the plan, against counted bytes of tensors."""

import pytest
import torch
from simulated_gpu import GPU
from tensor_bytes import TensorBytes

from iobs.core import quadratic
from iobs.core.patterns import Unstructured
from iobs.pruning.blockwise.storage import Storage
from iobs.pruning.calibration import gram
from iobs.pruning.calibration.gram import Gram, Statistics, relative_output_error, target_energy
from iobs.pruning.calibration.residency import Residency
from iobs.pruning.cost import memory_plan
from iobs.pruning.cost.checkpoint_size import checkpoint_bytes
from iobs.pruning.cost.loads import Rates
from iobs.pruning.cost.memory_plan import GramKind, Sizes, gathering_bytes, peaks, solving_bytes
from iobs.pruning.cost.phases import Shape, Work, network_seconds, phases
from iobs.pruning.layerwise import problem
from iobs.pruning.layerwise.problem import Task, solve_layer
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.solvers import ADMM

TOKENS, WIDTH = 64, 256


def counted(layer, kind, recipe, residency):
    """The peaks of the bytes of tensors while Grams are computed, and while a layer is solved."""
    torch.manual_seed(0)
    drifts = kind.drift(layer) > 0
    rows, columns = layer.shape
    weight = torch.randn(rows, columns)
    with TensorBytes() as gathering:
        grams = []
        for part in range(kind.parts):
            grams.append(Gram.empty(layer, weight.device, kind.pairs, False, drifts))
            for _ in range(2):
                own = torch.randn(1, TOKENS, columns)
                dense = own + 0.1 * torch.randn(1, TOKENS, columns) if kind.pairs else None
                grams[-1].add(own, dense, torch.randn(1, TOKENS, rows) if drifts else None)
            grams[-1].finish()
            grams[-1].park(str(part), residency.park)
    found = Statistics(grams[0], grams[1] if kind.parts == 2 else None)
    energy = target_energy(found.calibration, weight)
    found.forget_energy()
    tensors = [tensor for one in grams for tensor in (one.own, one.cross)]
    tensors += [one.drift.own for one in grams if one.drift is not None]
    tensors = [] if kind.parks(layer) else tensors
    with TensorBytes().hold(*(tensor for tensor in tensors if tensor is not None)) as solving:
        task = Task(layer, Unstructured(0.5), weight.clone(), weight.clone() if kind.pairs else None, recipe)
        solved = torch.cat([one.weight for one in solve_layer(task, found)])
        relative_output_error(found.calibration, solved, weight, energy=energy)
    return gathering.peak, solving.peak


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("solver", ["sparsegpt", "admm"])
@pytest.mark.parametrize("shape", [(WIDTH, 704), (704, WIDTH)])
def test_plan_foretells_the_bytes_of_grams_and_solves(shape, solver, pairs, parts, wide, monkeypatch):
    for module in (gram, problem, memory_plan):
        monkeypatch.setattr(module, "WIDE", 64 if wide else 10_000)
    recipe = Recipe(solver=solver, target="residual" if pairs else "layer")
    layer, kind = Layer("a", shape), GramKind(parts, pairs, WIDTH)
    gathered, solved = counted(layer, kind, recipe, Residency())
    assert 0.95 < gathering_bytes(layer, kind, TOKENS, 4) / gathered < 1.1
    assert 0.95 < solving_bytes(layer, recipe, kind) / solved < 1.3


@pytest.mark.parametrize(("shape", "pairs"), [((48, 352), True), ((512, WIDTH), False)])
def test_plan_foretells_the_bytes_of_solves_on_a_gpu(shape, pairs, gpu, monkeypatch):
    """The torch forms of the kernels take more matrices than those of a CPU, and no factor is computed in place."""
    for module in (gram, problem, memory_plan):
        monkeypatch.setattr(module, "WIDE", 64)
    for name, value in {"_LARGE": 64, "_ROWS": 32}.items():
        monkeypatch.setattr(quadratic, name, value)
    torch.manual_seed(0)
    recipe = Recipe(solver=ADMM("fast"), target="residual" if pairs else "layer")
    layer, kind = Layer("a", shape), GramKind(1, pairs, shape[0] if pairs else 0)
    own, weight = torch.randn(1, 2 * shape[1], shape[1]), torch.randn(shape).to(GPU)
    found = Gram.empty(layer, GPU, pairs, False, kind.drift(layer) > 0)
    drift = torch.randn(1, len(own[0]), shape[0]).to(GPU) if found.drift is not None else None
    found.add(own.to(GPU), (own + 0.1).to(GPU) if pairs else None, drift)
    found.finish()
    found.forget_energy()
    before = gpu.reset_peak()
    task = Task(layer, Unstructured(0.5), weight, weight.clone() if pairs else None, recipe)
    solve_layer(task, Statistics(found))
    assert before > 0
    assert 0.95 < solving_bytes(layer, recipe, kind, on_gpu=True) / gpu.peak < 1.1


@pytest.mark.parametrize("shape", [(WIDTH, 704), (704, WIDTH)])
@pytest.mark.parametrize("pairs", [False, True])
def test_grams_of_wide_layers_in_files_take_no_memory(shape, pairs, tmp_path, monkeypatch):
    for module in (gram, problem, memory_plan):
        monkeypatch.setattr(module, "WIDE", 64)
    recipe = Recipe(target="residual" if pairs else "layer")
    layer, kind = Layer("a", shape), GramKind(2, pairs, WIDTH, parked=True)
    storage = Storage("disk", torch.device("cpu"), tmp_path)
    gathered, solved = counted(layer, kind, recipe, storage)
    assert 0.95 < gathering_bytes(layer, kind, TOKENS, 4) / gathered < 1.1
    assert 0.95 < solving_bytes(layer, recipe, kind) / solved < 1.3
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == kind.parked_bytes(layer)


def test_two_streams_raise_the_peaks_of_grams_and_solves():
    sizes = Sizes([Layer("a", (WIDTH, 704)), Layer("b", (704, WIDTH))], 10**6, 2, 512, 512, 1000)
    own, residual = (peaks(sizes, Recipe(target=target), False) for target in ("layer", "residual"))
    # Of the layer that writes into the residual stream: two more Grams, and the moments of the drift.
    grams, moments = 2 * 8 * 704**2, 16 * WIDTH * 704
    assert residual["Grams"] - own["Grams"] > grams + moments
    assert residual["solves"] - own["solves"] > 8 * 704**2 + moments / 2


def test_biases_raise_the_peak_of_solves():
    sizes = [Sizes([Layer("a", (64, 64))], 10**4, 2, 512, 512, 1000, biased) for biased in (False, True)]
    plain, biased = (peaks(one, Recipe(target="residual"), False)["solves"] for one in sizes)
    copies = 2 * 8 * 64**2 + 8 * 64**2  # of both Grams, and of the moments of the drift
    assert biased - plain == copies


def test_steps_of_the_network_keep_the_input_of_every_block():
    recipe = Recipe(target="residual", blocks=BlockFit(network_steps=2))
    one, many = (Sizes([Layer("a", (64, 32))], 10**4, 2, 512, 512, 0, hidden=64, blocks=count) for count in (1, 33))
    name = "steps of the network"
    assert peaks(many, recipe, False)[name] - peaks(one, recipe, False)[name] == 2 * 32 * 512 * 64


def test_steps_of_the_network_move_weights_masters_and_masks():
    work = Work([Shape(64, 32)] * 2, 4096, 10**5)
    fit, rates = BlockFit(network_steps=10, network_lr=1e-3), Rates(1e30, 1e30, transfer=1.0)
    assert network_seconds(work, fit, rates) == 10 * (2 * 10**5 + 19 * 2 * 64 * 32)


def test_experts_behind_the_first_have_a_time_of_their_own():
    work = Work([Shape(8, 8, expert=expert) for expert in (2, 3)], 100, 1000)
    assert sum(phases(work, Recipe(), Rates(1e9, 1e9)).values()) > 0


@pytest.mark.parametrize(("name", "expected", "block"), [("one-shot", 2, 0), ("fast", 6, 4), ("best", 14, 0)])
def test_checkpoint_bytes_of_a_weight(name, expected, block):
    assert checkpoint_bytes(1000, 10, 2, Recipe.preset(name)) == 1000 * expected + 10 * block


def test_an_allocation_has_grams_of_held_out_samples():
    sizes = Sizes([Layer("a", (WIDTH, WIDTH))], 10**5, 2, 512, 512, 1000)
    recipe = Recipe(allocation="block", blocks=BlockFit(window=1))
    found = peaks(sizes, recipe, False)
    assert found["allocation"] - found["solves"] == 8 * WIDTH**2
