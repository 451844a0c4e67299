"""Text of a Llama on a CPU: ours beside llama.cpp, OpenVINO and ONNX Runtime.

    pip install 'iobs[export]' llama-cpp-python nncf
    python benchmarks/peers.py --data FOLDER [--parts real random] [--threads 1] [--recipes fast best]

Part "real": a pretrained Llama of 260 thousand parameters; perplexity over that of the dense network on unseen stories,
token by token through the form that is timed, the loss of pruning included. "fast" has 128 windows of 256 tokens,
"best" 512. Part "random": a Llama of 522 million
parameters, weights random, because speed does not depend on them; its accuracy is the change of the logits from float32
with the same weights, without the loss of pruning. Peers hold the dense network. Each form is timed in turns with ours
in int8 (random: with 50 % zeros): decoding after 8 tokens, and a prompt of 128 tokens. Medians; processor time of the
process with one thread, elapsed time with more. Each runtime keeps its defaults, also to round inputs and use AMX.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import running
import torch
from peers_forms import Form, Ours, Torch, peers
from rows import Row, Rows, parser, require_data, stamp

import iobs
from iobs import models

KEYS = ("part", "name", "sparsity", "threads", "recipe")
BATCHES = {"fast": 8, "best": 32}  # of 16 windows of calibration stories, for each recipe
BASE = {"real": ("ours int8", 0.0), "random": ("ours int8", 0.5)}
OURS = {
    "real": [("int8", 0.0), ("bf16", 0.0), ("int4", 0.0)]
    + [(one, zeros) for zeros in (0.2, 0.3, 0.5) for one in ("bf16", "int8", "int4")],
    "random": [("int8", 0.5), ("int8", 0.7), ("int8", 0.9), ("int8", 0.0), ("bf16", 0.5), ("int4", 0.5)],
}
PROMPT, LONG_PROMPT = 8, 128
TOKENS = {"real": 64, "random": 16}
REPETITIONS = {"real": 7, "random": 3}
WINDOWS, WINDOW = 24, 256
SMALL = "stories260K"


class Network:
    """The network of a part, its pruned forms, and the measure of accuracy."""

    def __init__(self, part: str, data: Path, recipe: str) -> None:
        self.part, self.data, self.zoo, self.recipe = part, data, require_data(data), recipe
        self.tokenizer = models.load(str(data / f"llama_{SMALL}")).tokenizer
        if part == "real":
            ids = [one for text in self.zoo.stories("validation") for one in self.tokenizer(text)["input_ids"]]
            self.windows = torch.tensor(ids[: WINDOWS * WINDOW]).view(WINDOWS, WINDOW)

    def recipe_of(self, sparsity: float) -> str:
        """The recipe that pruned the network with this share of zeros."""
        return "-" if not sparsity else "magnitude" if self.part == "random" else self.recipe

    @lru_cache(maxsize=1)  # noqa: B019 (one object a run)
    def at(self, sparsity: float) -> models.LoadedModel:
        """The network with this share of zeros, pruned by the recipe (random weights: by magnitude)."""
        if self.part == "random":
            module = running.network(sparsity)

            def write(model: models.LoadedModel, folder: Path) -> None:
                model.module.save_pretrained(folder)  # type: ignore[operator]

            return models.LoadedModel(module, self.tokenizer, "random", "causal-lm", None, write)
        model = models.load(str(self.data / f"llama_{SMALL}"), dtype=torch.float32)
        if sparsity:
            batches = blocks.llama(self.data, self.zoo, self.data).batches[: BATCHES[self.recipe]]
            iobs.prune(model.module, batches, sparsity, self.recipe, seed=0)  # type: ignore[arg-type]
        return model

    @cache  # noqa: B019
    def wanted(self, sparsity: float) -> Any:
        """Real: the loss of the dense network. Random: logits of the network in float32 after a prompt and 4 tokens."""
        model = self.at(sparsity).module
        if self.part == "real":
            with torch.no_grad():
                scores = torch.cat([model(input_ids=one[None]).logits for one in self.windows])
            return float(torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), self.windows[:, 1:].flatten()))
        return self._texts(Torch(model))

    def _texts(self, form: Form) -> np.ndarray:
        form.reset()
        found = [np.array(form.feed(range(1, PROMPT + 1)))]
        return np.stack(found + [np.array(form.feed([token])) for token in range(20, 24)])

    def accuracy(self, form: Form, sparsity: float) -> float:
        """Real: perplexity / that of the dense network. Random: relative change of the logits."""
        if self.part == "random":
            wanted = self.wanted(sparsity)
            return float(np.linalg.norm(self._texts(form) - wanted) / np.linalg.norm(wanted))
        total = 0.0
        for window in self.windows:
            form.reset()
            for token, following in zip(window[:-1].tolist(), window[1:].tolist(), strict=True):
                scores = np.array(form.feed([token]), np.float64)
                largest = scores.max()
                total += largest + math.log(np.exp(scores - largest).sum()) - scores[following]
        return math.exp(total / (WINDOWS * (WINDOW - 1)) - self.wanted(0.0))


def decode(form: Form, tokens: int) -> Callable[[Callable[[], float]], float]:
    """Seconds of new tokens after a prompt."""

    def run(clock: Callable[[], float]) -> float:
        form.reset()
        token = int(form.feed(range(1, PROMPT + 1)).argmax())
        start = clock()
        for _ in range(tokens):
            token = int(form.feed([token]).argmax())
        return clock() - start

    return run


def prompt(form: Form) -> Callable[[Callable[[], float]], float]:
    """Seconds of a long prompt."""
    tokens = [3 + 37 * place % 500 for place in range(LONG_PROMPT)]

    def run(clock: Callable[[], float]) -> float:
        form.reset()
        start = clock()
        form.feed(tokens)
        return clock() - start

    return run


def race(part: str, form: Form, base: Form, threads: int) -> Row:
    """Speeds of a form, and ratios to the base in turns with it."""
    clock = time.process_time if threads == 1 else time.perf_counter
    row: Row = {}
    for name, task, count in (
        ("decode", lambda one: decode(one, TOKENS[part]), TOKENS[part]),
        ("prompt", prompt, LONG_PROMPT),
    ):
        tasks = [task(base), task(form)]
        for one in tasks:
            one(clock)
        found = [[one(clock) for one in tasks] for _ in range(REPETITIONS[part])]
        first, second = (statistics.median(column) for column in zip(*found, strict=True))
        row |= {f"{name}_per_second": count / second, f"{name}_ratio": first / second}
    return row


def ours(network: Network, precision: str, sparsity: float) -> Form:
    """Our form; layers too small for `accelerate` are stored in the same precision."""
    form = {"bf16": "bitmask-bf16", "int8": "bitmask-int8", "int4": "bitmask-int4"}[precision]
    dense = {"bf16": "bf16", "int8": "int8"}.get(precision, form)
    small = form if sparsity and network.part == "real" else "int8" if network.part == "random" else dense
    return Ours(network.at(sparsity), precision, small)


def forms(network: Network, rows: Rows, threads: int) -> Iterator[tuple[str, float, Form]]:
    """The forms without a row, one at a time."""
    part = network.part

    def missing(name: str, sparsity: float = 0.0) -> bool:
        key = {"part": part, "name": name, "sparsity": sparsity, "recipe": network.recipe_of(sparsity)}
        return not rows.has(**key, threads=threads)

    for precision, sparsity in OURS[part]:
        if missing(f"ours {precision}", sparsity) and (threads == 1 or precision == "int8"):
            yield f"ours {precision}", sparsity, ours(network, precision, sparsity)
    with peers(network.at(0.0), threads, missing) as made:
        for name, form in made:
            yield name, 0.0, form
    for name, dtype in (("torch float32", torch.float32), ("torch bfloat16", torch.bfloat16)):
        if missing(name):
            yield name, 0.0, Torch(network.at(0.0).module.to(dtype))


def measure(part: str, data: Path, rows: Rows, threads: int, recipe: str) -> None:
    """All forms of a part that have no row yet."""
    network = Network(part, data, recipe)
    network.wanted(0.0)
    base: Form | None = None
    for name, sparsity, form in forms(network, rows, threads):
        if base is None:
            base = form if (name, sparsity) == BASE[part] else ours(network, "int8", BASE[part][1])
        start = time.process_time()
        row = race(part, form, base, threads) | {"accuracy": network.accuracy(form, sparsity), "bytes": form.bytes}
        rows.put(
            {"part": part, "name": name, "sparsity": sparsity, "threads": threads}
            | {"recipe": network.recipe_of(sparsity)}
            | row
            | {"processor_seconds": time.process_time() - start, **stamp(0)}
        )


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = ["# Text beside llama.cpp, OpenVINO and ONNX Runtime", "", "Made by `python benchmarks/peers.py`."]
    text += ["", (__doc__ or "").rpartition("\n\n")[2].replace("\n", " ").strip()]
    text += [
        "",
        "llama.cpp has its own quantisation, without an importance matrix; it takes other types where the columns are "
        "no multiple of 256, as all of the small Llama. OpenVINO's weights are compressed by NNCF without data; "
        'ONNX Runtime\'s are blocks of 32 columns ("dynamic": products in int8, a scale a row). Bytes are those of the '
        "files, embedding included; ONNX Runtime's keep the embedding in float32. Older rows of ours do so too, and "
        "fill 64 columns up to 128: today the file in int8 without zeros has 311,656 bytes. The pretrained Llama shows "
        "accuracy, not speed: its tokens take fractions of a millisecond, in which calls count more than products.",
    ]
    for part, threads in dict.fromkeys((row["part"], row["threads"]) for row in rows):
        own = [row for row in rows if (row["part"], row["threads"]) == (part, threads)]
        title = "The pretrained Llama of 260 thousand" if part == "real" else "A random Llama of 522 million"
        loss = "perplexity / dense" if part == "real" else "change of logits"
        base, zeros = BASE[part]
        text += ["", f"## {title} parameters, {threads} thread{'s' * (threads > 1)}", ""]
        text += [
            f"| form | zeros | recipe | {loss} | bytes | tokens/s | ratio to {base} ({zeros:.0%}) "
            "| prompt tokens/s | ratio |"
        ]
        text += ["|---" * 9 + "|"]
        for row in sorted(own, key=lambda one: one["accuracy"]):
            text.append(
                f"| {row['name']} | {row['sparsity']:.0%} | {row['recipe']} | {row['accuracy']:.4f} | {row['bytes']:,} "
                f"| {row['decode_per_second']:,.1f} | {row['decode_ratio']:.2f} "
                f"| {row['prompt_per_second']:,.0f} | {row['prompt_ratio']:.2f} |"
            )
        text += ["", *verdicts(own)] if part == "real" else []
    return "\n".join(text)


def verdicts(rows: list[Row]) -> list[str]:
    """For each peer, our fastest and our smallest form that is at least as accurate."""
    own = [row for row in rows if row["name"].startswith("ours")]
    text = ["At least as accurate as each peer:", ""]
    text += ["| peer | our fastest form | its speed / the peer's | our smallest form | its bytes / the peer's |"]
    text += ["|---" * 5 + "|"]
    for row in rows:
        if row in own:
            continue
        found = [one for one in own if one["accuracy"] <= row["accuracy"]]
        if not found:
            text += [f"| {row['name']} | none | - | none | - |"]
            continue
        fast, small = max(found, key=lambda one: one["decode_ratio"]), min(found, key=lambda one: one["bytes"])
        text += [
            f"| {row['name']} | {described(fast)} "
            f"| {fast['decode_ratio'] / row['decode_ratio']:.2f} | {described(small)} "
            f"| {small['bytes'] / row['bytes']:.2f} |"
        ]
    return text


def described(row: Row) -> str:
    """The name of one of our forms."""
    return f"{row['name']}, {row['sparsity']:.0%} zeros" + (f" by {row['recipe']}" if row["sparsity"] else "")


def main() -> None:
    found = parser(__doc__)
    found.add_argument("--parts", nargs="*", choices=tuple(BASE), default=list(BASE))
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--recipes", nargs="*", choices=tuple(BATCHES), default=list(BATCHES))
    options = found.parse_args()
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # a second pool of threads would slow torch down
    torch.set_num_threads(options.threads)
    logging.disable(logging.INFO)
    rows = Rows("peers", KEYS, options.again)
    for part in ["real"] if options.quick else options.parts:
        for recipe in options.recipes[:1] if options.quick or part == "random" else options.recipes:
            measure(part, options.data, rows, options.threads, recipe)


if __name__ == "__main__":
    main()
