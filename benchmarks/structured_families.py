"""Units removed from networks of every family: found, removed, saved, loaded by transformers, exported to ONNX.

    python benchmarks/structured_families.py                  every family of `breadth.py`, and networks of timm
    python benchmarks/structured_families.py --only llama vit

Networks are small and random, those of `breadth.py`: the question is which units are found, and whether the narrower
network is what it should be. 25 % of the units are removed at random, equally in layers of one width.

- transformers: a removal that the class can say is saved, loaded by `from_pretrained`, and the outputs are compared.
- timm (needs timm, onnx, onnxruntime): all units are removed, the network is exported to ONNX, and the outputs are
  compared.

Both compare with the wide network whose readers have zero columns for the removed units.
"""

from __future__ import annotations

import copy
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from breadth_models import build, names
from rows import Row, Rows, measured, parser, read, stamp
from torch import Tensor, nn

from iobs.models import ensure_torchvision
from iobs.pruning.network.modes import evaluating
from iobs.pruning.samples import batches
from iobs.pruning.structure.config_widths import ConfigWidths, widths_of
from iobs.pruning.structure.sites import Site, checked_sites
from iobs.pruning.structure.trace import shortened
from iobs.pruning.structure.units import remove, zero_columns
from iobs.pruning.widths.latency import Example, called_in

ensure_torchvision()

SHARE = 0.25
SECONDS = 60  # processor time for one network
KINDS = ("neurons", "heads", "channels")
NOT_RUN = ("not built", "dense forward refused")  # results of breadth.py without a dense network that runs
EQUAL = 1e-4  # largest difference of outputs, relative to the largest
# fmt: off
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {}, "resnet18": {}, "resnet50": {}, "resnext26ts": {}, "seresnet18": {}, "mobilenetv1_100": {},
    "mobilenetv2_035": {}, "mobilenetv3_small_050": {}, "mobilenetv4_conv_small_035": {}, "efficientnet_b0": {},
    "tf_efficientnetv2_b0": {}, "convnext_atto": {}, "convnextv2_atto": {}, "densenet121": {}, "vgg11": {},
    "regnetx_002": {}, "regnety_002": {}, "repvgg_a0": {}, "ghostnet_050": {}, "mobilevit_xxs": {},
    "hrnet_w18_small": {},
    "inception_v3": {}, "dla46_c": {}, "cspresnet50": {}, "darknet17": {}, "res2net50_14w_8s": {}, "mnasnet_small": {},
    "lcnet_035": {}, "rexnet_100": {}, "fbnetc_100": {}, "test_vit": {}, "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_patch16_224": {"depth": 2}, "beit_base_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "eva02_tiny_patch14_224": {"depth": 2}, "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1, 1, 1)},
    "mixer_s32_224": {}, "resmlp_12_224": {},
    "gmixer_12_224": {}, "poolformer_s12": {}, "caformer_s18": {},
    "edgenext_xx_small": {},
    "cait_xxs24_224": {"depth": 2}, "xcit_nano_12_p16_224": {"depth": 2}, "pit_ti_224": {}, "levit_128s": {},
    "fastvit_t8": {}, "starnet_s050": {}, "repvit_m0_9": {}, "test_nfnet": {},
}
# fmt: on
QUICK = ("llama", "qwen3", "gpt2", "phi3", "opt", "bert", "t5", "vit", "resnet18", "mobilenetv3_small_050", "test_vit")


def hugging_face(kind: str, name: str) -> tuple[nn.Module, Any]:
    """A small random network of a family of transformers, and a batch."""
    model, found = build(kind, name)
    torch.manual_seed(0)
    with torch.no_grad():
        for value in (value for value in model.parameters() if value.requires_grad):
            value.add_(0.02 * torch.randn_like(value))  # biases and norms of a new network are constant
    return model, found[0]


def timm_network(name: str) -> tuple[nn.Module, Tensor]:
    """A random network of timm, and a batch."""
    import timm

    for size in (64, 96, 128, 224, 256):
        for more in ({"img_size": size}, {}):
            try:
                torch.manual_seed(0)
                model = timm.create_model(name, pretrained=False, num_classes=10, **TIMM[name], **more).eval()
                batch = torch.randn(2, 3, size, size)
                with torch.no_grad():
                    model(batch)
                    for value in model.parameters():
                        value.add_(0.02 * torch.randn_like(value))
                return model, batch
            except Exception:  # another size may fit
                continue
    raise RuntimeError(f"timm builds no {name} for an image of 64 to 256 pixels")


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """All tensors of numbers that the model returns, without a cache."""
    with evaluating(model), torch.no_grad():
        found = batches.forward(model, batch)
    values = [found] if isinstance(found, Tensor) else batches.tensors(found)
    return [value for value in values if value.is_floating_point()]


def chosen(sites: Sequence[Site], widths: ConfigWidths) -> dict[str, list[int]]:
    """Random units to keep, equal numbers in layers of one width that the class can load; none of the refused."""
    draw = random.Random(0)
    counts = {site.name: site.count for site in sites}
    kept = {}
    for group in widths.groups:
        count = counts[group.sites[0]]
        wanted = max(1, count - max(1, round(SHARE * count)))
        possible = [one for one in group.counts or [wanted] if one < count]
        if possible and wanted < count:
            keep = min(possible, key=lambda one: abs(one - wanted))
            kept |= {name: sorted(draw.sample(range(count), keep)) for name in group.sites}
    return kept


def zeroed(model: nn.Module, sites: Sequence[Site], kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy whose readers have zero columns for the units that go."""
    model = copy.deepcopy(model)
    for site in sites:
        zero_columns(model, site, kept.get(site.name, range(site.count)))
    return model


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value."""
    scale = max(float(one.abs().max()) for one in expected) or 1.0
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) / scale


def reasons(widths: ConfigWidths, sites: Sequence[Site]) -> dict[str, str]:
    """One reason for each kind of units that the class cannot remove."""
    kinds = {site.name: site.kind for site in sites}
    found: dict[str, str] = {}
    for name, reason in widths.refused.items():
        found.setdefault(kinds[name], re.sub(r"gives \S+ fewer", "gives fewer", reason))
    return found


def measure(library: str, kind: str, name: str) -> Row:
    """One row: units found, the share of weights removed, and the differences of the outputs."""
    model, batch = timm_network(name) if library == "timm" else hugging_face(kind, name)
    with measured() as work:
        checked = checked_sites(model, [shortened(batch)])
        sites = checked.sites
        widths = widths_of(model, sites)
    kept = chosen(sites, widths)
    units = Counter(site.kind for site in sites)
    row: Row = {
        "library": library,
        "kind": kind,
        "network": name,
        "sites": {one: units[one] for one in KINDS if units[one]},
        "loadable": dict(Counter(site.kind for site in sites if site.name in kept)),
        "refused": reasons(widths, sites),
        "failed": sorted(set(checked.refused.values())),
        "biases": sorted({group.bias for group in widths.groups if group.bias}),
        **work.fields(),
    }
    before = sum(value.numel() for value in model.parameters())
    wide, dense = outputs(zeroed(model, sites, kept), batch), outputs(model, batch)
    remove(model, sites, kept)
    row["fields"] = widths.configure(model, {name: len(units) for name, units in kept.items()})
    row["removed"] = 1 - sum(value.numel() for value in model.parameters()) / before
    narrow = outputs(model, batch)
    row["difference"], row["effect"] = difference(wide, narrow), difference(dense, narrow)
    row["reloaded"] = (
        onnx_difference(model, batch, narrow) if library == "timm" else load_difference(model, batch, narrow)
    )
    return row


def load_difference(model: nn.Module, batch: Any, expected: Sequence[Tensor]) -> float:
    """Difference of the outputs after saving and loading by transformers."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded, report = type(model).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"parameters do not fit after loading: {report}")
    return difference(expected, outputs(loaded.eval(), batch))


def onnx_difference(model: nn.Module, batch: Tensor, expected: Sequence[Tensor]) -> float:
    """Difference of the outputs of ONNX Runtime."""
    found = called_in("onnx", Example(model, (batch,), {}))()
    return difference(expected, [torch.from_numpy(value) for value in found])  # type: ignore[attr-defined]


def cases() -> list[tuple[str, str, str]]:
    """Library, kind and name of every network."""
    families = {kind: found for kind, found in names().items() if kind != "timm"}
    return [
        *(("transformers", kind, name) for kind, found in families.items() for name in dict.fromkeys(found)),
        *(("timm", "timm", name) for name in TIMM),
    ]


def tables(rows: list[Row]) -> str:
    """Counts of each kind of network, the networks by the units that are removed and loaded, and what was refused."""
    lines = [
        "# Units of networks of every family",
        "",
        "Made by `python benchmarks/structured_families.py`: the small random networks of the breadth table and "
        "networks of timm, a quarter of the units removed. Outputs are compared with those of the wide network without "
        "these units, and again after loading by transformers or export to ONNX. Equal means within "
        f"{EQUAL:g} of the largest.",
    ]
    for library, again in (("transformers", "loaded by transformers"), ("timm", "exported to ONNX")):
        own = [row for row in rows if row["library"] == library]
        ran = [row for row in own if "error" not in row]
        right = [row for row in ran if row["loadable"] and max(row["difference"], row["reloaded"]) < EQUAL]
        lines += [
            "",
            f"**{library}**: {len(own)} networks; units removed and {again} with equal outputs: {len(right)}.",
            "",
            "| kind | networks | ran | with units | all units narrower | some | none | other outputs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_counts(kind, [row for row in own if row["kind"] == kind]) for kind in _distinct(own, "kind")]
        lines.append("")
        by_units: dict[str, list[str]] = {}
        for row in right:
            refused = ", ".join(kind for kind in KINDS if kind in row["refused"])
            units = ", ".join(kind for kind in KINDS if kind in row["loadable"])
            by_units.setdefault(units + (f"; some {refused} refused" if refused else ""), []).append(row["network"])
        lines += [f"- {units} ({len(found)}): {', '.join(dict.fromkeys(found))}." for units, found in by_units.items()]
        lines += _refusals([row for row in ran if row["refused"] or row["failed"]])
        others = [row for row in own if "error" in row or (row not in right and row["loadable"])]
        unbuilt = {(row["kind"], row["network"]) for row in read("breadth") if row["result"] in NOT_RUN}
        missing = [row for row in others if (row["kind"], row["network"]) in unbuilt]
        others = [row for row in others if row not in missing]
        if missing:
            lines += ["", f"{len(missing)} networks did not run dense, for the reasons in the breadth table's rows."]
        if others:
            lines += ["", "| did not run, or other outputs | why |", "|---|---|"]
            lines += [f"| {row['network']} ({row['kind']}) | {_why(row)} |" for row in others]
    return "\n".join(lines) + "\n"


def _distinct(rows: Sequence[Row], name: str) -> list[str]:
    return [*dict.fromkeys(row[name] for row in rows)]


def _counts(kind: str, rows: Sequence[Row]) -> str:
    ran = [row for row in rows if "error" not in row]
    found = [row for row in ran if row["sites"]]
    equal = [row for row in found if max(row["difference"], row["reloaded"]) < EQUAL]
    whole = sum(row["loadable"] == row["sites"] for row in equal)
    none = sum(not row["loadable"] for row in equal)
    counts = (len(rows), len(ran), len(found), whole, len(equal) - whole - none, none, len(found) - len(equal))
    return f"| {kind} | {' | '.join(map(str, counts))} |"


def _refusals(rows: Sequence[Row]) -> list[str]:
    """The reasons for units that stay, without the names of classes and parameters, the most frequent first."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for reason in (*row["refused"].values(), *row["failed"]):
            text = re.sub(r"of \S+Config\b", "of the configuration", reason.split(" (")[0])
            text = re.sub(r"(the narrower|a copy of the) \S+ fails.*", "a layer fails when its units are removed", text)
            reasons.setdefault(text, []).append(row["network"])
    if not reasons:
        return []
    lines = ["", "| units stay because | networks | such as |", "|---|---|---|"]
    for text, found in sorted(reasons.items(), key=lambda one: -len(one[1])):
        lines.append(f"| {text} | {len({*found})} | {', '.join([*dict.fromkeys(found)][:3])} |")
    return lines


def _why(row: Row) -> str:
    text = row.get("error") or f"outputs differ by {row['difference']:.0e}, after loading {row['reloaded']:.0e}"
    return re.sub(r"\s+", " ", text).replace("|", "/")


def _stop(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} processor seconds")


def main() -> None:
    """Measure all rows that are missing."""
    options = parser(__doc__, data=False)
    options.add_argument("--only", nargs="*", help="names of networks")
    options.add_argument("--kinds", nargs="*", help="of the families: CausalLM, timm, ...")
    given = options.parse_args()
    signal.signal(signal.SIGVTALRM, _stop)
    torch.set_num_threads(1)
    rows = Rows("structured_families", ("library", "kind", "network"), given.again)
    for library, kind, name in cases():
        wanted = name in given.only if given.only else name in QUICK or not given.quick
        wanted = wanted and kind in (given.kinds or [kind])
        if not wanted or rows.has(library=library, kind=kind, network=name):
            continue
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            row = measure(library, kind, name)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            row = {"library": library, "kind": kind, "network": name, "error": text, "processor_seconds": 0.0}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        rows.put({**row, **stamp(0)})


if __name__ == "__main__":
    main()
