"""Tiny networks of every family of transformers and of timm, each pruned in a process of its own, and checked.

    python benchmarks/breadth.py [--kinds CausalLM timm ...] [--names llama ...] [--dtypes float32 bfloat16]

A row a network and dtype is added to results/breadth.jsonl, and networks that have a row are skipped.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from breadth_batches import KINDS, Batch, run
from breadth_models import TIMM, build, names
from rows import Row, Rows, parser, stamp
from torch import Tensor, nn

import iobs
from iobs.errors import CoverageWarning, IOBSError
from iobs.pruning.coverage import EXPECTED
from iobs.pruning.coverage import KINDS as REASONS

KEYS = ("kind", "network", "dtype")
LIMIT = 240  # processor seconds of one network
WAIT = 10  # on a shared machine a network may take so many times as long
MEMORY = 8 * 2**30  # bytes of address space beyond the present
LEAST, WARNED = 0.95, 0.8  # shares of the weights; below the second a run must warn
# Names of parameters in no product that are tables of positions, or learned tokens and queries: embeddings too.
TABLES = re.compile(r"pos(ition)?(al)?s?(_|$)|pos_?emb|embeddings?$|tokens?(_emb\w*)?$|quer(y|ies)\w*$|latents?$")
QUICK = {
    "CausalLM": ["llama", "gpt2", "mixtral", "gpt_oss", "dbrx", "llama4_text", "xlnet", "mamba", "recurrent_gemma"],
    "Seq2SeqLM": ["t5", "bart"],
    "MaskedLM": ["bert", "deberta-v2"],
    "ImageClassification": ["vit", "convnext"],
    "CTC": ["wav2vec2"],
    "timm": ["resnet10t", "test_vit", "test_efficientnet"],
}


class _Stop(iobs.Callback):
    """Interrupt a run at its start."""

    def on_start(self, model: nn.Module, layers: list[str], rounds: int) -> None:
        raise KeyboardInterrupt


def measure(kind: str, network: str, dtype: str) -> Row:
    """Prune one network and check everything that a report promises; the fields of its row."""
    try:
        model, batches = build(kind, network)
    except Exception as error:
        return {"result": "not built", "why": f"{type(error).__name__}: {error}"[:300]}
    model, batches = model.to(getattr(torch, dtype)), [_cast(one, getattr(torch, dtype)) for one in batches]
    try:
        before = _first(run(model, batches[0]))
    except Exception as error:
        return {"result": "dense forward refused", "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        iobs.prune(model, batches, 0.5, "one-shot", solver="magnitude", callbacks=[_Stop()])
    except KeyboardInterrupt:
        pass
    except IOBSError as error:
        return {"result": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    problems = [] if torch.equal(before, _first(run(model, batches[0]))) else ["an interrupted run changes the output"]
    dense = {name: one.detach().clone() for name, one in model.named_parameters()}
    solver = "sparsegpt" if dtype == "float32" and kind != "timm" else "magnitude"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = iobs.prune(model, batches, 0.5, "one-shot", solver=solver, holdout=0.0)
    problems += _problems(model, batches[0], report, dense)
    coverage = report.coverage
    tables = [one for one in coverage.dense if one.kind == "parameter" and TABLES.search(one.name)]
    expected = sum(one.entries for one in (*tables, *(one for one in coverage.dense if one.kind in EXPECTED)))
    share = coverage.pruned / max(1, coverage.weights - expected)
    warned = any(issubclass(one.category, CoverageWarning) for one in caught)
    if share < WARNED and not warned:
        problems.append("no warning of the coverage")
    left = {reason: entries / max(1, coverage.weights) for reason, entries in coverage.by_kind.items()}
    return {
        "result": "failed" if problems else "passed",
        "why": "; ".join(problems),
        "coverage": coverage.share,
        "coverage_without_heads": share,
        "dense": {reason: [entries, coverage.names(reason)] for reason, entries in left.items()},
        "warned": warned,
        "layers": len(report.audit),
        "parameters": coverage.parameters,
    }


def _problems(model: nn.Module, batch: Batch, report: iobs.Report, dense: dict[str, Tensor]) -> list[str]:
    """What a report promises and the model does not keep."""
    found = []
    dead = {layer.name for layer in report.layers if layer.dead_columns}  # their weights are zero beyond the count
    if any(row.zeros < row.asked or (row.zeros > row.asked and row.name not in dead) for row in report.audit):
        found.append("a layer has more or fewer zeros than were asked")
    if {row.name: row.zeros for row in iobs.audit(model)}.items() < {r.name: r.zeros for r in report.audit}.items():
        found.append("iobs.audit counts other zeros than the report")
    zeros = changed = 0
    for name, one in model.named_parameters():
        if one.dtype != dense[name].dtype or one.shape != dense[name].shape:
            found.append(f"{name} has another dtype or shape")
        elif not torch.equal(one.detach(), dense[name]):
            # Block reconstruction also fits biases and scales of norms; the norms of weight norm follow their weight.
            matrix = one.ndim > 1 and not name.endswith(("parametrizations.weight.original0", ".weight_g"))
            zeros, changed = zeros + int((one == 0).sum()) * matrix, changed + one.numel() * matrix
    if zeros != report.zeros:
        found.append(f"{zeros} zeros in the changed parameters, and {report.zeros} in the report")
    if changed > report.weights and report.coverage.share < 1:
        found.append("parameters that belong to no pruned layer changed")
    if not bool(torch.isfinite(_first(run(model, batch)).float()).all()):
        found.append("the output is not finite")
    return found


def _first(output: Any) -> Tensor:
    """The first floating tensor of an output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(one for one in values if isinstance(one, Tensor) and one.is_floating_point())


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()}


def _child(sender: Connection, kind: str, network: str, dtype: str) -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="utf8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    warnings.simplefilter("ignore")
    began = time.process_time()
    try:
        row = measure(kind, network, dtype)
    except BaseException as error:
        row = {"result": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    sender.send({**row, "processor_seconds": time.process_time() - began})


def measured(kind: str, network: str, dtype: str) -> Row:
    """The row of a network, measured in a child process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(sender, kind, network, dtype))
    child.start()
    sender.close()
    late: Row = {"result": "out of time", "why": f"more than {LIMIT} seconds", "processor_seconds": float(LIMIT)}
    try:
        row = receiver.recv() if receiver.poll(WAIT * LIMIT) else late
    except EOFError:
        child.join()
        ended = {"result": "failed", "why": "the process ended without a word", "processor_seconds": 0.0}
        row = late if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else ended
    child.kill()
    child.join()
    return {**stamp(0), "kind": kind, "network": network, "dtype": dtype, **row}


def tables(rows: list[Row]) -> str:
    """The counts of each kind, and the networks below the wanted coverage."""
    ran = [row for row in rows if row["result"] in ("passed", "failed", "refused", "out of time")]
    passed = [row for row in ran if row["result"] == "passed"]
    full = [row for row in passed if row["coverage_without_heads"] >= LEAST]
    lines = [
        "# Networks of every family",
        "",
        "`python benchmarks/breadth.py` (with `--quick`: a network of each kind). Tiny random networks, built from the "
        "configurations of transformers and by the names of timm, each in a process of its own. Each is pruned to half "
        "of its entries, in float32 by SparseGPT and in bfloat16 by magnitude. Passed means: every layer has exactly "
        "the zeros asked, the report, `iobs.audit` and a count of the parameters agree, no other parameter changed, an "
        "interrupted run leaves the output as it was bit for bit, and a coverage under 80 % warns. Coverage is the "
        "pruned share of the weight entries without output heads and embeddings. Embeddings are also parameters in no "
        "product that hold positions, learned tokens or queries. Networks of timm are pruned by magnitude.",
        "",
        f"{len(passed)} of {len(ran)} whose dense forward pass runs passed; {len(full)} of these have a coverage of "
        f"{LEAST:.0%} or more.",
        "",
        "| kind | dtype | tried | not built, or refused dense | passed | coverage >= 95 % | lowest coverage |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
        done = [row for row in own if row["result"] == "passed"]
        built = sum(row["result"] not in ("not built", "dense forward refused") for row in own)
        shares = [row["coverage_without_heads"] for row in done]
        lowest = f"{min(shares):.0%}" if shares else ""
        most = sum(share >= LEAST for share in shares)
        lines.append(
            f"| {kind} | {dtype} | {len(own)} | {len(own) - built} | {len(done)} of {built} | {most} | {lowest} |"
        )
    lines += [
        "",
        "## Below 95 %, float32, with what stays dense",
        "",
        "| network | coverage | left dense |",
        "|---|---|---|",
    ]
    low = [row for row in passed if row["coverage_without_heads"] < LEAST and row["dtype"] == "float32"]
    for row in sorted(low, key=lambda row: row["coverage_without_heads"]):
        kinds = {reason: entry for reason, entry in row["dense"].items() if reason not in EXPECTED}
        why = "; ".join(f"{share:.0%} {REASONS[reason]} ({listed})" for reason, (share, listed) in kinds.items())
        lines.append(f"| {row['network']} ({row['kind']}) | {row['coverage_without_heads']:.0%} | {why} |")
    others = [row for row in ran if row["result"] != "passed"]
    if others:
        lines += ["", "## Not passed", "", "| network | dtype | result | why |", "|---|---|---|---|"]
        lines += [
            f"| {row['network']} ({row['kind']}) | {row['dtype']} | {row['result']} | {row['why']} |".replace("\n", " ")
            for row in others
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    options_of = parser(__doc__, data=False)
    options_of.add_argument("--kinds", nargs="*", choices=[*KINDS, "timm"])
    options_of.add_argument("--names", nargs="*")
    options_of.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    options_of.add_argument("--every", type=int, default=1, help="take only one network of so many")
    options = options_of.parse_args()
    torch.set_num_threads(1)
    model, data = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8)), [torch.randn(40, 24)]
    for solver in ("sparsegpt", "magnitude"):
        iobs.prune(model, data, 0.5, "one-shot", solver=solver)  # loads and compiles once, before the processes fork
    rows, chosen = Rows("breadth", KEYS, options.again), names()
    for kind in options.kinds or chosen:
        some = QUICK.get(kind, []) if options.quick else chosen[kind][:: options.every]
        for network in [one for one in some if not options.names or one in options.names]:
            for dtype in options.dtypes:
                if not rows.has(kind=kind, network=network, dtype=dtype):
                    rows.put(measured(kind, network, dtype))
                    row = rows.all[-1]
                    print("   ", row["result"], row.get("coverage_without_heads", ""), row["why"][:200], flush=True)


if __name__ == "__main__":
    assert len(TIMM) >= 100
    main()
