"""Hidden states on the device, in main memory or in files."""

import mmap

import families
import pytest
import torch
from safetensors.torch import load_file

import iobs
from iobs.errors import OutputError, ProblemError
from iobs.models.streamed import StreamedModel, StreamedStore
from iobs.pruning.blockwise.storage import Storage, choose_place
from iobs.pruning.calibration import gram
from iobs.pruning.descent.gradients import LossGradient
from iobs.pruning.recipe import BlockFit

STEPS = BlockFit(masks=2, steps=2, between=1, lr=1e-3, network_steps=2, network_lr=1e-4)


def pruned(folder, data, streams="auto", **options):
    with StreamedStore.open(folder / "model", folder / streams, streams=streams) as store:
        iobs.prune(store, data, 0.5, "one-shot", solver="sparsegpt", **options)
        place = store._storage.place
    return place, load_file(folder / streams / "model.safetensors")


def room(device, memory, disk):
    return {"device": device, "memory": memory, "disk": disk}


@pytest.mark.parametrize(
    ("place", "on_cpu", "free", "found"),
    [
        ("auto", True, room(0, 0, 0), "disk"),
        ("auto", False, room(100, 0, 0), "device"),
        ("auto", False, room(99, 100, 0), "memory"),
        ("auto", False, room(99, 99, 100), "disk"),
        ("device", False, room(0, 0, 0), "device"),
        ("memory", True, room(0, 0, 0), "memory"),
    ],
)
def test_place_of_streams_is_the_first_with_room(place, on_cpu, free, found):
    assert choose_place(place, on_cpu, 100, free) == found


def test_streams_without_room_or_with_an_unknown_place_are_refused():
    with pytest.raises(OutputError, match="give fewer samples"):
        choose_place("auto", False, 100, room(99, 99, 99))
    with pytest.raises(ProblemError, match='"auto", "device", "memory" or "disk"'):
        choose_place("tape", True, 0, room(0, 0, 0))


def test_storage_overwrites_a_tensor_of_the_same_name(tmp_path):
    for place in ("memory", "disk"):
        storage = Storage(place, torch.device("cpu"), tmp_path)
        first = storage.keep("0", torch.ones(3, 4, dtype=torch.bfloat16))
        second = storage.keep("0", torch.zeros(3, 4, dtype=torch.bfloat16))
        assert torch.equal(first, second)
        assert storage.fetch(second).data_ptr() != second.data_ptr()
        assert storage.keep("0", torch.ones(5)).tolist() == [1.0] * 5


class Runtime:
    """The CUDA runtime: records what is page-locked."""

    def __init__(self, code=0):
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address, size, flags):
        assert address not in self.locked
        self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


def test_page_locked_memory_has_the_bytes_of_the_plan_and_is_given_back(monkeypatch, tmp_path):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    storage = Storage("memory", torch.device("cuda", 0), tmp_path)
    given = {"0": torch.randn(3, 2048, 5, dtype=torch.bfloat16), "1": torch.ones(7) > 0, "2": torch.ones(0)}
    given["3"] = torch.ones((), dtype=torch.float64)
    for name, tensor in given.items():
        assert torch.equal(storage.keep(name, tensor), tensor)
    assert sorted(runtime.locked.values()) == sorted(one.nbytes for one in given.values() if one.numel())
    assert all(address % mmap.PAGESIZE == 0 for address in runtime.locked)  # ranges share no page
    storage.keep("1", torch.zeros(7, dtype=torch.bool))
    storage.keep("0", torch.ones(5))
    assert sum(runtime.locked.values()) == 5 * 4 + 7 + 8
    storage.clear()
    assert not runtime.locked
    assert not storage.kept


def test_memory_that_cannot_be_locked_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    storage = Storage("memory", torch.device("cuda", 0), tmp_path)
    with pytest.raises(OutputError, match=r'page-locked \(CUDA error 2\).*streams "disk"'):
        storage.keep("0", torch.ones(3))
    storage.clear()


@pytest.mark.parametrize("blocks", [None, STEPS], ids=["layers", "blocks"])
def test_weights_do_not_depend_on_the_place_of_streams(tmp_path, blocks):
    families.saved("llama", tmp_path / "model")
    data = families.language_batches(count=2)
    options = {"target": "residual", "blocks": blocks, "holdout": 0.25}
    places, weights = zip(*(pruned(tmp_path, data, place, **options) for place in ("auto", "memory")), strict=True)
    assert places == ("disk", "memory")
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_weights_do_not_depend_on_the_place_of_grams(tmp_path, monkeypatch):
    monkeypatch.setattr(gram, "WIDE", 16)
    families.saved("llama", tmp_path / "model")
    stored = set()
    park = Storage.park

    def watched(storage, name, moments):
        found = park(storage, name, moments)
        if storage.place == "disk":
            stored.add(name.split(".")[-1])
            assert (storage.folder / name).exists()
        return found

    monkeypatch.setattr(Storage, "park", watched)
    options = {"target": "residual", "allocation": "fisher", "holdout": 0.25}
    data = families.language_batches(count=2)
    _, weights = zip(*(pruned(tmp_path, data, place, **options) for place in ("auto", "memory")), strict=True)
    assert stored == {"gram"}
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_plan_names_the_place_of_streams(tmp_path):
    families.saved("llama", tmp_path / "model")
    data = families.language_batches()
    plans = {}
    for place in ("auto", "memory"):
        store = StreamedStore(StreamedModel.open(tmp_path / "model"), tmp_path / place, place)
        recipe = iobs.Recipe.preset("one-shot").but(target="residual", blocks=STEPS)
        plans[place] = store.plan(families.request_of(store, recipe), data)
    disk, memory = plans["auto"], plans["memory"]
    assert (disk.streams, memory.streams) == ("disk", "memory")
    assert disk.spilled_bytes == disk.streams_bytes == memory.streams_bytes
    assert memory.spilled_bytes == 0
    assert memory.peak_bytes >= memory.streams_bytes
    assert {"solves", "steps of blocks", "steps of the network"} <= disk.phases.keys()
    assert disk.phases["reading and writing"] > 0
    assert disk.seconds == pytest.approx(sum(disk.phases.values()))


def test_plan_tells_the_peak_of_every_phase(tmp_path):
    """The largest is the peak of the run; hidden states in memory count in all of them."""
    families.saved("llama", tmp_path / "model")
    data, found = families.language_batches(), {}
    for streams in ("memory", "disk"):
        store = StreamedStore(StreamedModel.open(tmp_path / "model"), tmp_path / streams, streams)
        found[streams] = store.plan(families.request_of(store), data, timed=False)
    held, spilled = found["memory"], found["disk"]
    assert {"before the blocks", "Grams", "solves"} <= held.peaks.keys() == spilled.peaks.keys()
    assert max(held.peaks.values()) == held.peak_bytes
    assert max(spilled.peaks.values()) == spilled.peak_bytes
    above = [one.peaks["Grams"] - one.peaks["before the blocks"] for one in (held, spilled)]
    assert above[0] == above[1] > 0


def test_the_dense_weights_of_a_block_are_gone_while_its_window_is_fitted(tmp_path, monkeypatch):
    families.saved("llama", tmp_path / "model", torch.float32)
    fit = BlockFit(window=1, masks=1, steps=2, network_steps=2, lr=1e-3, network_lr=1e-4)
    with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
        loaded = []

        def look(gradient):
            paths = [store.streamed.blocks[stage].path for stage in gradient.objective.stages]
            assert all(one.is_meta for path in paths for one in store.dense_model.get_submodule(path).parameters())
            loaded.append(any(not one.is_meta for one in store.model.get_submodule(paths[0]).parameters()))

        of = LossGradient.of
        monkeypatch.setattr(LossGradient, "of", lambda self, items: (look(self), of(self, items))[1])
        data = families.language_batches()
        iobs.prune(store, data, 0.5, solver="sparsegpt", target="residual", blocks=fit, holdout=0.0)
    assert loaded
    assert all(loaded)
