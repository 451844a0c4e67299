"""Embeddings of texts before and after a run: their cosine, and whether pairs of texts keep their order.

A model whose output is a state for every token, without scores, is compared by the KL divergence of a softmax over the
dimensions of its states, which says nothing to a reader. What users of such models compare is the angle between the
mean states of texts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.outputs import attended
from iobs.pruning.samples.subsets import Samples

_STATES = "last_hidden_state"
_MOST = 512  # texts whose pairs are compared


@torch.no_grad()
def embedded(model: nn.Module, samples: Samples, first: bool = False) -> Tensor | None:
    """The mean state of every sample, (samples, width) float32 on the CPU; None for models with other outputs.

    Args:
        model: in eval mode.
        samples: of this run; with several ranks None, since each has other samples.
        first: take the state of the first token instead of the mean.
    """
    found = []
    for batch in samples.batches if current().size == 1 else []:
        output = batches.forward(model, batch)
        states = output.get(_STATES) if isinstance(output, Mapping) and "logits" not in output else None
        if not isinstance(states, Tensor) or states.ndim != 3:
            return None
        if first:
            found.append(states[:, 0].float().cpu())
            continue
        mask = attended(model, batch)
        weights = torch.ones(states.shape[:2]) if mask is None else mask.float()
        weights = weights.to(states.device)[..., None]
        found.append(((states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)).cpu())
    return torch.cat(found) if found else None


def similarity(dense: Tensor, pruned: Tensor) -> dict[str, float]:
    """The mean cosine of embeddings (n, width) to those of the dense model, and the rank correlation of all pairs."""
    scores = {"cosine to the dense embedding": float(functional.cosine_similarity(dense, pruned).mean())}
    if len(dense) > 2:
        first, second = torch.triu_indices(min(len(dense), _MOST), min(len(dense), _MOST), 1)
        ranks = []
        for vectors in (dense, pruned):
            unit = functional.normalize(vectors[:_MOST])
            ranks.append((unit @ unit.T)[first, second].argsort().argsort().double())
        scores["rank correlation of pairs"] = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    return scores
