"""Modules that compute with stored matrices, and what they refuse: gradients, and damaged states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from iobs.errors import ModelError, ProblemError
from iobs.inference.formats import FormatName, StoredMatrix, require_valid, store
from iobs.inference.product import StoredProduct


class _WithoutGradient(torch.autograd.Function):
    """A function whose gradient is an error."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor, anchor: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute, recording nothing."""
        return compute(inputs)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        """Raise the error."""
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored has no gradient. Train the dense model, and accelerate "
            "or pack it afterwards; for outputs alone use torch.no_grad()."
        )


def without_gradient(compute: Callable[[Tensor], Tensor], inputs: Tensor, trained: bool = True) -> Tensor:
    """Apply a function that has no gradient.

    Where torch records, the output asks for a gradient as that of a dense layer does, and `backward` through it is a
    ProblemError. Otherwise the layers before would get wrong gradients without a word.

    Args:
        compute: the function.
        inputs: its argument.
        trained: the dense layer had a weight that asks for a gradient.

    Raises:
        ProblemError: `torch.jit.trace` runs the model; the trace would hold the outputs of this call.
    """
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        raise ProblemError(
            "A layer that iobs.accelerate or iobs pack stored cannot be traced. Trace or export the dense model."
        )
    if not torch.is_grad_enabled():
        return compute(inputs)
    if trained or inputs.requires_grad:
        anchor = torch.empty(0, requires_grad=True)  # so that the output asks for a gradient
        output: Tensor = _WithoutGradient.apply(inputs, anchor, compute)  # type: ignore[no-untyped-call]
        return output
    with torch.no_grad():
        return compute(inputs)


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
    buffers = {}
    for name, buffer in module.named_buffers(recurse=False):
        loaded = state.get(f"{prefix}{name}", buffer)
        if not isinstance(loaded, Tensor) or loaded.shape != buffer.shape:
            return None
        buffers[name] = loaded if metadata.get("assign_to_params_buffers") else loaded.to(buffer).contiguous()
    return buffers


class CheckedState(nn.Module):
    """A module whose buffers are checked before a state dict changes them, also where strict is False."""

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
        """Take a state dict without a problem."""
        problem = self._problem(state, prefix, buffers_after(self, state, prefix, metadata))
        if problem is not None:
            problems.append(f"{prefix}{problem}")
            return
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, problems)
        self._forget()

    def _problem(self, state: Mapping[str, Tensor], prefix: str, buffers: Mapping[str, Tensor] | None) -> str | None:
        """The problem of a state dict, which begins with a name inside the module, or None.

        Args:
            state: the state dict.
            prefix: of the module's names in it.
            buffers: as the module would have them; None for shapes that torch refuses itself.
        """
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what was made of the tensors before others were loaded."""


class StoredSettings(TypedDict, total=False):
    """Keyword arguments of `StoredLinear` after the bias."""

    dtype: torch.dtype
    threads: int
    most_tokens: int | None


class StoredLayer(CheckedState):
    """A layer with a stored matrix, for inference on the CPU.

    Its state dict holds the stored tensors. `.to(dtype)` changes the bias and `weight.dtype`, never the stored matrix.

    Args:
        matrix: the weight.
        bias: the bias, or None.
        dtype: dtype that `weight` reports.
    """

    def __init__(self, matrix: StoredMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.dtype = matrix.format, dtype
        self.trained = True  # whether the weight of the dense layer asked for a gradient: then `backward` is an error
        self._rows, self._columns = matrix.rows, matrix.columns
        for name, tensor in matrix.tensors.items():
            self.register_buffer(f"stored_{name}", tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def matrix(self) -> StoredMatrix:
        """The stored matrix; it shares the memory of the module."""
        return self._matrix_of(dict(self.named_buffers(recurse=False)))

    def _matrix_of(self, buffers: Mapping[str, Tensor]) -> StoredMatrix:
        tensors = {name.removeprefix("stored_"): tensor for name, tensor in buffers.items()}
        return StoredMatrix(self.format, self._rows, self._columns, tensors)

    @property
    def weight(self) -> Tensor:
        """The weight as a dense matrix, computed anew at each use: (rows, columns)."""
        return self.unpacked()

    def unpacked(self) -> Tensor:
        """The weight as a dense matrix, computed anew: (rows, columns)."""
        dense: Tensor = self.matrix.to_dense().to(self.dtype)
        return dense

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLayer:
        """Apply `.to(...)` to the bias alone.

        Raises:
            ProblemError: the module would move to another device than the CPU.
        """
        probe = fn(torch.zeros((), dtype=self.dtype))
        if probe.device.type != "cpu":
            raise ProblemError(
                f"A stored matrix computes on the CPU only; move the model to {probe.device.type} before "
                "iobs.accelerate, or keep it on the CPU."
            )
        if probe.is_floating_point():
            self.dtype = probe.dtype
        if self.bias is not None:
            self.bias = nn.Parameter(fn(self.bias.data), requires_grad=False)
        return self

    def _problem(self, state: Mapping[str, Tensor], prefix: str, buffers: Mapping[str, Tensor] | None) -> str | None:
        """A state dict of a dense model, or tensors that kernels would read beyond their ends."""
        if f"{prefix}weight" in state and not any(name.startswith(f"{prefix}stored_") for name in state):
            return (
                "weight is that of a dense layer, and the layer here is a stored matrix of iobs.accelerate; load the "
                "state dict into the dense model, and accelerate it afterwards."
            )
        try:
            if buffers is not None:
                require_valid(self._matrix_of(buffers))
        except ModelError as error:
            return f"matrix: {error}"
        return None

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{self._rows}, {self._columns}, format={self.format}"


class StoredEmbedding(StoredLayer):
    """An embedding with a stored matrix, for inference on the CPU.

    Args:
        matrix: (entries, embedding_dim).
        dtype: dtype of the output.
    """

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(matrix, None, dtype)
        self.num_embeddings, self.embedding_dim = matrix.rows, matrix.columns

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the rows are read with loops
    def forward(self, numbers: Tensor) -> Tensor:
        """The rows (..., embedding_dim) of numbers (...)."""
        rows = without_gradient(self._rows_of, numbers.reshape(-1), self.trained)
        return rows.view(*numbers.shape, self.embedding_dim)

    def _rows_of(self, numbers: Tensor) -> Tensor:
        return self.matrix.rows_of(numbers.long()).to(self.dtype)


class StoredLinear(StoredLayer):
    """A linear layer with a stored matrix, for inference on the CPU, see `StoredLayer`.

    Args:
        matrix: (out_features, in_features).
        bias: (out_features), or None.
        dtype: dtype that `weight` reports.
        threads: number of threads of a product.
        most_tokens: see `StoredProduct`.
    """

    def __init__(
        self,
        matrix: StoredMatrix,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        most_tokens: int | None = None,
    ) -> None:
        super().__init__(matrix, bias, dtype)
        self.out_features, self.in_features = matrix.rows, matrix.columns
        self.threads, self.most_tokens = threads, most_tokens
        self._product: StoredProduct | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output (..., out_features).

        Args:
            inputs: (..., in_features), any floating dtype.
        """
        flat: Tensor = self._multiply(inputs.reshape(-1, self.in_features))
        outputs = flat.view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)

    def _multiply(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # outside of a compilation the decorator would only take time
            outputs: Tensor = self._opaque(inputs)
            return outputs
        return without_gradient(self.product, inputs, self.trained)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # numba code is opaque to the compiler
    def _opaque(self, inputs: Tensor) -> Tensor:
        return without_gradient(self.product, inputs, self.trained)

    @property
    def product(self) -> StoredProduct:
        """The product of the stored matrix."""
        if self._product is None:
            self._product = StoredProduct(self.matrix, threads=self.threads, most_tokens=self.most_tokens)
        return self._product

    def use_threads(self, threads: int) -> None:
        """Set the number of threads of a product."""
        self.threads, self._product = threads, None

    def _forget(self) -> None:
        self._product = None

    def __getstate__(self) -> dict[str, object]:
        # Addresses of the product belong to this copy of the tensors.
        return {**self.__dict__, "_product": None}

    def extra_repr(self) -> str:
        """Shape and format."""
        return f"{self.in_features}, {self.out_features}, format={self.format}, threads={self.threads}"


class StoredConv(StoredLinear):
    """A convolution of size 1 with a stored matrix, for inference on the CPU.

    Args:
        matrix: (out_channels, in_channels).
        bias: (out_channels), or None.
        stride: of every spatial dimension.
        settings: further arguments of `StoredLinear`.
    """

    def __init__(
        self, matrix: StoredMatrix, bias: Tensor | None, stride: tuple[int, ...], **settings: Unpack[StoredSettings]
    ) -> None:
        super().__init__(matrix, bias, **settings)
        self.stride = stride

    def forward(self, inputs: Tensor) -> Tensor:
        """The output (samples, out_channels, ...) of an input (samples, in_channels, ...), or of one sample.

        It is contiguous, or has its channels last if the input has, as torch's own: code may take a `view` of it.
        """
        last = _channels_last(inputs)
        for dimension, stride in enumerate(reversed(self.stride), start=1):
            inputs = inputs.movedim(-dimension, 0)[::stride].movedim(0, -dimension)
        channels = -1 - len(self.stride)  # counted from the end: one sample has no dimension before it
        outputs = super().forward(inputs.movedim(channels, -1)).movedim(-1, channels)
        return outputs if last else outputs.contiguous()


def _channels_last(images: Tensor) -> bool:
    """True if images, or volumes, lie in memory with their channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return images.ndim in formats and images.is_contiguous(memory_format=formats[images.ndim])


def refuse_to_save(model: nn.Module) -> None:
    """Let `save_pretrained` of a model with stored layers be an error: transformers could not read such a file."""
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = _refused  # type: ignore[assignment]


def _refused(*_: object, **__: object) -> None:
    raise ModelError(
        "Layers of this model are stored matrices, which from_pretrained cannot read. Save the dense model before "
        "iobs.accelerate, or write a packed file of it: iobs.save_packed(model, path, precision=...)."
    )


def can_store(module: nn.Module) -> bool:
    """True if a module has a stored form: a linear layer, or a convolution of size 1 without groups or padding."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return type(module) is nn.Linear
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):  # a class of its own may compute something else
        return False
    single = set(module.kernel_size) == {1} and module.groups == 1
    return single and not isinstance(module.padding, str) and set(module.padding) == {0}


def is_table(module: nn.Module) -> bool:
    """True if a module is an embedding with a stored form."""
    return type(module) is nn.Embedding and module.max_norm is None


def matrix_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer, an embedding or a convolution of size 1 as a matrix (rows, columns)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().flatten(1)


def stored(module: nn.Module, name: FormatName, threads: int = 1, most_tokens: int | None = None) -> StoredLinear:
    """The stored form of a module, see `can_store`.

    Args:
        module: the dense module.
        name: a format.
        threads: number of threads of a product.
        most_tokens: see `StoredProduct`.
    """
    return with_matrix(module, store(matrix_of(module), name), threads, most_tokens)


def table_with_matrix(module: nn.Module, matrix: StoredMatrix) -> StoredEmbedding:
    """An embedding like `module`, see `is_table`, with a stored matrix in place of its weight."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    made = StoredEmbedding(matrix, weight.dtype)
    made.trained = weight.requires_grad
    return made


def with_matrix(
    module: nn.Module, matrix: StoredMatrix, threads: int = 1, most_tokens: int | None = None
) -> StoredLinear:
    """A module like `module`, see `can_store`, with a stored matrix in place of its weight."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    settings: StoredSettings = {"dtype": weight.dtype, "threads": threads, "most_tokens": most_tokens}
    if isinstance(module, nn.Linear):
        made = StoredLinear(matrix, bias, **settings)
    else:
        made = StoredConv(matrix, bias, module.stride, **settings)  # type: ignore[arg-type]
    made.trained = weight.requires_grad
    return made
