"""Print the tables of docs/howto/any-size.md: predicted memory and time of two large networks on GPUs.

    python benchmarks/any_size.py

Nothing is measured, and no weights are needed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from iobs.models.skeleton import shapes_of
from iobs.pruning.cost.machines import GPUS, Machine, Need, Network, need
from iobs.pruning.recipe import Recipe

SAMPLES, LENGTH, BATCH, HOLDOUT = 128, 2048, 1, 0.1
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
SIZES = {
    "8 billion": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70 billion": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


@cache
def network(size: str) -> Network:
    """The shapes of a Llama 3."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**LLAMA, **SIZES[size]}))
        return shapes_of(folder)


def recipes() -> dict[str, tuple[Recipe, float]]:
    """Recipes by their names in the tables, with the share of held-out samples."""
    fast = Recipe.preset("fast")
    assert fast.blocks is not None
    return {
        "`one-shot`": (Recipe.preset("one-shot"), 0.0),
        "`fast`, one block": (fast.but(blocks=replace(fast.blocks, window=1)), HOLDOUT),
        "`fast`": (fast, HOLDOUT),
        "`best`": (Recipe.preset("best"), HOLDOUT),
    }


def needed(network: Network, name: str, machine: Machine, holdout: float | None = None) -> Need:
    """Memory and time of a recipe on a machine."""
    recipe, usual = recipes()[name]
    return need(network, recipe, SAMPLES, LENGTH, BATCH, machine, usual if holdout is None else holdout)


def memory_and_time(network: Network, machines: list[Machine]) -> Iterator[str]:
    """A row for each recipe: the peak of a GPU, and hours on each machine."""
    titles = [f"{'' if one.count == 1 else f'{one.count} x '}{_title(one)}" for one in machines]
    yield f"| recipe | peak memory of a GPU | {' | '.join(titles)} |"
    yield "|---|---|" + "---|" * len(machines)
    for name in recipes():
        found = [needed(network, name, one) for one in machines]
        peak = max(found[0].peak_bytes.values())
        yield f"| {name} | {peak / 1e9:.1f} GB | {' | '.join(_hours(one) for one in found)} |"


def by_phase(networks: dict[str, Network]) -> Iterator[str]:
    """A row for each phase: memory and minutes on one H100."""
    columns = {
        f"{size}, {name}": needed(one, name, GPUS[2]) for size, one in networks.items() for name in ("`fast`", "`best`")
    }
    yield f"| phase | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)
    names = dict.fromkeys(name for one in columns.values() for name in (*one.peak_bytes, *one.phases))
    for name in names:
        yield f"| {name} | {' | '.join(_phase(one, name) for one in columns.values())} |"


def further(networks: dict[str, Network]) -> Iterator[str]:
    """The figures of the text."""
    for size, one in networks.items():
        without = max(needed(one, "`fast`, one block", GPUS[2], 0.0).peak_bytes.values())
        streams = needed(one, "`best`", GPUS[2]).streams_bytes
        yield f"{size}, `fast` with one block without held-out samples: {without / 1e9:.1f} GB"
        yield f"{size}, hidden states and fitted parameters of `best` on every rank: {streams / 1e9:.0f} GB"


def _title(machine: Machine) -> str:
    return machine.name if machine.count == 1 else machine.name.partition(" (")[0]


def _hours(found: Need) -> str:
    hours = sum(found.phases.values()) / 3600
    return f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 1 else f"{hours:.2f} h"


def _phase(found: Need, name: str) -> str:
    minutes = found.phases.get(name)
    parts = [f"{found.peak_bytes[name] / 1e9:.1f} GB"] if name in found.peak_bytes else []
    parts += [] if minutes is None else [f"{minutes / 60:.0f} min" if minutes >= 600 else f"{minutes / 60:.1f} min"]
    return ", ".join(parts)


def shapes() -> dict[str, Network]:
    """The networks of the tables."""
    return {size: network(size) for size in SIZES}


def tables() -> Iterator[str]:
    """The tables of the page, in order."""
    found = shapes()
    machines = [replace(gpu, count=count) for count in (1, 8) for gpu in GPUS]
    yield from memory_and_time(found["8 billion"], machines)
    yield ""
    yield from memory_and_time(found["70 billion"], [one for one in machines if one.memory > 5e10])
    yield ""
    yield from by_phase(found)


if __name__ == "__main__":
    print("\n".join(tables()))
    print("\n".join(further(shapes())))
