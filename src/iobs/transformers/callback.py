"""`SparsityCallback`: a Hugging Face `Trainer` that keeps the zeros of a pruned model."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import TrainerCallback

from iobs.errors import AuditError, LayerSelectionError, ModelError
from iobs.pruning.keep_sparse import SparseTraining, keep_sparse

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_LOG = logging.getLogger("iobs")
_SHARDED = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"}  # of accelerate.DistributedType


class SparsityCallback(TrainerCallback):
    """Keep every zero of a pruned model while a Hugging Face `Trainer` trains it.

    The zeros are those of the model when training begins; after a resume these are the zeros of the checkpoint. Zeros
    are kept by `iobs.keep_sparse`, so gradient accumulation, mixed precision and gradient clipping need nothing else.
    Matrices that are not trained, such as the base model under LoRA adapters, are counted only.

    The zeros are counted after the first step, at every log, at every save, and at the end, after
    `load_best_model_at_end` has loaded its model. Each log gains `sparsity`: the share of zeros among the entries of
    all matrices that held zeros when training began.

    The errors come from the methods that the `Trainer` calls.

    Raises:
        ModelError: DeepSpeed, FSDP, Megatron or tensor parallelism splits the parameters, or the optimizer steps on
            tensors that are not parameters of the model.
        LayerSelectionError: the model holds no zeros.
        AuditError: zeros were lost, or the checkpoint that is resumed has fewer zeros than the model had.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}  # zeros by matrix of the model that the Trainer was given
        self._zeros: dict[str, int] = {}  # zeros by matrix when training began
        self._training: SparseTraining | None = None
        self._first_step = True

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object
    ) -> None:
        """Refuse split parameters, and count the zeros of the model before a checkpoint is loaded into it."""
        _require_whole_parameters(args)
        model = context.get("model")
        self._promised = _zeros(model) if isinstance(model, nn.Module) else {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object
    ) -> None:
        """Keep the zeros from here on."""
        _require_whole_parameters(args)
        model, optimizer = context["model"], context["optimizer"]
        assert isinstance(model, nn.Module)
        assert isinstance(optimizer, torch.optim.Optimizer)
        self._stop()
        self._zeros, self._first_step = _zeros(model), True
        what = "Training would begin with fewer zeros than the Trainer was given, perhaps from a dense checkpoint"
        _require_zeros(self._promised, self._zeros, what)
        if not self._zeros:
            raise LayerSelectionError("The model holds no zeros to keep; prune it before training.")
        _require_own_parameters(model, optimizer)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in stepped for name, parameter in model.named_parameters() if name in self._zeros):
            self._training = keep_sparse(model, optimizer)
        _LOG.info("Training keeps %d zeros in %d matrices.", sum(self._zeros.values()), len(self._zeros))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object
    ) -> None:
        """Count once after the first step: an optimizer that writes elsewhere is zeros before time is lost."""
        if self._first_step:
            self._first_step = False
            self._check(context["model"], "after the first step; its optimizer may write the weights outside of step()")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object) -> None:
        """Add `sparsity` to the log and to `state.log_history`."""
        if not self._zeros:  # an evaluation before or after the training
            return
        share = self._check(context["model"], f"at step {state.global_step}")
        for log in (context.get("logs"), state.log_history[-1] if state.log_history else None):
            if isinstance(log, dict):
                log["sparsity"] = share

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object) -> None:
        """Count the zeros of a checkpoint."""
        self._check(context["model"], f"in the checkpoint of step {state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: object
    ) -> None:
        """Count the zeros of the final model, and remove the masks."""
        self._stop()
        share = self._check(context["model"], "at the end of training")
        _LOG.info("Training kept all %d zeros; sparsity %.4f.", sum(self._zeros.values()), share)
        self._zeros = {}
        if hasattr(context["model"], "peft_config"):
            _LOG.warning("Merge the adapters with iobs.transformers.merge_adapters: a plain merge fills the zeros.")

    def _check(self, model: object, when: str) -> float:
        """Count the zeros, and return their share. Raises AuditError if zeros were lost."""
        assert isinstance(model, nn.Module)
        now = _zeros(model, self._zeros)
        _require_zeros(self._zeros, now, f"Zeros were lost {when}")
        entries = sum(value.numel() for name, value in model.named_parameters() if name in self._zeros)
        return sum(now.values()) / entries

    def _stop(self) -> None:
        if self._training is not None:
            self._training.remove()
            self._training = None


@torch.no_grad()
def _zeros(model: nn.Module, names: dict[str, int] | None = None) -> dict[str, int]:
    """Zeros by matrix: of the named parameters, or of those that hold zeros and are not entirely zero."""
    zeros = {
        name: int((value == 0).sum())
        for name, value in model.named_parameters()
        if value.ndim >= 2 and (names is None or name in names)
    }
    if names is not None:
        return zeros
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    return {name: count for name, count in zeros.items() if 0 < count < sizes[name]}


def _require_zeros(promised: dict[str, int], zeros: dict[str, int], what: str) -> None:
    lost = {name: count for name, count in promised.items() if zeros.get(name, 0) < count}
    if lost:
        name, expected = next(iter(lost.items()))
        raise AuditError(
            f"{what}: {name!r} has {zeros.get(name, 0):,} zeros, expected {expected:,} ({len(lost)} matrices differ). "
            "Train again from the pruned model with iobs.transformers.SparsityCallback."
        )


def _require_whole_parameters(args: TrainingArguments) -> None:
    """Refuse training in which a rank holds parts of flattened parameters."""
    sharded = [name for name in ("deepspeed", "fsdp") if getattr(args, name, None)]
    sharded += [
        name
        for name, variable in (("deepspeed", "ACCELERATE_USE_DEEPSPEED"), ("fsdp", "ACCELERATE_USE_FSDP"))
        if os.environ.get(variable, "").lower() in ("true", "1")
    ]
    kind = getattr(getattr(args, "distributed_state", None), "distributed_type", None)
    if str(getattr(kind, "value", kind)).upper() in _SHARDED:
        sharded.append(str(kind.value).lower())  # type: ignore[union-attr]
    if sharded:
        raise ModelError(
            f"SparsityCallback cannot keep zeros under {sharded[0]}: it splits or flattens the parameters, and the "
            "masks would not fit them. Train in one process or with DistributedDataParallel (torchrun)."
        )


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that step on copies or placeholders, such as the layerwise optimizers of `Trainer`."""
    parameters = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in parameters for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise ModelError(
            f"The optimizer {type(optimizer).__name__} steps on {foreign} tensors that are not parameters of the "
            "model, so their zeros cannot be kept. Choose an optimizer that steps on the parameters themselves, such "
            "as optim='adamw_torch'."
        )
