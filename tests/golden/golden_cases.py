"""Runs whose resulting bits are stored: every recipe on the small menagerie, every solver, every method."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import menagerie
import torch
from torch import Tensor

import iobs
from iobs.models.streamed_store import StreamedStore

BEST = iobs.Recipe.preset("best")
STEP = replace(BEST.rounds.finetune, steps=6)
LAST = replace(BEST.finetune, steps=30, most_steps=None)
HALF = iobs.Unstructured(0.6)


def _pruned(name: str, pattern: object = HALF, recipe: str = "one-shot", **options: object) -> Iterable[Tensor]:
    model, data = menagerie.build(name)
    iobs.prune(model, data, pattern, recipe, **options)
    return model.state_dict().values()


def _peer(name: str, solver: object) -> Iterable[Tensor]:
    model, data = menagerie.build(name)
    iobs.prune(model, data, 0.6, iobs.Recipe(solver=solver), holdout=0.0)
    return model.state_dict().values()


def _low_memory(family: str, **options: object) -> Iterable[Tensor]:
    import families
    from safetensors.torch import load_file

    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        families.LANGUAGE_MODELS[family][0]().eval().save_pretrained(Path(folder) / "model")
        output = Path(folder) / "out"
        with StreamedStore.open(Path(folder) / "model", output, arithmetic=torch.float32) as store:
            iobs.prune(store, families.language_batches(), HALF, "one-shot", **{"holdout": 0.0, **options})
        return load_file(output / "model.safetensors").values()


def _quadratic() -> iobs.Quadratic:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    return iobs.Quadratic.at(torch.randn(12, 24, generator=generator).double(), (inputs.T @ inputs / 200).double())


def _solved(solver: str, pattern: object, **options: object) -> Iterable[Tensor]:
    return [iobs.solve(_quadratic(), pattern, solver, damping=0.01, **options).weight]


def _minimised(method: str) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(5)
    design = torch.randn(80, 20, generator=generator, dtype=torch.float64)
    target = design[:, :4] @ torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    target = target + 0.1 * torch.randn(80, generator=generator, dtype=torch.float64)
    return [torch.as_tensor(iobs.minimize(iobs.objectives.LeastSquares(design, target), 4, method=method).theta)]


RECIPE_CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "sparsegpt": {"solver": "sparsegpt"},
    "2:4": {"pattern": iobs.NM(2, 4)},
    "dense targets": {"target": "dense"},
    "fast": {"recipe": "fast"},
    "best": {"recipe": "best", "rounds": iobs.Rounds(3, "auto", finetune=STEP), "finetune": LAST},
    "growing": {
        "recipe": "best",
        "rounds": iobs.Rounds(4, "cubic", finetune=replace(STEP, lr=1e-3, optimizer="adam")),
        "finetune": None,
    },
    "paper": {"recipe": "paper", "rounds": 3},
    "keep zeros": {"keep_zeros": True, "refine": "swap", "inputs": "dense", "batch_norm": "update"},
}
TARGETLESS = {"convolutional", "shared kernel", "recurrent"}
INDIVISIBLE = {"convolutional", "shared kernel", "perceptron"}


def cases() -> dict[str, Callable[[], Iterable[Tensor]]]:
    """Name -> run that returns the tensors to hash."""
    found: dict[str, Callable[[], Iterable[Tensor]]] = {}
    for name in menagerie.CASES:
        for label, options in RECIPE_CASES.items():
            if (label == "paper" and name in TARGETLESS) or (label == "2:4" and name in INDIVISIBLE):
                continue
            found[f"prune / {name} / {label}"] = lambda name=name, options=options: _pruned(name, **options)
        if name not in TARGETLESS:
            found[f"peer / {name} / woodfisher"] = lambda name=name: _peer(name, iobs.WoodFisher(block=50))
            found[f"peer / {name} / chita++"] = lambda name=name: _peer(name, iobs.CHITA(stages=4, block=50))
    found["prune / perceptron / best, whole"] = lambda: _pruned("perceptron", recipe="best")
    for family in ("llama", "opt"):
        found[f"low memory / {family}"] = lambda family=family: _low_memory(family)
        found[f"low memory / {family} / held out"] = lambda family=family: _low_memory(
            family, holdout=0.25, solver="sparsegpt"
        )
    for solver in ("magnitude", "wanda", "sparsegpt", "obc", "admm"):
        for pattern in (iobs.Unstructured(0.5), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4)):
            for refine in (None, "swap"):
                found[f"solve / {solver} / {pattern} / {pattern!r} / {refine}"] = (
                    lambda solver=solver, pattern=pattern, refine=refine: _solved(solver, pattern, refine=refine)
                )
    for method in ("iht", "topk_iobs", "iobs", "stochastic_iobs", "obc", "obs", "htp", "auto"):
        found[f"minimize / {method}"] = lambda method=method: _minimised(method)
    return found


def digest(run: Callable[[], Iterable[Tensor]]) -> str:
    """Hash of the tensors of a run, or the name of the error that it ends with."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensors = [tensor.detach().cpu().contiguous().view(-1) for tensor in run()]
        except iobs.errors.IOBSError as error:
            return type(error).__name__
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
