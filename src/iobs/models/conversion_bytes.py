"""Bytes of the tensors that a conversion makes, counted on tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from iobs.pruning.network.calls import Args, Kwargs

_Rule = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the tensors that torch functions make inside the context, besides given ones.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given.values()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # by address: the storage and its bytes

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._given or (place in self._made and not _gone(self._made[place][0])):
            return
        self._made = {one: made for one, made in self._made.items() if not _gone(made[0])}
        self._made[place] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))


def _gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def with_peak(rule: _Rule, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The tensors that a conversion makes of given ones, and the most bytes of new tensors that are alive meanwhile."""
    with _Alive(given) as alive:
        found = rule(given)
    return found, alive.peak
