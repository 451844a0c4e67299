"""Prune one layer of the embedded language model with the family of methods, and draw their masks.

Writes images/method_masks.png and prints the table of docs/methods.md: python docs/make_method_masks.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import iobs
from iobs.core.masks import top_mask
from iobs.data import calibration_batches, open_source

LAYER = "model.layers.0.self_attn.v_proj"
PATTERN = iobs.Unstructured(0.75, per="row")
DAMPING = 0.01
IMAGE = Path(__file__).parent / "images" / "method_masks.png"


@dataclass(frozen=True)
class Problem:
    """One layer: weights (rows, d), Hessian (d, d), and gradients of the loss for each row (rows, samples, d)."""

    weight: Tensor
    hessian: Tensor
    gradients: Tensor

    def fisher(self) -> Tensor:
        """The empirical Fisher matrix of every row, damped: (rows, d, d)."""
        fisher = self.gradients.transpose(1, 2) @ self.gradients / self.gradients.shape[1]
        return torch.stack([damped(matrix) for matrix in fisher])

    def error(self, sparse: Tensor) -> float:
        """Squared change of the layer's output, relative to the output."""
        change = sparse - self.weight
        return float(energy(change, self.hessian) / energy(self.weight, self.hessian))


def energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """Squared norm of the outputs of a layer."""
    return ((weight @ hessian) * weight).sum()


def damped(matrix: Tensor) -> Tensor:
    """The matrix plus a multiple of the identity, relative to the mean of its diagonal."""
    return matrix + DAMPING * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype)


def truncated(weight: Tensor, scores: Tensor) -> Tensor:
    """The entries of largest score in each row, unchanged."""
    return torch.where(top_mask(scores, PATTERN), weight, 0.0)


def magnitude(problem: Problem) -> Tensor:
    """Keep the largest weights."""
    return truncated(problem.weight, problem.weight.abs())


def obd(problem: Problem) -> Tensor:
    """Optimal Brain Damage: diagonal Hessian, no update."""
    return truncated(problem.weight, problem.weight.square() * problem.hessian.diagonal())


def added_updates(weight: Tensor, inverse: Tensor) -> Tensor:
    """Rank all weights of one row once, and add up the update of each removal (d,)."""
    scores = (weight.square() / inverse.diagonal())[None]
    removed = ~top_mask(scores, PATTERN)[0]
    factors = torch.where(removed, weight / inverse.diagonal(), 0.0)
    return torch.where(removed, 0.0, weight - inverse @ factors)


def lobs(problem: Problem) -> Tensor:
    """Layer-wise OBS: saliencies computed once, updates added."""
    inverse = torch.linalg.inv(damped(problem.hessian))
    return torch.stack([added_updates(row, inverse) for row in problem.weight])


def woodfisher(problem: Problem) -> Tensor:
    """WoodFisher: the same with the Fisher matrix of each row."""
    inverses = torch.linalg.inv(problem.fisher())
    return torch.stack([added_updates(*pair) for pair in zip(problem.weight, inverses, strict=True)])


def woodtaylor(problem: Problem) -> Tensor:
    """WoodTaylor: the gradient moves the centre first, then one removal at a time."""
    fishers, rows = problem.fisher(), []
    for weight, fisher, gradients in zip(problem.weight, fishers, problem.gradients, strict=True):
        gradient = gradients.mean(0)
        model = iobs.Quadratic.newton(weight[None], gradient[None], short_step(weight, fisher, gradient))
        rows.append(iobs.solve(model, PATTERN, "obc", damping=0.0).weight[0])
    return torch.stack(rows)


def short_step(weight: Tensor, fisher: Tensor, gradient: Tensor) -> Tensor:
    """The Fisher matrix, damped tenfold until the Newton step is at most a tenth of the weights."""
    amount = DAMPING * fisher.diagonal().mean()
    while torch.linalg.solve(fisher, gradient).norm() > 0.1 * weight.norm():
        fisher = fisher + amount * torch.eye(len(fisher), dtype=fisher.dtype)
        amount = 10 * amount
    return fisher


def chita(problem: Problem) -> Tensor:
    """CHITA: hard thresholding of the quadratic with the Fisher matrix, then the best weights on the support."""
    rows = []
    for weight, fisher in zip(problem.weight, problem.fisher(), strict=True):
        found = hard_thresholding(weight[None], fisher)
        mask = (found != 0)[0]
        solved = torch.linalg.solve(fisher[mask][:, mask], (fisher @ weight)[mask])
        rows.append(torch.zeros_like(weight).masked_scatter(mask, solved))
    return torch.stack(rows)


def hard_thresholding(weight: Tensor, hessian: Tensor, steps: int = 200) -> Tensor:
    """Gradient steps of length 1 / L, each followed by truncation."""
    step = 1 / torch.linalg.eigvalsh(hessian)[-1]
    found = truncated(weight, weight.abs())
    for _ in range(steps):
        found = found - step * (found - weight) @ hessian
        found = truncated(found, found.abs())
    return found


def kiht(problem: Problem) -> Tensor:
    """k-IHT on the layer's own quadratic."""
    return hard_thresholding(problem.weight, problem.hessian)


def solver(name: str, refine: str | None = None) -> Callable[[Problem], Tensor]:
    """A solver of `iobs.solve` on the layer's quadratic."""

    def solved(problem: Problem) -> Tensor:
        quadratic = iobs.Quadratic.at(problem.weight, problem.hessian)
        return iobs.solve(quadratic, PATTERN, name, refine=refine, damping=DAMPING).weight

    return solved


def stochastic(problem: Problem) -> Tensor:
    """Stochastic I-OBS: the step of the paper's appendix, from the truncated weights."""
    rows = []
    for weight in problem.weight:
        quadratic = iobs.Quadratic.at(weight[None], problem.hessian)
        found = iobs.minimize(quadratic, k=len(weight) // 4, method="stochastic_iobs", max_steps=100)
        rows.append(torch.from_numpy(found.theta))
    return torch.stack(rows)


METHODS: dict[str, Callable[[Problem], Tensor]] = {
    "magnitude": magnitude,
    "OBD": obd,
    "L-OBS": lobs,
    "WoodFisher": woodfisher,
    "WoodTaylor": woodtaylor,
    "CHITA": chita,
    "OBS, OBC": solver("obc"),
    "SparseGPT": solver("sparsegpt"),
    "k-IHT": kiht,
    "stochastic I-OBS": stochastic,
    "Topk-I-OBS, refitted": solver("magnitude", "refit"),
    "I-OBS by ADMM, swaps": solver("admm", "swap"),
}


def collect(network: nn.Module, batches: list[dict[str, Tensor]]) -> Problem:
    """The layer's problem: its inputs in one forward pass, and the loss's gradient for every window of text."""
    layer = network.get_submodule(LAYER)
    assert isinstance(layer, nn.Linear)
    inputs: list[Tensor] = []
    errors: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach().double())),
        layer.register_full_backward_hook(lambda _, __, grads: errors.append(grads[0].double())),
    ]
    for batch in batches:
        tokens = batch["input_ids"]
        network(input_ids=tokens, labels=tokens).loss.mul(len(tokens)).backward()
    for handle in handles:
        handle.remove()
    x, e = torch.cat(inputs), torch.cat(errors)
    flat = x.flatten(0, 1)
    gradients = torch.einsum("ntr,ntd->rnd", e, x)
    return Problem(layer.weight.detach().double(), flat.T @ flat / len(flat), gradients)


def log_probabilities(network: nn.Module, weight: Tensor, batches: list[dict[str, Tensor]]) -> Tensor:
    """Predictions of the network on text, with other weights in the layer: (tokens, vocabulary)."""
    layer = network.get_submodule(LAYER)
    assert isinstance(layer, nn.Linear)
    old = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.copy_(weight)
        logits = [network(input_ids=batch["input_ids"]).logits.flatten(0, 1) for batch in batches]
        layer.weight.copy_(old)
    return torch.cat(logits).log_softmax(1)


def draw(masks: dict[str, Tensor], errors: dict[str, float]) -> None:
    """One figure for each mask: the first 24 rows and 48 columns, compared with the mask of smallest error."""
    reference = masks[min(errors, key=errors.__getitem__)][:24, :48]
    figure, axes = plt.subplots(4, 3, figsize=(9.6, 7.6), dpi=100)
    colours = matplotlib.colors.ListedColormap(["#ffffff", "#f2b8a0", "#d1495b", "#30475e"])
    for axis, (name, mask) in zip(axes.flat, masks.items(), strict=True):
        kept = mask[:24, :48]
        # 0: removed by both; 1: kept by the reference only; 2: kept by this method only; 3: kept by both
        axis.imshow((2 * kept.int() + reference.int()).numpy(), cmap=colours, vmin=0, vmax=3, interpolation="nearest")
        axis.set_title(f"{name}: error {errors[name]:.3f}", fontsize=10)
        axis.set(xticks=[], yticks=[])
    marks = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colours(i), edgecolor="#30475e", linewidth=0.5) for i in (3, 2, 1, 0)
    ]
    texts = ["kept, as in the best mask", "kept here only", "kept in the best mask only", "removed by both"]
    figure.legend(marks, texts, loc="lower center", ncols=4, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(IMAGE)


def main() -> None:
    """Run all methods, draw their masks, print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loaded = iobs.load()
    network = loaded.module.eval()
    batches = calibration_batches(open_source([], "calibration", loaded), loaded, samples=256, length=64, seed=0)
    heldout = calibration_batches(open_source([], "evaluation", loaded), loaded, samples=24, length=256, seed=0)
    problem = collect(network, batches)
    dense = log_probabilities(network, problem.weight, heldout)
    found = {name: method(problem) for name, method in METHODS.items()}
    errors = {name: problem.error(weight) for name, weight in found.items()}
    for name, weight in found.items():
        sparse = log_probabilities(network, weight, heldout)
        divergence = nn.functional.kl_div(sparse, dense, log_target=True, reduction="batchmean")
        sys.stdout.write(f"| {name} | {errors[name]:.3f} | {1000 * divergence:.1f} |\n")
        assert bool(((weight != 0).sum(1) <= weight.shape[1] // 4).all())
    draw({name: weight != 0 for name, weight in found.items()}, errors)


if __name__ == "__main__":
    main()
