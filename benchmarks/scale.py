"""A random Llama directory pruned block by block: peak anonymous memory against the prediction, seconds a block.

    python benchmarks/scale.py [--layers 22] [--samples 16] [--length 512] [--folder DIR]

22 layers is the model of 1.1 billion parameters (2.2 GB in bfloat16). The directory is made a tensor at a time, so
that making it needs no memory either.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

import iobs
from iobs.models.shards import Entry, ShardWriter
from iobs.models.streaming import prune_directory
from iobs.prune.memory import MemoryWatch
from iobs.prune.plan import Plan
from iobs.prune.progress import Quiet

WIDTH, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 2048, 5632, 32, 4, 32000


def entries(layers: int) -> dict[str, Entry]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    keys = WIDTH // HEADS * KEY_HEADS
    for index in range(layers):
        block = f"model.layers.{index}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (WIDTH, WIDTH),
            f"{block}self_attn.k_proj.weight": (keys, WIDTH),
            f"{block}self_attn.v_proj.weight": (keys, WIDTH),
            f"{block}self_attn.o_proj.weight": (WIDTH, WIDTH),
            f"{block}mlp.gate_proj.weight": (HIDDEN, WIDTH),
            f"{block}mlp.up_proj.weight": (HIDDEN, WIDTH),
            f"{block}mlp.down_proj.weight": (WIDTH, HIDDEN),
            f"{block}input_layernorm.weight": (WIDTH,),
            f"{block}post_attention_layernorm.weight": (WIDTH,),
        }
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    return {name: Entry(torch.bfloat16, shape) for name, shape in shapes.items()}


def make(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    described = entries(layers)
    writer = ShardWriter(folder / "model.safetensors", described, {"format": "pt"})
    for name, entry in described.items():
        one = torch.ones(entry.shape) if len(entry.shape) == 1 else torch.randn(entry.shape, generator=generator) * 0.02
        writer.put(name, one.to(torch.bfloat16))
    writer.close()


class Clock(Quiet):
    def __init__(self) -> None:
        self.began = time.perf_counter()

    def layer(self, round_index: int, record: object) -> None:
        peak = MemoryWatch().peak / 2**20
        elapsed = time.perf_counter() - self.began
        print(f"{elapsed:8.1f} s  {record.name}: solve {record.seconds:.1f} s, now {peak:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--solver", default="admm")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.folder or Path(tempfile.mkdtemp())
    if not (folder / "model").exists():
        make(folder / "model", options.layers)
    shutil.rmtree(folder / "pruned", ignore_errors=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (options.samples, options.length), generator=generator)
    plans: list[Plan] = []

    def announce(plan: Plan) -> None:
        plans.append(plan)
        print(f"predicted: peak {plan.peak_bytes / 2**20:.0f} MB, {plan.seconds / 60:.1f} min; the model has", end=" ")
        print(f"{plan.model_bytes / 2**20:.0f} MB", flush=True)

    report = prune_directory(
        folder / "model",
        folder / "pruned",
        [{"input_ids": row[None]} for row in tokens],
        iobs.Unstructured(0.5),
        solver=options.solver,
        budget="fast",
        holdout=0.0,
        progress=Clock(),
        announce=announce,
    )
    predicted, peak = plans[0].peak_bytes / 2**20, report.peak_memory_bytes / 2**20
    print(
        f"{options.layers} layers, {report.sparsity:.4f} zeros, {report.seconds / 60:.1f} min, peak {peak:.0f} MB",
        end="",
    )
    print(f" (predicted {predicted:.0f} MB, {100 * (predicted / peak - 1):+.0f} %)")


if __name__ == "__main__":
    main()
