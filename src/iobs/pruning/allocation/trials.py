"""Damage of a layer that is pruned alone: to the outputs of the model, or to the output of its block.

Both run the blocks from the layer on: the hidden states of the dense model before its block are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from iobs.pruning.calibration.losses import divergence
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.outputs import attended, logits


@dataclass
class Trials:
    """Samples that follow a sweep through the dense model, and the damage of changed weights on them.

    Args:
        stream: the dense model on this rank's samples; the sweep advances it.
        answers: outputs of the dense model by batch; None: the damage is that of the block's output.
    """

    stream: Stream
    answers: list[Tensor] | None = None
    _dense: dict[int, list[Tensor]] = field(default_factory=dict, init=False)  # outputs of the current block

    @torch.no_grad()
    def prepare(self, stage: int) -> None:
        """Compute the dense outputs of a block, unless they are known; call it while the weights are dense."""
        if self.answers is None and stage not in self._dense:
            self._dense = {stage: [self._after(stage, index) for index in range(len(self.stream.data))]}

    @torch.no_grad()
    def damage(self, stage: int) -> float:
        """The damage of the present weights of a block on the samples of all ranks.

        It is a divergence in nats, or a relative squared error.

        The squared error of a block is relative to the squared norm of its output at each position. The mean over
        positions is taken. The errors are relative because norms behind the block divide by this norm.
        """
        total, count = 0.0, 0.0
        for index, batch in enumerate(self.stream.data):
            if self.answers is not None:
                blocks = range(stage, len(self.stream.chain))
                hidden = self.stream.through(blocks, index, self.stream.state(index))
                found = logits(self.stream.output(index, hidden))
                samples = batches.size(batch)
                total += float(divergence(self.stream.model, batch, self.answers[index], found)) * samples
                count += samples
            else:
                errors = _relative_errors(self._after(stage, index), self._dense[stage][index])
                mask = attended(self.stream.model, batch)
                if mask is not None and mask.shape == errors.shape:
                    errors = errors[mask.to(errors.device)]
                total += float(errors.sum())
                count += errors.numel()
        totals = torch.tensor([total, count], dtype=torch.float64)
        current().sum(totals)
        return float(totals[0] / totals[1].clamp_min(1.0))

    def _after(self, stage: int, index: int) -> Tensor:
        return self.stream.through([stage], index, self.stream.state(index))


def _relative_errors(found: Tensor, dense: Tensor) -> Tensor:
    """Squared errors relative to the squared norms, in float64: by position for text, otherwise by sample."""
    axes = 2 if dense.ndim == 3 else 1
    error = (found.double() - dense.double()).square().flatten(axes).sum(-1)
    return error / dense.double().square().flatten(axes).sum(-1).clamp_min(1e-30)
