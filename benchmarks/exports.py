"""Round trips of the exports: files of other runtimes, read by these runtimes, beside the pruned network in torch.

    pip install 'iobs[export]'
    python benchmarks/exports.py --data FOLDER [--minilm FOLDER] [--again]

ResNet-20, a ViT, all-MiniLM-L6-v2 and a Llama of 260 thousand parameters, pruned in one shot. A row a network, pattern,
target and number of bits is added to results/exports.jsonl.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import networks
import torch
from rows import Row, Rows, parser, require_data, stamp
from torch import Tensor

import iobs
from iobs import models

KEYS = ("network", "pattern", "target", "bits", "seed")
HALF, GRID = "50%", "50%+int4"
OWN = "own"  # the number of bits that holds the weights
IMAGES = {"resnet20": "resnet20", "vit_cifar": "vit"}  # networks of images, and the form of their inputs
GRAPHS = (
    (HALF, "onnx", OWN),
    (HALF, "onnx", "8"),
    (GRID, "onnx", OWN),
    (HALF, "openvino", OWN),
    (HALF, "openvino", "8"),
    (GRID, "openvino", OWN),
)
CASES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "resnet20": GRAPHS,
    "vit_cifar": GRAPHS,
    "minilm": (*GRAPHS, (HALF, "compressed-tensors", "8"), (GRID, "compressed-tensors", OWN)),
    "llama_stories260K": (
        (HALF, "gguf", "32"),
        (HALF, "gguf", OWN),
        (HALF, "gguf", "8"),
        (GRID, "gguf", OWN),
        *GRAPHS,
        (HALF, "compressed-tensors", "8"),
        (GRID, "compressed-tensors", OWN),
    ),
}


def fed(given: Tensor) -> list[Any]:
    """Arrays for the inputs of a graph: the samples and, for an encoder, the mask of whole texts."""
    return [given.numpy(), torch.ones_like(given).numpy()]


def onnx_runtime(folder: Path, given: Tensor, _: Any) -> Tensor:
    """In 32 bits: by default ONNX Runtime rounds the inputs of some products with integers to 8 bits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(
        session.run(None, dict(zip([one.name for one in session.get_inputs()], fed(given), strict=False)))[0]
    )


def openvino(folder: Path, given: Tensor, _: Any) -> Tensor:
    """In 32 bits: by default OpenVINO rounds the inputs of products with integers to 8 bits."""
    import openvino as runtime

    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = runtime.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)
    return torch.from_numpy(model(fed(given)[: len(model.inputs)])[0].copy())


def transformers(folder: Path, given: Tensor, module: torch.nn.Module) -> Tensor:
    from transformers import AutoModel, AutoModelForCausalLM

    file = {"gguf_file": "model.gguf"} if (folder / "model.gguf").exists() else {}
    kind = AutoModelForCausalLM if hasattr(module, "lm_head") else AutoModel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _tensor(kind.from_pretrained(folder, dtype=torch.float32, **file).eval()(given))


def _tensor(output: Any) -> Tensor:
    """The logits or, of an encoder, the hidden states."""
    return output if isinstance(output, Tensor) else output[0]


RUNTIMES: dict[str, tuple[str, Callable[[Path, Tensor, Any], Tensor]]] = {
    "gguf": ("transformers", transformers),
    "onnx": ("ONNX Runtime", onnx_runtime),
    "openvino": ("OpenVINO", openvino),
    "compressed-tensors": ("transformers", transformers),
}


def pruned(zoo: Any, folder: Path, minilm: Path | None, name: str, pattern: str) -> tuple[Any, Tensor]:
    """The network, pruned in one shot, and unseen inputs."""
    if name in IMAGES:
        kind = IMAGES[name]
        case = networks.image_classifier(name, kind)(zoo, folder, 0)
        model, batches, given = case.module, case.batches[:4], zoo.cifar10("test5000", kind)[0][:64]
    elif name == "minilm":
        assert minilm is not None
        case = blocks.encoder(folder, zoo, minilm)
        model, batches, given = models.load(minilm), case.batches[:12], case.batches[-1]["input_ids"]
    else:
        case = blocks.llama(folder, zoo, folder)
        model, batches = models.load(folder / name), case.batches[:8]
        texts = model.tokenizer(zoo.stories("validation")[:4], verbose=False)["input_ids"]
        given = torch.tensor([one[:64] for one in texts])
    iobs.prune(getattr(model, "module", model), batches, pattern, "one-shot", seed=0)
    return model, given


@torch.no_grad()
def measure(model: Any, given: Tensor, target: str, bits: str) -> Row:
    """Export, read and compare; bytes are those of weights and graph."""
    module = getattr(model, "module", model).eval()
    wanted = _tensor(module(given))
    runtime, read = RUNTIMES[target]
    began = time.process_time()  # no counting hooks here: torch cannot capture a graph with them
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "out"
        example = None if isinstance(model, models.LoadedModel) else given[:1]
        found = iobs.export(model, folder, target, None if bits == OWN else int(bits), example=example)
        outputs = read(folder, given, module)
    forms = Counter(one.form for one in found.matrices)
    return {
        "target": target,
        "bits": bits,
        "bytes": found.bytes,
        "dense_bytes": sum(one.nbytes for one in module.parameters()),
        "zeros": found.zeros,
        "kept": found.kept_zeros,
        "rounded": sum(not one.exact for one in found.matrices),
        "forms": dict(forms),
        "runtime": runtime,
        "difference": float((outputs - wanted).abs().max()),
        "largest": float(wanted.abs().max()),
        "processor_seconds": time.process_time() - began,
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = [
        "# Round trips of the exports",
        "",
        "`python benchmarks/exports.py`: networks pruned in one shot, written by `iobs export`, read by the named"
        " runtime on the CPU in 32 bits, on unseen inputs. Bytes are those of weights and graph; those of the "
        "dense weights in float32 stand above each table. The difference is the largest of any output entry to "
        "the pruned network in torch, and holds the rounding of weights where there is some; the largest output "
        "stands beside it. GGUF files were read by transformers, not by llama.cpp. OpenVINO and ONNX Runtime ran "
        "without their default rounding of inputs to 8 bits.",
    ]
    for name in CASES:
        own = [row for row in rows if row["network"] == name]
        if not own:
            continue
        text += ["", f"## {name}", "", f"Dense float32: {own[0]['dense_bytes']:,} bytes.", ""]
        text += ["| format | pattern | matrices | rounded | bytes | zeros kept | largest difference (of) | read by |"]
        text += ["|---" * 8 + "|"]
        for row in own:
            forms = ", ".join(f"{count} {form}" for form, count in row["forms"].items())
            found = f"{row['difference']:.1e} ({row['largest']:.0f})"
            kept = f"{row['kept']:,} of {row['zeros']:,}"
            text.append(
                f"| {row['target']} | {row['pattern']} | {forms} | {row['rounded']} | {row['bytes']:,} | {kept} "
                f"| {found} | {row['runtime']} |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2; without it the network is left out")
    options = flags.parse_args()
    torch.set_num_threads(1)
    zoo, rows = require_data(options.data), Rows("exports", KEYS, options.again)
    for name, wanted in CASES.items():
        if name == "minilm" and options.minilm is None:
            continue
        made: dict[str, tuple[Any, Tensor]] = {}
        for pattern, target, bits in wanted:
            if rows.has(network=name, pattern=pattern, target=target, bits=bits, seed=0):
                continue
            if pattern not in made:
                made[pattern] = pruned(zoo, options.data, options.minilm, name, pattern)
            rows.put({**stamp(0), "network": name, "pattern": pattern, **measure(*made[pattern], target, bits)})


if __name__ == "__main__":
    main()
