"""`python benchmarks/check_gpu.py`: comparisons with the CPU, times, prediction, files."""

import importlib.util
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import families
import pytest
import torch
from checks import benchmarks
from simulated_gpu import GPU

import iobs
from iobs.pruning.calibration import gram
from iobs.pruning.cost.machines import Rates
from iobs.solvers import SOLVERS

with benchmarks() as imported:
    check_gpu, check_results = imported("check_gpu"), imported("check_results")
Check, Findings, solver_checks = check_gpu.Check, check_gpu.Findings, check_gpu.solver_checks
network_checks, sparse_products, timed_block = (
    check_results.network_checks,
    check_gpu.sparse_products,
    check_gpu.timed_block,
)

HERE = torch.device("cpu")
FEW = {"SparseGPT, float32", "block reconstruction, float64"}  # comparisons of networks


def test_first_solvers_on_a_gpu_pass_the_check(gpu):
    found = [*itertools.islice(solver_checks(GPU), 3)]
    assert [one.name for one in found if not one.passed] == []
    assert len({one.name for one in found}) == 3


@pytest.mark.slow
def test_solvers_on_a_gpu_pass_the_check(gpu):
    found = [*solver_checks(GPU)]
    assert len(found) > 20
    assert [one.name for one in found if not one.passed] == []


def test_solver_that_differs_on_the_device_fails_the_check(gpu, monkeypatch):
    def shifted(problem, *arguments, **options):
        solution = solve(problem, *arguments, **options)
        return (
            solution
            if problem.device == HERE
            else type(solution)(solution.weight * 1.5, *list(vars(solution).values())[1:])
        )

    solve = iobs.solve
    monkeypatch.setattr(iobs, "solve", shifted)
    assert not next(solver_checks(GPU)).passed


def test_block_is_timed_and_its_rates_are_positive():
    found = Findings({})
    rates = timed_block(HERE, 256, found)
    assert min(rates.product, rates.solve, rates.transfer) > 0
    names = {one.name for one in found.timings}
    assert {"product in bfloat16", "inverse", "projection", "gradient step of a block"} <= names
    assert found.notes


def test_products_with_zeros_are_compared_and_timed_or_noted(monkeypatch):
    """Without a GPU: the kernel of offsets runs in Triton's interpreter."""
    found = Findings({})
    monkeypatch.setattr(check_gpu, "_PRODUCTS", 1)
    sparse_products(HERE, 64, found)
    there = importlib.util.find_spec("triton") is not None
    assert len(found.checks) == (8 if there else 0)
    assert all(one.passed for one in found.checks)
    assert there or any("pip install triton" in note for note in found.notes)
    names = [one.name for one in found.timings]
    assert "dense product of 2:4, 64 x 64, 1 token(s)" in names
    assert len(names) == len(set(names)) == 8 + len(found.checks)


@pytest.fixture
def tiny(monkeypatch):
    """Checks on a tiny network, and a block of 16 columns."""
    families.ensure_torchvision()
    model = families.LANGUAGE_MODELS["phi3"][0]().eval()  # of few layers: it is pruned many times
    monkeypatch.setattr(iobs, "load", lambda: SimpleNamespace(module=model))
    monkeypatch.setattr(check_gpu, "_SHRUNK", 256)
    monkeypatch.setattr(check_results, "SOLVERS", {"magnitude": SOLVERS["magnitude"]})


@pytest.mark.slow
def test_whole_check_runs_and_predicts_every_recipe(tiny, monkeypatch, tmp_path):
    cases = [one for one in check_results.network_cases() if one.name in FEW]
    monkeypatch.setattr(check_results, "network_cases", lambda: cases)
    assert check_gpu.main(["--device", "cpu", "--out", str(tmp_path / "new" / "found")]) == 0
    found = json.loads((tmp_path / "new" / "found.json").read_text())
    names = {one["name"] for one in found["checks"]}
    assert {f"prune, {name}" for name in FEW} <= names
    assert found["predicted"].keys() == {"one-shot", "fast", "best"}
    assert found["predicted"]["best"]["steps of the network"] > 0
    plain, fitted = (sum(found["predicted"][name].values()) for name in ("one-shot", "fast"))
    assert plain < fitted


@pytest.mark.slow
def test_every_comparison_of_networks_passes_on_the_cpu(tiny):
    found = [*network_checks(HERE)]
    assert len(found) == len(check_results.network_cases()) == 6
    assert [one.name for one in found if not one.passed] == []


@pytest.mark.slow
def test_error_of_a_kernel_is_a_failed_check_and_the_rest_is_written(tiny, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(check_results, "_pruned", broken)
    monkeypatch.setattr(check_gpu, "kernel_times", broken)
    assert check_gpu.main(["--device", "cpu", "--out", str(tmp_path / "found")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    bad = {one["name"]: one["detail"] for one in found["checks"] if not one["passed"]}
    assert bad["times of one block"] == "RuntimeError: no kernel image"
    assert sum(name.startswith("prune,") for name in bad) == 6
    assert found["predicted"] == {}


def test_device_that_misses_a_batch_fails_the_comparisons_of_networks(tiny, monkeypatch):
    def pruned(store, data, recipe):
        """The second run of a comparison is that of the device; a third one is of the CPU again."""
        runs.append(recipe)
        return prune(store, data[:-1] if len(runs) == 2 else data, recipe)

    def check(*arguments):
        runs.clear()
        return compare(*arguments)

    prune, compare, runs = check_results._pruned, check_results._network_check, []
    monkeypatch.setattr(check_results, "_pruned", pruned)
    monkeypatch.setattr(check_results, "_network_check", check)
    cases = [
        replace(case, recipe=case.recipe.but(solver="sparsegpt"))  # ADMM takes longer
        for case in check_results.network_cases()
        if case.recipe.blocks is None and case.there is None
    ]
    monkeypatch.setattr(check_results, "network_cases", lambda: cases)
    found = [*network_checks(HERE)]
    assert len(found) == 3
    assert [one.name for one in found if one.passed] == []


@pytest.mark.slow
def test_network_on_a_gpu_passes_the_check(embedded, gpu, monkeypatch):
    monkeypatch.setattr(iobs, "load", lambda: embedded)  # transformers fills no buffers on the simulated GPU
    assert [one for one in itertools.islice(network_checks(GPU), 1) if not one.passed] == []


@pytest.mark.slow
def test_products_of_ten_bits_fail_the_check(monkeypatch):
    """TF32 in the products of Gram matrices, which a user may allow, and a run must not take."""

    def pruned(store, data, recipe):
        if runs.append(recipe) or len(runs) == 2:
            monkeypatch.setattr(gram, "_accumulate", lambda total, left, right=None: accumulate(total, short(left)))
        return prune(store, data, recipe)

    def short(value):
        return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    prune, accumulate, runs = check_results._pruned, gram._accumulate, []
    monkeypatch.setattr(check_results, "_pruned", pruned)
    assert not next(network_checks(HERE)).passed


def test_block_that_does_not_fit_is_timed_again_without_the_timings_of_the_first_try(tiny, monkeypatch):
    tries = []

    def timed(device, shrink, found):
        found.timings.append(shrink)
        tries.append(shrink)
        if len(tries) == 1:
            raise RuntimeError("cannot allocate memory")
        return Rates(1.0, 1.0)

    for name, empty in (("timed_block", timed), ("solver_checks", lambda _: []), ("network_checks", lambda _: [])):
        monkeypatch.setattr(check_gpu, name, empty)
    found = check_gpu.run(HERE)
    assert tries == [256, 512]
    assert found.timings == [512]


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_findings_are_written_and_a_difference_is_the_exit_status(monkeypatch, tmp_path, capsys, passed, status):
    def run(device):
        return Findings(
            {"device": str(device)}, [Check("solve", passed, "found")], predicted={"one-shot": {"Grams": 60.0}}
        )

    monkeypatch.setattr(check_gpu, "run", run)
    assert check_gpu.main(["--device", "cpu", "--out", str(tmp_path / "found")]) == status
    assert json.loads((tmp_path / "found.json").read_text())["checks"][0]["passed"] is passed
    assert "one-shot: 1 min" in (tmp_path / "found.txt").read_text()
    assert capsys.readouterr().out == (tmp_path / "found.txt").read_text()


def test_missing_device_is_one_clear_line(tmp_path, capsys):
    assert check_gpu.main(["--device", "cuda:7", "--out", str(tmp_path / "found")]) == 2
    assert "give --device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
