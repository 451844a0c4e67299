"""Distributed runs: two ranks agree with one process, and a rank that dies ends the other."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app
from iobs.core.masks import RowsOf
from iobs.errors import DistributedError
from iobs.pruning import driver
from iobs.pruning.runtime import ranks as module
from iobs.pruning.runtime.ranks import Ranks

WORKER = Path(__file__).with_name("rank.py")


def launch(mode, output, ranks):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [str(WORKER), mode, str(output)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    whole = [sys.executable, *torchrun, *arguments]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one-shot", "rounds"])
def test_two_ranks_agree_with_one_process(mode, tmp_path):
    weights = []
    for ranks in (1, 2):
        run = launch(mode, tmp_path / str(ranks), ranks)
        assert run.returncode == 0, run.stderr[-2000:]
        weights.append(load_file(tmp_path / f"{ranks}.0.safetensors"))
    one, two = weights
    other = load_file(tmp_path / "2.1.safetensors")
    assert all(torch.equal(two[name], other[name]) for name in two)  # ranks hold the same bits
    matrices = [name for name in one if one[name].ndim > 1]
    same = sum(int(((one[name] == 0) == (two[name] == 0)).sum()) for name in matrices)
    assert same / sum(one[name].numel() for name in matrices) >= 0.9999
    for name in matrices:
        assert torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-3 * float(one[name].abs().max()))


@pytest.mark.slow
def test_block_reconstruction_on_two_ranks_agrees_with_one_process(tmp_path):
    runs = [launch("blocks", tmp_path / str(ranks), ranks) for ranks in (1, 2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    one, two, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("1.0", "2.0", "2.1"))
    assert all(torch.equal(two[name], other[name]) for name in two)
    assert all(torch.allclose(one[name], two[name], rtol=1e-6, atol=1e-8) for name in one)
    one, two = (load_file(tmp_path / f"{ranks}.streamed" / "model.safetensors") for ranks in (1, 2))
    assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6) for name in one)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_divide_the_rows_of_a_layer_and_agree_with_one_process(ranks, tmp_path):
    runs = [launch("divide", tmp_path / str(count), count) for count in (1, ranks)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    one = load_file(tmp_path / "1.0.safetensors")
    several = [load_file(tmp_path / f"{ranks}.{rank}.safetensors") for rank in range(ranks)]
    solved = [found.pop("solved") for found in several]
    # q, k, v, o and down are divided. Gate and up are one layer for each of two ranks; three ranks divide them too.
    assert one.pop("solved") == sum(solved) == 5 * 256 + 2 * 320
    assert max(solved) - min(solved) <= 8
    assert all(torch.equal(several[0][name], found[name]) for found in several for name in one)
    matrices = [name for name in one if "proj.weight" in name]
    for name in matrices:
        assert int((one[name] == 0).sum()) == int((several[0][name] == 0).sum())
        equal = ((one[name] == 0) == (several[0][name] == 0)).double().mean()
        assert equal >= 0.998, (name, equal)
    for name in one:
        assert float((one[name] - several[0][name]).norm()) <= 0.05 * float(one[name].norm()), name


@pytest.mark.slow
def test_keep_sparse_holds_on_sharded_parameters_and_through_a_checkpoint(tmp_path):
    run = launch("fsdp", tmp_path / "out", 2)
    assert run.returncode == 0, run.stderr[-2000:]
    ranks = [load_file(tmp_path / f"out.{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert int((ranks[0]["0.weight"] == 0).sum()) == ranks[0]["0.weight"].numel() // 2


@pytest.mark.slow
def test_keep_sparse_holds_on_two_ranks_under_ddp(tmp_path):
    run = launch("ddp", tmp_path / "out", 2)
    assert run.returncode == 0, run.stderr[-2000:]
    ranks = [load_file(tmp_path / f"out.{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert int((ranks[0]["0.weight"] == 0).sum()) == ranks[0]["0.weight"].numel() // 2


@pytest.mark.slow
def test_rank_ends_if_another_rank_dies_and_the_run_can_go_on(tmp_path):
    run = launch("death", tmp_path / "out", 2)  # ends, or runs into its time limit
    assert run.returncode != 0
    assert not (tmp_path / "out.1.safetensors").exists()
    assert list((tmp_path / "checkpoint").glob("*.safetensors"))
    for mode in ("resumed", "one-shot"):
        run = launch(mode, tmp_path / mode, 2)
        assert run.returncode == 0, run.stderr[-2000:]
    resumed, undisturbed = (load_file(tmp_path / f"{mode}.1.safetensors") for mode in ("resumed", "one-shot"))
    assert all(torch.equal(value, resumed[name]) for name, value in undisturbed.items())


@pytest.fixture
def command(monkeypatch):
    """Run the command line in this process with some of torchrun's environment variables set."""

    def run(*arguments, **variables):
        for name in ("RANK", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"CUDA_VISIBLE_DEVICES": "", **variables}.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, [*map(str, arguments)])

    return run


def test_ranks_ignore_variables_of_other_programs(command, tmp_path):
    assert command("--version", WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1").stdout.startswith("iobs")
    alone = command("prune", "-o", tmp_path / "out", tmp_path / "none", WORLD_SIZE="2", RANK="0")
    assert isinstance(alone.exception, SystemExit)
    assert "Traceback" not in alone.stderr
    assert "other ranks" not in alone.stderr


def test_ranks_that_cannot_be_reached_raise_one_error(command, tmp_path):
    variables = {"WORLD_SIZE": "2", "RANK": "first", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = command("prune", "-o", tmp_path / "out", **variables)
    assert run.exit_code == 1
    assert run.stderr.startswith("Error: The other ranks cannot be reached")
    assert "Traceback" not in run.stderr


def test_ranks_share_the_samples_of_a_batch_that_has_fewer_of_them():
    batch = {"inputs": torch.arange(2.0)[:, None], "labels": torch.arange(2)}
    shares = [Ranks(rank, 4).rows(batch)["labels"].tolist() for rank in range(4)]
    assert shares == [[0], [1], [], []]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pattern", [0.5, iobs.Structured(0.5)], ids=str)
def test_only_the_first_rank_shows_progress(pattern, rank, monkeypatch, capsys):
    class Watching(iobs.Callback):
        def on_layer(self, record, round_index):
            called.append(record.name)

    called = []
    monkeypatch.setattr(driver, "current", lambda: Ranks(rank, 2))
    monkeypatch.setenv("FORCE_COLOR", "1")  # a bar as on a terminal
    layers, data = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)], [torch.randn(20, 8)]
    iobs.prune(torch.nn.Sequential(*layers), data, pattern, "one-shot", callbacks=[Watching()], progress=True)
    assert bool(called) == (rank == 0)
    assert (capsys.readouterr().err == "") == (rank > 0)


@pytest.mark.slow
def test_command_line_runs_under_torchrun(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--data", text, "--samples", "8", "--batch-size", "2", "--seq-len", "32", "--solver", "sparsegpt"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "iobs"]
    for name, more in (("out", []), ("streamed", ["--low-memory"])):
        call = [*torchrun, "prune", models.EMBEDDED, "-o", tmp_path / name, *options, *more]
        run = subprocess.run([*map(str, call)], env=environment, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stderr[-2000:]
        assert (tmp_path / name / "report.json").is_file()
    assert iobs.audit(tmp_path / "streamed") is not None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "streamed", "text.txt"]


@pytest.fixture
def group(monkeypatch):
    """A process group of two ranks, whose other rank gives the same tensors; returns the tensors of every exchange."""
    seen = []

    def all_reduce(tensor):
        seen.append(tensor.device.type)
        tensor.mul_(2)

    def broadcast(tensor, source):
        seen.append(tensor.device.type)
        tensor.fill_(source)

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module.dist, "broadcast", broadcast)
    return seen


@pytest.mark.parametrize(
    ("backends", "place"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_exchanges_are_on_a_device_of_the_process_group(gpu, group, monkeypatch, backends, place):
    monkeypatch.setattr(module.dist, "get_backend_config", lambda: backends)
    two = Ranks(0, 2)
    assert two.total(3.0) == 6.0
    assert RowsOf(iobs.Unstructured(0.5), 8, two).most(3.0) == 6.0
    mine = torch.ones(2)
    two.broadcast(mine, 1)
    assert mine.tolist() == [1.0, 1.0]
    assert mine.device.type == "cpu"
    assert group == [place] * 3
    there = torch.ones(2, device="cuda")
    two.sum(there)
    assert there.tolist() == [2.0, 2.0]
    assert group[3:] == ["cuda"]


def test_exchange_that_the_group_refuses_is_one_error():
    with pytest.raises(DistributedError, match="refuses an exchange"), module.explained():
        raise ValueError("Tensors must be contiguous")


@pytest.mark.parametrize(
    ("processes", "gpus", "backend"), [(2, 0, "gloo"), (2, 1, "gloo"), (2, 2, "cpu:gloo,cuda:nccl")]
)
def test_ranks_take_gpus_only_if_each_has_its_own(monkeypatch, processes, gpus, backend):
    """More processes than GPUs run on the CPU; all of them must make the same group."""
    chosen, made, waits = [], [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(module, "_met", lambda: (None, 0, processes))
    monkeypatch.setattr(
        module.dist, "init_process_group", lambda name, **others: made.append(name) or waits.append(others)
    )
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: processes)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for rank in range(processes):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with module.joined():
            pass
    assert made == [backend] * processes
    assert all(one["timeout"] >= timedelta(days=1) for one in waits)  # the solve of one layer may take hours
    assert chosen == ([*range(processes)] if "nccl" in backend else [])
