"""Zeros in sentence encoders: embeddings of every method and recipe beside the dense model's.

    python benchmarks/encoders.py [--networks minilm mpnet] [--patterns 0.5 2:4] [--methods NAME...] [--models FOLDER]

Sentences, calibration and scores are those of `bytes_on_disk.py`: 200 sentences, half of other documents of C4 and half
of WikiText-2, and 512 sentences of C4 to calibrate. One thread; processor seconds of `iobs.prune` alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from bytes_on_disk import NETWORKS, encoder
from language_models import MODEL, pruned, shown_pattern
from rows import Row, Rows, is_model, parser, require_data, stamp

ENCODERS = ("minilm", "mpnet")
PATTERNS = ("0.5", "2:4")
RUN = ("magnitude", "Wanda", "SparseGPT", "ALPS-like", "one-shot, equal shares", "one-shot", "fast")
QUICK = ("SparseGPT", "one-shot")


def measure(folder: Path, data: Path, method: str, pattern: str) -> Row:
    """The scores after one run, and its processor time."""
    case = encoder(folder, data)
    row = pruned(case.module, case.batches, method, pattern)
    return row | case.score(case.module)


def tables(rows: list[Row]) -> str:
    """The page: one table for each encoder."""
    lines = [
        "# Zeros in sentence encoders",
        "",
        "Made by `python benchmarks/encoders.py`. Mean distance of the cosines between 200 sentences to the dense "
        "model's, and their rank correlation; half of the sentences are of C4, half of WikiText-2, and 512 others of "
        "C4 calibrate. Processor seconds of `iobs.prune` on one thread, and their ratio to SparseGPT's. The embedding "
        "stays dense.",
    ]
    for network in dict.fromkeys(row["network"] for row in rows):
        lines += ["", f"## {NETWORKS[network]}", ""]
        lines.append("| zeros | method | error of cosines | rank correlation | seconds | / SparseGPT |")
        lines.append("|---|---|---|---|---|---|")
        for pattern in PATTERNS:
            chosen = {row["method"]: row for row in rows if (row["network"], row["pattern"]) == (network, pattern)}
            plain = chosen.get("SparseGPT")
            for method in [name for name in RUN if name in chosen]:
                row = chosen[method]
                seconds = row["processor_seconds"]
                ratio = "" if plain is None else f"{seconds / plain['processor_seconds']:.1f}"
                scores = f"{row['error']:.4f} | {row['rank']:.3f}"
                lines.append(f"| {shown_pattern(pattern)} | {method} | {scores} | {seconds:.0f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--networks", nargs="*", default=[*ENCODERS], choices=ENCODERS)
    options.add_argument("--patterns", nargs="*", default=[*PATTERNS])
    options.add_argument("--methods", nargs="*", default=[*RUN], choices=RUN)
    options.add_argument("--models", type=Path, default=MODEL.parent)
    given = options.parse_args()
    require_data(given.data)
    torch.set_num_threads(1)
    rows = Rows("encoders", ("network", "method", "pattern"), again=given.again)
    networks, methods, patterns = given.networks, given.methods, given.patterns
    if given.quick:
        networks, methods, patterns = ["minilm"], [*QUICK], ["0.5"]
    for network in networks:
        folder = given.models / network
        if not is_model(folder, network):
            continue
        for pattern in patterns:
            for method in methods:
                if not rows.has(network=network, method=method, pattern=pattern):
                    row = measure(folder, given.data, method, pattern)
                    rows.put({"network": network, "method": method, "pattern": pattern} | row | stamp(0))


if __name__ == "__main__":
    main()
