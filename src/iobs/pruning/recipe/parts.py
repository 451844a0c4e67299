"""Parts of a recipe as values: allocation, rounds, fine-tuning, block reconstruction, rules, solvers of whole networks.

Each checks its own settings when it is made. `iobs.pruning.baselines` has the mathematics of the solvers.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from iobs.core.patterns import Budget, Pattern, as_pattern
from iobs.errors import PatternError, ProblemError, is_a
from iobs.pruning.samples.batches import Batch
from iobs.solvers import Solver, require_known_solver

Criterion = Literal["auto", "uniform", "fisher", "search"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
Schedule = Literal["constant", "cubic", "auto"]
LossFunction = Callable[[nn.Module, Batch], Tensor]
LossName = Literal["task", "kl", "block"]  # `descent.scoring.LOSSES` defines each
DISTANCES: tuple[LossName, ...] = ("kl", "block")  # from the dense model, which needs no labels
Loss = LossName | LossFunction
Augmentation = Callable[[Batch, torch.Generator], Batch]
Optimizer = Literal["sgd", "momentum", "adam", "auto"]

MOST_EPOCHS = 10.0  # of block reconstruction with epochs="auto"; more overfit the calibration samples


def require_count(name: str, value: object, least: int) -> None:
    """Raise unless a setting is a whole number of at least `least`.

    Raises:
        ProblemError: the value is none.
    """
    if not is_a(Integral, value) or value < least:  # type: ignore[operator]
        raise ProblemError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def require_flag(name: str, value: object) -> None:
    """Raise unless a setting is True or False.

    Raises:
        ProblemError: the value is neither.
    """
    if not isinstance(value, bool):
        raise ProblemError(f"{name} must be true or false, got {value!r}.")


def require_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless a setting has one of its allowed values.

    Raises:
        ProblemError: the value is not allowed.
    """
    if value not in allowed:
        choices = ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in allowed)
        raise ProblemError(f"{name} must be one of {choices}; got {value!r}.")


def require_finetune(name: str, value: object) -> None:
    """Raise unless a setting is a `FineTune` or None.

    Raises:
        ProblemError: the value is neither.
    """
    if value is not None and not isinstance(value, FineTune):
        raise ProblemError(f"{name} must be a FineTune, or None for no steps; got {value!r}.")


@dataclass(frozen=True)
class Allocation:
    """Sparsity per layer under one global count.

    Args:
        criterion: "uniform": every layer has the same sparsity. "fisher": the sum of the damages of all layers, in nats
            of the model's loss, is least. The damage of a layer is its squared output error, solved at a few
            sparsities, weighted by the Fisher information of its rows. "search": starts from
            "fisher" and moves weights between layers while the divergence of the whole network falls. "auto": "search"
            where all Grams fit into memory, enough samples can judge, and no steps of the whole network follow, block
            by block; otherwise "fisher". It is "uniform" where the pattern fixes the count of every layer. Bits and
            whole units are divided by "fisher" or "uniform" alone, and "auto" is "fisher" there.
        least: lowest sparsity of any layer, where zeros are divided.
        most: highest sparsity of any layer; None lets a layer keep an eighth of what the mean layer keeps.
        bounds: (least, most) sparsity by name pattern of layers, shell style or "re:..."; the last match wins.
        generations: number of trials of "search"; with 0 "auto" does not search.

    Raises:
        ProblemError: an unknown criterion, or bounds outside [0, 1).
    """

    criterion: Criterion = "auto"
    least: float = 0.0
    most: float | None = None
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    generations: int = 100

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            choices = ", ".join(f'"{name}"' for name in CRITERIA)
            raise ProblemError(f"There is no allocation {self.criterion!r}; choose one of {choices}.")
        if not isinstance(self.bounds, Mapping) or not all(_is_pair(ends) for ends in self.bounds.values()):
            raise ProblemError(f"bounds must map names of layers to (least, most), got {self.bounds!r}.")
        object.__setattr__(self, "bounds", {name: tuple(ends) for name, ends in self.bounds.items()})
        ranges = [(self.least, 0.0 if self.most is None else self.most), *self.bounds.values()]
        if not all(is_a(Real, end) and 0 <= end < 1 for ends in ranges for end in ends):
            raise ProblemError(f"Bounds of an allocation are sparsities in [0, 1), got {ranges}.")
        require_count("generations", self.generations, 0)


def _is_pair(ends: object) -> bool:
    return isinstance(ends, (tuple, list)) and len(ends) == 2


def as_allocation(choice: str | Allocation) -> Allocation:
    """The allocation with that criterion; an `Allocation` is returned unchanged.

    Raises:
        ProblemError: there is no such criterion.
    """
    return choice if isinstance(choice, Allocation) else Allocation(choice)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FineTune:
    """Settings of fine-tuning: gradient steps on the pruned network (Algorithm 2, line 9).

    Args:
        lr: learning rate, or "auto": short trials after the first projection choose it on held-out samples.
        optimizer: "sgd": as in the paper. "momentum": SGD with Nesterov momentum 0.9. "adam". "auto", only with
            lr="auto": the better of "adam" and "momentum" in the same trials.
        steps: number of steps. Each step takes the next batch of the calibration data, in an endless loop. A single
            step without a batch_size takes the gradient of all data, as in the paper.
        most_steps: upper limit of the steps for cheap networks. The steps grow towards it while they cost less than
            1.25e13 multiply-adds in all. On text they grow only if `augment` samples text. None: exactly `steps`.
        loss: "task": the model's own loss, or cross-entropy with the labels. "kl": KL divergence to the dense model.
            "block": mean squared distance to the block outputs of the dense model. Or a function (model, batch) ->
            scalar.
        parameters: "prunable": train the parameters that hold pruned matrices, as in the paper. "all": train every
            parameter.
        support: "dense": removed weights may grow again, as in the paper. "fixed": train only weights that the last
            projection kept.
        decay: True: warm up over the first tenth of all steps of the run, then decay linearly to zero. Without warm-up
            the first updates of Adam have full size and undo the exact refit.
        batch_size: samples per step. None: the calibration batches unchanged. "auto": 64 samples, or a tenth of all
            samples if that is less, but at least 16; for text 2048 tokens.
        augment: (batch, torch.Generator) -> batch, applied before each use. "auto": mirror and shift images as far as
            the dense model's predictions stay the same. With the losses "kl" and "block" it also mixes two samples of
            real numbers. With these losses it samples half of the windows of text from the dense causal model. None: no
            augmentation.

    Raises:
        ProblemError: a setting is outside its range.
    """

    lr: float | Literal["auto"] = 0.01
    optimizer: Optimizer = "sgd"
    steps: int = 1
    most_steps: int | None = None
    loss: Loss = "task"
    parameters: Literal["prunable", "all"] = "prunable"
    support: Literal["dense", "fixed"] = "dense"
    decay: bool = False
    batch_size: int | Literal["auto"] | None = None
    augment: Augmentation | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.lr != "auto" and not (is_a(Real, self.lr) and 0 < self.lr < math.inf):
            raise ProblemError(f'lr must be "auto" or a finite number above zero, got {self.lr!r}.')
        require_count("steps", self.steps, 1)
        if self.most_steps is not None and not (is_a(Integral, self.most_steps) and self.most_steps >= self.steps):
            raise ProblemError(
                f"most_steps must be a whole number of at least steps={self.steps}, or None; got {self.most_steps!r}."
            )
        size = None if self.batch_size == "auto" else self.batch_size
        if size is not None and not (is_a(Integral, size) and size >= 1):
            raise ProblemError(f'batch_size must be a whole number of at least 1, "auto" or None, got {size!r}.')
        if self.augment is not None and self.augment != "auto" and not callable(self.augment):
            raise ProblemError(f'augment must be "auto", None or a function, got {self.augment!r}.')
        require_choice("optimizer", self.optimizer, get_args(Optimizer))
        if self.optimizer == "auto" and self.lr != "auto":
            raise ProblemError(
                f'optimizer="auto" is chosen together with lr="auto", got lr={self.lr}; give an optimizer too: "adam".'
            )
        require_choice("parameters", self.parameters, ("prunable", "all"))
        require_flag("decay", self.decay)
        require_choice("support", self.support, ("dense", "fixed"))
        if self.loss not in get_args(LossName) and not callable(self.loss):
            names = ", ".join(f'"{name}"' for name in get_args(LossName))
            raise ProblemError(f"loss must be {names} or a function, got {self.loss!r}.")

    @property
    def imitates(self) -> bool:
        """True if the loss is a distance to the dense model, which also gives it for samples without labels."""
        return self.loss in DISTANCES


@dataclass(frozen=True)
class Rounds:
    """Repeated projections (Algorithm 2); one round is one-shot pruning.

    Args:
        count: number of projections. The best one on held-out samples is the result.
        schedule: sparsity of the rounds. "constant": the requested sparsity in every round. "cubic": the first round
            prunes to the requested sparsity, to measure the damage. Then the dense weights are restored, and the
            sparsity grows to the requested sparsity by a cubic curve. "auto": "cubic" if the first projection does
            damage, otherwise no further rounds.
        finetune: gradient steps between two projections; None: no steps.
        data: "fixed": every round uses all samples. "fresh": each round uses a disjoint part of the samples.

    Raises:
        ProblemError: a setting is outside its range.
    """

    count: int = 1
    schedule: Schedule = "constant"
    finetune: FineTune | None = None
    data: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        require_count("rounds", self.count, 1)
        require_choice("schedule", self.schedule, get_args(Schedule))
        require_choice("data", self.data, ("fixed", "fresh"))
        require_finetune("rounds.finetune", self.finetune)
        if self.count == 1 and self.finetune is not None:
            raise ProblemError(
                "rounds.finetune lies between two rounds: give rounds.count=2 or more, or finetune= for steps after "
                "the projection."
            )
        if self.schedule == "cubic" and self.count < 3:
            raise ProblemError('schedule="cubic" needs three rounds or more: the first only measures the damage.')


@dataclass(frozen=True)
class BlockFit:
    """Settings of block reconstruction.

    Each block is projected several times with growing sparsity, with gradient steps on the block alone between two
    projections. Then a window of blocks is fitted, and slides on by one block. The fitted parameters are the surviving
    weights of pruned layers, biases and norm scales. The loss is the squared distance to the dense model's output, on
    inputs of the pruned model. A fit that raises the held-out loss is undone.

    Args:
        window: number of blocks that are fitted together. Blocks without pruned layers do not count.
        masks: number of projections of each block.
        between: gradient steps between two projections, on the block alone.
        steps: gradient steps of each window; 0 for none.
        epochs: most passes of a fit over the calibration samples, which limits `steps` and `network_steps`; None: no
            limit. "auto": 10, and on a CPU fewer for large models of text: as many as take about 1e14 multiply-adds in
            all, at least one.
        lr: learning rate of Adam, or "auto": short trials on the first block choose it on held-out samples.
        batch_size: samples per step. "auto": 1,024 tokens of text, or 16 samples of other data. Half of the short
            windows that a causal model gets are then joined, so that later positions are fitted too.
        last: loss of the last window. "kl": the KL divergence of the network's outputs. "mse": as for other windows.
        network_steps: gradient steps of the whole network after the last window, block by block; 0 for none. Where a
            recipe has them and fine-tuning too, text takes these steps alone, and other data the fine-tuning alone.
        network_lr: learning rate of these steps, or "auto": short trials choose it on held-out samples.
        sampled: windows of text per calibration window that the dense model samples. They are added to the calibration
            samples, so that many steps do not overfit few windows. Sampling needs a causal language model in memory,
            and windows of equal length without padding. "auto" is 2 where this is so, up to 2^17 tokens of calibration
            text, otherwise 0. Held-out samples stay as they are.

    Raises:
        ProblemError: a setting is outside its range.
    """

    window: int = 2
    masks: int = 3
    between: int = 50
    steps: int = 300
    epochs: float | Literal["auto"] | None = None
    lr: float | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    last: Literal["kl", "mse"] = "kl"
    network_steps: int = 0
    network_lr: float | Literal["auto"] = "auto"
    sampled: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        counts = {"window": 1, "masks": 1, "between": 0, "steps": 0, "network_steps": 0}
        counts |= {} if self.sampled == "auto" else {"sampled": 0}
        for name, least in counts.items():
            require_count(f"{name} of blocks", getattr(self, name), least)
        if self.epochs not in (None, "auto") and not (is_a(Real, self.epochs) and self.epochs > 0):  # type: ignore[operator]
            raise ProblemError(f'epochs of blocks must be a number above zero, "auto" or None, got {self.epochs!r}.')
        for name in ("lr", "network_lr"):
            rate = getattr(self, name)
            if rate != "auto" and not (is_a(Real, rate) and 0 < rate < math.inf):
                raise ProblemError(f'{name} of blocks must be "auto" or a finite number above zero, got {rate!r}.')
        if self.batch_size != "auto" and not (is_a(Integral, self.batch_size) and self.batch_size >= 1):
            raise ProblemError(
                f'batch_size of blocks must be a whole number of at least 1 or "auto", got {self.batch_size!r}.'
            )
        require_choice("last of blocks", self.last, ("kl", "mse"))

    @property
    def fits_levels(self) -> bool:
        """True if windows are also fitted between two projections, before the sparsity is reached."""
        return self.masks > 1 and self.between > 0

    def within(self, batches: int) -> BlockFit:
        """The settings with `steps` and `network_steps` within the limit of epochs.

        Args:
            batches: number of calibration batches of one step each.
        """
        epochs = MOST_EPOCHS if self.epochs == "auto" else self.epochs
        if epochs is None or epochs == math.inf:
            return self
        most = math.ceil(epochs * batches)
        return replace(self, steps=min(self.steps, most), network_steps=min(self.network_steps, most))


@dataclass(frozen=True)
class Rule:
    """Settings for the layers whose name matches; of several matching rules the last one wins, field by field.

    Layers with a pattern of their own take no part in the allocation of the other layers' sparsity.

    Args:
        match: shell pattern ("*.mlp.*"), or "re:" and a regular expression for the whole name.
        pattern: replaces the pattern of the run: a Pattern, a sparsity such as 0.3, or "2:4".
        solver: replaces the recipe's solver; a name or a solver of one layer.
        dense: leave these layers dense.

    Raises:
        ProblemError: the rule sets nothing, contradicts itself, or its expression or solver does not exist.
        PatternError: the pattern does not exist, or is a budget.
    """

    match: str
    pattern: Pattern | float | str | None = None
    solver: str | Solver | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise ProblemError(f"match of a rule must be a name pattern, got {self.match!r}.")
        require_flag(f"dense of the rule {self.match!r}", self.dense)
        if self.dense and (self.pattern is not None or self.solver is not None):
            raise ProblemError(f"The rule {self.match!r} says dense=True and a pattern or solver; give one of them.")
        if not self.dense and self.pattern is None and self.solver is None:
            raise ProblemError(f"The rule {self.match!r} changes nothing; give pattern=, solver= or dense=True.")
        if self.pattern is not None:
            object.__setattr__(self, "pattern", copy(as_pattern(self.pattern)))  # told from the run's by identity
        if isinstance(self.pattern, Budget):
            raise PatternError(
                f"The rule {self.match!r} has a budget, which is of the whole network; a rule gives each of its layers "
                'one pattern, such as "rate:3.0". Give the budget as the pattern of the run.'
            )
        if self.solver is not None:
            require_known_solver(self.solver)
        try:
            re.compile(self.expression)
        except re.error as error:
            raise ProblemError(f"{self.match!r} is not a regular expression: {error}.") from None

    @property
    def expression(self) -> str:
        """The regular expression that a layer's whole name must match."""
        return self.match[3:] if self.match.startswith("re:") else fnmatch.translate(self.match)

    def matches(self, name: str) -> bool:
        """True if the rule holds for the layer of this name."""
        return re.fullmatch(self.expression, name) is not None


@dataclass(frozen=True)
class NetworkSolver:
    """A solver of one quadratic over the weights of all layers, under one global count.

    Args:
        stages: number of prunings on the way to the requested sparsity. Each takes new gradients; the density falls by
            equal factors from 0.9.
        damping: added to the diagonal of the empirical Fisher matrix.
        block: least number of weights in a diagonal block of the Fisher matrix; every layer is cut evenly.

    Raises:
        ProblemError: a setting is not positive.
    """

    stages: int = 1
    damping: float = 1e-4
    block: int = 500

    def __post_init__(self) -> None:
        counts = is_a(Integral, self.stages, self.block) and self.stages >= 1 and self.block >= 1
        if not counts or not is_a(Real, self.damping) or self.damping <= 0:
            raise ProblemError(
                f"stages, damping and block must be positive, got {self.stages}, {self.damping} and {self.block}."
            )


class GlobalMagnitude(NetworkSolver):
    """Keep the largest weights of the whole network, unchanged."""


class WoodFisher(NetworkSolver):
    """Rank weights one by one by w^2 / (2 [F^-1]_ii) and add up their updates (Singh and Alistarh, 2020)."""


class CBS(NetworkSolver):
    """Search the mask by swaps, interactions included, then update jointly (Yu et al., 2022)."""


@dataclass(frozen=True)
class CHITA(NetworkSolver):
    """Sparse least squares in the gradients; `stages=15` is CHITA++ (Benbaki et al., 2023).

    Args:
        searches: limit of searches for a better mask in every stage. Each takes a projected gradient step with a line
            search from the exact solution on the mask, and solves again. Without a search the mask is often that of
            magnitude, as in the best one-shot runs of the authors' code on ResNet-20. A search lowers the quadratic
            loss, and may lower the accuracy.

    Raises:
        ProblemError: as `NetworkSolver`, or `searches` is negative.
    """

    searches: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("searches", self.searches, 0)


NETWORK_SOLVERS: dict[str, type[NetworkSolver]] = {
    "global-magnitude": GlobalMagnitude,
    "woodfisher": WoodFisher,
    "cbs": CBS,
    "chita": CHITA,
}
