"""Algorithm 2 for any network: project every layer, measure, step, and again; the best projection is the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.prune import batches as data_batches
from iobs.prune.allocation import Allocation, as_allocation, require_room
from iobs.prune.batches import Batch
from iobs.prune.distributed import current
from iobs.prune.faithful import multiplied_as_they_are
from iobs.prune.layers import select
from iobs.prune.network import evaluating, keeping_buffers, seeded
from iobs.prune.progress import Progress, Quiet
from iobs.prune.record import Report
from iobs.prune.run import Run
from iobs.prune.settings import Settings, resolve
from iobs.prune.spread import require_fit
from iobs.prune.steps import GradientStep
from iobs.prune.workbench import Workbench
from iobs.solvers import Budget, Refinement, Solver


def prune(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor | Mapping[str, Any],
    pattern: Pattern,
    *,
    solver: str | Solver | None = None,
    budget: Budget | None = None,
    refine: str | Refinement | None = None,
    damping: float | None = None,
    rounds: int | None = None,
    schedule: Literal["constant", "cubic", "auto"] | None = None,
    step: GradientStep | Literal[False] | None = None,
    polish: GradientStep | Literal[False] | None = None,
    recipe: Literal["best", "fast", "paper"] | None = None,
    allocation: str | Allocation | None = None,
    target: Literal["current", "dense", "network"] | None = None,
    inputs: Literal["pruned", "dense"] | None = None,
    data: Literal["fixed", "fresh"] | None = None,
    include: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    depthwise: bool | None = None,
    keep_zeros: bool | None = None,
    holdout: float | None = None,
    batch_norm: Literal["keep", "update"] | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
) -> Report:
    """Prune a network in place.

    Args:
        model: any `nn.Module` on any device. If the run fails or is interrupted its weights are as before.
        batches: calibration data: tensors, tuples (inputs, targets), or mappings as Hugging Face models take.
        pattern: `Unstructured` or `NM`, for every pruned layer; with an allocation (recipes "fast" and "best") a
            sparsity is the share of all pruned layers together. Layers left dense are not counted.
        solver: of the layer problems: "admm" (default), "sparsegpt", "obc", "magnitude", "wanda", "exact", or any
            `iobs.solvers.Solver`.
        budget: of "admm" alone, and no recipe: "fast", "default" or "best", time against error.
        refine: "refit", "swap" or None: improves each layer's solution.
        damping: relative to the mean of the Hessian's diagonal; 0.01 by default.
        rounds: projections, 1 by default. Between them `step` is taken; the best round by held-out loss wins.
        schedule: sparsity of the rounds: "constant" (default), or "cubic" growth towards the asked one. Cubic rounds
            begin with a projection to the asked sparsity, which stays a candidate, and then start again from the dense
            weights. "auto" grows only where that first projection does damage, or else goes straight to the polish.
        step: gradient steps between rounds; False takes a recipe's away.
        polish: gradient steps on the final support, after the last round; False takes a recipe's away.
        recipe: "best", "fast" or "paper" sets solver, rounds, step, target and so on together; what is given
            explicitly overrides it. More than one round with neither recipe nor step means "best".
        allocation: how the sparsity is spread over layers: "uniform" (default) gives every layer the same; "error",
            "fisher", "kl" and "evolve" keep the global count and spend it where it matters, "auto" as well as the data
            allows; or an `Allocation` with bounds.
        target: a layer imitates its "current" weights on its own inputs (default, as the paper), or the "dense"
            network's output on inputs that have not drifted, or that of the "network" as it is when the sweep begins:
            dense in the first, with the gradient steps in it later.
        inputs: a layer's inputs come through the "pruned" layers before it (default), or from the "dense" network.
        data: "fixed" (default): every round sees all data; "fresh": each round sees its own share.
        include: name patterns of layers to prune, shell style or "re:..."; all by default.
        skip: name patterns of layers that stay dense.
        depthwise: prune depthwise convolutions too.
        keep_zeros: entries that are zero in the given network stay zero; a network is pruned further.
        holdout: share of the samples kept aside, 0.1 by default: they choose the best round, damp the
            correction of drift and judge the allocation.
        batch_norm: "keep" the statistics (default), or "update" them on the calibration data after every projection.
        seed: of the split, the order of steps and all else that is drawn.
        progress: is told how the run is getting on.
        checkpoint: a directory where everything dear is kept as soon as it is computed. A run that was killed ends,
            started again with the same arguments, in the same bits. It is the caller's to remove.

    Returns:
        The report: settings, every round with every layer, the final audit.

    Raises:
        ProblemError: a setting outside its range, or a loss without a gradient.
        CalibrationError: no data, or data that does not fit.
        LayerSelectionError: a name pattern matches nothing.
        ModelError: the model is no module, or cannot be copied.
        PatternError: the pattern does not fit a layer, or an allocation does not fit the pattern.
        NonFiniteError: NaN or infinity in weights, inputs or gradients.
        NotPositiveDefiniteError: a layer's Hessian cannot be factorised.
        AuditError: fewer zeros than asked.
        CheckpointError: the checkpoint is of another run (the message names the difference), or cannot be written.
        DistributedError: fewer batches than ranks, or a rank is gone.
    """
    names = set(Settings.__dataclass_fields__)
    settings = resolve(recipe, {name: value for name, value in locals().items() if name in names})
    selection = select(model, include, skip, depthwise=settings.depthwise)
    require_fit(selection, pattern)
    allocation = as_allocation(settings.allocation).under(pattern)
    require_room(allocation, pattern, selection.layers)
    settings = replace(settings, allocation=allocation)
    collected = data_batches.collect(batches)
    # The dense reference is copied inside: a key-value cache would grow each time one of its blocks is run.
    with torch.inference_mode(False), evaluating(model) as frozen, seeded(model, settings.seed):
        with keeping_buffers(model):
            data_batches.require_all_accepted(model, collected)
            selection = multiplied_as_they_are(model, selection, collected[0])
        told = progress if progress is not None and current().first else Quiet()
        return Run(Workbench(model, selection, pattern, settings, collected, told, checkpoint, frozen)).execute()
