"""A linear layer as non-zero entries and short column offsets, for CUDA devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from iobs.inference.column_offsets import dense, in_bounds, smallest
from iobs.inference.loading import buffers_after
from iobs.inference.no_gradient import without_gradient

_FEW = 4  # tokens; more are multiplied by the unpacked matrix


class OffsetLinear(nn.Module):
    """A linear layer whose weight is its non-zero entries with their columns, for inference on a CUDA device.

    An entry takes its own bits, eight or sixteen for its offset, and half a bit or one for the column of its group. Few
    tokens are multiplied by a Triton kernel, more by the matrix that is unpacked for the moment.

    Args:
        layer: the dense layer, in float32, bfloat16 or float16. Its weight is stored without rounding.
    """

    values: Tensor
    offsets: Tensor
    bases: Tensor
    starts: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, self.trained = layer.weight.detach(), layer.weight.requires_grad
        for name, part in zip(("values", "offsets", "bases", "starts"), smallest(weight), strict=True):
            self.register_buffer(name, part)
        self.longest = _longest(self.starts)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weight as a dense matrix, computed anew at each use: (out_features, in_features)."""
        if self.values.is_cuda:
            from iobs.inference.offsets_triton import unpack

            return unpack(self.values, self.offsets, self.bases, self.starts, self.longest, self.in_features)
        return dense(self.values, self.offsets, self.bases, self.starts, self.in_features)

    @property
    def bytes(self) -> int:
        """Bytes of values, offsets, bases and starts."""
        return sum(one.numel() * one.element_size() for one in (self.values, self.offsets, self.bases, self.starts))

    def forward(self, given: Tensor) -> Tensor:
        """The layer's output (..., out_features) of (..., in_features)."""
        flat = given.reshape(-1, self.in_features)
        if not 0 < len(flat) <= _FEW or not _has_kernel(given):
            return nn.functional.linear(given, self._unpacked(given), self.bias)
        few: Tensor = self._few(flat.contiguous())
        return few.view(*given.shape[:-1], self.out_features)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpacked(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            return self.weight.to(given.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _few(self, given: Tensor) -> Tensor:
        from iobs.inference.offsets_triton import multiply

        parts = self.values, self.offsets, self.bases, self.starts, self.longest
        return without_gradient(lambda few: multiply(*parts, few, self.bias), given, self.trained)

    def _load_from_state_dict(
        self,
        state: dict[str, Tensor],
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        problems: list[str],
    ) -> None:
        """Take a state dict; parts that the kernel would read beyond their ends are an error."""
        new = buffers_after(self, state, prefix, metadata)
        if new and not in_bounds(new["values"], new["offsets"], new["bases"], new["starts"], self.in_features):
            problems.append(f"{prefix}weight: the column offsets are damaged; accelerate the dense model again.")
            return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, problems)
        self.longest = _longest(self.starts)

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{self.in_features}, {self.out_features}, format=offsets"


def _has_kernel(given: Tensor) -> bool:
    """Check that the kernel can read activations: a model may have been moved to the CPU."""
    return given.is_cuda


def _longest(starts: Tensor) -> int:
    """Most groups of a row."""
    return int(starts.diff().max())
