"""Forms of linear layers on CUDA devices: 2:4 by torch's semi-structured tensors, and bitmasks by a Triton kernel."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from iobs.inference.no_gradient import without_gradient

_OLDEST = (8, 0)  # compute capability with 2:4 products (Ampere)
_ROWS, _COLUMNS = 32, 64  # a 2:4 matrix of torch has multiples of these
_FEW = 4  # tokens; more are multiplied by the unpacked matrix
_NO_BITMASK_BELOW = 0.3  # share of zeros; below it there is too little to gain


class BitmaskLinear(nn.Module):
    """A linear layer whose weight is a bitmask and the non-zero entries, for inference on a CUDA device.

    Few tokens are multiplied by a Triton kernel, more by the matrix that is unpacked for the moment.

    Args:
        layer: the dense layer, in float32, bfloat16 or float16. Its weight is stored without rounding.
    """

    mask: Tensor
    values: Tensor
    starts: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, self.trained = layer.weight.detach(), layer.weight.requires_grad
        kept = weight != 0
        words = -(-self.in_features // 32)
        wide = torch.zeros(self.out_features, 32 * words, dtype=torch.bool)
        wide[:, : self.in_features] = kept.cpu()
        mask = torch.from_numpy(np.packbits(wide.numpy(), axis=1, bitorder="little").view(np.int32))
        counts = kept.sum(1)
        self.register_buffer("mask", mask.to(weight.device))
        self.register_buffer("values", weight[kept])
        self.register_buffer("starts", torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weight as a dense matrix, computed anew at each use: (out_features, in_features)."""
        bits = torch.arange(32, device=self.mask.device, dtype=torch.int32)
        kept = ((self.mask[..., None] >> bits) & 1).flatten(1)[:, : self.in_features].bool()
        found: Tensor = torch.zeros(kept.shape, dtype=self.values.dtype, device=kept.device)
        found.masked_scatter_(kept, self.values)
        return found

    @property
    def bytes(self) -> int:
        """Bytes of mask, values and starts."""
        return sum(one.numel() * one.element_size() for one in (self.mask, self.values, self.starts))

    def forward(self, given: Tensor) -> Tensor:
        """The layer's output (..., out_features) of (..., in_features)."""
        flat = given.reshape(-1, self.in_features)
        if not 0 < len(flat) <= _FEW:
            return nn.functional.linear(given, self.weight.to(given.dtype), self.bias)
        few: Tensor = self._few(flat.contiguous())
        found = few.view(*given.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias.to(found.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _few(self, given: Tensor) -> Tensor:
        from iobs.inference.bitmask_triton import multiply

        return without_gradient(lambda few: multiply(self.mask, self.values, self.starts, few), given, self.trained)

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{self.in_features}, {self.out_features}, format=bitmask"


def is_two_four(weight: Tensor) -> bool:
    """Check that each 4 neighbours of a row hold at most 2 non-zero entries."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight.reshape(-1, 4) != 0).sum(1) <= 2).all())


def no_two_four(weight: Tensor, capability: tuple[int, int]) -> str | None:
    """The reason why torch has no 2:4 product for a 2:4 weight, or None.

    Args:
        weight: (rows, columns).
        capability: compute capability of the device.
    """
    if capability < _OLDEST:
        return f"2:4 products need a GPU of compute capability 8.0 (Ampere) or newer, this one has {capability}"
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"2:4 products need float16 or bfloat16, the layer has {str(weight.dtype)[6:]}: model.to(torch.bfloat16)"
    rows, columns = weight.shape
    if rows % _ROWS or columns % _COLUMNS:
        return f"2:4 products need multiples of {_ROWS} rows and {_COLUMNS} columns, a layer has {rows} x {columns}"
    return None


def semi_structured(layer: nn.Linear) -> nn.Linear:
    """A copy of a linear layer whose weight is a semi-structured tensor of torch."""
    made = copy.copy(layer)
    made._parameters = dict(layer._parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the tensors a prototype
        weight = torch.sparse.to_sparse_semi_structured(layer.weight.detach().contiguous())
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def is_form(module: nn.Module) -> bool:
    """Check that a module is one of the forms already."""
    weight = module._parameters.get("weight")
    return isinstance(module, BitmaskLinear) or isinstance(weight, torch.sparse.SparseSemiStructuredTensor)


def bytes_of(form: nn.Module, name: str, weight: Tensor) -> int:
    """Bytes of the weight of a form; `weight` is the dense one."""
    if isinstance(form, BitmaskLinear):
        return form.bytes
    dense = weight.numel() * weight.element_size()
    # 2:4: two values of four, and two bits for the place of each.
    return dense if name == "dense" else dense // 2 + weight.numel() // 8


def forms(layer: nn.Linear, capability: tuple[int, int]) -> tuple[dict[str, Callable[[], nn.Module]], list[str]]:
    """Makers of the forms that a layer on a CUDA device may take, and notes on those it may not.

    Args:
        layer: the dense layer.
        capability: compute capability of the device.
    """
    weight, notes = layer.weight.detach(), []
    found: dict[str, Callable[[], nn.Module]] = {}
    if is_two_four(weight) and bool((weight == 0).any()):
        reason = no_two_four(weight, capability)
        if reason is None:
            found["2:4"] = lambda: semi_structured(layer)
        else:
            notes.append(reason)
    if float((weight == 0).float().mean()) >= _NO_BITMASK_BELOW:
        if importlib.util.find_spec("triton") is None:
            notes.append("bitmasks on a GPU need triton: pip install triton")
        else:
            found["bitmask"] = lambda: BitmaskLinear(layer)
    return found, notes


def reason(error: Exception) -> str:
    """The line of an error that says what is wrong: Triton's compiler shows the place first and the reason last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if type(error).__name__ == "CompilationError" else lines[0]


def usable(makers: Mapping[str, Callable[[], nn.Module]], given: Tensor) -> tuple[dict[str, nn.Module], list[str]]:
    """The forms that run on this device, and notes on the others: torch may be built without their kernels."""
    found: dict[str, nn.Module] = {}
    notes: list[str] = []
    for name, make in makers.items():
        try:
            form = make()
            form(given)
        except Exception as error:  # compilers and libraries of the device raise errors of their own kinds
            notes.append(f"{name} does not run here ({reason(error)})")
        else:
            found[name] = form
    return found, notes


def waiting(form: nn.Module, given: Tensor) -> Tensor:
    """The output of a form, when the device has computed it."""
    found: Tensor = form(given)
    torch.cuda.synchronize(given.device)
    return found
