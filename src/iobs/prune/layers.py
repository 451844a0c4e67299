"""Which tensors of a network are matrices that can be pruned, where they live, and how to read and write them."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from iobs.errors import LayerSelectionError, ModelError, NonFiniteError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Layer:
    """The address of one weight matrix: (module path, parameter, expert or projection, groups, transposed).

    `matrix` is always (rows, columns) = (outputs, inputs of one group): convolution kernels are flattened, the
    (in, out) weight of GPT-2's Conv1D is transposed. The rows of a grouped convolution fall into `groups` equal
    consecutive parts, each with a Gram matrix of its own. The queries', keys' and values' weights that
    `nn.MultiheadAttention` keeps in one parameter are three matrices, since their inputs may differ.
    """

    path: str
    shape: tuple[int, int]
    parameter: str = "weight"
    expert: int | None = None
    projection: Literal["q", "k", "v"] | None = None
    groups: int = 1
    transposed: bool = False
    stored_as: str | None = None  # the name of a parameter of another module, where this one shares it

    @property
    def name(self) -> str:
        """What reports and name patterns call this matrix."""
        name = self.path if self.parameter == "weight" else f"{self.path}.{self.parameter}"
        parts = (part for part in (self.expert, self.projection) if part is not None)
        return ".".join([name, *map(str, parts)])

    @property
    def weights(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    @property
    def key(self) -> str:
        """Name of the parameter that holds it, as `named_parameters` has it."""
        return self.stored_as or _joined(self.path, self.parameter)

    @property
    def is_called(self) -> bool:
        """Whether it is the weight of its module, so that what the module is called with is its input."""
        return self.expert is None and self.parameter == "weight"

    def stored(self, model: nn.Module) -> nn.Parameter:
        """The whole parameter that holds it."""
        return model.get_submodule(self.path).get_parameter(self.parameter)

    def tensor(self, model: nn.Module) -> Tensor:
        """The stored tensor (a view of its slice for an expert or a projection)."""
        return self._slice(self.stored(model).detach())

    def _slice(self, stored: Tensor) -> Tensor:
        if self.projection is not None:
            return projections(stored)[self.projection]
        return stored if self.expert is None else stored[self.expert]

    def matrix(self, stored: Tensor) -> Tensor:
        """A copy of this layer's part of a parameter as its matrix (rows, columns), in float32 (float64 stays)."""
        part = self._slice(stored)
        matrix = part.T if self.transposed else part.flatten(1)
        return matrix.to(torch.promote_types(matrix.dtype, torch.float32), copy=True).contiguous()

    def read(self, model: nn.Module) -> Tensor:
        """A copy of the model's matrix, (rows, columns), in float32 (float64 stays)."""
        return self.matrix(self.stored(model).detach())

    def write(self, model: nn.Module, matrix: Tensor) -> None:
        """Store a matrix, rounded to the parameter's own dtype; zeros stay exact."""
        stored = self.tensor(model)
        stored.copy_(matrix.T if self.transposed else matrix.reshape(stored.shape))


def projections(stored: Tensor) -> dict[Literal["q", "k", "v"], Tensor]:
    """The queries', keys' and values' rows of the `in_proj_weight` of nn.MultiheadAttention, as views."""
    queries, keys, values = stored.chunk(3)
    return {"q": queries, "k": keys, "v": values}


@dataclass(frozen=True)
class Selection:
    """The layers that will be pruned, and every other weight matrix with the reason why it stays dense."""

    layers: tuple[Layer, ...]
    skipped: dict[str, str]


def library_class(module: str, name: str) -> tuple[type, ...]:
    """A class of a library that whoever built the model has imported, for isinstance; empty if it was not imported."""
    loaded = sys.modules.get(module)
    return () if loaded is None else (vars(loaded)[name],)


def linear_maps() -> tuple[type[nn.Module], ...]:
    """The classes that multiply their input by their `weight`; GPT-2's Conv1D among them if it was imported."""
    return nn.Linear, *CONVOLUTIONS, *library_class("transformers.pytorch_utils", "Conv1D")


def find_layers(model: nn.Module) -> list[Layer]:
    """Every matrix of a network that can be pruned.

    Linear, Conv1d-3d, GPT-2's Conv1D and their subclasses, fused experts, the projections of nn.MultiheadAttention.
    """
    transposed, maps = library_class("transformers.pytorch_utils", "Conv1D"), linear_maps()
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # one for each, though shared
    layers = []
    for path, module in model.named_modules():
        if not isinstance(module, maps):
            layers.extend(_projections_of(path, module) if isinstance(module, nn.MultiheadAttention) else [])
            layers.extend(_fused_experts(path, module))
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or not weight.is_floating_point() or not weight.numel():
            continue  # computed from other parameters anew in every forward pass, quantised, or without entries
        name, is_transposed = names[id(weight)], isinstance(module, transposed)
        layers.append(
            Layer(
                path,
                (weight.shape[1], weight.shape[0]) if is_transposed else (weight.shape[0], weight[0].numel()),
                groups=int(module.groups) if isinstance(module, CONVOLUTIONS) else 1,
                transposed=is_transposed,
                stored_as=None if name == _joined(path, "weight") else name,
            )
        )
    return layers


def _joined(path: str, parameter: str) -> str:
    return f"{path}.{parameter}" if path else parameter


def _projections_of(path: str, module: nn.MultiheadAttention) -> list[Layer]:
    """What queries, keys and values are multiplied by: in one parameter where they have the same width, else in three.

    That of the output is a Linear. What is computed from other parameters anew in every forward pass is left out.
    """
    width, own = module.embed_dim, dict(module.named_parameters(recurse=False))
    if module.kdim == module.vdim == width:
        layers = [Layer(path, (width, width), "in_proj_weight", projection=one) for one in ("q", "k", "v")]
    else:
        widths = {"q": width, "k": module.kdim, "v": module.vdim}
        layers = [Layer(path, (width, columns), f"{one}_proj_weight") for one, columns in widths.items()]
    return [layer for layer in layers if layer.parameter in own]


def _fused_experts(path: str, module: nn.Module) -> list[Layer]:
    """The slices of three-dimensional parameters (experts, rows, columns) of a module that holds many experts.

    Such modules say how many experts they hold, `num_experts`, and those that keep (experts, columns, rows) say
    `is_transposed`; this is how every mixture of transformers does it.
    """
    count, transposed = getattr(module, "num_experts", None), bool(getattr(module, "is_transposed", False))
    layers = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count and parameter.is_floating_point():
            rows, columns = parameter.shape[:0:-1] if transposed else parameter.shape[1:]
            layers += [Layer(path, (rows, columns), name, expert, transposed=transposed) for expert in range(count)]
    return layers


def other_weights(model: nn.Module, layers: Sequence[Layer]) -> dict[str, str]:
    """Every other parameter of two or more dimensions, and why it is not pruned."""
    known = {id(model.get_parameter(layer.key)) for layer in layers}
    reasons = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.squeeze().ndim < 2 or id(parameter) in known:
                continue
            full = _joined(path, name)
            reason = "embedding" if isinstance(module, nn.Embedding) else "not the weight of a linear map"
            reasons[full.removesuffix(".weight")] = reason if parameter.numel() else "without entries"
    return reasons


def select(
    model: nn.Module,
    include: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    *,
    depthwise: bool = False,
    check_finite: bool = True,
) -> Selection:
    """Choose the layers to prune.

    Dense by default: output heads of language models, weights tied to an embedding, depthwise convolutions. A layer
    that `include` names is pruned even so.

    Args:
        model: any network.
        include: name patterns, shell style ("model.layers.*.mlp.*") or "re:" and a regular expression; None is all.
        skip: name patterns of layers that stay dense.
        depthwise: prune depthwise convolutions too.
        check_finite: look at every entry; not where the weights are not in memory.

    Raises:
        ModelError: the model is no module.
        LayerSelectionError: a pattern matches no layer, no layer is left, or a lazy layer was never called.
        NonFiniteError: a weight holds NaN or infinity.
    """
    _require_module(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise LayerSelectionError(f"{name!r} has no shape yet; call the model on a batch first.")
    found = find_layers(model)
    included, skipped_by_user = matching(found, include, "include"), matching(found, skip, "skip")
    defaults = _dense_by_default(model, found, depthwise)
    layers: list[Layer] = []
    taken: set[str | None] = set()
    skipped = other_weights(model, found)
    for layer in found:
        if layer.stored_as in taken:
            skipped[layer.name] = defaults[layer.name]  # whatever was included: a matrix is pruned once
        elif layer.name in skipped_by_user:
            skipped[layer.name] = "skipped by name"
        elif include is not None and layer.name not in included:
            skipped[layer.name] = "not among the included names"
        elif include is None and layer.name in defaults:
            skipped[layer.name] = defaults[layer.name]
        else:
            layers.append(layer)
            taken.add(layer.key)
    if not layers:
        raise LayerSelectionError(
            f"Nothing is left to prune: the model has {len(found)} weight matrices and all are skipped. "
            "Change include= or skip=."
        )
    if check_finite:
        require_finite(model, layers)
    return Selection(tuple(layers), skipped)


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        raise ModelError(f"What is pruned is a torch.nn.Module with its weights; got {got}.")


def require_finite(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Look at every entry of layers' weights.

    Raises:
        NonFiniteError: one is NaN or infinite; names the layer.
    """
    for layer in layers:
        if not bool(torch.isfinite(layer.tensor(model)).all()):
            raise NonFiniteError(f"The weight of layer {layer.name!r} holds NaN or infinity; repair the model first.")


def matching(layers: Sequence[Layer], patterns: str | Sequence[str] | None, option: str) -> set[str]:
    """The names of the layers that name patterns choose.

    Args:
        layers: of the model.
        patterns: shell style ("model.layers.*.mlp.*") or "re:" and a regular expression for the whole name.
        option: where the patterns were given, for the message.

    Raises:
        LayerSelectionError: a pattern is no regular expression, or matches no layer.
    """
    chosen: set[str] = set()
    asked = [patterns] if isinstance(patterns, str) else [] if patterns is None else patterns
    if not isinstance(asked, Iterable) or not all(isinstance(pattern, str) for pattern in asked):
        raise LayerSelectionError(f"{option} takes a name pattern or a list of them, got {patterns!r}.")
    for pattern in asked:
        expression = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        try:
            matched = {layer.name for layer in layers if re.fullmatch(expression, layer.name)}
        except re.error as error:
            raise LayerSelectionError(f"{option}={pattern!r} is not a regular expression: {error}.") from None
        if not matched:
            names = ", ".join(layer.name for layer in layers[:5])
            raise LayerSelectionError(
                f"{option}={pattern!r} matches none of the model's {len(layers)} layers (the first are {names}). "
                'Patterns are shell style, "*.mlp.*", or "re:" and a regular expression for the whole name.'
            )
        chosen |= matched
    return chosen


def _dense_by_default(model: nn.Module, layers: list[Layer], depthwise: bool) -> dict[str, str]:
    reasons = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads: set[int] = set()
    if isinstance(model, library_class("transformers.modeling_utils", "PreTrainedModel")):
        head = model.get_output_embeddings()  # type: ignore[operator]
        heads = set() if head is None else {id(head)}
    for layer in layers:
        module = model.get_submodule(layer.path)
        if id(layer.stored(model)) in embeddings:
            reasons[layer.name] = "tied to an embedding"
        elif layer.stored_as is not None:
            reasons[layer.name] = f"shares {layer.stored_as}"
        elif id(module) in heads:
            reasons[layer.name] = "output head"
        elif layer.groups > 1 and layer.groups == getattr(module, "in_channels", None) and not depthwise:
            reasons[layer.name] = "depthwise convolution"
    return reasons
