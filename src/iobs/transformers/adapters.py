"""LoRA adapters on a sparse base model: trained under the masks of the base, and merged without loss of zeros."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from iobs.errors import LayerSelectionError, ModelError, NonFiniteError, first_line

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclass(frozen=True)
class MergedMatrix:
    """One matrix of the base model before and after a merge.

    Attributes:
        name: of the parameter in the base model.
        entries: number of its entries.
        zeros_before: zeros of the base.
        zeros_after: zeros after the merge.
        dropped: share of the adapter's squared update that fell on zeros of the base and was left out. It is 0 if the
            adapters were trained under `mask_adapters`, or if the zeros were not kept.
    """

    name: str
    entries: int
    zeros_before: int
    zeros_after: int
    dropped: float


@dataclass(frozen=True)
class MergeReport:
    """Zeros before and after a merge, matrix by matrix; `print` shows the totals.

    Attributes:
        rows: the matrices that an adapter changed.
    """

    rows: tuple[MergedMatrix, ...]

    @property
    def zeros_before(self) -> int:
        """Zeros of all adapted matrices before the merge."""
        return sum(row.zeros_before for row in self.rows)

    @property
    def zeros_after(self) -> int:
        """Zeros of all adapted matrices after the merge."""
        return sum(row.zeros_after for row in self.rows)

    def __str__(self) -> str:
        entries = max(1, sum(row.entries for row in self.rows))
        worst = max((row.dropped for row in self.rows), default=0.0)
        before, after = self.zeros_before, self.zeros_after
        return (
            f"{len(self.rows)} matrices merged: {before:,} zeros before ({before / entries:.1%}), "
            f"{after:,} after ({after / entries:.1%}). "
            f"Share of an update that fell on zeros and was left out: at most {worst:.1%}."
        )


@dataclass(frozen=True)
class MaskedAdapters:
    """The hooks of `mask_adapters`; after `remove()` the adapters act on all entries again.

    Attributes:
        handles: of the hooks, one per adapted layer.
    """

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def mask_adapters(model: PeftModel) -> MaskedAdapters:
    """Let LoRA adapters of linear layers act only where the base model is not zero.

    A layer then computes `x (W + M * s B A)^T`, with M zero at the zeros of W. So `merge_adapters` changes no output,
    up to rounding. This is MaskLoRA (Zimmer et al., 2023, arXiv:2312.15230). Every forward pass of an adapted layer
    forms one matrix of the shape of W, and the backward pass another.

    Args:
        model: a PEFT model with LoRA adapters, in training or not; its base is pruned.

    Returns:
        A handle; its `remove()` removes the masks.

    Raises:
        LayerSelectionError: no adapted layer holds a zero.
        ModelError: an adapter is no plain LoRA of a linear layer, or has dropout.
    """
    chosen = [(name, layer) for name, layer in _adapted(model) if _holds_zeros(layer)]
    if not chosen:
        raise LayerSelectionError("No adapted layer of the base model holds a zero; prune it before adding adapters.")
    for name, layer in chosen:
        _require_plain_lora(name, layer)
    return MaskedAdapters(
        tuple(layer.register_forward_hook(_subtract_at_zeros, with_kwargs=True) for _, layer in chosen)
    )


def merge_adapters(model: PeftModel, *, keep_zeros: bool = True) -> tuple[nn.Module, MergeReport]:
    """Merge the active adapters into a sparse base model and keep every zero of the base.

    The merge is that of `peft`, layer by layer, followed by the masks of the base. Entries of the update at zeros are
    left out; the report says how large they were. Train under `mask_adapters` and there are none. Bits of matrices
    without adapters do not change.

    Args:
        model: a PEFT model whose adapters can be merged (LoRA, LoHa, IA3 and others). It is used up: keep the result.
        keep_zeros: False merges as `peft` does, and warns how many zeros were lost.

    Returns:
        The base model with merged weights, and the zeros before and after.

    Raises:
        ModelError: nothing is left to merge, the base is quantised, or a layer needs a merge of its own.
        NonFiniteError: an adapter holds NaN or infinity, or a merged weight is too large for its dtype. After these
            errors the model is unchanged.
    """
    layers = list(_adapted(model))
    if not layers:
        raise ModelError("The model has no adapted layers; give the PEFT model, before any merge.")
    for name, layer in layers:
        _require_mergeable(name, layer)
    for name, layer in layers:
        _merge_by_peft(name, copy.deepcopy(layer))  # an overflow of any layer is result before one is changed
    rows = [row for name, layer in layers for row in _merge(name, layer, keep_zeros)]
    rows += [row for name, base, trained in _retrained(model) for row in _mask_copy(name, base, trained, keep_zeros)]
    report = MergeReport(tuple(rows))
    if report.zeros_after < report.zeros_before:
        warnings.warn(
            f"The merge lost {report.zeros_before - report.zeros_after:,} of {report.zeros_before:,} zeros; "
            "merge_adapters with keep_zeros=True keeps them.",
            stacklevel=2,
        )
    return model.unload(), report


def _adapted(model: nn.Module) -> Iterator[tuple[str, BaseTunerLayer]]:
    """The adapted layers and their names in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield _base_name(name), module


def _retrained(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Modules that `modules_to_save` trains in full: name, the base module and its trained copy."""
    from peft.utils import ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            yield _base_name(name), module.original_module, module.modules_to_save[module.active_adapters[0]]


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of two or more dimensions of floating point, by name, without those of submodules."""
    parameters = module.named_parameters(recurse=False)
    return {name: value for name, value in parameters if value.ndim >= 2 and value.is_floating_point()}


def _holds_zeros(layer: BaseTunerLayer) -> bool:
    return any(bool((value == 0).any()) for value in _matrices(layer.get_base_layer()).values())


def _require_mergeable(name: str, layer: BaseTunerLayer) -> None:
    if layer.merged:
        raise ModelError(f"The adapter of {name!r} is merged already; call unmerge_adapter() first.")
    matrices = _matrices(layer.get_base_layer())
    if not matrices or any(value.is_meta for value in matrices.values()):
        raise ModelError(
            f"The base weights of {name!r} are quantised or not in memory, so zeros cannot be kept in them; load the "
            "base model in float32, bfloat16 or float16."
        )
    if hasattr(layer, "unload_and_optionally_merge_module"):
        raise ModelError(f"{name!r} is a {type(layer).__name__}, which peft merges in another way; leave it out.")
    for part, value in layer.named_parameters():
        if not part.startswith("base_layer.") and not bool(value.isfinite().all()):
            raise NonFiniteError(f"The adapter of {name!r} holds NaN or infinity in {part!r}; train it again.")


def _require_plain_lora(name: str, layer: BaseTunerLayer) -> None:
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear) or any(adapter in layer.lora_variant for adapter in layer.active_adapters):
        raise ModelError(
            f"mask_adapters takes plain LoRA of linear layers, and {name!r} is another adapter; train it without "
            "masks, merge_adapters keeps the zeros all the same."
        )
    if any(isinstance(layer.lora_dropout[adapter], nn.Dropout) for adapter in layer.lora_dropout):
        raise ModelError(f"mask_adapters needs lora_dropout=0, and {name!r} has dropout.")


def _subtract_at_zeros(
    layer: BaseTunerLayer, inputs: tuple[Tensor, ...], keywords: Mapping[str, Sequence[str] | None], output: Tensor
) -> Tensor:
    """Forward hook of `mask_adapters`: remove the part of the update that lies on zeros of the base.

    The adapters are the active ones, or for each sample that of `adapter_names`.
    """
    if layer.disable_adapters or layer.merged:
        return output
    names = keywords.get("adapter_names")
    if names is None:
        adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        return output - _beside(layer, adapters, inputs[0]).to(output.dtype) if adapters else output
    result = output.clone()
    for adapter in {name for name in names if name in layer.lora_A}:
        samples = [number for number, name in enumerate(names) if name == adapter]
        result[samples] -= _beside(layer, [adapter], inputs[0][samples]).to(output.dtype)
    return result


def _beside(layer: BaseTunerLayer, adapters: Sequence[str], inputs: Tensor) -> Tensor:
    """The outputs of adapters of a layer at zeros of the base."""
    kept = layer.get_base_layer().weight != 0
    update = torch.stack([layer.get_delta_weight(adapter) for adapter in adapters]).sum(0).masked_fill(kept, 0)
    update = update.T if layer.fan_in_fan_out else update
    return functional.linear(inputs.to(update.dtype), update)


@torch.no_grad()
def _merge_by_peft(name: str, layer: BaseTunerLayer) -> None:
    """Merge one layer in place.

    Raises:
        NonFiniteError: a merged weight is not finite; the layer is unchanged.
    """
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:  # of a merged weight that is not finite
        dtype = next(iter(_matrices(layer.get_base_layer()).values())).dtype
        raise NonFiniteError(f"{name!r} cannot be merged in {dtype}: {first_line(error)}") from error


@torch.no_grad()
def _merge(name: str, layer: BaseTunerLayer, keep_zeros: bool) -> Iterator[MergedMatrix]:
    """Merge one layer in place; one copy of its weights is held meanwhile."""
    base = layer.get_base_layer()
    before = {part: value.detach().clone() for part, value in _matrices(base).items()}
    masked = any(hook is _subtract_at_zeros for hook in layer._forward_hooks.values())
    _merge_by_peft(name, layer)
    for part, value in _matrices(base).items():
        zeros = before[part] == 0
        change = (value - before[part]).double().square()
        dropped = 0.0
        if keep_zeros:
            value.masked_fill_(zeros, 0)
            dropped = 0.0 if masked else float(change[zeros].sum() / change.sum().clamp_min(1e-300))
        yield MergedMatrix(f"{name}.{part}", value.numel(), int(zeros.sum()), int((value == 0).sum()), dropped)


@torch.no_grad()
def _mask_copy(name: str, base: nn.Module, trained: nn.Module, keep_zeros: bool) -> Iterator[MergedMatrix]:
    """Write the zeros of a base module into its trained copy, in place."""
    copies = dict(trained.named_parameters())
    for part, value in base.named_parameters():
        if value.ndim < 2 or part not in copies:
            continue
        zeros, copy = value == 0, copies[part]
        change = (copy - value).double().square()
        dropped = 0.0
        if keep_zeros:
            dropped = float(change[zeros].sum() / change.sum().clamp_min(1e-300))
            copy.masked_fill_(zeros, 0)
        yield MergedMatrix(f"{name}.{part}", value.numel(), int(zeros.sum()), int((copy == 0).sum()), dropped)
