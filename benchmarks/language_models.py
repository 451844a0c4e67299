"""A real language model of 135 million parameters: perplexity of every method and recipe beside the peers'.

    python benchmarks/language_models.py [MODEL] [--patterns 0.5 0.6 0.7 2:4 4:8] [--methods NAME...]

MODEL is a directory of transformers; by default SmolLM2-135M as `real_models.py smollm2` beside zoo.py makes it.
Calibration: the first 64 windows of 512 tokens of C4, or as many as a row says. Judged on 32 windows of 1,024 tokens
each of WikiText-2 (test) and of other documents of C4, in float32. One thread; processor seconds of `iobs.prune` alone.
Peers are written here or in the library and run by the same evaluation; "divided" peers take our division among layers
and rows. The choice of D2Prune (Xiong et al., 2026) is that of its authors for OPT: keys lose entries by Wanda and are
not updated. Its further term in the score of an entry, with the scale that they give, is less than a thousandth of
SparseGPT's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from alps_like import ALPSLike
from rows import Row, Rows, is_model, measured, parser, stamp
from torch import Tensor, nn

import iobs
from iobs import models
from iobs.core import modes
from iobs.evaluate import perplexity
from iobs.pruning.recipe import Recipe, Rule

MODEL = Path.home() / ".cache" / "iobs-real-models" / "smollm2"
WINDOWS, LENGTH, BATCH = 64, 512, 4
JUDGED, JUDGED_LENGTH = 32, 1024
JUDGES = 300  # last documents of C4, which no method sees
PATTERNS = ("0.5", "0.6", "0.7", "2:4", "4:8")
DENSE = "dense"
OUTLIER, SPREAD = 5.0, 0.08  # of OWL: times the mean score, and the largest change of a block's share
Batch = dict[str, Tensor]


def owl(model: nn.Module, batches: list[Batch], pattern: str) -> Recipe:
    """SparseGPT with the shares of OWL (Yin et al., 2024): blocks with more outliers of |w_ij| norm(x_j) stay denser.

    Raises:
        ValueError: the pattern is no share of zeros.
    """
    sparsity, squares, taken = float(pattern), dict[str, Tensor](), []
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and ".layers." in name
    }

    def add(name: str, inputs: Tensor) -> None:
        squares[name] = squares.get(name, torch.zeros(())) + inputs.flatten(0, -2).square().sum(0)

    for name, layer in layers.items():
        taken.append(layer.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0])))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in taken:
        handle.remove()
    blocks = dict.fromkeys(name[: name.index(".", name.index(".layers.") + 8)] for name in layers)
    outliers = torch.zeros(len(blocks))
    for number, block in enumerate(blocks):
        inside = [name for name in layers if name.startswith(f"{block}.")]
        scores = [layers[name].weight.detach().abs() * squares[name].sqrt() for name in inside]
        above = sum(int((score > OUTLIER * score.mean()).sum()) for score in scores)
        outliers[number] = above / sum(score.numel() for score in scores)
    kept = (outliers - outliers.min()) / (outliers.max() - outliers.min()) * 2 * SPREAD
    shares = sparsity - (kept - kept.mean())
    rules = [Rule(f"{block}.*", float(share)) for block, share in zip(blocks, shares, strict=True)]
    return Recipe(solver="sparsegpt", rules=tuple(rules))


METHODS: dict[str, Recipe | str | Callable[[nn.Module, list[Batch], str], Recipe]] = {
    "magnitude": Recipe(solver="magnitude"),
    "Wanda": Recipe(solver="wanda"),
    "SparseGPT": Recipe(solver="sparsegpt"),
    "SparseGPT, divided": Recipe.preset("one-shot").but(solver="sparsegpt", target="layer"),
    "SparseGPT, OWL": owl,
    "SparseGPT, D2Prune": Recipe(solver="sparsegpt", rules=(Rule("*.k_proj", solver="wanda"),)),
    "ALPS-like": Recipe(solver=ALPSLike()),
    "one-shot, equal shares": Recipe(target="residual"),
    "one-shot": "one-shot",
    "fast": "fast",
    "best": "best",
}
WINDOWS_OF = {f"one-shot, {windows} windows": windows for windows in (8, 16, 32, 128, 256)}
METHODS |= dict.fromkeys(WINDOWS_OF, "one-shot")
WITHIN = {"best, within an hour": "60min"}
METHODS |= dict.fromkeys(WITHIN, "best")
BY_MKL = {f"{method}, products by MKL": METHODS[method] for method in ("SparseGPT", "one-shot")}
METHODS |= BY_MKL
QUICK = ("magnitude", "Wanda", "SparseGPT", "one-shot")


def texts(model: Path, data: Path, windows: int = WINDOWS) -> dict[str, Tensor]:
    """Token windows: "calibration" (windows, `LENGTH`); "WikiText-2" and "C4" (windows, `JUDGED_LENGTH`); int64."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def packed(documents: list[str], windows: int, length: int) -> Tensor:
        found: list[int] = []
        for document in documents:
            found += tokens(document + "\n\n")
            if len(found) >= windows * length:
                break
        return torch.tensor(found[: windows * length]).view(windows, length)

    with gzip.open(data / "c4" / "c4_sample.jsonl.gz", "rt", encoding="utf8") as file:
        documents = [json.loads(line)["text"] for line in file]
    wiki = (data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf8")[:400_000]
    return {
        "calibration": packed(documents[:-JUDGES], windows, LENGTH),
        "WikiText-2": packed([wiki], JUDGED, JUDGED_LENGTH),
        "C4": packed(documents[-JUDGES:], JUDGED, JUDGED_LENGTH),
    }


def pruned(model: nn.Module, batches: list[Batch], method: str, pattern: str) -> Row:
    """The share of zeros after one run, and its work."""
    with products_by_mkl() if method in BY_MKL else nullcontext(), measured() as work:
        recipe = METHODS[method]
        recipe = recipe(model, batches, pattern) if callable(recipe) else recipe
        report = iobs.prune(model, batches, pattern, recipe, within=WITHIN.get(method))
        with modes.full_precision():
            products = "oneDNN" if torch.get_float32_matmul_precision() == "medium" else "MKL"
    zeros = sum(one.zeros for one in report.audit) / sum(one.weights for one in report.audit)
    return {"zeros": zeros, "products": products, **work.fields()}


@contextmanager
def products_by_mkl() -> Iterator[None]:
    """Context in which torch multiplies float32 as it does by itself, to compare times on processors of AMD."""
    modes._settings.cache_clear()
    try:
        with patch.object(modes, "_is_quick_and_exact", return_value=False):
            yield
    finally:
        modes._settings.cache_clear()


def measure(folder: Path, method: str, pattern: str, text: dict[str, Tensor]) -> Row:
    """Perplexities after one run, and its processor time."""
    model = models.load(str(folder), dtype=torch.float32).module
    row: Row = {"zeros": 0.0, "seconds": 0.0, "processor_seconds": 0.0}
    if method != DENSE:
        calibration = text["calibration"][: WINDOWS_OF.get(method, WINDOWS)]
        batches = [{"input_ids": windows} for windows in calibration.split(BATCH)]
        row = pruned(model, batches, method, pattern)
    return row | {name: perplexity(model, text[name]) for name in ("WikiText-2", "C4")}


def tables(rows: list[Row]) -> str:
    """The page: one table for each pattern."""
    lines = ["# A language model of 135 million parameters", "", "Made by `python benchmarks/language_models.py`.", ""]
    lines += [
        "SmolLM2-135M-Instruct (30 blocks, 106 million pruned weights); 64 windows of 512 tokens of C4 to calibrate "
        "where nothing else is said. Perplexity on WikiText-2 and on other documents of C4; processor seconds of "
        "`iobs.prune` on one thread, and their ratio to SparseGPT's where one machine measured both. Peers give every "
        "layer the same share unless divided, or by OWL, which gives it to blocks by their outliers. D2Prune stands "
        "for its choice of matrices that are not updated. Products of float32 are computed by oneDNN, in half of the "
        "time that MKL takes on this processor. torch calls MKL by itself, as did the rows with that word; ratios are "
        "those of rows with the same products.",
        "",
    ]
    dense = [row for row in rows if row["method"] == DENSE]
    for pattern in dict.fromkeys(row["pattern"] for row in rows if row["method"] != DENSE):
        chosen = {row["method"]: row for row in rows if row["pattern"] == pattern and row["method"] != DENSE}
        plain = [row for method, row in chosen.items() if method in ("SparseGPT", "SparseGPT, products by MKL")]
        lines += [
            f"## {shown_pattern(pattern)}",
            "",
            "| method | WikiText-2 | C4 | seconds | / SparseGPT |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| dense | {row['WikiText-2']:.1f} | {row['C4']:.1f} | | |" for row in dense]
        for method in METHODS:
            if method in chosen:
                row = chosen[method]
                same = [one for one in plain if all(one[key] == row[key] for key in ("machine", "products"))]
                ratio = f"{row['processor_seconds'] / same[0]['processor_seconds']:.1f}" if same else ""
                scores = f"{row['WikiText-2']:.1f} | {row['C4']:.1f}"
                by = "" if row["products"] == "oneDNN" else ", MKL"
                lines.append(f"| {method} | {scores} | {row['processor_seconds']:.0f}{by} | {ratio} |")
        lines.append("")
    return "\n".join(lines)


def shown_pattern(pattern: str) -> str:
    return pattern if ":" in pattern else f"{float(pattern):.0%} zeros".replace("%", " %")


def wanted(methods: list[str], patterns: list[str]) -> Iterator[tuple[str, str]]:
    """Methods and patterns, in the order in which they are measured."""
    yield DENSE, "0"
    for pattern in patterns:
        for method in methods:
            yield method, pattern


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", nargs="?", type=Path, default=MODEL)
    options.add_argument("--patterns", nargs="*", default=[*PATTERNS])
    options.add_argument("--methods", nargs="*", default=[*METHODS], choices=[*METHODS])
    given = options.parse_args()
    if not is_model(given.model, "language models"):
        return
    torch.set_num_threads(1)
    rows = Rows("language_models", ("method", "pattern"), again=given.again)
    text = texts(given.model, given.data, max(WINDOWS, *(WINDOWS_OF.get(method, 0) for method in given.methods)))
    methods, patterns = (list(QUICK), ["0.5"]) if given.quick else (given.methods, given.patterns)
    for method, pattern in wanted(methods, patterns):
        if not rows.has(method=method, pattern=pattern):
            rows.put({"method": method, "pattern": pattern} | measure(given.model, method, pattern, text) | stamp(0))


if __name__ == "__main__":
    main()
