"""What the C library keeps of freed tensors."""

import sys

import pytest
import torch

from iobs.prune.memory import resident, reusing_memory

MEGABYTE = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no such switch")
class TestReusingMemory:
    def test_freed_memory_is_kept_inside_and_returned_at_the_end(self) -> None:
        with reusing_memory():
            pass  # what earlier tests have left is returned
        with reusing_memory():
            before = resident()
            tensor = torch.ones(64 * MEGABYTE // 4)
            filled = resident()
            assert filled - before > 60 * MEGABYTE
            del tensor
            assert filled - resident() < 4 * MEGABYTE
        assert filled - resident() > 60 * MEGABYTE

    def test_an_error_ends_it_too(self) -> None:
        with pytest.raises(ZeroDivisionError), reusing_memory():
            raise ZeroDivisionError
        before = resident()
        tensor = torch.ones(64 * MEGABYTE // 4)
        del tensor
        assert resident() - before < 4 * MEGABYTE
