"""Recipes: everything that the user chooses for a run, as frozen values without tensors, paths or results.

What a run decides itself is in `workspace.Decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, get_args

from iobs.errors import ProblemError, is_a, shown
from iobs.pruning.recipe import text
from iobs.pruning.recipe.parts import CBS as CBS
from iobs.pruning.recipe.parts import CHITA as CHITA
from iobs.pruning.recipe.parts import NETWORK_SOLVERS as NETWORK_SOLVERS
from iobs.pruning.recipe.parts import Allocation as Allocation
from iobs.pruning.recipe.parts import Augmentation as Augmentation
from iobs.pruning.recipe.parts import BlockFit as BlockFit
from iobs.pruning.recipe.parts import FineTune as FineTune
from iobs.pruning.recipe.parts import GlobalMagnitude as GlobalMagnitude
from iobs.pruning.recipe.parts import Loss as Loss
from iobs.pruning.recipe.parts import LossFunction as LossFunction
from iobs.pruning.recipe.parts import NetworkSolver as NetworkSolver
from iobs.pruning.recipe.parts import Optimizer as Optimizer
from iobs.pruning.recipe.parts import Rounds as Rounds
from iobs.pruning.recipe.parts import Rule as Rule
from iobs.pruning.recipe.parts import WoodFisher as WoodFisher
from iobs.pruning.recipe.parts import as_allocation as as_allocation
from iobs.pruning.recipe.parts import require_choice, require_finetune
from iobs.pruning.report import JsonObject
from iobs.solvers import REFINEMENTS, SOLVERS, Refinement, Solver, require_known_refinement, require_known_solver
from iobs.solvers.admm import ADMM
from iobs.solvers.families import GRID_SOLVERS, UNIT_SOLVERS
from iobs.solvers.magnitude import Magnitude

TargetName = Literal["layer", "dense", "residual", "model"]  # `layerwise.projection.TARGETS` defines each


class Changes(TypedDict, total=False):
    """Fields of a recipe that `iobs.prune` and `Recipe.but` take as keywords."""

    solver: str | Solver | NetworkSolver
    refine: str | Refinement | None
    damping: float
    allocation: str | Allocation
    target: TargetName
    curvature: Literal["layer", "fisher", "auto"]
    inputs: Literal["pruned", "dense"]
    rounds: int | Rounds
    finetune: FineTune | None
    rules: tuple[Rule, ...]
    batch_norm: Literal["keep", "update"]
    keep_zeros: bool
    depthwise: bool
    bias: Literal["auto", "keep", "refit"]
    blocks: BlockFit | None


class Named(Protocol):
    """Anything with a name that rules match, such as a layer."""

    @property
    def name(self) -> str:
        """The name of the layer."""
        ...


N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class LayerSettings:
    """Settings of the solve of one layer: what a recipe and its rules say of it.

    Args:
        solver: of the layer, or of the whole network, which solves no single layer.
        refine: improves its solution; a name, a `Refinement`, or None.
        damping: added to the diagonal of its Hessian, relative to the mean of this diagonal.
        keep_zeros: True: entries that are zero in the given model stay zero.
        reads_weights_only: True if mask and weights depend on no data.
    """

    solver: str | Solver | NetworkSolver = "admm"
    refine: str | Refinement | None = None
    damping: float = 0.01
    keep_zeros: bool = False
    reads_weights_only: bool = False


@dataclass(frozen=True)
class Recipe:
    """All settings that say how to prune, independent of the model, the data and the machine.

    Args:
        solver: for each layer: "admm", "sparsegpt", "obc", "lobs", "nettrim", "magnitude", "wanda", "exact", or a
            solver with options, such as `ADMM(budget="best")` or `SparseGPT(block=64)`. For the whole network at
            once: "global-magnitude", "woodfisher", "cbs", "chita", or a solver with options, such as
            `CHITA(stages=15)`.
        refine: improves each layer's solution: "refit", "swap", a `Refinement`, or None.
        damping: added to the diagonal of each layer's Hessian, relative to the mean of this diagonal.
        allocation: how sparsity is divided among the layers: "uniform", "fisher", "search", "auto", or an
            `Allocation` with bounds.
        target: the output that each layer should match. "layer": the output of its own current weights on its own
            inputs, as in the paper. "dense": the output of the layer in the dense model. "residual": as "dense", but a
            layer whose output is added to a residual matches the sum of both; later rounds have the target "model".
            "model": its output in the model at the start of the round, dense in the first round and fine-tuned later.
        curvature: the quadratic of each layer. "layer": the squared error of its output. "fisher": rows are weighted by
            their Fisher information about the model's outputs where they compete for entries or bits, and coded
            integers, and with ADMM the weights on the mask, are those that are best for all rows together. "auto":
            "fisher" for models of text. On pictures weights of rows gain nothing, or lose (LOG.md).
        inputs: inputs of each layer: "pruned": through the pruned layers before it; "dense": from the dense model.
        rounds: repeated projections. `but` and `iobs.prune` also take a number of rounds, see `but`.
        finetune: gradient steps on the final support, after the last round; None: no steps.
        rules: settings for single layers by name.
        batch_norm: "keep" the running statistics, or "update" them on the calibration data after every projection.
        keep_zeros: True: entries that are zero in the given model stay zero, to prune a pruned model further.
        depthwise: True: also prune depthwise convolutions.
        bias: "keep" the biases of pruned layers, or "refit" them, so that the mean output of each layer is that of its
            target. "auto" is "refit" with target="residual", otherwise "keep".
        blocks: block reconstruction in the first round, with projections of its own; None: no reconstruction. Rounds
            after it have the target "model".

    Raises:
        ProblemError: a setting is unknown or outside its range, or two settings contradict each other.
    """

    solver: str | Solver | NetworkSolver = "admm"
    refine: str | Refinement | None = None
    damping: float = 0.01
    allocation: str | Allocation = "uniform"
    target: TargetName = "layer"
    curvature: Literal["layer", "fisher", "auto"] = "layer"
    inputs: Literal["pruned", "dense"] = "pruned"
    rounds: Rounds = field(default_factory=Rounds)
    finetune: FineTune | None = None
    rules: tuple[Rule, ...] = ()
    batch_norm: Literal["keep", "update"] = "keep"
    keep_zeros: bool = False
    depthwise: bool = False
    bias: Literal["auto", "keep", "refit"] = "auto"
    blocks: BlockFit | None = None

    def __post_init__(self) -> None:
        if not is_a(Real, self.damping):
            raise ProblemError(f"damping must be a number, got {shown(self.damping)}.")
        if not 0 <= self.damping < math.inf:
            raise ProblemError(f"damping must not be negative or infinite, got {self.damping}; 0.01 is usual.")
        if not isinstance(self.rounds, Rounds):
            raise ProblemError(f"rounds must be a Rounds or, in .but(), a number of rounds; got {self.rounds!r}.")
        require_finetune("finetune", self.finetune)
        if not isinstance(self.rules, (tuple, list)) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ProblemError(f"rules must be a tuple of iobs.Rule, got {self.rules!r}.")
        object.__setattr__(self, "rules", tuple(self.rules))
        self._require_solvers()
        for name, allowed in _CHOICES.items():
            require_choice(name, getattr(self, name), allowed)
        if self.target == "model" and self.inputs == "dense":
            raise ProblemError(
                'target="model" matches outputs on the pruned model\'s inputs; with inputs="dense" use "layer".'
            )
        if self.target == "residual" and self.inputs == "dense":
            raise ProblemError(
                'target="residual" corrects the drift of the pruned model; with inputs="dense" use "layer" or "dense".'
            )
        if self.blocks is not None:
            self._require_blocks()
        as_allocation(self.allocation)
        if self.network_solver is None:
            self._require_known_names()
        else:
            self._require_no_ignored_fields()

    @property
    def network_solver(self) -> NetworkSolver | None:
        """The solver, if it prunes all layers together; None if it prunes single layers."""
        if isinstance(self.solver, str) and self.solver in NETWORK_SOLVERS:
            return NETWORK_SOLVERS[self.solver]()
        return self.solver if isinstance(self.solver, NetworkSolver) else None

    @property
    def division(self) -> Allocation:
        """The division of sparsity among layers: none with a solver of the whole network, which has one count."""
        return as_allocation("uniform" if self.network_solver is not None else self.allocation)

    @property
    def refits_biases(self) -> bool:
        """True if the biases of pruned layers are refitted."""
        return self.bias == "refit" or (self.bias == "auto" and self.target == "residual")

    @property
    def of_later_rounds(self) -> Recipe:
        """The recipe of all rounds but the first: they project the current weights, which hold all gradient steps."""
        later = self.blocks is not None or self.target == "residual"
        return self.but(blocks=None, target="model") if later else self

    @property
    def reads_weights_only(self) -> bool:
        """True if masks and weights depend on no data: magnitude in every layer, and nothing is refitted."""
        solvers = [self.solver, *(rule.solver for rule in self.rules if rule.solver is not None)]
        plain = self.refine is None and self.target == "layer" and self.blocks is None and not self.keep_zeros
        return plain and not self.refits_biases and all(is_magnitude(solver) for solver in solvers)

    @property
    def may_weigh_rows(self) -> bool:
        """True if rows are weighted by their Fisher information, at least in models of text."""
        return self.curvature != "layer" and self.network_solver is None and not self.reads_weights_only

    def weighs_rows_of(self, positions: float) -> bool:
        """True if rows are weighted, for samples with this many positions: more than one are those of text."""
        return self.may_weigh_rows and (self.curvature == "fisher" or positions > 1)

    def with_quick_solver(self) -> Recipe:
        """The recipe with the fast form of ADMM in its place, for solves that only measure; other solvers stay."""
        slow = self.solver == "admm" or isinstance(self.solver, ADMM)
        return replace(self, solver=ADMM("fast")) if slow else self

    @property
    def compares(self) -> bool:
        """True if losses of the model are needed: a published one-shot pruner of a whole model measures none."""
        return self.network_solver is None or self.rounds.count > 1 or self.finetune is not None

    @property
    def steps(self) -> list[FineTune]:
        """The gradient steps between the rounds and after the last one, as far as there are any."""
        return [step for step in (self.rounds.finetune, self.finetune) if step is not None]

    @property
    def changes_all(self) -> bool:
        """True if a run changes other parameters than the pruned matrices and their biases."""
        return self.blocks is not None or any(step.parameters == "all" for step in self.steps)

    @property
    def needs_dense_model(self) -> bool:
        """True if a run of a model in memory needs a copy of the dense model."""
        if not self.compares:
            return False
        return (
            self.target != "layer"
            or self.blocks is not None
            or self.inputs == "dense"
            or self.rounds.schedule == "auto"
            or self.rounds.finetune is None  # rounds are then compared by the divergence from the dense model
            or any(step.imitates for step in self.steps)
            or any(step.augment == "auto" for step in self.steps)  # "auto" compares predictions of the dense model
        )

    def for_layer(self, name: str) -> LayerSettings:
        """The settings of one layer: the last matching rule with a solver replaces the solver."""
        solvers = [rule.solver for rule in self.rules if rule.solver is not None and rule.matches(name)]
        recipe = replace(self, solver=solvers[-1]) if solvers else self
        return LayerSettings(recipe.solver, recipe.refine, recipe.damping, recipe.keep_zeros, recipe.reads_weights_only)

    def for_layers(self, layers: Iterable[N]) -> dict[N, LayerSettings]:
        """The settings of layers."""
        return {layer: self.for_layer(layer.name) for layer in layers}

    def _require_solvers(self) -> None:
        """Raise unless solver and refinement are names, or objects of the right kind.

        Raises:
            ProblemError: one of them is of another kind, or unknown.
        """
        for name, kinds in (("solver", (*REFINEMENTS.values(),)), ("refine", (*SOLVERS.values(),))):
            value = getattr(self, name)
            if isinstance(value, kinds) or not (callable(value) or isinstance(value, (str, NetworkSolver, NoneType))):  # type: ignore[arg-type]
                raise ProblemError(f"{name} must be a name or an object with its options, got {shown(value)}.")
        if self.solver is None or isinstance(self.refine, NetworkSolver):
            raise ProblemError("solver must be a name or a solver, and refine a name, a refinement or None.")

    def _require_known_names(self) -> None:
        """Raise unless there are a solver of single layers and a refinement of these names.

        Raises:
            ProblemError: a name is unknown.
        """
        assert not isinstance(self.solver, NetworkSolver)
        try:
            require_known_solver(self.solver)
        except ProblemError as error:
            others = ", ".join(sorted(NETWORK_SOLVERS))
            raise ProblemError(
                f"{str(error).rstrip('.')}; or one of the whole network: {others}; or of whole units: "
                f"{', '.join(UNIT_SOLVERS)}."
            ) from None
        require_known_refinement(self.refine)

    def _require_no_ignored_fields(self) -> None:
        """Raise if a field is set that a solver of the whole network ignores."""
        usual = Recipe(), PRESETS["one-shot"]
        read = {"solver", "damping", "rounds", "finetune", "batch_norm", "depthwise"}
        ignored = [field.name for field in fields(self) if field.name not in read]
        changed = [name for name in ignored if getattr(self, name) not in [getattr(recipe, name) for recipe in usual]]
        if changed:
            raise ProblemError(
                f"{', '.join(changed)}: not with a solver of the whole network, which has one count and one quadratic "
                'for all layers. Start from Recipe(), or from the preset "one-shot".'
            )

    def _require_blocks(self) -> None:
        """Raise unless the settings of block reconstruction go with the others.

        Raises:
            ProblemError: they are of another kind, or another setting contradicts them.
        """
        if not isinstance(self.blocks, BlockFit):
            raise ProblemError(f"blocks must be a BlockFit, or None for no reconstruction; got {self.blocks!r}.")
        if self.target == "model" or self.inputs == "dense":
            raise ProblemError(
                'blocks= fits the dense outputs on pruned inputs: target must be "residual", "dense" or "layer", and '
                'inputs "pruned"; or leave them out with blocks=None (--set blocks=null).'
            )

    @classmethod
    def preset(cls, name: str) -> Recipe:
        """One of the recipes "one-shot", "fast", "best" and "paper".

        Raises:
            ProblemError: there is no such recipe.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ProblemError(
                f"There is no recipe {shown(name)}; give {', '.join(PRESETS)}, the path of a .yaml file, or an "
                "iobs.Recipe."
            )
        return PRESETS[name]

    def but(self, **changes: Unpack[Changes]) -> Recipe:
        """A changed copy of the recipe.

        `rounds` may be a number: it changes the count and keeps the schedule and the fine-tuning between the rounds. If
        the recipe has only one round, it takes the schedule and the fine-tuning of "best".

        Raises:
            ProblemError: an unknown field, or a setting outside its range.
        """
        names = [field.name for field in fields(self)]
        unknown = sorted(changes.keys() - set(names))
        if unknown:
            raise ProblemError(f"A recipe has no field {', '.join(unknown)}; the fields are {', '.join(names)}.")
        values: dict[str, Any] = dict(changes)
        if "rounds" in values and not isinstance(values["rounds"], Rounds):
            count = values.pop("rounds")
            changed = replace(self, **values)
            return replace(changed, rounds=changed._rounds(count))
        return replace(self, **values)

    def _rounds(self, count: int) -> Rounds:
        """The rounds of the recipe with another count, as `but` describes."""
        if is_a(Integral, count) and count > 1 and self.rounds.count == 1 and self.network_solver is None:
            return replace(Recipe.preset("best").rounds, count=count)
        if is_a(Real, count) and count == 1:
            return Rounds(data=self.rounds.data)
        return replace(self.rounds, count=count)

    def to_dict(self, complete: bool = False) -> JsonObject:
        """The recipe in plain types, ready for JSON and YAML.

        Args:
            complete: list fields with their default value too.

        Raises:
            ProblemError: a field is a function or an object that plain types cannot express.
        """
        return text.to_dict(self, complete)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Recipe:
        """The recipe from the result of `to_dict`; `rounds` may also be a number, as in `but`.

        Raises:
            ProblemError: an unknown key (the message names it), or a setting outside its range.
        """
        rounds = values.get("rounds")
        if not isinstance(rounds, Real):
            return text.from_dict(cls, values)
        others = {name: value for name, value in values.items() if name != "rounds"}
        return text.from_dict(cls, others).but(rounds=rounds)  # type: ignore[arg-type]  # `but` checks it

    def to_yaml(self, complete: bool = False) -> str:
        """The recipe as YAML; arguments and errors as in `to_dict`."""
        return text.dump_yaml(text.to_dict(self, complete))

    @classmethod
    def from_yaml(cls, source: str | Path) -> Recipe:
        """A recipe from a YAML file (a `Path`) or from YAML text (a `str`); the section `run` is ignored.

        Raises:
            ProblemError: the text is no recipe, or the file cannot be read.
        """
        values = text.read_yaml(source)
        return cls.from_dict({name: value for name, value in values.items() if name != text.RUN})

    def __str__(self) -> str:
        """The fields that differ from the defaults, a line each."""
        return text.recipe_as_text(self)


def is_magnitude(solver: object) -> bool:
    """True if a solver keeps the largest weights of a layer, and changes none."""
    return solver == "magnitude" or isinstance(solver, Magnitude)


def as_recipe(recipe: Recipe | str | Path) -> Recipe:
    """A recipe from a preset's name, the path of a YAML file, or a recipe.

    Raises:
        ProblemError: the value is none of these.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith((".yaml", ".yml"))):
        return Recipe.from_yaml(Path(recipe))
    return Recipe.preset(recipe)


_CHOICES: dict[str, tuple[object, ...]] = {
    "target": get_args(TargetName),
    "curvature": ("layer", "fisher", "auto"),
    "inputs": ("pruned", "dense"),
    "batch_norm": ("keep", "update"),
    "keep_zeros": (False, True),
    "depthwise": (False, True),
    "bias": ("auto", "keep", "refit"),
}


_ONE_SHOT = Recipe(allocation=Allocation("auto", generations=0), target="residual", curvature="auto")
_DISTILLATION = FineTune(
    lr="auto", optimizer="auto", steps=25, loss="kl", decay=True, batch_size="auto", augment="auto"
)

# "one-shot" prunes every layer once; one backward pass divides the sparsity. "fast" adds a short block reconstruction.
# "best" reconstructs blocks with moving masks, and takes steps of the whole network. It grows the sparsity over rounds
# where the first projection does damage, and fine-tunes on the final support. What is "auto" is found on the
# calibration data (LOG.md has the measurements). "paper" is Algorithm 2 to the letter.
PRESETS: dict[str, Recipe] = {
    "one-shot": _ONE_SHOT,
    "fast": replace(_ONE_SHOT, blocks=BlockFit(masks=1, steps=100, epochs=1.0)),
    "best": replace(
        _ONE_SHOT,
        allocation="auto",
        blocks=BlockFit(masks=4, network_steps=1200, epochs="auto", sampled="auto"),
        rounds=Rounds(5, "auto", finetune=replace(_DISTILLATION, support="fixed")),
        finetune=replace(_DISTILLATION, steps=600, most_steps=4800, parameters="all"),
    ),
    "paper": Recipe(
        solver="sparsegpt", rounds=Rounds(10, finetune=FineTune(lr=0.01, optimizer="sgd", steps=1, loss="task"))
    ),
}

# Recipes for patterns that remove whole units.
_OF_ENTRIES = tuple(kind for kind in (*SOLVERS.values(), *GRID_SOLVERS.values()) if isinstance(kind, type))
# One projection that repairs the residual stream, with the bias as a free column. "best" adds gradient steps on the KL
# divergence to the dense network, in eval mode. Batch norms keep their statistics, which the exact refit relies on.
_UNITS_ONE_SHOT = Recipe(target="residual", damping=1e-3)
_UNITS_FINETUNE = FineTune(
    lr="auto",
    optimizer="adam",
    steps=300,
    most_steps=1500,
    loss="kl",
    decay=True,
    batch_size="auto",
    augment="auto",
    parameters="all",
    support="fixed",
)
STRUCTURED = {
    "one-shot": _UNITS_ONE_SHOT,
    "fast": replace(_UNITS_ONE_SHOT, allocation="auto"),
    "best": replace(_UNITS_ONE_SHOT, allocation="auto", finetune=_UNITS_FINETUNE),
}


def as_structured_recipe(recipe: Recipe | str | Path) -> Recipe:
    """The recipe of a run that removes units: "one-shot", "fast" or "best" for units, a `Recipe`, or a YAML file.

    Raises:
        ProblemError: the recipe has no form for units.
    """
    if isinstance(recipe, str) and recipe in STRUCTURED:
        return STRUCTURED[recipe]
    if recipe == "paper":
        raise ProblemError(f'The recipe "{recipe}" has no form for whole units: use "fast" or "best".')
    return as_recipe(recipe)


def require_structured(recipe: Recipe) -> None:
    """Raise unless a recipe can remove whole units.

    Raises:
        ProblemError: it names a setting or a solver that only zeros have.
    """
    reasons = {
        "rounds": recipe.rounds.count > 1,
        "blocks": recipe.blocks is not None,
        "rules": bool(recipe.rules),
        "keep_zeros": recipe.keep_zeros,
        "a solver of the whole network": recipe.network_solver is not None,
    }
    refused = [name for name, applies in reasons.items() if applies]
    if refused:
        raise ProblemError(f"Structured removes units once, layer after layer; leave out {', '.join(refused)}.")
    solver, names = recipe.solver, ", ".join(UNIT_SOLVERS)
    if solver not in ("admm", *UNIT_SOLVERS) if isinstance(solver, str) else isinstance(solver, _OF_ENTRIES):
        raise ProblemError(f"The solver {solver!r} does not choose whole units; leave it out, or give one of {names}.")
