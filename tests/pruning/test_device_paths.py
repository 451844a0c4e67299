"""Solvers, pruning from files and scores on a simulated GPU: results equal those of the CPU."""

import families
import pytest
import torch
from menagerie import SmallTransformer, token_batches
from safetensors.torch import load_file
from simulated_gpu import GPU, OnGpu, on_gpu

import iobs
from iobs.evaluate.scores import accuracy, perplexity
from iobs.models.streamed import StreamedModel, StreamedStore
from iobs.pruning import blockwise
from iobs.pruning.descent import gradients
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction import fits
from iobs.pruning.runtime.ranks import Ranks
from iobs.solvers import REFINEMENTS, SOLVERS
from iobs.solvers.families import GRID_SOLVERS

PATTERNS = [iobs.Unstructured(0.5), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4)]
READS_PER_LAYER = 40  # each waits for the GPU; 36 were counted
COMPARED = 1e-6  # float64 sums in another order


def problem(rows, columns):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), inputs.T @ inputs


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("refine", [None, *sorted(REFINEMENTS)])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_solve_on_a_gpu_gives_the_solution_of_the_cpu(gpu, solver, refine, pattern):
    weight, hessian = problem(2 if solver == "exact" else 4, 8)
    here = iobs.solve(iobs.Quadratic.at(weight, hessian), pattern, solver, refine=refine)
    there = iobs.solve(iobs.Quadratic.at(weight.to(GPU), hessian.to(GPU)), pattern, solver, refine=refine)
    assert isinstance(there.weight, OnGpu)
    assert there.weight.device == there.mask.device == there.loss.device == GPU
    assert torch.equal(there.mask.cpu(), here.mask)
    assert torch.allclose(there.weight.cpu(), here.weight, rtol=COMPARED, atol=COMPARED)


OTHER_FAMILIES = [
    *((iobs.Groups(4, 2), name) for name in ("search", "greedy", "exact", "osscar", "magnitude", "wanda", "flap")),
    *((iobs.Grid(4, 4), name) for name in sorted(GRID_SOLVERS) if name != "sparsegpt"),
    *((iobs.Unstructured(0.5) & iobs.Grid(4, 4), name) for name in ("admm", "sparsegpt", "magnitude")),
]


@pytest.mark.parametrize(("pattern", "solver"), OTHER_FAMILIES, ids=str)
def test_solve_groups_and_grids_on_a_gpu(gpu, pattern, solver):
    weight, hessian = problem(6, 16 if isinstance(pattern, iobs.Groups) else 8)
    here = iobs.solve(iobs.Quadratic.at(weight, hessian), pattern, solver)
    there = iobs.solve(iobs.Quadratic.at(weight.to(GPU), hessian.to(GPU)), pattern, solver)
    assert there.weight.device == GPU
    assert torch.allclose(there.weight.cpu(), here.weight, rtol=COMPARED, atol=COMPARED)


INCLUDE = ["*.q*", "*.down*"]  # two layers of every block: every step of the simulated GPU is slow
STREAMED = {
    "residual": {"target": "residual"},
    "blocks": {
        "target": "residual",
        "blocks": BlockFit(masks=2, steps=2, between=1, lr=1e-3, network_steps=2, network_lr=1e-4),
    },
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] if name == "blocks" else [])
        for name, options in STREAMED.items()
    ],
)
def test_prune_from_files_on_a_gpu_gives_the_weights_of_the_cpu(gpu, tmp_path, options):
    families.saved("llama", tmp_path / "model")
    recipe, found = iobs.Recipe.preset("one-shot").but(solver="sparsegpt", **options), []
    for device in ("cpu", "cuda"):
        with StreamedStore.open(
            tmp_path / "model", tmp_path / device, device=device, arithmetic=torch.float32
        ) as store:
            data = families.language_batches(length=8, count=1)
            report = iobs.prune(store, data, 0.5, recipe, holdout=0.25, include=INCLUDE)
            if device == "cuda":
                assert all(tensor.device in (GPU, torch.device("meta")) for tensor in store.model.parameters())
        assert report.sparsity == pytest.approx(0.5, abs=0.01)
        found.append(load_file(tmp_path / device / "model.safetensors"))
    here, there = found
    for name, value in here.items():
        assert torch.equal(value == 0, there[name] == 0), name
        assert torch.allclose(value, there[name], rtol=2**-7, atol=1e-4), name  # one step of bfloat16


def test_evaluate_on_a_gpu(gpu):
    text = families.LANGUAGE_MODELS["llama"][0]().eval()
    windows = torch.cat([batch["input_ids"] for batch in families.language_batches()])
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(2)]
    network = torch.nn.Linear(6, 3)
    here = perplexity(text, windows), accuracy(network, batches)
    gpu.reads.clear()
    there = perplexity(on_gpu(text), windows), accuracy(on_gpu(network), batches)
    assert there == pytest.approx(here, rel=1e-6)
    assert sum(gpu.reads.values()) <= 2 * (len(windows) + len(batches))


def test_prune_on_a_gpu_reads_few_values_per_layer(gpu):
    torch.manual_seed(0)
    model, data = SmallTransformer(depth=2).eval(), token_batches(count=2)
    report = iobs.prune(on_gpu(model), data, 0.5, iobs.Recipe(solver="sparsegpt"))
    assert not gpu.reads["cpu"]
    assert sum(gpu.reads.values()) <= READS_PER_LAYER * len(report.audit)


class StopsInNetworkSteps(iobs.Callback):
    def on_measure(self, task, done, total):
        if task == "steps of the whole network":  # after the first step, which is stored
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["memory", "disk"])
def test_streams_outside_the_gpu_give_the_same_bits_also_after_a_kill(gpu, tmp_path, streams, monkeypatch):
    families.saved("llama", tmp_path / "model")
    fit = BlockFit(masks=1, steps=1, lr=1e-3, network_steps=2, network_lr=1e-4)
    recipe = iobs.Recipe.preset("one-shot").but(solver="magnitude", blocks=fit)
    monkeypatch.setattr(fits, "STEPS_BETWEEN_SAVES", 1)

    def run(place, **options):
        with StreamedStore.open(tmp_path / "model", tmp_path / place, device="cuda", streams=place) as store:
            data = families.language_batches(batch=2, count=2)
            iobs.prune(store, data, 0.5, recipe, holdout=0.0, include=INCLUDE, **options)
        return load_file(tmp_path / place / "model.safetensors")

    with pytest.raises(KeyboardInterrupt):
        run(streams, checkpoint=tmp_path / "run", callbacks=[StopsInNetworkSteps()])
    found = [run("device"), run(streams, checkpoint=tmp_path / "run")]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.slow
def test_float16_from_files_on_a_gpu_takes_its_steps_in_float16(gpu, tmp_path, monkeypatch):
    families.saved("llama", tmp_path / "model", torch.float16)
    fit = BlockFit(masks=1, steps=2, lr=1e-3, network_steps=2, network_lr=1e-4)
    recipe = iobs.Recipe.preset("one-shot").but(solver="magnitude", blocks=fit)
    scales = []
    scale_of = gradients.scale_of
    monkeypatch.setattr(gradients, "scale_of", lambda *given: (scales.append(scale_of(*given)), scales[-1])[1])
    with StreamedStore.open(tmp_path / "model", tmp_path / "out", device="cuda") as store:
        assert store.arithmetic is torch.float16
        data = families.language_batches(batch=2, count=2)
        report = iobs.prune(store, data, 0.5, recipe, holdout=0.0, include=INCLUDE)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
    assert max(scales) >= 2
    assert all(bool(value.isfinite().all()) for value in load_file(tmp_path / "out" / "model.safetensors").values())


@pytest.mark.slow
def test_streams_stay_on_a_gpu_with_room(gpu, tmp_path, monkeypatch):
    families.saved("llama", tmp_path / "model")
    data, recipe = families.language_batches(count=4), iobs.Recipe.preset("one-shot")
    for free, place in ((2**40, "device"), (0, "memory")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None, free=free: (free, free))
        store = StreamedStore(StreamedModel.open(tmp_path / "model", device="cuda"), tmp_path / place)
        assert store.plan(families.request_of(store, recipe), data).streams == place


@pytest.mark.slow
def test_streams_are_placed_with_held_out_samples_and_beside_those_of_other_ranks(gpu, tmp_path, monkeypatch):
    families.saved("llama", tmp_path / "model")
    data, recipe = families.language_batches(count=4), iobs.Recipe(target="residual")
    store = StreamedStore(StreamedModel.open(tmp_path / "model", device="cuda"), tmp_path / "out")
    plans = [store.plan(families.request_of(store, recipe, holdout), data) for holdout in (0.0, 0.25)]
    free = sum(plan.peak_bytes for plan in plans) // 2  # between both, with the streams on the device
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
    for holdout, place in ((0.0, "device"), (0.25, "memory")):
        store.place(families.request_of(store, recipe, holdout), data)
        assert store._storage.place == place
    where = plans[0], plans[0].model_bytes
    room = store._room(*where)
    monkeypatch.setattr(blockwise, "current", lambda: Ranks(0, 4))
    monkeypatch.setattr(blockwise, "available", lambda: 4000)
    shared = store._room(*where)
    assert shared["memory"] == 1000
    assert shared["disk"] < room["disk"] / 3
    assert shared["device"] == room["device"]
