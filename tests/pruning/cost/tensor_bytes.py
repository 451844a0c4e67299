"""Count of the bytes of the tensors that are alive, at its largest."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class TensorBytes(TorchDispatchMode):
    """The peak of the bytes of tensors that torch functions return inside the context, in memory and not in files.

    Attributes:
        peak: bytes.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._mapped = []
        self._alive = {}  # by address of the storage: a weak reference to it, and its bytes

    def hold(self, *tensors):
        """Count tensors that were made before; returns the counter."""
        mapped = {one.untyped_storage()._cdata for one in self._mapped}
        for one in tensors:
            storage = one.untyped_storage()
            size = 0 if storage.filename or one.is_meta or storage._cdata in mapped else storage.nbytes()
            self._alive[storage._cdata] = StorageWeakRef(storage), size
        return self

    def leave(self, mapped):
        """Count the tensor of a mapped file no longer, which safetensors does not call a file."""
        self._mapped.append(mapped)
        self._alive.pop(mapped.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.hold(*(one for one in tree_iter(found) if isinstance(one, Tensor)))
        self._alive = {place: one for place, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found
