"""Draw the picture of the README: accuracy against sparsity for three networks, this library's recipes and its peers.

    python benchmarks/picture.py

Reads results/networks.jsonl, which `python benchmarks/networks.py` makes; writes docs/images/accuracy-light.png and
accuracy-dark.png. A point is the mean over all seeds of a method at a sparsity. Every peer and every sparsity of these
three networks is drawn; of the library's own recipes only the two presets, without their ablations.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
ROWS, IMAGES = HERE / "results" / "networks.jsonl", HERE.parent / "docs" / "images"
PANELS = {
    "resnet20": "ResNet-20, CIFAR-10",
    "mlpnet": "MLPNet, MNIST",
    "mobilenet": "MobileNetV1 0.75, ImageNet",
}
OURS = {"best without blocks": ("iobs best, without blocks", "#2f7ed8", "o"), "fast": ("iobs fast", "#e8833a", "s")}
PEERS = {
    "CHITA, 15 stages": ("CHITA, 15 stages", "#3d9b6f", "^"),
    "CHITA": ("CHITA", "#3d9b6f", "v"),
    "CBS": ("CBS", "#a06cc4", "D"),
    "WoodFisher": ("WoodFisher", "#b08a3e", "P"),
    "SparseGPT": ("SparseGPT", "#c2557a", "X"),
    "magnitude": ("magnitude", "#8a949e", "."),
}
THEMES = {"light": ("#ffffff", "#24292f", "#d8dee4"), "dark": ("#0d1117", "#e6edf3", "#30363d")}


def means(network: str) -> tuple[dict[str, dict[float, float]], float]:
    """Mean score by method and sparsity, and the score of the dense network (mean over the seeds)."""
    scores: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    dense: dict[int, float] = {}
    for line in ROWS.read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        if row["network"] == network:
            scores[row["method"]][float(row["level"])].append(row["score"])
            dense |= {row["seed"]: row["dense"]} if "dense" in row else {}
    found = {method: {level: mean(values[level]) for level in sorted(values)} for method, values in scores.items()}
    return found, mean(dense.values())


def draw(theme: str) -> Path:
    """Draw the three panels in one theme, and return the file."""
    paper, ink, grid = THEMES[theme]
    style = {"font.size": 11, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    style |= {"axes.edgecolor": grid, "axes.facecolor": paper, "figure.facecolor": paper, "axes.titlesize": 12}
    with rc_context(style):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for panel, (network, title) in zip(panels, PANELS.items(), strict=True):
            found, dense = means(network)
            panel.axhline(dense, color=ink, linewidth=1, linestyle=(0, (4, 3)))
            panel.annotate(
                "dense", (1, dense), (0, 3), textcoords="offset points", xycoords=("axes fraction", "data"), ha="right"
            )
            for method, (name, colour, marker) in (PEERS | OURS).items():
                points = found.get(method, {})
                panel.plot(
                    [100 * level for level in points],
                    list(points.values()),
                    color=colour,
                    marker=marker,
                    label=name,
                    linewidth=2.6 if method in OURS else 1.2,
                    linestyle="--" if method == "CHITA" else "-",
                    zorder=3 if method in OURS else 2,
                )
            panel.set(title=title, xlabel="zeros, % of the weights", ylim=(-3, 103))
            panel.grid(color=grid, linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("accuracy, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False)
        file = IMAGES / f"accuracy-{theme}.png"
        figure.savefig(file, dpi=130, metadata={"Software": None})
    return file


if __name__ == "__main__":
    for theme in THEMES:
        print(draw(theme))
