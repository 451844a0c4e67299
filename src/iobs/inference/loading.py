"""State dicts that are loaded into stored layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def buffers_after(
    module: nn.Module, state: Mapping[str, object], prefix: str, metadata: Mapping[str, object]
) -> dict[str, Tensor] | None:
    """The buffers that a module will have after a state dict is loaded; None for shapes that torch refuses itself.

    Args:
        module: with buffers of its own.
        state: the state dict; buffers that it lacks stay as they are.
        prefix: of the module's names in the state dict.
        metadata: of the module, as torch gives it to `_load_from_state_dict`.
    """
    found = {}
    for name, own in module.named_buffers(recurse=False):
        given = state.get(f"{prefix}{name}", own)
        if not isinstance(given, Tensor) or given.shape != own.shape:
            return None
        found[name] = given if metadata.get("assign_to_params_buffers") else given.to(own).contiguous()
    return found
