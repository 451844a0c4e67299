"""Cost against depth and samples: processor time of each recipe, pattern and store for models of 4 to 32 blocks.

    python benchmarks/depth.py [--blocks 4 8 16 32] [--draw]

Llamas of random weights that differ in their number of blocks alone, the same text for each. A cost that is linear in
depth has a ratio of at most 2 from one depth to the next. Then twice and four times the text for 8 blocks. `--draw`
writes docs/images/depth.png from the rows.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from rows import Row, Rows, read, stamp

import iobs
from iobs.core.patterns import Pattern
from iobs.models.streamed import StreamedStore
from iobs.pruning.recipe import BlockFit

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "depth.png"
DEPTHS = (4, 8, 16, 32)
RUNS = 2  # the faster one counts: other processes of the machine only make a run slower
OF_SAMPLES = 8  # blocks of the models with more text
WIDTH, VOCABULARY, WINDOWS, LENGTH = 128, 512, 24, 64
# Few steps: what grows is their price, and `best` takes a number of them that does not depend on the depth. Rates are
# given, since trials of a rate end by the losses, after one more or less.
BEST = iobs.Recipe.preset("best").but(
    blocks=BlockFit(masks=2, steps=20, between=5, network_steps=20, lr=3e-4, network_lr=1e-4)
)
CASES: dict[str, tuple[iobs.Recipe | str, Pattern | str, bool]] = {  # name -> recipe, pattern, by blocks
    "one-shot, 50 %": ("one-shot", "50%", False),
    "fast, 50 %": ("fast", "50%", False),
    "best, 50 %": (BEST, "50%", False),
    "fast, 2:4": ("fast", "2:4", False),
    "fast, 50 % and 4 bits": ("fast", iobs.Unstructured(0.5) & iobs.Grid(4), False),
    "fast, 3 bits a weight": ("fast", iobs.Rate(3.0), False),
    "fast, structured 30 %": ("fast", iobs.Structured(0.3), False),
    "one-shot, by blocks": ("one-shot", "50%", True),
    "fast, by blocks": ("fast", "50%", True),
}


def model_of(blocks: int) -> torch.nn.Module:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def text(windows: int) -> list[dict[str, torch.Tensor]]:
    """Windows of random tokens, in batches of eight."""
    tokens = torch.randint(VOCABULARY, (windows, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part} for part in tokens.split(8)]


def measure(case: str, blocks: int, windows: int) -> Row:
    """Seconds of one run."""
    recipe, pattern, streamed = CASES[case]
    model = model_of(blocks)
    with ExitStack() as stack:
        if streamed:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model.save_pretrained(f"{folder}/model")
            store = stack.enter_context(StreamedStore.open(f"{folder}/model", f"{folder}/out"))
        wall, processor = time.perf_counter(), time.process_time()
        iobs.prune(store if streamed else model, text(windows), pattern, recipe)
        return {
            "case": case,
            "blocks": blocks,
            "windows": windows,
            "wall_seconds": time.perf_counter() - wall,
            "processor_seconds": time.process_time() - processor,
        }


def ratios(rows: list[Row], size: str) -> Iterator[tuple[str, list[float], list[float]]]:
    """Each case with its seconds by a size, "blocks" or "windows", and the ratio of each size to the one before it."""
    for case in CASES:
        seconds = {row[size]: row["processor_seconds"] for row in rows if row["case"] == case}
        times = [seconds[value] for value in sorted(seconds)]
        if times:
            yield case, times, [after / before for before, after in itertools.pairwise(times)]


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md: a table of depths, and one of samples."""
    depths, samples = (
        [row for row in rows if row["windows"] == WINDOWS],
        [row for row in rows if row["blocks"] == OF_SAMPLES],
    )
    lines = [
        "# Cost against depth and samples",
        "",
        f"Made by `python benchmarks/depth.py`. Llamas of random weights, width {WIDTH}, windows of {LENGTH} tokens; "
        "processor seconds of the fastest run, and the largest ratio from one size to twice the size.",
        "",
        *_table(depths, "blocks", f"recipe and pattern, {WINDOWS} windows; blocks:"),
        "",
        *_table(samples, "windows", f"recipe and pattern, {OF_SAMPLES} blocks; windows:"),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row], size: str, title: str) -> Iterator[str]:
    """The lines of a table of the cases that were measured at several sizes."""
    sizes = sorted({row[size] for row in rows})
    yield f"| {title} | {' | '.join(map(str, sizes))} | largest ratio |"
    yield "|---|" + "---|" * (len(sizes) + 1)
    for case, times, steps in ratios(rows, size):
        if steps:
            cells = [f"{seconds:.1f}" for seconds in times] + [""] * (len(sizes) - len(times))
            yield f"| {case} | {' | '.join(cells)} | {max(steps):.2f} |"


def draw(rows: list[Row]) -> Path:
    """The picture: seconds against blocks, both logarithmic, with a line of slope one."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["windows"] == WINDOWS]
    depths = sorted({row["blocks"] for row in rows})
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    panel = figure.subplots()
    for case, times, _ in ratios(rows, "blocks"):
        panel.plot(depths[: len(times)], times, marker="o", markersize=4, label=case)
    least = min(row["processor_seconds"] for row in rows)
    panel.plot(depths, [0.7 * least * depth / depths[0] for depth in depths], "--", color="gray", label="linear")
    panel.set(xscale="log", yscale="log", xlabel="blocks", ylabel="processor seconds", xticks=depths)
    panel.set_xticklabels([str(depth) for depth in depths])
    panel.minorticks_off()
    panel.grid(linewidth=0.4)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(IMAGE, dpi=130, metadata={"Software": None})
    return IMAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="*", default=DEPTHS)
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        print(draw(read("depth")))
        return
    rows = Rows("depth", ("case", "blocks", "windows"), again=options.again)
    measure(options.cases[0], 2, WINDOWS)  # compiles kernels
    sizes = [(blocks, WINDOWS) for blocks in options.blocks] + [(OF_SAMPLES, 2 * WINDOWS), (OF_SAMPLES, 4 * WINDOWS)]
    for case in options.cases:
        for blocks, windows in sizes:
            if not rows.has(case=case, blocks=blocks, windows=windows):
                runs = [measure(case, blocks, windows) for _ in range(RUNS)]
                rows.put(min(runs, key=lambda row: row["processor_seconds"]) | {"runs": RUNS} | stamp(0))


if __name__ == "__main__":
    main()
