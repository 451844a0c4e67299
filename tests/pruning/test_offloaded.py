"""Models in main memory whose blocks visit a simulated GPU give the weights of models that are there whole."""

import copy
import gc
import shutil
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import families
import pytest
import torch
from menagerie import build
from safetensors.torch import load_file
from simulated_gpu import GPU, OnGpu, on_gpu
from torch import nn
from typer.testing import CliRunner

import iobs
from iobs.cli import app, running
from iobs.cli.by_blocks import StreamPlace, run_where_it_fits
from iobs.core.modes import full_precision
from iobs.errors import ModelError, OutputError, ProblemError
from iobs.pruning import blockwise
from iobs.pruning.blockwise import offloaded as offloaded_store
from iobs.pruning.blockwise.offloaded import OffloadedStore
from iobs.pruning.blockwise.storage import Storage
from iobs.pruning.recipe import BlockFit
from iobs.pruning.store import Store

FIT = BlockFit(masks=2, between=1, steps=2, lr=1e-3, network_steps=2, network_lr=1e-4)
FAST, BEST = (iobs.Recipe.preset(name) for name in ("fast", "best"))
# In memory "auto" divides the zeros by outputs of the network, and `best` samples text; block by block it does not.
SAME = {"allocation": "fisher"}
UNIFORM = {"allocation": "uniform"}
QUICK = {"solver": "sparsegpt"}
CHOICES = {
    "one-shot": ("llama", "one-shot", QUICK),
    "magnitude": ("llama", iobs.Recipe(solver="magnitude"), {}),
    "fast": ("llama", FAST.but(blocks=replace(FAST.blocks, steps=2, lr=1e-3)), QUICK | SAME),
    "best": ("llama", BEST.but(blocks=replace(FIT, sampled=0)), QUICK | SAME),
    "first block": ("transformer", "one-shot", QUICK),
    "own outputs": ("llama", iobs.Recipe(), {}),
    "tied biases": ("opt", "one-shot", QUICK),
    "transposed": ("gpt2", "one-shot", QUICK | {"bias": "refit"}),
    "tuples": ("bloom", "one-shot", QUICK),
    "experts": ("mixtral", "one-shot", QUICK),
    # The trials that correct the damages of networks for pictures need the whole network.
    "convolutions": ("convolutional", FAST.but(blocks=replace(FAST.blocks, steps=2, lr=1e-3)), QUICK | UNIFORM),
    "pictures": ("vit", "one-shot", QUICK | UNIFORM),
}


def made(name):
    torch.manual_seed(0)
    if name in families.LANGUAGE_MODELS:
        return families.LANGUAGE_MODELS[name][0]().eval(), families.language_batches(count=4)
    if name in families.PICTURE_MODELS:
        return families.PICTURE_MODELS[name][0]().eval(), families.picture_batches(name)
    return build(name)


def differing(one, other):
    """The names of tensors that differ."""
    found = dict(other.state_dict())
    return [name for name, value in one.state_dict().items() if not torch.equal(value.cpu(), found[name].cpu())]


def is_home(model):
    return not any(isinstance(one.data, OnGpu) or one.device == GPU for one in [*model.parameters(), *model.buffers()])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe", "options"), CHOICES.values(), ids=CHOICES)
def test_blocks_that_visit_the_gpu_give_the_weights_of_a_resident_run(gpu, name, recipe, options):
    offloaded, data = made(name)
    model, before = on_gpu(copy.deepcopy(offloaded)), [*offloaded.parameters()]
    there = iobs.prune(OffloadedStore(offloaded), data, 0.5, recipe, holdout=0.25, **options)
    options = options | {"include": [row.name for row in there.audit]}  # not layers found by their use
    here = iobs.prune(model, data, 0.5, recipe, holdout=0.25, **options)
    assert is_home(offloaded)
    assert differing(model, offloaded) == []
    assert [row.zeros for row in there.audit] == [row.zeros for row in here.audit]
    assert there.zeros == here.zeros
    assert all("forward" not in vars(module) for module in offloaded.modules())
    assert all(one is other for one, other in zip(before, offloaded.parameters(), strict=True))


@pytest.mark.slow
def test_best_by_blocks_on_a_cpu_keeps_what_is_frozen():
    model, data = made("llama")
    for name, one in model.named_parameters():
        one.requires_grad_("norm" not in name)
    before, offloaded = copy.deepcopy(model), copy.deepcopy(model)
    options = {**SAME, **QUICK, "holdout": 0.25}
    iobs.prune(model, data, 0.5, BEST.but(blocks=replace(FIT, sampled=0)), **options)
    report = iobs.prune(
        OffloadedStore(offloaded, "cpu"), data, 0.5, BEST.but(blocks=replace(FIT, sampled=0)), **options
    )
    assert differing(model, offloaded) == []
    changed = differing(before, offloaded)
    assert changed
    assert not [name for name in changed if "norm" in name]
    assert all(one.requires_grad == ("norm" not in name) for name, one in offloaded.named_parameters())
    assert not any("Peak memory of" in note for note in report.notes)


@pytest.mark.slow
def test_best_takes_steps_of_the_network_on_pictures_too(gpu):
    """A fine-tuning of the whole network needs all of it on the GPU."""
    offloaded, data = made("vit")
    model, blocks = on_gpu(copy.deepcopy(offloaded)), replace(FIT, sampled=0)
    # Equal shares: on pictures trials of the whole network correct the allocation, which is in memory in one run alone.
    parts, best = iobs.Recipe(target="residual", blocks=blocks), BEST.but(allocation="uniform", blocks=blocks)
    iobs.prune(model, data, 0.5, parts, holdout=0.25, **QUICK)
    report = iobs.prune(OffloadedStore(offloaded), data, 0.5, best, holdout=0.25, **QUICK)
    assert any(note.startswith("Block by block: steps") for note in report.notes)
    assert differing(model, offloaded) == []


class Watching(iobs.Callback):
    """Counts the blocks on the GPU after every layer."""

    def on_start(self, model, layers, rounds):
        self.model, self.most = model, 0
        batch = families.language_batches(count=1)[0]
        with torch.no_grad():
            self.dense = model(input_ids=batch["input_ids"].to(GPU)).logits.cpu()  # the model can be called

    def on_layer(self, entry, index):
        there = [any(one.device == GPU for one in block.parameters()) for block in self.model.model.layers]
        self.most = max(self.most, sum(there))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "most"), [(None, 1), (1, 1), (2, 2)])
def test_only_the_blocks_of_a_window_are_on_the_gpu(gpu, window, most):
    torch.manual_seed(0)
    config = families.hf.LlamaConfig(**{**families.DECODER, "num_hidden_layers": 4})
    model = families.hf.AutoModelForCausalLM.from_config(config).eval()
    watch, data = Watching(), families.language_batches(count=2)
    with torch.no_grad(), full_precision():  # the products of a run
        dense = model(**families.language_batches(count=1)[0]).logits
    fit = None if window is None else BlockFit(steps=1, lr=1e-3, window=window)
    recipe = iobs.Recipe(solver="magnitude", target="residual", blocks=fit)
    iobs.prune(OffloadedStore(model), data, 0.5, recipe, callbacks=[watch], holdout=0.0)
    assert watch.most == most
    assert torch.equal(watch.dense, dense)
    assert is_home(model)
    gc.collect()
    assert not gpu.bytes  # nothing stays behind


@pytest.mark.slow
def test_peak_on_the_gpu_is_below_that_of_a_resident_run(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: gpu.peak)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8}
    config = families.hf.LlamaConfig(**{**families.DECODER, **sizes})
    model = families.hf.AutoModelForCausalLM.from_config(config).eval()
    block = sum(one.nbytes for one in model.model.layers[0].parameters())
    data = families.language_batches(batch=1, length=8, count=2)
    recipe = iobs.Recipe(solver="magnitude", target="dense")
    peaks = []
    for store in (OffloadedStore(copy.deepcopy(model), streams="device"), on_gpu(copy.deepcopy(model))):
        start = gpu.reset_peak()
        report = iobs.prune(store, data, 0.5, recipe, holdout=0.0)
        peaks.append(gpu.peak - start)
        said = f"Peak memory of cuda:0: {gpu.peak / 1e9:.2f} GB." in report.notes
        assert said == isinstance(store, OffloadedStore)
    # The resident run holds the dense model and the copies of the weights besides its own.
    assert peaks[0] < peaks[1] - (3 * 8 - 8 - 4) * block


class Stops(iobs.Callback):
    def __init__(self, layers):
        self.left = layers

    def on_layer(self, entry, index):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "blocks", [pytest.param(None, id="layers"), pytest.param(FIT, id="steps", marks=pytest.mark.slow)]
)
def test_an_interrupted_run_gives_the_weights_back(gpu, tmp_path, blocks):
    model, data = made("llama")
    before, weights = copy.deepcopy(model), [one.data_ptr() for one in model.parameters()]
    options = {"solver": "magnitude", "target": "residual", "blocks": blocks, "holdout": 0.0, "checkpoint": tmp_path}
    options["include"] = ["*.q_proj", "*.down_proj"]  # two layers of both blocks: every step there is slow
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(OffloadedStore(model), data, 0.5, "one-shot", callbacks=[Stops(3)], **options)
    assert is_home(model)
    assert differing(before, model) == []
    assert [one.data_ptr() for one in model.parameters()] == weights
    iobs.prune(OffloadedStore(model), data, 0.5, "one-shot", **options)  # goes on from the checkpoint
    iobs.prune(OffloadedStore(before), data, 0.5, "one-shot", **{**options, "checkpoint": None})
    assert differing(before, model) == []


def test_main_memory_without_room_for_copies_is_refused(monkeypatch):
    model, data = made("llama")
    before = copy.deepcopy(model)
    monkeypatch.setattr(offloaded_store, "available", lambda: 1000)
    with pytest.raises(OutputError, match="Copies of the dense weights take"):
        iobs.prune(OffloadedStore(model, "cpu"), data, 0.5, "one-shot")
    assert differing(before, model) == []


MAGNITUDE = {"recipe": "one-shot", "solver": "magnitude"}


def test_files_of_an_offloaded_run_lie_in_its_folder(tmp_path, monkeypatch):
    model, data = made("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    folders = []

    def storage(place, device, folder):
        folders.append(folder)
        return Storage(place, device, folder)

    monkeypatch.setattr(blockwise, "Storage", storage)
    iobs.prune(OffloadedStore(model, "cpu", folder=tmp_path), data, 0.5, **MAGNITUDE)
    assert [folder.parent for folder in folders[1:]] == [tmp_path]  # the first is of the store before its run
    assert not [*tmp_path.iterdir()]


def test_disk_without_room_for_hidden_states_is_refused(tmp_path, monkeypatch):
    model, data = made("llama")
    before = copy.deepcopy(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"Files of hidden states .* choose a folder on another disk"):
        iobs.prune(OffloadedStore(model, "cpu", folder=tmp_path), data, 0.5, **MAGNITUDE)
    assert differing(before, model) == []
    iobs.prune(OffloadedStore(model, "cpu", "device"), data, 0.5, **MAGNITUDE)  # takes no room on the disk


class Branching(nn.Module):
    """No chain: both blocks read the same input."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))

    def forward(self, value):
        return self.blocks[0](value) + self.blocks[1](value)


def test_models_without_a_chain_are_refused(gpu):
    model = Branching()
    before = copy.deepcopy(model)
    with pytest.raises(ModelError, match="Branching does not run exactly along a chain of blocks"):
        iobs.prune(OffloadedStore(model), [torch.randn(4, 6)], 0.5, "one-shot")
    assert is_home(model)
    assert differing(before, model) == []


def test_recipes_that_need_the_whole_model_are_refused(gpu):
    model, data = made("llama")
    with pytest.raises(ProblemError, match=r"rounds.*: not with one block"):
        iobs.prune(OffloadedStore(model), data, 0.5, "paper")
    with pytest.raises(ProblemError, match="cannot be used"):
        OffloadedStore(model, "cuda:x")


@pytest.mark.slow
def test_streams_of_an_offloaded_run_may_lie_anywhere(gpu):
    model, data = made("llama")
    found = []
    for place in ("device", "memory", "disk"):
        other = copy.deepcopy(model)
        iobs.prune(OffloadedStore(other, streams=place), data, 0.5, "one-shot", solver="sparsegpt", blocks=FIT)
        found.append(other)
    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []


NETWORK = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(nn.Linear(7, 8), nn.Sequential(*blocks), nn.Linear(8, 3))


def batches():
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randn(20, 7, generator=drawn), torch.randint(3, (20,), generator=drawn)) for _ in range(3)]
"""


@pytest.mark.slow
def test_command_line_keeps_a_model_that_does_not_fit_in_main_memory(gpu, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 1000))

    def run(device, *more):
        options = ["--data", f"{file}:batches", "--device", device, "-o", str(tmp_path / device)]
        return CliRunner().invoke(app, ["prune", f"{file}:net", *options, *more])

    # Without arithmetic, which differs between devices.
    one_shot = ["--recipe", "one-shot", "--solver", "magnitude", "--set", "allocation=uniform"]
    planned = run("cuda", *one_shot, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "its blocks visit cuda:0" in planned.stderr
    assert "Predicted peak memory" in planned.stdout
    assert "in main memory, beside the model" in planned.stdout
    refused = run("cuda", "--recipe", "paper")
    assert refused.exit_code == 2
    assert "on cuda:0, which has less. Its blocks would visit cuda:0, but: " in refused.stderr
    assert "in files" in run("cuda", *one_shot, "--dry-run", "--streams", "disk").stdout
    done = run("cuda", *one_shot, "--streams", "memory")
    assert done.exit_code == 0, done.output
    assert "Predicted peak memory" in done.stderr
    assert zeros_in(tmp_path / "cuda") == ZEROS


ZEROS = {
    "0.weight": 28,
    **{f"1.{block}.{layer}.weight": 64 for block in range(3) for layer in (0, 2)},
    "2.weight": 12,
}


def zeros_in(folder):
    """The zeros of every tensor in the files of a folder that has some."""
    found = {name: int((value == 0).sum()) for name, value in load_file(folder / "model.safetensors").items()}
    return {name: count for name, count in found.items() if count}


class FillsTheGpu(iobs.Callback):
    """The GPU is full after some layers of a run with the whole model there."""

    def __init__(self, layers):
        self.left = layers

    def on_start(self, model, layers, rounds):
        self.model = model

    def on_layer(self, entry, index):
        self.left -= 1
        if not self.left:
            assert not is_home(self.model)
            raise torch.OutOfMemoryError(FULL)


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


def fills(store):
    """A run that fills the GPU if the whole model is there; returns the class of the store."""
    assert is_home(store.model) == isinstance(store, OffloadedStore)
    if store.whole:
        raise torch.OutOfMemoryError(FULL)
    return type(store)


def resident():
    """A model on the GPU, and its store with copies of the weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(GPU)
    store = Store(model)
    store.remember(None)
    return SimpleNamespace(module=model), store


def test_run_that_fills_the_gpu_begins_again_by_blocks(gpu):
    loaded, store = resident()
    request = SimpleNamespace(recipe=iobs.Recipe.preset("one-shot"))
    assert run_where_it_fits(fills, loaded, store, request, StreamPlace(None, None)) is OffloadedStore
    assert is_home(loaded.module)
    gc.collect()
    assert not gpu.bytes  # the copies of the weights are gone too


def test_run_that_needs_the_whole_model_or_fails_otherwise_does_not_begin_again(gpu):
    loaded, store = resident()
    for request in (None, SimpleNamespace(recipe=iobs.Recipe.preset("paper"))):
        with pytest.raises(torch.OutOfMemoryError):
            run_where_it_fits(fills, loaded, store, request, StreamPlace(None, None))

    def fails(store):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one_shot = SimpleNamespace(recipe=iobs.Recipe.preset("one-shot"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_where_it_fits(fails, loaded, store, one_shot, StreamPlace(None, None))
    assert not is_home(loaded.module)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_command_line_goes_on_by_blocks_when_the_gpu_is_full(gpu, tmp_path, monkeypatch, resume):
    file, full = tmp_path / "mine.py", FillsTheGpu(4)
    file.write_text(NETWORK)
    monkeypatch.setattr(running, "Watch", lambda steps: full)

    def run(*more):
        options = ["--data", f"{file}:batches", "--device", "cuda", "-o", str(tmp_path / "out"), *more]
        return CliRunner().invoke(app, ["prune", f"{file}:net", *options, *(["--resume"] if resume else [])])

    done = run("--recipe", "one-shot", "--solver", "magnitude", "--set", "allocation=uniform")
    assert done.exit_code == 0, done.output
    assert "The run takes more memory than cuda:0 has: it begins again, and the blocks visit cuda:0." in done.stderr
    assert "Predicted peak memory" in done.stderr
    assert full.left < 0
    assert is_home(full.model)
    assert zeros_in(tmp_path / "out") == ZEROS


def test_command_line_without_a_way_by_blocks_says_that_memory_ran_out(gpu, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    monkeypatch.setattr(running, "Watch", lambda steps: FillsTheGpu(1))
    options = ["--data", f"{file}:batches", "--device", "cuda", "-o", str(tmp_path / "out"), "--rounds", "2"]
    failed = CliRunner().invoke(app, ["prune", f"{file}:net", *options, "--recipe", "paper"])
    assert failed.exit_code == 1
    assert "The memory is not enough (CUDA out of memory" in failed.stderr
    assert not (tmp_path / "out").exists()
