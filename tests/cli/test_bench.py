"""`iobs bench`: speed and memory of the forms of a model, and their table, line and picture."""

import json
import signal
import time
from dataclasses import replace

import pytest
import torch
import transformers
from checks import one_error
from torch import nn
from typer.testing import CliRunner

from iobs import models
from iobs.cli import app, benching
from iobs.cli.benching import Repetition, Timing, Workload, accepted_input, fastest_threads, repetition
from iobs.errors import ModelError
from iobs.inference import StoredLinear, cpu
from iobs.inference.decoder import Decoder
from iobs.inference.storing import bytes_held, replace_layers, stored_matrices
from iobs.models import EMBEDDED, LoadedModel
from iobs.models.packed import open_packed
from iobs.report.comparisons import RunningRow, running_figure, running_line, running_notes, running_table

ROWS = [
    RunningRow("dense float32", 10.0, "tokens/s", 90.0, {"matrices": 3_000_000, "embeddings": 1_000_000}, 9_000_000),
    RunningRow("dense bfloat16", 8.0, "tokens/s", 20.0, {"matrices": 2_000_000}, 7_000_000),
    RunningRow("iobs int8", 25.0, "tokens/s", 80.0, {"matrices": 900_000, "copies": 100_000}, None),
]


def invoked(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def workload(model, **changes):
    return Workload(
        **{"model": str(model), "tokens": 5, "prompt": 7, "shape": None, "precision": "int8", "threads": None} | changes
    )


def test_line_compares_with_the_fastest_dense_form(real_figures):
    assert running_line(ROWS) == (
        "iobs int8 against dense float32, the fastest dense form: 2.50 times the tokens/s, 25% of the bytes."
    )
    assert [len(column._cells) for column in running_table(ROWS).columns] == [3] * 5
    assert running_figure(ROWS).count("<svg") == 1
    assert "dense bfloat16" in running_figure(ROWS)
    assert "  iobs int8: 0.9 matrices, 0.1 copies for the compiled step" in running_notes(ROWS)


def test_bytes_are_those_of_all_tensors_that_a_form_holds(packed):
    """Embeddings, biases and buffers count, a tied weight once, and what the compiled step stores again counts too."""
    dense = models.load(EMBEDDED)
    held = bytes_held(dense.module)
    assert sum(held.values()) == sum(one.nbytes for one in (*dense.module.parameters(), *dense.module.buffers()))
    assert held["embeddings"] == dense.module.lm_head.weight.nbytes
    assert held["others"] >= sum(one.nbytes for one in dense.module.parameters() if one.ndim == 1)
    ready = open_packed(packed / "int8").module
    assert bytes_held(ready)["embeddings"] == ready.lm_head.matrix.bytes
    assert bytes_held(ready)["matrices"] == sum(
        one.matrix.bytes for one in ready.model.layers.modules() if isinstance(one, StoredLinear)
    )
    if cpu.level() != "none":
        assert repetition(dense, workload(EMBEDDED), stored=False).own_bytes == 0
        again = repetition(dense, workload(EMBEDDED), stored=True).own_bytes  # every dense layer is stored again
        assert again > bytes_held(ready)["matrices"] > 0
        assert 0 < repetition(open_packed(packed / "int8"), workload("x"), stored=True).own_bytes < again


def test_ctrl_c_is_heard_by_one_process_which_ends_the_other():
    """A process that measures printed a traceback of its own, and finished its repetition first."""

    def stopped():
        with benching._process() as pool:
            assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
            pool.submit(time.sleep, 3600)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()


@pytest.mark.parametrize("stored", [False, True])
def test_repetition_times_a_language_model(stored, monkeypatch):
    steps = []
    monkeypatch.setattr(Decoder, "generate", lambda *arguments: steps.append(1) or iter(range(5)))
    loaded = models.load(EMBEDDED)
    if stored:
        replace_layers(loaded.module, dict(stored_matrices(loaded.module, "int8")))
    timing = repetition(loaded, workload(EMBEDDED), stored).run()
    assert timing.speed > 0
    assert timing.prompt_speed > 0
    assert bool(steps) is (stored and cpu.level() != "none")


@pytest.mark.parametrize(("precision", "threads"), [("bf16", 1), ("int8", 2)])
def test_a_packed_file_is_named_by_its_formats(packed, tmp_path, monkeypatch, precision, threads):
    modules, before = [], torch.get_num_threads()
    monkeypatch.setattr(benching, "_prepared", [])
    monkeypatch.setattr(benching, "_HIGH_WATER", tmp_path / "none")
    monkeypatch.setattr(
        benching, "repetition", lambda loaded, *_: modules.append(loaded.module) or Repetition(lambda: None, 5)
    )
    try:
        name, held = benching._prepare(workload("x", threads=threads), str(packed / precision), "stored")
    finally:
        torch.set_num_threads(before)
    assert name == f"iobs {precision}"
    assert held["embeddings"] > 0
    assert held["copies"] == 5
    assert {one.threads for one in modules[0].modules() if isinstance(one, StoredLinear)} == {threads}


def test_repetition_times_pictures_of_a_known_shape():
    calls = []

    class Network(nn.Conv2d):
        def forward(self, given):
            calls.append(tuple(given.shape))
            return super().forward(given)

    loaded = LoadedModel(Network(3, 4, 1), None, "net", "other", None, lambda *_: None)
    assert repetition(loaded, workload("net", shape=(3, 8, 9)), False).run().prompt_speed is None
    assert calls == [(1, 3, 8, 9)] * 5
    loaded.module.default_cfg = {"input_size": (3, 2, 2)}
    repetition(loaded, workload("net"), False).run()
    assert calls[-1] == (1, 3, 2, 2)
    del loaded.module.default_cfg
    with pytest.raises(ModelError, match="--shape"):
        repetition(loaded, workload("net"), False)


def test_texts_are_timed_where_a_model_takes_token_ids_alone():
    """Sentence encoders were refused, as if they were models of pictures."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1}
    encoder = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    seen = []
    encoder.register_forward_pre_hook(lambda *given: seen.append(given[2]["input_ids"].shape), with_kwargs=True)
    loaded = LoadedModel(encoder, None, "net", "other", 6, lambda *_: None)
    timing = repetition(loaded, workload("net"), False).run()
    assert (timing.unit, timing.prompt_speed, timing.speed > 0) == ("texts/s", None, True)
    assert seen == [(1, 6)] * 5  # at most the context
    translator = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **sizes)).eval()
    with pytest.raises(ModelError, match=r"does not take token ids alone, and is not timed: .+"):
        accepted_input(replace(loaded, module=translator), workload("net"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp4"], "'fp4' is not one of bf16, int8, int4"),
        (["--shape", "3xx"], "does not read C,H,W"),
        (["--plot", "x.gif"], "must end in .svg"),
    ],
)
def test_wrong_options_are_refused_before_any_work(arguments, message):
    run = invoked("no-such-model", *arguments)
    assert run.exit_code == 2
    assert message in " ".join(run.output.replace("\u2502", " ").split())


@pytest.mark.slow
def test_bench_measures_dense_and_stored_forms(tmp_path, real_figures):
    """Three processes load the model; the memory of each is its own."""
    run = invoked(str(EMBEDDED), "--tokens", "4", "--repetitions", "1", "--plot", str(tmp_path / "x.svg"), "--json")
    assert run.exit_code == 0, run.output
    rows = json.loads(run.stdout)["forms"]
    assert [row["form"] for row in rows] == ["dense float32", "dense bfloat16", "dense int8", "iobs int8"]
    buffers = sum(buffer.nbytes for buffer in models.load().module.buffers())  # rotary: float32 in every form
    assert rows[0]["bytes"] - buffers == 2 * (rows[1]["bytes"] - buffers)
    assert all(row["speed"] > 0 for row in rows)
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_bench_takes_the_faster_number_of_threads(monkeypatch):
    """A repetition that is faster with one thread gets one, and the other way round."""
    kept = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for speeds, best in (({1: 200.0, 4: 3.0}, 1), ({1: 20.0, 4: 60.0}, 4)):
        used.clear()
        assert fastest_threads(lambda speeds=speeds: Timing("tokens/s", speeds[used[-1]])) == best
        assert used == [1, 4, best]
    monkeypatch.undo()
    assert torch.get_num_threads() == kept


@pytest.fixture
def narrower(run, classifier, tmp_path):
    """The name of a network, and the directory of the network without half of its units."""
    net, out = f"{classifier}:net", tmp_path / "out"
    given = ("--data", f"{classifier}:batches", "-o", out, "--pattern", "structured:50%", "--recipe", "one-shot")
    told = run("prune", net, *given).output
    assert f"--beside {net}" in "".join(told.split("\n"))
    return net, out


def test_narrower_network_is_measured_beside_the_one_before(narrower, run, monkeypatch):
    net, out = narrower
    found = json.loads(run("bench", out, "--beside", net, "--shape", "7", "--runtime", "torch", "--json").stdout)
    (row,) = found["beside"]
    assert (row["beside"], row["model"], row["runtime"]) == (net, str(out), "torch")
    assert (row["entries_beside"], row["entries"]) == (179, 91)
    assert row["share"] == pytest.approx(row["seconds"] / row["seconds_beside"])
    for seconds, said in (((2e-3, 1e-3), "2.00 times as fast as"), ((1e-3, 0.99e-3), "NOT faster than")):
        monkeypatch.setattr("iobs.cli.benching.shares_of", lambda *_, seconds=seconds: seconds)
        shown = " ".join(run("bench", out, "--beside", net, "--shape", "7", "--runtime", "torch").output.split())
        assert said in shown
        assert "million parameters" in shown


def test_narrower_network_is_measured_in_onnx_runtime(narrower, run):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    net, out = narrower
    rows = json.loads(run("bench", out, "--beside", net, "--shape", "7", "--json").stdout)["beside"]
    assert [row["runtime"] for row in rows] == ["torch", "ONNX Runtime"]
    assert all(row["seconds"] > 0 for row in rows)


def test_language_model_is_measured_beside_another_on_a_prompt(run, monkeypatch):
    given = []
    monkeypatch.setattr("iobs.cli.benching.shares_of", lambda *all_: given.append(all_[2]) or (1.0, 0.5))
    run("bench", EMBEDDED, "--beside", EMBEDDED, "--prompt", "9", "--runtime", "torch")
    assert given[0]["input_ids"].shape == (1, 9)


def test_models_that_cannot_be_compared_are_an_error(narrower, run):
    net, out = narrower
    shown = run("bench", out, "--beside", net, "--shape", "5", "--runtime", "torch", code=2).output
    assert "could not be compared" in " ".join(shown.split())
    assert "--beside MODEL" in run("bench", out, "--runtime", "torch", code=2).output
    assert "torch" in run("bench", out, "--beside", net, "--runtime", "tensorrt", code=2).output


def test_plain_bench_of_a_narrower_network_names_the_comparison(narrower, run, monkeypatch):
    monkeypatch.setattr(benching, "measure_forms", lambda *_: iter(ROWS))
    assert "--beside MODEL" in " ".join(run("bench", narrower[1]).output.split())
    assert "--beside" not in run("bench", EMBEDDED).output


@pytest.mark.parametrize("free", [10**12, 1])
def test_forms_are_measured_one_after_another_if_memory_does_not_hold_all(free, monkeypatch):
    groups = []
    monkeypatch.setattr(benching, "available", lambda: free)
    monkeypatch.setattr(benching, "_measure_together", lambda workload, dense, forms, *_: groups.append(forms) or [])
    assert [*benching.measure_forms(workload(EMBEDDED), 1)] == []
    forms = ["float32", "bfloat16", "filled", "stored"]
    assert groups == ([[form] for form in forms] if free == 1 else [forms])


def test_figure_that_cannot_be_written_is_refused_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(benching, "measure_forms", lambda *_: pytest.fail("the work began"))
    (tmp_path / "config.json").touch()
    figure = tmp_path / "missing" / "speed.svg"
    assert f"Cannot write {figure}" in one_error(run("bench", tmp_path, "--plot", figure, code=2))
