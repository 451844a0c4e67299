"""Draw docs/images/run.png: the way of one pruning run through the modules.

python docs/make_run_picture.py
"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

FILE = Path(__file__).parent / "images" / "run.png"
# (left, bottom, width, name, what it does, colour)
BOXES = (
    (0.0, 8.1, 6.4, "driver.prune", "checks the arguments, selects layers, opens a workspace", "#dbe7f5"),
    (0.0, 6.8, 6.4, "decisions + allocation", "steps that are affordable; a pattern for each layer", "#dbe7f5"),
    (
        0.0,
        5.2,
        6.4,
        "algorithm.project",
        "lines 3 to 8 of Algorithm 2: every layer, in the order of the pass",
        "#f5e6d0",
    ),
    (0.5, 3.9, 2.8, "calibration.Sweep", "inputs and Grams", "#f9f1e4"),
    (3.6, 3.9, 2.8, "layerwise.Projection", "quadratic, solver, write", "#f9f1e4"),
    (0.5, 2.6, 5.9, "reconstruction.Reconstruction", "block by block: project, fit a window, slide on", "#f9f1e4"),
    (0.0, 1.3, 6.4, "algorithm.finetune", "line 9: gradient steps on float32 masters", "#f5e6d0"),
    (0.0, 0.0, 6.4, "audit, Report", "zeros counted entry by entry; the best record is kept", "#dbe7f5"),
    (7.4, 6.8, 3.0, "store.Store", "where weights live", "#e3efdf"),
    (7.4, 3.9, 3.0, "iobs.solve", "one layer, in iobs.solvers", "#e3efdf"),
    (7.4, 2.6, 3.0, "descent.Descent", "all gradient steps", "#e3efdf"),
)
# From one box to another, and a label.
ARROWS = (
    ((3.2, 8.1), (3.2, 7.75), ""),
    ((3.2, 6.8), (3.2, 6.15), ""),
    ((1.9, 5.2), (1.9, 4.85), ""),
    ((3.3, 4.4), (3.6, 4.4), ""),
    ((6.4, 4.4), (7.4, 4.4), ""),
    ((3.4, 3.9), (3.4, 3.55), "with blocks"),
    ((6.4, 3.1), (7.4, 3.1), ""),
    ((3.2, 2.6), (3.2, 2.25), ""),
    ((6.4, 1.9), (8.9, 2.6), ""),
    ((3.2, 1.3), (3.2, 0.95), ""),
    ((6.4, 5.9), (8.2, 6.8), "reads and writes"),
)


def main() -> None:
    """Write the picture."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(9.4, 7.6))
    for left, bottom, width, name, text, colour in BOXES:
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom),
                width,
                0.95,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=colour,
                edgecolor="#555",
            )
        )
        axes.text(left + width / 2, bottom + 0.62, name, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(left + width / 2, bottom + 0.27, text, ha="center", va="center", fontsize=8.5, color="#333")
    for start, end, label in ARROWS:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555"})
        if label:
            middle = ((start[0] + end[0]) / 2 + 0.12, (start[1] + end[1]) / 2)
            axes.text(*middle, label, fontsize=8, color="#555", va="center")
    axes.annotate(
        "next round",
        xy=(0.0, 5.6),
        xytext=(-0.75, 3.7),
        rotation=90,
        fontsize=8,
        color="#555",
        va="center",
        ha="center",
        arrowprops={"arrowstyle": "-|>", "color": "#555", "connectionstyle": "angle,angleA=90,angleB=0,rad=6"},
    )
    axes.plot([-0.75, -0.75, 0.0], [3.1, 1.8, 1.8], color="#555", linewidth=1)
    axes.set_xlim(-1.2, 10.7)
    axes.set_ylim(-0.2, 9.3)
    axes.axis("off")
    figure.savefig(FILE, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
