"""Forms of linear layers on CUDA devices: 2:4 by torch's semi-structured tensors, column offsets by a Triton kernel."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from iobs.inference.offsets import OffsetLinear

_OLDEST = (8, 0)  # compute capability with 2:4 products (Ampere)
_ROWS, _COLUMNS = 32, 64  # a 2:4 matrix of torch has multiples of these
_NO_OFFSETS_BELOW = 0.4  # share of zeros; below it there is too little to gain


def is_two_four(weight: Tensor) -> bool:
    """True if each 4 neighbours of a row hold at most 2 non-zero entries."""
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
    """True if a module is one of the forms already."""
    weight = module._parameters.get("weight")
    return isinstance(module, OffsetLinear) or isinstance(weight, torch.sparse.SparseSemiStructuredTensor)


def bytes_of(form: nn.Module, name: str, weight: Tensor) -> int:
    """Bytes of the weight of a form; `weight` is the dense one."""
    if isinstance(form, OffsetLinear):
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
    makers: dict[str, Callable[[], nn.Module]] = {}
    if is_two_four(weight) and bool((weight == 0).any()):
        reason = no_two_four(weight, capability)
        if reason is None:
            makers["2:4"] = lambda: semi_structured(layer)
        else:
            notes.append(reason)
    if float((weight == 0).float().mean()) >= _NO_OFFSETS_BELOW:
        if importlib.util.find_spec("triton") is None:
            notes.append("products with zeros left out need triton on a GPU: pip install triton")
        else:
            makers["offsets"] = lambda: OffsetLinear(layer)
    return makers, notes


def reason(error: Exception) -> str:
    """The line of an error that says what is wrong: Triton's compiler shows the place first and the reason last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if type(error).__name__ == "CompilationError" else lines[0]


def usable(makers: Mapping[str, Callable[[], nn.Module]], inputs: Tensor) -> tuple[dict[str, nn.Module], list[str]]:
    """The forms that run on this device, and notes on the others: torch may be built without their kernels."""
    running: dict[str, nn.Module] = {}
    notes: list[str] = []
    for name, make in makers.items():
        try:
            form = make()
            form(inputs)
        except Exception as error:  # compilers and libraries of the device raise errors of their own kinds
            notes.append(f"{name} does not run here ({reason(error)})")
        else:
            running[name] = form
    return running, notes


def waiting(form: nn.Module, inputs: Tensor) -> Tensor:
    """The output of a form, when the device has computed it."""
    output: Tensor = form(inputs)
    torch.cuda.synchronize(inputs.device)
    return output
