"""Runs with block reconstruction that are killed, or lose their disk or a file, go on and end in the same bits."""

import copy
import errno
from dataclasses import replace
from functools import partial

import families
import pytest
import torch
from menagerie import SmallTransformer, token_batches
from safetensors.torch import load_file

import iobs
from iobs.errors import ModelError, OutputError
from iobs.models.streamed import StreamedStore
from iobs.pruning.blockwise import storage
from iobs.pruning.cost import memory
from iobs.pruning.descent.gradients import BlockwiseGradient
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction import fits
from iobs.pruning.runtime.checkpoint import DiskCheckpoint

FIT = BlockFit(masks=2, between=1, steps=2, lr=1e-3, network_steps=5, network_lr=1e-4)
OPTIONS = {"solver": "sparsegpt", "target": "residual", "blocks": FIT, "holdout": 0.25}
INCLUDE = ["*.q*", "*.down*"]  # two layers of every block: a run is repeated many times


def transformer():
    """A network of two blocks, and its batches."""
    torch.manual_seed(0)
    return SmallTransformer(depth=2).eval(), token_batches()


class Killed(BaseException):
    pass


@pytest.fixture
def puts(monkeypatch):
    """Counts the entries of checkpoints, and raises after `puts["last"]` of them; states are stored every two steps."""
    found = {"count": 0, "last": 10**9}
    write = DiskCheckpoint.put

    def put(self, key, tensors, values):
        write(self, key, tensors, values)
        found["count"] += 1
        if found["count"] == found["last"]:
            raise Killed

    monkeypatch.setattr(DiskCheckpoint, "put", put)
    monkeypatch.setattr(fits, "STEPS_BETWEEN_SAVES", 2)
    return found


def killed_again_and_again(puts, run, every):
    """Run, killed after `every` further entries each time, until a run ends; returns the number of kills."""
    kills = 0
    while True:
        puts.update(count=0, last=every)
        try:
            run()
        except Killed:
            kills += 1
            continue
        return kills


def test_resident_run_that_is_killed_repeatedly_ends_in_the_same_bits(puts, tmp_path):
    model, data = transformer()
    undisturbed = copy.deepcopy(model)
    iobs.prune(undisturbed, data, 0.5, "one-shot", include=INCLUDE, **OPTIONS)
    assert not puts["count"]

    def run():
        network = copy.deepcopy(model)
        iobs.prune(network, data, 0.5, "one-shot", include=INCLUDE, checkpoint=tmp_path / "run", **OPTIONS)
        return network

    assert killed_again_and_again(puts, run, 6) >= 3
    puts.update(last=10**9)
    resumed = run()
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), undisturbed.parameters(), strict=True))


# The steps of a rate of 100 are all left out.
@pytest.mark.parametrize("rate", [pytest.param("auto", marks=pytest.mark.slow), 100.0])
def test_run_that_is_killed_repeatedly_has_the_notes_of_an_undisturbed_one(puts, tmp_path, rate):
    model, data = transformer()
    options = {**OPTIONS, "blocks": replace(FIT, lr=rate, network_lr=rate), "include": INCLUDE}
    expected = iobs.prune(copy.deepcopy(model), data, 0.5, "one-shot", **options).notes
    assert len(expected) >= 2
    found = []

    def run():
        report = iobs.prune(copy.deepcopy(model), data, 0.5, "one-shot", checkpoint=tmp_path / "run", **options)
        found.append(report.notes)

    assert killed_again_and_again(puts, run, 6) >= 3
    puts.update(last=10**9)
    run()
    assert found == [expected, expected]


def test_entries_that_no_resumed_run_reads_are_removed(puts, tmp_path, monkeypatch):
    """The largest size of the checkpoint is the one of the plan, and the rest of the disk stays free."""
    model, sizes, largest = families.LANGUAGE_MODELS["llama"][0](), {}, [0]
    write, drop = DiskCheckpoint.put, DiskCheckpoint.drop

    def put(self, key, tensors, values):
        sizes[key] = sum(one.nbytes for one in tensors.values() if one.ndim > 1)
        largest[0] = max(largest[0], sum(sizes.values()))
        write(self, key, tensors, values)

    monkeypatch.setattr(DiskCheckpoint, "put", put)
    monkeypatch.setattr(DiskCheckpoint, "drop", lambda self, key: (sizes.pop(key, 0), drop(self, key))[1])
    monkeypatch.setattr(memory, "STEPS_BETWEEN_SAVES", 2)
    recipe = iobs.Recipe(**{name: value for name, value in OPTIONS.items() if name != "holdout"})
    recipe = recipe.but(blocks=replace(FIT, masks=4))
    data = families.language_batches(count=4)
    report = iobs.prune(model, data, 0.5, recipe, holdout=0.25, checkpoint=tmp_path / "run")
    weights = sum(model.get_parameter(f"{row.name}.weight").numel() for row in report.audit)
    assert largest[0] == memory.checkpoint_bytes(weights, weights // 2, 4, recipe)
    assert not [key for key in sizes if "level" in key or "so far 0" in key or "so far 1" in key]
    assert len([*(tmp_path / "run").glob("*.safetensors")]) == len(sizes)


def streamed(folder, output, checkpoint=None):
    options = {**OPTIONS, "include": INCLUDE, "checkpoint": checkpoint}
    with StreamedStore.open(folder / "model", folder / output) as store:
        iobs.prune(store, families.language_batches(count=4), 0.5, "one-shot", **options)
    return load_file(folder / output / "model.safetensors")


def test_streamed_run_that_is_killed_repeatedly_ends_in_the_same_bits(puts, tmp_path):
    families.saved("llama", tmp_path / "model")
    expected = streamed(tmp_path, "undisturbed")
    found = {}
    kills = killed_again_and_again(puts, lambda: found.update(streamed(tmp_path, "out", tmp_path / "run")), 6)
    assert kills >= 3
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.slow
def test_streamed_fast_that_is_killed_after_every_entry_ends_in_the_same_bits(puts, tmp_path):
    """Kills in every phase: the allocation, the trials of rates, the solves of layers, the fits of windows."""
    families.saved("llama", tmp_path / "model")
    fast = iobs.Recipe.preset("fast")
    recipe = fast.but(solver="sparsegpt", blocks=replace(fast.blocks, steps=2))

    def run(output, checkpoint=None):
        with StreamedStore.open(tmp_path / "model", tmp_path / output) as store:
            data = families.language_batches(count=4)
            iobs.prune(store, data, 0.5, recipe, include=INCLUDE, checkpoint=checkpoint)
        return load_file(tmp_path / output / "model.safetensors")

    expected, found = run("undisturbed"), {}
    kills = killed_again_and_again(puts, lambda: found.update(run("out", tmp_path / "run")), 1)
    assert kills >= 8  # the allocation, 4 layers, a rate and the windows
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_at_most_one_interval_of_network_steps_is_lost(puts, tmp_path, monkeypatch):
    model, data = transformer()
    taken = []
    of = BlockwiseGradient.of
    monkeypatch.setattr(BlockwiseGradient, "of", lambda self, index: (taken.append(1), of(self, index))[1])
    options = {**OPTIONS, "include": INCLUDE, "checkpoint": tmp_path / "run"}
    run = partial(iobs.prune, data=data, pattern=0.5, recipe="one-shot", **options)
    run(copy.deepcopy(model))
    assert len(taken) == FIT.network_steps
    whole, blocks = puts["count"], 3  # two blocks, and the vectors behind them
    last = whole - 2 * blocks - 2  # between the entries of the second state, after four steps
    puts.update(count=0, last=last)
    with pytest.raises(Killed):
        run(copy.deepcopy(model), checkpoint=tmp_path / "killed")
    puts.update(count=0, last=10**9)
    taken.clear()
    run(copy.deepcopy(model), checkpoint=tmp_path / "killed")
    assert len(taken) == FIT.network_steps - 2  # the first state, after two steps, was read


def test_full_disk_is_one_error_and_the_run_can_go_on(puts, tmp_path, monkeypatch):
    families.saved("llama", tmp_path / "model")
    expected = streamed(tmp_path, "undisturbed")
    reserve, left = storage.reserve, [12]

    def full(file, size):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, size)

    monkeypatch.setattr(storage, "reserve", full)
    with pytest.raises(OutputError, match="No space left on device"):
        streamed(tmp_path, "out", tmp_path / "run")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(storage, "reserve", reserve)
    found = streamed(tmp_path, "out", tmp_path / "run")
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_vanished_shard_is_one_error_and_the_run_can_go_on(puts, tmp_path):
    families.saved("llama", tmp_path / "model")
    expected = streamed(tmp_path, "undisturbed")
    shard, away = tmp_path / "model" / "model.safetensors", tmp_path / "away"

    class Vanishes(iobs.Callback):
        def on_layer(self, *_):
            if shard.exists():
                shard.rename(away)

    def run(callbacks):
        with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
            options = {**OPTIONS, "include": INCLUDE, "checkpoint": tmp_path / "run", "callbacks": callbacks}
            iobs.prune(store, families.language_batches(count=4), 0.5, "one-shot", **options)

    with pytest.raises(ModelError, match="put the file back and start again"):
        run([Vanishes()])
    assert not (tmp_path / "out").exists()
    away.rename(shard)
    run([])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
