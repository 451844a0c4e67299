"""Observation of a model before a run: which of its matrices a forward pass multiplies with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError, is_out_of_memory
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.linearity import changing_modules
from iobs.pruning.calibration.uses import Observer
from iobs.pruning.network.layers import Layer, found_by_use
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch


@torch.no_grad()
def observe(model: nn.Module, data: Sequence[Batch], seed: int) -> bool:
    """Find the layers that no class shows, on the first sample of one batch of each kind, and remember them.

    A kind of batches has the same names and shapes. Nothing is found if the model rejects a batch; the check of the
    batches reports it afterwards.

    Args:
        model: the model, while its weights are in memory.
        data: calibration data.
        seed: of random draws in the forward pass.

    Returns:
        True if layers were found.

    Raises:
        CalibrationError: the model rejects a batch, and has no layer that its class shows.
    """
    found_by_use(model, ())
    observer, called = Observer(model), set[str]()
    changing: set[str] = set()  # modules whose product has another factor or input than their class says
    kinds = {(batches.layout(batch), tuple(one.dtype for one in batches.tensors(batch))): batch for batch in data}

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if layer.path not in changing:
            called.add(layer.key)

    with evaluating(model), seeded(model, seed), keeping_buffers(model):
        for batch in kinds.values():
            one = batches.first_sample(batch)
            try:
                changing = changing_modules(model, observer.classes, one)
                with observer.watch(called), captured_inputs(model, observer.classes, note):
                    batches.forward(model, one)
            except batches.REFUSALS as error:
                if is_out_of_memory(error):
                    raise
                if not observer.classes:
                    raise CalibrationError(
                        f"The model cannot take a calibration batch, {batches.shapes(one)}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                return False
    found = observer.layers(called)
    found_by_use(model, found)
    return bool(found)
