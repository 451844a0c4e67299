"""Runs whose results are stored: every recipe on several kinds of networks, every solver, every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import menagerie
import numpy as np
import torch
from torch import Tensor, nn

import iobs
from iobs.data.sources import embedded_text
from iobs.models.streamed import StreamedStore

BEST = iobs.Recipe.preset("best")
# Without trials of rates, which take most of the time; "best, whole" has them.
STEP = replace(BEST.rounds.finetune, steps=4, lr=1e-3, optimizer="adam")
LAST = replace(BEST.finetune, steps=8, lr=1e-3, optimizer="adam", most_steps=None)
FEW_STEPS = replace(iobs.Recipe.preset("fast").blocks, steps=8)
HALF = iobs.Unstructured(0.6)


def _embedded() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The language model that comes with the package, and 12 windows of its text."""
    loaded = iobs.load()
    encoded = loaded.tokenizer([text[:400] for text in embedded_text("calibration")[:40]])["input_ids"]
    windows = torch.tensor([tokens[:24] for tokens in encoded if len(tokens) >= 24][:12])
    return loaded.module, [{"input_ids": batch, "labels": batch} for batch in windows.split(4)]


def _labelled_images(key: str | None = None) -> list[object]:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8) % 4) for _ in range(4)]
    return [{key: images, "labels": labels} for images, labels in batches] if key else [*batches]


def _convolutional() -> tuple[nn.Module, list[object]]:
    torch.manual_seed(0)
    return menagerie.SmallConvolutional().eval(), _labelled_images()


def _vision_transformer() -> tuple[nn.Module, list[object]]:
    import families  # makes torchvision importable before transformers is

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    config = families.hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4)
    return families.hf.ViTForImageClassification(config).eval(), _labelled_images("pixel_values")


def _pruned(name: str, pattern: object = HALF, recipe: str = "one-shot", **options: object) -> Iterable[Tensor]:
    model, data = NETWORKS[name]() if name in NETWORKS else menagerie.build(name)
    if name == "embedded":
        options.setdefault("include", "*.layers.1.*")  # one of four blocks, for a fourth of the time
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


def _path(estimator: object, loss: str) -> Iterable[Tensor]:
    """Coefficients of the chosen columns, for every k of a path."""
    generator = np.random.default_rng(7)
    design = generator.normal(size=(120, 12))
    linear = design[:, :3] @ [1.0, -2.0, 1.5]
    target = linear + generator.normal(size=120) if loss == "squared" else linear + generator.logistic(size=120) > 0
    fitted = estimator.fit(design, target)
    return [torch.as_tensor(np.ravel(entry["coef"])) for entry in fitted.path_]


def _packed(precision: str | None) -> Iterable[Tensor]:
    """The bytes of a packed file. Its weights are the same numbers on every machine."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    with torch.no_grad(), TemporaryDirectory() as folder:
        for parameter in model.parameters():
            values = torch.arange(parameter.numel(), dtype=torch.float32) * 0.618034 % 1
            parameter.copy_((values - 0.5).where(values > 0.5, 0.0).view_as(parameter))
        iobs.save_packed(model, Path(folder) / "packed", precision=precision)
        files = sorted(file for file in (Path(folder) / "packed").rglob("*") if file.is_file())
        return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Iterable[object]]]] = {
    "embedded": _embedded,
    "labelled convolutional": _convolutional,
    "ViT": _vision_transformer,
}
SHORT_BEST = {
    "recipe": "best",
    "rounds": iobs.Rounds(3, "auto", finetune=STEP),
    "finetune": LAST,
    "blocks": replace(BEST.blocks, steps=8, between=4, network_steps=8, sampled=0),
}
MAIN_CASES: dict[str, dict[str, object]] = {
    "one-shot": {},
    "fast": {"recipe": "fast"},
    "best": SHORT_BEST,
    "paper": {"recipe": "paper", "rounds": 3},
    "structured": {"pattern": iobs.Structured(0.3), "recipe": "fast"},
    "zeros and bits": {"pattern": iobs.Unstructured(0.5) & iobs.Grid(4)},
}
RECIPE_CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "sparsegpt": {"solver": "sparsegpt"},
    "2:4": {"pattern": iobs.NM(2, 4)},
    "dense targets": {"target": "dense"},
    "fast": {"recipe": "fast", "blocks": FEW_STEPS},
    "best": SHORT_BEST,
    "growing": {
        "recipe": "best",
        "blocks": FEW_STEPS,
        "rounds": iobs.Rounds(4, "cubic", finetune=STEP),
        "finetune": None,
    },
    "paper": {"recipe": "paper", "rounds": 3},
    "keep zeros": {"keep_zeros": True, "refine": "swap", "inputs": "dense", "target": "dense", "batch_norm": "update"},
}
TARGETLESS = {"convolutional", "shared kernel", "recurrent"}
INDIVISIBLE = {"convolutional", "shared kernel", "perceptron"}


def cases() -> dict[str, Callable[[], Iterable[Tensor]]]:
    """Name -> run that returns the tensors of its result."""
    runs: dict[str, Callable[[], Iterable[Tensor]]] = {}
    for name in NETWORKS:
        for label, options in MAIN_CASES.items():
            if (name, label) == ("embedded", "structured"):
                continue  # the traces of its wide blocks take half a minute
            runs[f"main / {name} / {label}"] = partial(_pruned, name, **options)
    # The attention alone: both choices together take half a minute for a block.
    attention = {"include": "*.layers.1.self_attn.*"}
    runs["main / embedded / zeros and bits"] = partial(_pruned, "embedded", **attention, **MAIN_CASES["zeros and bits"])
    for name in menagerie.CASES:
        for label, options in RECIPE_CASES.items():
            if (label == "paper" and name in TARGETLESS) or (label == "2:4" and name in INDIVISIBLE):
                continue
            runs[f"prune / {name} / {label}"] = partial(_pruned, name, **options)
        if name not in TARGETLESS:
            runs[f"peer / {name} / woodfisher"] = partial(_peer, name, iobs.WoodFisher(block=50))
            runs[f"peer / {name} / chita++"] = partial(_peer, name, iobs.CHITA(stages=4, block=50))
    runs["prune / perceptron / best, whole"] = partial(
        _pruned, "perceptron", recipe="best", finetune=replace(BEST.finetune, steps=100, most_steps=800)
    )
    runs["prune / transformer / rate"] = partial(_pruned, "transformer", iobs.Rate(4.0), "fast")
    for family in ("llama", "opt"):
        runs[f"low memory / {family}"] = partial(_low_memory, family)
        runs[f"low memory / {family} / held out"] = partial(_low_memory, family, holdout=0.25, solver="sparsegpt")
    for solver in ("magnitude", "wanda", "sparsegpt", "obc", "admm"):
        for pattern in (iobs.Unstructured(0.5), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4)):
            for refine in (None, "swap"):
                runs[f"solve / {solver} / {pattern!r} / {refine}"] = partial(_solved, solver, pattern, refine=refine)
    for method in ("iht", "topk_iobs", "iobs", "stochastic_iobs", "obc", "obs", "htp", "auto"):
        runs[f"minimize / {method}"] = partial(_minimised, method)
    runs["path / squared"] = partial(_path, iobs.SparseRegressor(k="cv"), "squared")
    runs["path / logistic"] = partial(_path, iobs.SparseClassifier(k="bic"), "logistic")
    for precision in (None, "bf16", "int8", "int4"):
        runs[f"packed / {precision}"] = partial(_packed, precision)
    return runs
