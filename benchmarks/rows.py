"""Rows of measurements: one JSON object a line, each with commit, seed, processor seconds and machine.

A benchmark appends a row as soon as it is measured, and skips rows that the file already has. So it can be stopped and
continued. `--again` measures every row anew that is not of the present commit; but a race in which a peer took part
that is not installed here stays as it is (`Rows.unmeasured`). RESULTS.md is made from the rows alone.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import iobs

RESULTS = Path(__file__).resolve().parent / "results"
REQUIRED = ("commit", "seed", "processor_seconds", "machine")
UNRECORDED = "not recorded"  # machine of the rows from before machines and processor time were recorded
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of results/NAME.jsonl; none if there is no such file."""
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()] if file.exists() else []


@dataclass
class Rows:
    """The rows of one benchmark.

    Args:
        name: of the file in results/.
        keys: fields that tell one measurement from another.
        again: measure rows of other commits anew.
    """

    name: str
    keys: tuple[str, ...]
    again: bool = False
    all: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.all = read(self.name)

    def has(self, **key: Any) -> bool:
        """Check that there is a row with these keys: with `again` one of the present commit."""
        return any(self._same(row, key) and (not self.again or row["commit"] == commit()) for row in self.all)

    def unmeasured(self, here: Iterable[str], **key: Any) -> list[str]:
        """The solvers of a race that need a row: none with `again` if a solver that has a row cannot run here.

        The times of a race are compared, so they are measured anew in one run, or not at all.

        Args:
            here: names of the solvers that can run.
            **key: the keys of the race's rows, without the solver.
        """
        here = list(here)
        raced = {row["solver"] for row in self.all if all(row.get(name) == value for name, value in key.items())}
        if self.again and (missing := raced.difference(here)):
            shown, names = " ".join(map(str, key.values())), ", ".join(sorted(missing))
            print(f"{shown}: the rows stay, since {names} took part and cannot run here.", flush=True)
            return []
        return [name for name in here if not self.has(**key, solver=name)]

    def put(self, row: Row) -> None:
        """Add a row in place of the older one with the same keys, and write the file."""
        missing = [name for name in (*REQUIRED, *self.keys) if row.get(name) is None]
        assert not missing, f"a row without {', '.join(missing)}"
        with _alone(self.name):
            self.all = [old for old in read(self.name) if not self._same(old, row)] + [row]
            text = "".join(json.dumps(one) + "\n" for one in self.all)
            (RESULTS / f"{self.name}.jsonl").write_text(text, encoding="utf8")
        shown = " ".join(str(row[key]) for key in self.keys)
        score = f": {row['score']:.3f}" if isinstance(row.get("score"), float) else ""
        print(f"{shown}{score}, {row['processor_seconds']:.1f} s", flush=True)

    def _same(self, row: Row, key: Row) -> bool:
        return all(row.get(name) == key[name] for name in self.keys)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process at a time change the rows of a benchmark."""
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class Work:
    """The work of one measurement.

    Attributes:
        wall_seconds: from beginning to end.
        processor_seconds: of all threads of this process.
        steps: number of gradient steps, trials included.
        forward: layer multiply-adds of forward passes.
        backward: layer multiply-adds of forward passes that a gradient passed back through.
    """

    wall_seconds: float = 0.0
    processor_seconds: float = 0.0
    steps: int = 0
    forward: float = 0.0
    backward: float = 0.0

    def fields(self, per_sample: float = 0.0) -> Row:
        """The fields of a row; passes are in samples of the whole network, `per_sample` multiply-adds each."""
        row: Row = {"seconds": self.wall_seconds, "processor_seconds": self.processor_seconds}
        if per_sample:
            passes = {"forward": round(self.forward / per_sample), "backward": round(self.backward / per_sample)}
            row |= {"steps": self.steps, **passes}
        return row


@contextmanager
def measured() -> Iterator[Work]:
    """Measure the work of a block of code; the result is complete when the block has ended."""
    work = Work()

    def passed(module: nn.Module, args: object, output: object) -> None:
        weight = getattr(module, "weight", None)
        if not isinstance(output, Tensor) or not isinstance(weight, Tensor) or weight.ndim < 2:
            return
        if isinstance(module, nn.Embedding) or output.is_meta:  # a meta tensor: nothing was computed
            return
        products = output.numel() // weight.shape[0] * weight.numel()
        work.forward += products
        if output.requires_grad:
            output.register_hook(lambda gradient: returned(products))

    def returned(products: float) -> None:
        work.backward += products

    def stepped(*_: object) -> None:
        work.steps += 1

    hooks = [
        register_module_forward_hook(passed),
        register_optimizer_step_post_hook(stepped),
    ]
    wall, processor = time.perf_counter(), time.process_time()
    try:
        yield work
    finally:
        work.wall_seconds, work.processor_seconds = time.perf_counter() - wall, time.process_time() - processor
        for hook in hooks:
            hook.remove()


def warm_up(*recipes: iobs.Recipe) -> None:
    """Compile the kernels of these recipes before anything is timed."""
    data = [(torch.randn(64, 40), torch.randint(0, 8, (64,)))]
    for recipe in recipes:
        for width in (24, 300):
            layers = nn.Linear(40, width), nn.ReLU(), nn.Linear(width, 8)
            iobs.prune(nn.Sequential(*layers), data, 0.5, recipe)


def stamp(seed: int, device: str = "cpu") -> Row:
    """Commit, seed and machine of a row; the GPU comes first where `device` is one."""
    gpu = "" if device == "cpu" else f"{torch.cuda.get_device_name(device)}, "
    return {"seed": seed, "commit": commit(), "machine": gpu + machine()}


@cache
def commit() -> str:
    """The last commit that changed the library or the running script, with "-dirty" if either differs from it."""
    code = ["src", str(Path(sys.argv[0]).resolve())]
    last = _git("log", "-1", "--format=%h", "--", *code)
    return f"{last}-dirty" if _git("status", "--porcelain", "--", *code) else last


def _git(*arguments: str) -> str:
    asked = ["git", *arguments]
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(asked, cwd=root, capture_output=True, text=True, check=False).stdout.strip()


@cache
def machine() -> str:
    """Processor, threads and torch version."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf8").splitlines() if file.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    name = names[0] if names else platform.processor()
    return f"{name}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def level_name(text: str) -> str:
    """One name for each level: "50%" and ".5" are "0.5"; N:M stays."""
    if ":" in text:
        return text
    return str(float(text.removesuffix("%")) / (100 if text.endswith("%") else 1))


def parser(description: str | None, data: bool = True) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        found.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of zoo.py")
    found.add_argument("--quick", action="store_true", help="the part that `make benchmarks-quick` measures")
    found.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    found.add_argument("--seeds", nargs="*", type=int)
    return found


def is_model(folder: Path, rows: str) -> bool:
    """Check that there is a model directory; if there is none, say so.

    Args:
        folder: of the model.
        rows: what is not measured without it, for the message.
    """
    if not (folder / "config.json").exists():
        print(f"No rows of {rows}: {folder} is no model directory; real_models.py makes it.")
        return False
    return True


def importable(rows: str, *packages: str) -> bool:
    """Import packages that some rows need; if one of them is missing or broken, say so.

    Args:
        rows: what is not measured without them, for the message.
        packages: names to import.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # a package of another version of torch fails in many ways
            print(f"No rows of {rows}: {package} cannot be imported ({type(error).__name__}: {error}).")
            return False
    return True


def require_data(folder: Path) -> Any:
    """The loaders of the networks and data that are not part of this repository.

    Raises:
        SystemExit: there is no zoo.py.
    """
    if not (folder / "zoo.py").is_file():
        raise SystemExit(f"{folder}/zoo.py is not there: give --data FOLDER (CONTRIBUTING.md, Benchmarks and data).")
    spec = importlib.util.spec_from_file_location("zoo", folder / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # torch.export looks for the module of a network's class
    spec.loader.exec_module(module)
    return module
