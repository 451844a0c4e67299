"""Accuracy and perplexity of a model on calibration samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.losses import IGNORED, next_token_loss
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import class_axis, logits, targets
from iobs.pruning.samples.subsets import Samples


@torch.no_grad()
def metric(model: nn.Module, samples: Samples) -> tuple[str, float] | None:
    """The metric that people know for the task of a model, if the samples allow to measure it.

    Token ids and outputs of one row per token give the perplexity of the next tokens. Integer labels give the accuracy
    in per cent. Anything else gives None.

    Args:
        model: in eval mode.
        samples: of this run; with several ranks each measures its share.
    """
    part = current().share(samples)
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    names: set[str] = set()
    with reusing_memory():
        for batch in part.batches:
            found = _measured(logits(batches.forward(model, batch)), batch)
            if found is None:
                names.add("")
                break
            names.add(found[0])
            totals += torch.tensor(found[1:], dtype=torch.float64, device=totals.device)
    current().sum(totals)
    total, count = totals.tolist()
    if not samples.batches or not count or (names - {"accuracy"} and names - {"perplexity"}):
        return None
    if "perplexity" in names:
        return "perplexity", math.exp(min(total / count, 700.0))
    return "accuracy", 100 * total / count


def _measured(values: Tensor, batch: Batch) -> tuple[str, float, float] | None:
    """The name of the metric, its sum over the scored positions of a batch, and their number."""
    given, wanted = batches.inputs(batch), targets(batch)
    tokens = given.get("input_ids") if isinstance(given, Mapping) else None
    if isinstance(tokens, Tensor) and values.ndim == 3 and values.shape[:2] == tokens.shape:
        if wanted is not None and wanted.shape != tokens.shape:
            return None
        return _next_tokens(values, tokens if wanted is None else wanted, given)
    if wanted is None or wanted.is_floating_point() or wanted.dtype == torch.bool:
        return None
    axis = class_axis(values, batch)
    best = (values > 0).long() if axis is None else values.argmax(axis)
    if best.numel() != wanted.numel():
        return None
    wanted = wanted.to(best.device).reshape(best.shape)
    scored = wanted != IGNORED
    return "accuracy", float(((best == wanted) & scored).sum()), float(scored.sum())


def _next_tokens(values: Tensor, labels: Tensor, given: object) -> tuple[str, float, float] | None:
    """Sum of the negative log-likelihoods of the next tokens, and their number; padding is not scored."""
    wanted = labels.to(values.device)
    mask = given.get("attention_mask") if isinstance(given, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        wanted = wanted.masked_fill(mask.to(values.device) == 0, IGNORED)
    if wanted.shape[1] < 2 or int(wanted[:, 1:].max()) >= values.shape[2]:
        return None
    total = next_token_loss(values, wanted, "sum")
    return "perplexity", float(total), float((wanted[:, 1:] != IGNORED).sum())
