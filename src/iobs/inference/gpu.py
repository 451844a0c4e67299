"""The form of linear layers on CUDA devices: non-zero entries with short column offsets, by a Triton kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from iobs.inference.modules import CheckedState, without_gradient

OFFSETS = "offsets"  # name of the form
_NO_OFFSETS_BELOW = 0.4  # share of zeros; below it there is too little to gain
# Non-zero entries of a row lie in groups of `GROUP`. A group has the column of its first entry, and each entry its
# offset from there. The last group of a row is filled up with zeros.
GROUP = 32  # entries of a group, which share the column that their offsets count from
_WIDTHS = {torch.uint8: 2**8, torch.int16: 2**15, torch.int32: 2**31}  # columns that a group of offsets can span


def form_of(layer: nn.Linear) -> tuple[Callable[[], nn.Module] | None, str]:
    """The maker of the form that a layer on a CUDA device may take, or None; and a note where a package is missing."""
    weight = layer.weight.detach()
    if float((weight == 0).float().mean()) < _NO_OFFSETS_BELOW:
        return None, ""
    if importlib.util.find_spec("triton") is None:
        return None, "products with zeros left out need triton on a GPU: pip install triton"
    return lambda: OffsetLinear(layer), ""


def reason(error: Exception) -> str:
    """The line of an error that says what is wrong: Triton's compiler shows the place first and the reason last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if type(error).__name__ == "CompilationError" else lines[0]


def usable(make: Callable[[], nn.Module], inputs: Tensor) -> tuple[nn.Module | None, str]:
    """The form if it runs on this device, or None and a note: its library may be built without kernels for it."""
    try:
        form = make()
        form(inputs)
    except Exception as error:  # compilers and libraries of the device raise errors of their own kinds
        return None, f"{OFFSETS} does not run here ({reason(error)})"
    return form, ""


def waiting(form: nn.Module, inputs: Tensor) -> Tensor:
    """The output of a form, when the device has computed it."""
    output: Tensor = form(inputs)
    torch.cuda.synchronize(inputs.device)
    return output


def in_bounds(values: Tensor, offsets: Tensor, bases: Tensor, starts: Tensor, columns: int) -> bool:
    """True if the starts divide all groups among the rows, and every entry has one of the columns."""
    counts = starts.long().diff()
    if int(starts[0]) != 0 or int(starts[-1]) != len(bases) or bool((counts < 0).any()):
        return False
    places = (bases.long()[:, None] + offsets.view(-1, GROUP).long()).flatten()[values != 0]
    return bool(((places >= 0) & (places < columns)).all())


def smallest(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, offsets, bases and starts of a matrix, with offsets of 8 bits or of 16, whichever take fewer bytes.

    Args:
        weight: (rows, columns).
    """
    columns = weight.shape[1]
    dtypes = torch.uint8, torch.int16 if columns <= _WIDTHS[torch.int16] else torch.int32
    candidates = [packed(weight, dtype) for dtype in dtypes]
    return min(candidates, key=lambda parts: sum(part.nbytes for part in parts))


def packed(weight: Tensor, offset: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values (32 n,), offsets (32 n,), bases (n,) and starts (rows + 1,) of a matrix (rows, columns).

    A group has 32 entries of a row, or fewer and zeros after them where the row ends or an offset would be too large.
    """
    (rows, columns), device = weight.shape, weight.device
    kept = weight != 0
    counts = kept.sum(1)
    ends = counts.cumsum(0)
    at = ends - counts  # the first entry of every row that is in no group yet
    past = torch.zeros(1, dtype=torch.long, device=device)  # a window may reach past the last entry
    places = torch.cat([kept.nonzero()[:, 1], past])
    entries, lane = weight[kept], torch.arange(GROUP, device=device)
    steps = [torch.zeros(3, 0, dtype=torch.long, device=device)]
    # One group of every row at a time: how far it reaches depends on where the last one ended.
    while bool((unfinished := at < ends).any()):
        window = at[unfinished, None] + lane
        reached = places[window.clamp(max=len(entries))]
        taken = (window < ends[unfinished, None]) & (reached - reached[:, :1] < _WIDTHS[offset])
        steps.append(torch.stack([unfinished.nonzero()[:, 0], at[unfinished], taken.sum(1)]))
        at[unfinished] += steps[-1][2]
    groups = torch.cat(steps, 1)
    groups = groups[:, groups[0].argsort(stable=True)]  # by row, in the order of columns
    row, first, length = groups
    taken, window = lane < length[:, None], first[:, None] + lane
    window = torch.where(taken, window, first[:, None])
    base = places[first]
    values = torch.where(taken, entries[window], 0) if len(first) else weight.new_zeros(0, GROUP)
    offsets = torch.where(taken, places[window] - base[:, None], 0)
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    starts[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    narrow = torch.int16 if columns <= _WIDTHS[torch.int16] else torch.int32
    return values.flatten(), offsets.flatten().to(offset), base.to(narrow), starts


def dense(values: Tensor, offsets: Tensor, bases: Tensor, starts: Tensor, columns: int) -> Tensor:
    """The matrix (rows, columns) of `packed` parts, in plain torch."""
    rows = len(starts) - 1
    row = torch.arange(rows, device=starts.device).repeat_interleave(starts.diff().long())
    place = (row * columns + bases.long())[:, None] + offsets.view(-1, GROUP).long()
    kept = values != 0
    flat = torch.zeros(rows * columns, dtype=values.dtype, device=values.device)
    flat[place.flatten()[kept]] = values[kept]
    return flat.view(rows, columns)


_FEW = 4  # tokens; more are multiplied by the unpacked matrix


class OffsetLinear(CheckedState):
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
        return sum(part.nbytes for part in (self.values, self.offsets, self.bases, self.starts))

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output (..., out_features) of (..., in_features)."""
        flat = inputs.reshape(-1, self.in_features)
        if not 0 < len(flat) <= _FEW or not _has_kernel(inputs):
            return nn.functional.linear(inputs, self._unpacked(inputs), self.bias)
        few: Tensor = self._few(flat.contiguous())
        return few.view(*inputs.shape[:-1], self.out_features)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpacked(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.weight.to(inputs.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _few(self, inputs: Tensor) -> Tensor:
        from iobs.inference.offsets_triton import multiply

        parts = self.values, self.offsets, self.bases, self.starts, self.longest
        return without_gradient(lambda few: multiply(*parts, few, self.bias), inputs, self.trained)

    def _problem(self, state: Mapping[str, Tensor], prefix: str, buffers: Mapping[str, Tensor] | None) -> str | None:
        """Parts that the kernel would read beyond their ends."""
        if buffers is None:
            return None
        values, offsets, bases, starts = (buffers[name] for name in ("values", "offsets", "bases", "starts"))
        if in_bounds(values, offsets, bases, starts, self.in_features):
            return None
        return "weight: the column offsets are damaged; accelerate the dense model again."

    def _forget(self) -> None:
        self.longest = _longest(self.starts)

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{self.in_features}, {self.out_features}, format=offsets"


def _has_kernel(inputs: Tensor) -> bool:
    """True if the kernel can read activations: a model may have been moved to the CPU."""
    return inputs.is_cuda


def _longest(starts: Tensor) -> int:
    """Most groups of a row."""
    return int(starts.diff().max())
