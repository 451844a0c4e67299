"""Bypasses: layers of a block that need not be computed again once the input of a later layer is known.

The layers return tensors without data (on torch's device "meta"), and so does every function that computes with such a
tensor. The later layer receives its known input instead. If anything else depends on a tensor without data, then the
block fails or its output has no data. Such a bypass is not taken: `inputs.execution_order` tries it on one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from iobs.pruning.calibration.hooks import Args, Kwargs
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import replaced_forwards

META = torch.device("meta")
# Functions that are left to torch: attributes, changes in place, and moves to the device of a tensor.
_UNCHANGED = frozenset({"__get__", "__set__", "__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "to"})


@dataclass(frozen=True)
class Bypass:
    """Layers that are not computed, and a later layer whose input replaces all that follows from their outputs.

    Args:
        layer: the first of the layers that receive the known input.
        receivers: paths of all layers that receive it.
        skipped: paths of the layers that are not computed.
    """

    layer: Layer
    receivers: tuple[str, ...]
    skipped: tuple[str, ...]

    @contextmanager
    def taken(self, model: nn.Module, value: Callable[[], Tensor]) -> Iterator[None]:
        """Skip layers and give later layers their known input; the modules are restored on exit.

        Args:
            model: the model.
            value: returns the known input; a copy, since the model may change it in place.
        """
        known: list[Tensor] = []  # one object for all receivers, whose inputs are compared by identity

        def receive(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            if not known:
                known.append(value())
            return (known[0], *args[1:]), kwargs

        with ExitStack() as stack:
            for path in self.skipped:
                module = model.get_submodule(path)
                stack.enter_context(replaced_forwards([(module, without_data(module))]))
            for path in self.receivers:
                receiver = model.get_submodule(path)
                # Before the hooks that capture the input.
                handle = receiver.register_forward_pre_hook(receive, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(_WithoutData())
            yield


def bypasses(groups: list[list[Layer]], once: set[str]) -> list[Bypass]:
    """The bypasses that may exist in a block: every group of layers with its input known, after the group before it.

    Args:
        groups: layers with the same input, in execution order.
        once: paths of the modules that are called once.
    """
    usable = [all(one.is_called and one.expert is None and one.path in once for one in group) for group in groups]
    return [
        Bypass(later[0], tuple(one.path for one in later), tuple(one.path for one in before))
        for before, later, fit, also in zip(groups, groups[1:], usable, usable[1:], strict=False)
        if fit and also
    ]


def without_state(value: object) -> bool:
    """Check that nested arguments hold nothing that could keep a tensor from one call of a block to the next."""
    if isinstance(value, dict):
        return all(without_state(one) for one in value.values())
    if isinstance(value, (tuple, list)):
        return all(without_state(one) for one in value)
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype, torch.device))


class _Detached(nn.Module):
    """The forward of a module, for `functional_call`: no hook of the module runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.own = module, module.forward

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the forward that the module had."""
        return self.own(*args, **kwargs)


def without_data(module: nn.Module) -> Callable[..., object]:
    """The forward of a module whose tensors, inputs and outputs have no data."""
    detached = _Detached(module)

    def forward(*args: object, **kwargs: object) -> object:
        given, named = tree_map_only(Tensor, lambda value: value.to(META), (args, kwargs))
        state = {name: value.to(META) for name, value in detached.state_dict(keep_vars=True).items()}
        return functional_call(detached, state, given, named)

    return forward


class _WithoutData(TorchFunctionMode):
    """Give every function meta tensors alone if one of its arguments is a meta tensor.

    Otherwise torch would refuse most functions of both kinds. A function that changes a tensor in place is left to
    torch: it refuses to write a tensor without data into another.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Call the function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _UNCHANGED or "out" in kwargs or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        found: list[bool] = []
        tree_map_only(Tensor, lambda value: found.append(value.device == META), (args, kwargs))
        if any(found) and not all(found):
            args, kwargs = tree_map_only(Tensor, lambda value: value.to(META), (args, kwargs))
        return func(*args, **kwargs)
