"""Quality at equal bytes on disk: our files beside those of GGUF, ONNX Runtime, OpenVINO, EntroPack and our grids.

    python benchmarks/bytes_on_disk.py [--networks minilm vit ...] [--forms PATTERN ...]

Sentence encoders: 200 sentences, half of other documents of C4 and half of WikiText-2 (test); the mean distance of the
cosines between them to the dense model's, and their rank correlation. Calibration: 512 sentences of C4. ViT and
ResNet-20: accuracy on 5,000 test images of CIFAR-10; 1,000 other images to calibrate. SmolLM2-135M: as
`language_models.py`. Encoders and SmolLM2 are directories that `real_models.py` beside zoo.py makes. Bytes are those
of the files with the weights, everything in them included. Nothing is chosen on what a form is judged by.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from bytes_on_disk_forms import GGUF, Case, Form, Forward, NotMadeError, forms
from language_models import MODEL, texts
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from networks import drawn
from rows import Row, Rows, is_model, parser, require_data, stamp
from scipy.stats import spearmanr
from torch import Tensor, nn

from iobs import models
from iobs.evaluate import perplexity

SENTENCES, JUDGED, LONGEST, BATCH = 512, 200, 64, 16
NETWORKS = {
    "minilm": "all-MiniLM-L6-v2",
    "mpnet": "all-mpnet-base-v2",
    "vit": "ViT, CIFAR-10",
    "resnet20": "ResNet-20, CIFAR-10",
    "smollm2": "SmolLM2-135M-Instruct",
}
SCORES = {  # column: text of its head, digits
    "error": ("error of cosines", 5),
    "rank": ("rank correlation", 4),
    "accuracy": ("accuracy, %", 2),
    "WikiText-2": ("WikiText-2", 2),
    "C4": ("C4", 2),
}
DRAWN = {"error": True, "accuracy": False, "WikiText-2": True}  # what the picture shows; True: less is better
FAMILIES = {
    "iobs": ("iobs, Rate", "#2f7ed8", "o"),
    "grid": ("iobs, grids", "#3d9b6f", "^"),
    "GGUF": ("GGUF", "#e8833a", "s"),
    "ONNX-Runtime": ("ONNX Runtime", "#8a949e", "v"),
    "OpenVINO": ("OpenVINO, NNCF", "#c2557a", "X"),
    "entropack": ("EntroPack", "#7a5ab5", "D"),
}
_MORE = 1.1  # a peer may have this many times our bytes


class Encoder(nn.Module):
    """A sentence encoder: normalised means of the last hidden states."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None].float()
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def sentences(text: str) -> list[str]:
    """The sentences of 40 to 300 characters of a text."""
    parts = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n", text))
    return [part for part in parts if 40 <= len(part) <= 300 and not part.startswith("=")]


def spread(items: list[str], count: int) -> list[str]:
    """Some of the items, evenly spread over the list."""
    return items[:: len(items) // count][:count]


def encoder(folder: Path, data: Path) -> Case:
    """A sentence encoder with the sentences that calibrate and judge it."""
    from transformers import AutoModel, AutoTokenizer

    # The pooler is part of no embedding of sentences. Attention in plain products can be traced.
    body = AutoModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").float()
    tokenizer, module = AutoTokenizer.from_pretrained(folder), Encoder(body).eval()
    with gzip.open(data / "c4" / "c4_sample.jsonl.gz", "rt", encoding="utf8") as file:
        documents = [json.loads(line)["text"] for line in file]
    wiki = (data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf8")

    def batches(chosen: list[str]) -> list[dict[str, Tensor]]:
        chosen = sorted(chosen, key=len)
        found = []
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            made = tokenizer(part, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
            found.append({name: made[name] for name in ("input_ids", "attention_mask")})
        return found

    calibration = batches(spread([one for text in documents[:-300] for one in sentences(text)], SENTENCES))
    calibration = [calibration[place] for place in drawn(len(calibration), len(calibration), 0)]  # not by length
    other = spread([one for text in documents[-300:] for one in sentences(text)], JUDGED // 2)
    judged = batches(other + spread(sentences(wiki), JUDGED // 2))
    pairs = torch.triu_indices(JUDGED, JUDGED, 1)

    @torch.no_grad()
    def cosines(forward: Forward) -> Tensor:
        vectors = torch.cat([forward(*batch.values()) for batch in judged])
        return (vectors @ vectors.T)[pairs[0], pairs[1]]

    exact = cosines(module)

    def score(forward: Forward) -> dict[str, float]:
        found = cosines(forward)
        return {"error": float((found - exact).abs().mean()), "rank": float(spearmanr(found, exact).statistic)}

    return Case(module, calibration, score, eight=("*position_embeddings*",))


def classifier(zoo: Any, make: Callable[[], nn.Module], name: str) -> Case:
    """A classifier of CIFAR-10."""
    images, _ = zoo.cifar10("train10k", name)
    test, labels = zoo.cifar10("test5000", name)
    chosen = images[drawn(len(images), 1000, 0)]

    @torch.no_grad()
    def score(forward: Forward) -> dict[str, float]:
        found = torch.cat([forward(part).argmax(1) for part in test.split(250)])
        return {"accuracy": 100 * float((found == labels).float().mean())}

    module = Named(make()).eval()
    return Case(module, [{"images": part} for part in chosen.split(50)], score, levels=(4, 3, 2.5, 2))


class Named(nn.Module):
    """A network whose input has a name."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


def language_model(folder: Path, data: Path) -> Case:
    """SmolLM2, whose weights are Q4_1 values; in GGUF files its embedding, which is the head too, stays in 8 bits."""
    module, text = models.load(str(folder), dtype=torch.float32).module, texts(folder, data)

    def score(forward: Forward) -> dict[str, float]:
        assert isinstance(forward, nn.Module)
        return {name: perplexity(forward, text[name]) for name in ("WikiText-2", "C4")}

    batches = [{"input_ids": windows} for windows in text["calibration"].split(4)]
    return Case(module, batches, score, eight=("*embed_tokens*",), levels=(1.8, 2.7, 3.45, 4.5, 5.35), fitted=(1.8,))


def cases(data: Path, folder: Path) -> dict[str, Callable[[], Case]]:
    """The networks by name."""
    zoo = require_data(data)
    return {
        "minilm": lambda: encoder(folder / "minilm", data),
        "mpnet": lambda: encoder(folder / "mpnet", data),
        "vit": lambda: classifier(zoo, zoo.vit_cifar, "vit"),
        "resnet20": lambda: classifier(zoo, zoo.resnet20, "resnet20"),
        "smollm2": lambda: language_model(folder / "smollm2", data),
    }


def measure(case: Case, make: Callable[[Case, Path], Form]) -> Row:
    """Bytes and scores of a form, or the reason why it is not made."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()  # hooks that count products would be traced into the graphs of peers
        try:
            form = make(case, Path(folder))
        except NotMadeError as error:
            return {"reason": str(error), "processor_seconds": time.process_time() - began}
        seconds = time.process_time() - began
        count = sum(one.numel() for one in case.module.parameters())
        scores = case.score(form.forward)
        return {"bytes": form.bytes, "bits": 8 * form.bytes / count, **scores, "processor_seconds": seconds}


def tables(rows: list[Row]) -> str:
    """The page: our files beside the best peer of their size, and all forms, by network."""
    lines = [
        "# Quality at equal bytes on disk",
        "",
        "Made by `python benchmarks/bytes_on_disk.py`. Bytes are those of the files with the weights, everything in "
        "them included (tokenizers are not); bits are those bytes for one parameter. Every row is read back from its "
        "file. Encoders: mean distance of the cosines between 200 sentences to the dense model's, and their rank "
        "correlation; half of the sentences are of C4, half of WikiText-2. Images: accuracy on 5,000 test images. "
        "SmolLM2: perplexities, 32 windows of 1,024 tokens. GGUF types with importances weigh columns by the mean "
        "squares of their inputs, as llama.cpp does; its replacements stand in where columns are no multiple of 256.",
        "",
        "![Quality against bytes on disk](results/bytes_on_disk.png)",
    ]
    for network, title in NETWORKS.items():
        own = [row for row in rows if row["network"] == network]
        if own:
            lines += ["", f"## {title}", "", *_beside(own), *_all(own)]
    return "\n".join(lines)


def _shown_scores(rows: list[Row]) -> list[str]:
    return [name for name in SCORES if any(name in row for row in rows)]


def _beside(rows: list[Row]) -> list[str]:
    """Our files beside the best peer that has at most a tenth more bytes."""
    made = [row for row in rows if "bytes" in row]
    score = next((name for name in DRAWN if any(name in row for row in made)), None)
    ours = sorted((row for row in made if row["form"].startswith("iobs ")), key=lambda row: -row["bytes"])
    peers = [row for row in made if row["form"].split()[0] not in ("iobs", "grid", "dense")]
    if score is None or not ours:
        return []
    title, digits = SCORES[score]
    lines = [f"| ours | MB | {title} | best peer of at most 1.1 times its bytes | MB | {title} | ours / peer |"]
    lines.append("|---" * 7 + "|")
    for row in ours:
        near = [one for one in peers if one["bytes"] <= _MORE * row["bytes"]]
        cells = [row["form"], f"{row['bytes'] / 1e6:.2f}", f"{row[score]:.{digits}f}"]
        if near:
            best = (min if DRAWN[score] else max)(near, key=lambda one: one[score])
            ratio = row[score] / best[score]
            cells += [best["form"], f"{best['bytes'] / 1e6:.2f}", f"{best[score]:.{digits}f}", f"{ratio:.2f}"]
        else:
            cells += ["none", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _all(rows: list[Row]) -> list[str]:
    """Every form from large to small, and those that could not be made."""
    scores = _shown_scores(rows)
    lines = [f"| form | MB | bits | {' | '.join(SCORES[name][0] for name in scores)} | seconds |"]
    lines.append("|---" * (4 + len(scores)) + "|")
    for row in sorted((row for row in rows if "bytes" in row), key=lambda row: -row["bytes"]):
        cells = [row["form"], f"{row['bytes'] / 1e6:.2f}", f"{row['bits']:.2f}"]
        cells += [f"{row[name]:.{SCORES[name][1]}f}" for name in scores]
        lines.append(f"| {' | '.join(cells)} | {row['processor_seconds']:.0f} |")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            reasons.setdefault(row["reason"], []).append(row["form"])
    missing = [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return [*lines, *(["", "Not measured:", "", *missing] if missing else [])]


def plot(rows: list[Row], file: Path) -> None:
    """Draw the picture: quality against megabytes, a panel for each network."""
    made = [row for row in rows if "bytes" in row]
    shown = [name for name in NETWORKS if any(row["network"] == name for row in made)]
    if not shown:
        return
    figure = Figure(figsize=(4.6 * len(shown), 4.4), layout="constrained")
    for panel, network in zip(figure.subplots(1, len(shown), squeeze=False).flat, shown, strict=True):
        own = [row for row in made if row["network"] == network]
        score = next(name for name in DRAWN if any(name in row for row in own))
        for family, (label, colour, marker) in FAMILIES.items():
            points = sorted((row["bytes"] / 1e6, row[score]) for row in own if row["form"].split()[0] == family)
            line = "-" if family == "iobs" else "none"  # forms of a peer are no series
            if points:
                panel.plot(*zip(*points, strict=True), linestyle=line, color=colour, marker=marker, label=label)
        if score != "error":
            panel.axhline(*(row[score] for row in own if row["form"].startswith("dense")), color="gray", linestyle=":")
        panel.set(title=NETWORKS[network], xlabel="megabytes on disk", ylabel=SCORES[score][0], xscale="log")
        panel.set_yscale("log" if score == "error" else "linear")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(color="#dddddd", linewidth=0.6, which="both")
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=100, metadata={"Software": None})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", type=Path, default=MODEL.parent, help="folder of the encoders and SmolLM2")
    options.add_argument("--networks", nargs="*", default=[*NETWORKS], choices=[*NETWORKS])
    options.add_argument("--forms", nargs="*", default=["*"], help="names, shell style")
    given = options.parse_args()
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)  # quantisers report every tensor
    rows = Rows("bytes_on_disk", ("network", "form"), given.again)
    for name, load in cases(given.data, given.models).items():
        if name not in given.networks or (given.quick and name != "resnet20"):
            continue
        if name in ("minilm", "mpnet", "smollm2") and not is_model(given.models / name, name):
            continue
        case = load()
        for form, make in forms(case).items():
            wanted = any(fnmatch(form, pattern) for pattern in given.forms) and (name != "smollm2" or in_torch(form))
            if wanted and not rows.has(network=name, form=form):
                rows.put({"network": name, "form": form} | measure(case, make) | stamp(0))


def in_torch(form: str) -> bool:
    """True for the forms of language models: perplexities are computed in torch, from decoded weights."""
    return form.startswith(("dense", "iobs", *(f"GGUF {kind}" for kind in (*GGUF, "IQ4_NL"))))


if __name__ == "__main__":
    main()
