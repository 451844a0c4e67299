"""Making the module of a directory takes no memory of its parameters, and leaves no gaps in the heap."""

import subprocess
import sys

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from iobs.models.skeleton import skeleton

MADE = """
import ctypes, sys
from pathlib import Path
import torch, transformers
from iobs.models.skeleton import skeleton

class Heap(ctypes.Structure):  # what mallinfo2 of glibc returns
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd us fs used free top".split()]

library = ctypes.CDLL(None)
if not hasattr(library, "mallinfo2"):
    sys.exit(3)
library.mallinfo2.restype = Heap
size = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, vocab_size=64)
heads = dict(num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16", architectures=["LlamaForCausalLM"])
transformers.LlamaConfig(**size, **heads).save_pretrained(sys.argv[1])
freed = torch.empty(30 << 20, dtype=torch.uint8)
del freed  # from now on glibc puts tensors of up to 30 MB into the heap
assert transformers.LlamaForCausalLM  # its code is imported before the heap is measured
before = library.mallinfo2().arena
module = skeleton(Path(sys.argv[1]))
assert all(one.is_meta for one in module.parameters())
print(library.mallinfo2().arena - before, sum(2 * one.numel() for one in module.parameters()))
"""


class Made(TorchDispatchMode):
    """The bytes that operators allocated outside the meta device: all of them, and the most that lived at a time."""

    def __init__(self):
        super().__init__()
        self.storages, self.bytes, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not found.is_meta:
            self.storages = {one: size for one, size in self.storages.items() if not one.expired()}
            storage = found.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference not in self.storages:
                self.bytes += storage.nbytes()
            self.storages[reference] = storage.nbytes()
            self.most = max(self.most, sum(self.storages.values()))
        return found


def test_parameters_are_not_in_memory_together(directory):
    with Made() as made:
        module = skeleton(directory)
    assert all(one.is_meta for one in module.parameters())
    stored = sum(one.nbytes for one in module.parameters())
    assert made.bytes > 0.9 * stored  # transformers allocates each before it moves: allocations are seen
    assert made.most < 0.3 * stored


@pytest.mark.slow  # a process of its own imports torch and transformers
@pytest.mark.skipif(sys.platform != "linux", reason="the C library is glibc on Linux alone")
def test_heap_does_not_grow_by_the_parameters(tmp_path):
    made = subprocess.run([sys.executable, "-c", MADE, str(tmp_path)], capture_output=True, text=True)
    if made.returncode == 3:
        pytest.skip("the C library does not report the size of its heap")
    assert made.returncode == 0, made.stderr
    grown, stored = map(int, made.stdout.split())
    assert stored > 200e6
    assert grown < 0.3 * stored
