"""Block reconstruction and its parts: a row for every ablation, on three real networks.

    python benchmarks/blocks.py --data FOLDER [--minilm FOLDER] [--networks llama encoder vit] [--rows residual ...]

Networks: a Llama of 260 thousand parameters (perplexity / dense on all of validation.txt), all-MiniLM-L6-v2 (mean
cosine to the dense embeddings of unseen C4 texts), a ViT (accuracy on the test files of CIFAR-10). A seed draws the
calibration samples. Scores of the test files are only reported: the run chooses its rates on held-out calibration
samples. "Passes" counts the projection of the queries of every block, in passes of the calibration set through the
network; a call inside a gradient step counts three times.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows, commit, machine, require_data
from torch import Tensor, nn

import iobs
from iobs import models
from iobs.models.vision_shim import ensure_torchvision
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.samples import batches

SHOT = Recipe()
RESIDUAL = SHOT.but(target="residual")
ALLOCATED = RESIDUAL.but(allocation="auto", curvature="fisher")
ROWS: dict[str, Recipe] = {
    "own": SHOT,
    "own, bias": SHOT.but(bias="refit"),
    "dense": SHOT.but(target="dense"),
    "dense, bias": SHOT.but(target="dense", bias="refit"),
    "residual, no bias": SHOT.but(target="residual", bias="keep"),
    "residual": SHOT.but(target="residual"),
    "window 1, one mask": RESIDUAL.but(blocks=BlockFit(window=1, masks=1, last="mse", steps=100)),
    "window 1, moving masks": RESIDUAL.but(blocks=BlockFit(window=1, last="mse", steps=100, between=25)),
    "window 2, one mask": RESIDUAL.but(blocks=BlockFit(masks=1, last="mse", steps=100)),
    "window 2, one mask, KL": RESIDUAL.but(blocks=BlockFit(masks=1, steps=100)),
    "window 2, moving masks, KL": RESIDUAL.but(blocks=BlockFit(steps=100, between=25)),
    "the same, 300 steps": RESIDUAL.but(blocks=BlockFit()),
    "blocks": ALLOCATED.but(blocks=BlockFit()),
    "two blocks": ALLOCATED.but(blocks=BlockFit(masks=4)),
    "two blocks, 600 steps": ALLOCATED.but(blocks=BlockFit(masks=4, steps=600)),
    "two blocks, network steps": ALLOCATED.but(blocks=BlockFit(masks=4, network_steps=600)),
    "two blocks, 1200 network steps": ALLOCATED.but(blocks=BlockFit(masks=4, network_steps=1200)),
    "two blocks, 600 steps, 1200 network steps": ALLOCATED.but(blocks=BlockFit(masks=4, steps=600, network_steps=1200)),
    "one block, network steps": ALLOCATED.but(blocks=BlockFit(window=1, last="mse", masks=4, network_steps=600)),
    "one block, 1200 network steps": ALLOCATED.but(blocks=BlockFit(window=1, last="mse", masks=4, network_steps=1200)),
    "two blocks, 1200 network steps, sampled text": ALLOCATED.but(
        blocks=BlockFit(masks=4, network_steps=1200, sampled=2)
    ),
    "one-shot": Recipe.preset("one-shot"),
    "fast": Recipe.preset("fast"),
    "best": Recipe.preset("best"),
}
LEVELS = {
    "llama": ("50%", "2:4", "70%"),
    "llama-512": ("50%", "2:4", "70%"),
    "encoder": ("50%", "70%"),
    "encoder-128": ("50%", "70%"),
    "vit": ("70%", "90%"),
}


@dataclass(frozen=True)
class Case:
    """A network to prune: the module, its calibration batches, its score, and its query layers, which count passes."""

    module: nn.Module
    batches: list[Any]
    score: Callable[[nn.Module], float]
    queries: str


def llama(data: Path, zoo: Any, _: Path, seed: int = 0) -> Case:
    """512 windows of 256 tokens of calibration stories; perplexity / dense on windows of 512 tokens."""
    return stories(data, zoo, 256, seed)


def llama_long(data: Path, zoo: Any, _: Path, seed: int = 0) -> Case:
    """256 windows of 512 tokens of calibration stories, the network's full context; otherwise as "llama"."""
    return stories(data, zoo, 512, seed)


def stories(data: Path, zoo: Any, length: int, seed: int) -> Case:
    """The Llama with windows of `length` tokens, 131,072 tokens in all."""
    loaded = models.load(str(data / "llama_stories260K"), dtype=torch.float32)

    def windows(texts: list[str], size: int) -> Tensor:
        ids = [one for text in texts for one in loaded.tokenizer(text)["input_ids"]]
        return torch.tensor(ids[: len(ids) // size * size]).view(-1, size)

    texts = zoo.stories("calibration")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = windows([texts[place] for place in order[:1100]], length)
    picked = cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[: 2**17 // length]]
    validation = windows(zoo.stories("validation"), 512)

    @torch.no_grad()
    def loss(module: nn.Module) -> float:
        total = 0.0
        for part in validation.split(16):
            scores = module(input_ids=part).logits[:, :-1]
            total += float(nn.functional.cross_entropy(scores.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        return total / validation[:, 1:].numel()

    dense = loss(loaded.module)
    ids = [{"input_ids": part} for part in picked.split(16)]
    return Case(loaded.module, ids, lambda module: math.exp(loss(module) - dense), "q_proj")


def encoder(data: Path, zoo: Any, folder: Path, seed: int = 0) -> Case:
    """512 pieces of 64 tokens of C4; mean cosine to the dense embeddings of 300 other texts."""
    return documents(data, folder, 64, 300, seed)


def encoder_long(data: Path, zoo: Any, folder: Path, seed: int = 0) -> Case:
    """512 pieces of 128 tokens of C4; mean cosine to the dense embeddings of 700 other texts."""
    return documents(data, folder, 128, 700, seed)


def documents(data: Path, folder: Path, length: int, count: int, seed: int) -> Case:
    """The encoder with pieces of `length` tokens, judged on the next `count` texts."""
    ensure_torchvision()
    from transformers import AutoModel, AutoTokenizer

    module, tokenizer = AutoModel.from_pretrained(folder).float().eval(), AutoTokenizer.from_pretrained(folder)
    with gzip.open(next((data / "c4").glob("*.gz")), "rt", encoding="utf8") as file:
        texts = [json.loads(line)["text"] for line in file]
    if seed:
        texts = [texts[place] for place in torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))]
    ids: list[list[int]] = []
    used = 0
    while len(ids) < 512:
        row = tokenizer(texts[used], truncation=True, max_length=length)["input_ids"]
        ids += [row] if len(row) == length else []
        used += 1
    given = torch.tensor(ids)
    fed = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in given.split(16)]
    others = [text[:400] for text in texts[used : used + count]]
    judged = [tokenizer(others[start : start + 20], padding=True, return_tensors="pt") for start in range(0, count, 20)]

    @torch.no_grad()
    def embeddings(network: nn.Module) -> Tensor:
        found = []
        for part in judged:
            mask = part["attention_mask"][..., None].float()
            found.append((network(**part).last_hidden_state * mask).sum(1) / mask.sum(1))
        return nn.functional.normalize(torch.cat(found), dim=1)

    dense = embeddings(module)
    return Case(module, fed, lambda network: float((embeddings(network) * dense).sum(1).mean()), "query")


def vit(data: Path, zoo: Any, _: Path, seed: int = 0) -> Case:
    """1,000 images; accuracy on 5,000 others, in percent."""
    images, _labels = zoo.cifar10("train10k", "vit")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
    test = zoo.cifar10("test5000", "vit")
    return Case(zoo.vit_cifar(), [*images[order].split(50)], lambda network: zoo.accuracy(network, *test), "qkv")


CASES = {"llama": llama, "llama-512": llama_long, "encoder": encoder, "encoder-128": encoder_long, "vit": vit}


def counted(module: nn.Module, suffix: str, phase: Callable[[], str] = str) -> Counter[str]:
    """Count positions through all modules with a suffix by phase, three times inside gradient steps.

    A run may join windows of text, so that samples are no measure of its work. An output without data cost nothing.
    """
    total: Counter[str] = Counter()

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not first.is_meta:
            total[phase()] += first[..., 0].numel() * (3 if first.requires_grad else 1)

    for name, one in module.named_modules():
        if name.endswith(suffix):
            one.register_forward_hook(hook, with_kwargs=True)
    return total


def measure(case: Case, name: str, row: str, level: str, seed: int) -> dict[str, Any]:
    """Prune a copy of a network by one recipe, and score it."""
    module = copy.deepcopy(case.module)
    total = counted(module, case.queries)
    with torch.no_grad():
        for batch in case.batches:
            batches.forward(module, batch)
    one_pass = total.total()
    total.clear()
    began = time.process_time()
    report = iobs.prune(module, case.batches, level, ROWS[row], seed=seed)
    seconds = time.process_time() - began
    passes = total.total() / one_pass
    return {
        "network": name,
        "row": row,
        "level": level,
        "seed": seed,
        "score": round(case.score(module), 4),
        "zeros": round(report.zeros / report.weights, 4),
        "passes": round(passes, 2),
        "processor_seconds": round(seconds, 1),
        "commit": commit(),
        "machine": machine(),
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md: one table per network."""
    lines = [
        "# Residual targets and block reconstruction",
        "",
        "Made by `python benchmarks/blocks.py --data FOLDER [--seed 1]`, one thread. Cells with ± have several draws. "
        "Passes are forward passes of the calibration data (a gradient step counts as three); passes of the Llama and "
        "of the encoders up to commit 6068592 are too high: they count attention that a shortcut left out. Cells "
        "without a figure are not measured yet.",
        "",
    ]
    for name in CASES:
        own = [row for row in rows if row["network"] == name]
        if not own:
            continue
        levels = LEVELS[name]
        lines += [f"### {name}: {(CASES[name].__doc__ or '').strip()}", ""]
        lines += ["| | " + " | ".join(levels) + " | passes | processor seconds |", "|---" * (len(levels) + 3) + "|"]
        for row in dict.fromkeys(one["row"] for one in own):
            found = [one for one in own if one["row"] == row]
            last = found[-1]
            cells = [cell([one["score"] for one in found if one["level"] == level]) for level in levels]
            lines.append(f"| {row} | " + " | ".join(cells) + f" | {last['passes']} | {last['processor_seconds']} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def cell(scores: list[float]) -> str:
    """A score, or the mean of several draws with their standard deviation."""
    if not scores:
        return ""
    spread = f" ± {statistics.stdev(scores):.2g} ({len(scores)})" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.4g}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minilm", type=Path, default=Path())
    parser.add_argument("--networks", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--levels", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    given = parser.parse_args()
    torch.set_num_threads(1)
    zoo = require_data(given.data)
    rows = Rows("blocks", ("network", "row", "level", "seed"), given.again)
    for name in given.networks:
        case = CASES[name](given.data, zoo, given.minilm, given.seed)
        for row in given.rows:
            for level in given.levels or LEVELS[name]:
                if not rows.has(network=name, row=row, level=level, seed=given.seed):
                    rows.put(measure(case, name, row, level, given.seed))


if __name__ == "__main__":
    main()
