"""Draw the picture of docs/howto/zeros-or-bits.md: accuracy against bits a weight, zeros with bits and bits alone.

    python benchmarks/picture_bytes.py

Reads results/equal_bytes.jsonl, which `python benchmarks/equal_bytes.py` makes; writes docs/images/bytes-light.png and
bytes-dark.png. Bits include masks and 16-bit scales. Every one-shot method of the drawn networks is in the picture.
"""

from __future__ import annotations

from pathlib import Path

from equal_bytes import LOWER
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture import IMAGES, THEMES
from rows import Row, read

PANELS = {
    "mlpnet": ("MLP, MNIST", "accuracy, %", (70, 95)),
    "resnet20": ("ResNet-20, CIFAR-10", "accuracy, %", (70, 93)),
    "vit": ("ViT, CIFAR-10", "accuracy, %", (55, 76)),
    "llama_stories260K": ("Llama 260K, stories", "perplexity / dense", (0.95, 4)),
    "minilm": ("all-MiniLM-L6-v2, C4", "cosine to the dense embeddings", (0.78, 1.005)),
}
METHODS = {
    "GPTQ": ("GPTQ, bits alone", "#8a949e", "v", "--"),
    "joint pass": ("SparseGPT, zeros and bits", "#c2557a", "X", "--"),
    "dense grid": ("iobs, bits alone", "#2f7ed8", "o", "-"),
    "sparse grid": ("iobs, zeros and bits", "#e8833a", "s", "-"),
    "rate": ("iobs, rate", "#3d9b6f", "^", "-"),
}


def draw(theme: str) -> Path:
    """Draw all panels in one theme, and return the file."""
    paper, ink, grid = THEMES[theme]
    style = {"font.size": 11, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    style |= {"axes.edgecolor": grid, "axes.facecolor": paper, "figure.facecolor": paper, "axes.titlesize": 12}
    rows = read("equal_bytes")
    with rc_context(style):
        figure = Figure(figsize=(15, 8), layout="constrained")
        *panels, last = figure.subplots(2, 3).flat
        for panel, (network, (title, metric, limits)) in zip(panels, PANELS.items(), strict=True):
            own = [row for row in rows if row["network"] == network]
            panel.set(title=title, xlabel="bits a weight", ylabel=metric, xscale="log", ylim=limits, xlim=(1.4, 9))
            panel.set_xticks([1.5, 2, 3, 4, 6, 8], ["1.5", "2", "3", "4", "6", "8"], minor=False)
            panel.set_xticks([], minor=True)
            panel.axhline(1 if network in LOWER else own[0]["dense"], color=ink, linewidth=1, linestyle=(0, (4, 3)))
            _curves(panel, own)
            panel.grid(color=grid, linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        last.axis("off")
        last.legend(handles, labels, loc="center", fontsize=13, frameon=False)
        file = IMAGES / f"bytes-{theme}.png"
        figure.savefig(file, dpi=110, metadata={"Software": None})
    return file


def _curves(panel: Axes, rows: list[Row]) -> None:
    for method, (name, colour, marker, line) in METHODS.items():
        points = sorted((row["bits"], row["score"]) for row in rows if row["method"] == method)
        panel.plot(
            [bits for bits, _ in points],
            [score for _, score in points],
            color=colour,
            marker=marker,
            label=name,
            linestyle=line,
            linewidth=2.4 if line == "-" else 1.2,
        )


if __name__ == "__main__":
    for theme in THEMES:
        print(draw(theme))
