"""Selection of the layers to prune, by name and by kind, and the census of what was and was not selected.

Models that a run cannot prune are refused in one sentence before any work.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from iobs.core.late import library_class
from iobs.errors import LayerSelectionError, ModelError, NonFiniteError, listed, require_values, shown
from iobs.pruning.coverage import Coverage, DenseWeight, Reason
from iobs.pruning.network.layers import (
    Layer,
    changing_functions,
    embedding_layers,
    find_layers,
    holds_weights,
    joined,
    linear_maps,
    overlapping,
)
from iobs.pruning.network.modes import state

_BY_USE = {"parameter", "convolution"}  # reasons of weights that a forward pass of the whole model may show
_LISTED = 5  # weights and kinds of modules that an error names
_SUPPORTED = (
    "Linear, Conv1d to Conv3d, MultiheadAttention, LSTM, GRU, RNN, and Conv1D and fused experts of transformers"
)


# ---- models that a run can prune
def require_usable(model: object, *, in_memory: bool = True, removes_units: bool = False) -> None:
    """Raise unless iobs can read, run and write the weights of a model.

    Args:
        model: what the user gave as the model.
        in_memory: False if a store holds the weights, and the model's own tensors are without values.
        removes_units: refuse also wrappers that remember the shapes of the parameters.

    Raises:
        ModelError: it is no module, compiled by torch.jit or torch.export, split over processes, made in inference
            mode, without values (meta device), or has stored matrices of `iobs.accelerate`.
        LayerSelectionError: a lazy layer was never called.
    """
    require_module(model)
    assert isinstance(model, nn.Module)
    require_visible(model, removes_units)
    if without := without_shape(model):
        raise LayerSelectionError(f"{without[0]!r} has no shape yet; call the model on a batch first.")
    if in_memory:
        require_values(
            _tensors(model),
            " If it does not fit on the device, prune an OffloadedStore of it, or use --low-memory on the command "
            "line.",
        )
    for name, tensor in _tensors(model):
        if isinstance(tensor, library_class("torch.distributed.tensor", "DTensor")):
            raise ModelError(
                f"{name} is split over processes (fully_shard or tensor parallelism): prune the model before it is "
                "split, then split it, and call iobs.keep_sparse to train it further."
            )
        if tensor.is_inference():
            raise ModelError(
                f"{name} was made in inference mode, so that it cannot be trained or changed: copy the model outside "
                "of torch.inference_mode, model = copy.deepcopy(model), and prune the copy."
            )
    require_unstored(model)


def require_visible(model: nn.Module, removes_units: bool = False) -> None:
    """Raise unless the layers of a model are Python modules; `removes_units` as in `require_usable`.

    Raises:
        ModelError: torch.jit, torch.export or a wrapper hides them; says which module it is, and what to do.
    """
    for path, module in model.named_modules():
        if reason := _unusable(module, removes_units):
            raise ModelError(f"{path or 'The model'} is a {type(module).__name__}: {reason}")


def _unusable(module: nn.Module, removes_units: bool) -> str | None:
    """The reason why a model with this module is refused, and what to do; None if it is not."""
    if isinstance(module, torch.jit.ScriptModule):
        if next(module.parameters(), None) is not None:
            return "torch.jit hides the layers inside. Prune the Python modules, and script or trace them afterwards."
    elif any(kind.__module__.startswith("torch.export") for kind in type(module).__mro__):
        return "an exported program is a fixed graph. Prune the Python module, and export it afterwards."
    elif isinstance(module, library_class("torch.distributed.fsdp", "FullyShardedDataParallel")):
        return "it splits and flattens the parameters. Prune the model before it is wrapped."
    elif isinstance(module, library_class("deepspeed.runtime.engine", "DeepSpeedEngine")):
        return "it splits and flattens the parameters. Prune the model before deepspeed.initialize."
    elif removes_units and isinstance(module, nn.parallel.DistributedDataParallel):
        return "it reduces gradients of the shapes that it was built with. Prune its .module, then wrap that again."
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes of a module, such as tables of a first call."""
    yield from state(model)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield joined(path, name), value


def without_shape(model: nn.Module) -> list[str]:
    """The names of parameters of lazy layers that were never called."""
    return [name for name, value in model.named_parameters() if isinstance(value, nn.UninitializedParameter)]


def require_module(model: object) -> None:
    """Raise unless a model is a module.

    Raises:
        ModelError: it is not.
    """
    if isinstance(model, library_class("torch.export", "ExportedProgram")):
        raise ModelError("An exported program is a fixed graph. Prune the Python module, and export it afterwards.")
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        raise ModelError(f"The model must be an instance of torch.nn.Module, got {got}.")


def require_unstored(
    model: nn.Module, advice: str = "No solver changes them. Prune the dense model, and accelerate it last."
) -> None:
    """Raise if a layer is a stored matrix.

    Args:
        model: the network.
        advice: what to do otherwise, in a sentence or two.

    Raises:
        ModelError: a layer is one.
    """
    stored = (
        library_class("iobs.inference.modules", "StoredLayer"),
        library_class("iobs.inference.gpu", "OffsetLinear"),
    )
    names = [path for path, module in model.named_modules() if isinstance(module, stored)]
    if names:
        raise ModelError(
            f"{len(names)} layers of the model, {names[0]!r} first, are stored matrices of iobs.accelerate or of a "
            f"packed file. {advice}"
        )


# ---- the layers of a model
@dataclass(frozen=True)
class Selection:
    """The layers to prune, and for every other weight matrix the reason why it stays dense."""

    layers: tuple[Layer, ...]
    skipped: dict[str, Reason]


def other_parameters(model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The parameters of two or more dimensions that no layer holds: name, module and parameter."""
    of_layers = {id(model.get_parameter(layer.key)) for layer in layers}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.squeeze().ndim >= 2 and id(parameter) not in of_layers:
                yield joined(path, name).removesuffix(".weight"), module, parameter


def other_weights(model: nn.Module, layers: Sequence[Layer]) -> dict[str, Reason]:
    """The other parameters of two or more dimensions, by name, with the reason why they are not pruned."""
    changing = changing_functions(model)
    return {
        name: _reason_of(module, parameter, changing.get(name))
        for name, module, parameter in other_parameters(model, layers)
    }


def _reason_of(module: nn.Module, parameter: nn.Parameter, changing: str | None = None) -> Reason:
    """The reason why a parameter that no layer holds is not pruned; `changing` is a function that changes it."""
    kind = type(module).__name__
    if not parameter.numel():
        return Reason("empty", "without entries")
    if parameter.is_complex():
        return Reason("complex", f"{str(parameter.dtype).removeprefix('torch.')}: iobs prunes real numbers only")
    if not holds_weights(parameter):
        short = "floats of 8 bits or less" if parameter.is_floating_point() else "not floating point"
        return Reason("quantised", f"{short}: {str(parameter.dtype).removeprefix('torch.')}")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Reason("embedding", "embedding")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return Reason("recurrent", f"parameter of a recurrent layer, {kind}")
    if isinstance(module, _ConvTransposeNd):
        return Reason("convolution", f"weight of a transposed convolution, {kind}")
    if isinstance(module, (ParametrizationList, *linear_maps(), nn.MultiheadAttention)):
        return Reason("transformed", "the weight is computed from it in every forward pass")
    if changing is not None:
        return Reason("parameter", f"parameter of {kind}, which {changing} changes before it multiplies")
    why = "it is not used, is changed before it multiplies, or multiplies in several forms"
    return Reason("parameter", f"parameter of {kind}, in no matrix product that was observed: {why}")


def unobserved(skipped: dict[str, Reason]) -> dict[str, Reason]:
    """The reasons of a run that does not observe the whole model, which would show further layers."""
    return {
        name: Reason(why.kind, f"{why}; layers are found by their use only in a run with the whole model in memory")
        if why.kind in _BY_USE
        else why
        for name, why in skipped.items()
    }


def may_be_found(model: nn.Module) -> bool:
    """True if a parameter is left in which an observed forward pass may find a layer."""
    if without_shape(model):
        return False
    kinds = {_reason_of(module, parameter).kind for _, module, parameter in other_parameters(model, find_layers(model))}
    return bool(kinds & _BY_USE)


def select(
    model: nn.Module,
    include: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    *,
    depthwise: bool = False,
    embeddings: bool = False,
    check_finite: bool = True,
) -> Selection:
    """Choose the layers to prune.

    Embeddings, output heads of language models, weights tied to an embedding and depthwise convolutions are dense by
    default. Layers that `include` names are pruned nevertheless.

    Args:
        model: any module.
        include: name patterns, shell style ("model.layers.*.mlp.*") or "re:" and a regular expression; None: all.
        ignore: name patterns of layers that stay dense.
        depthwise: prune depthwise convolutions too.
        embeddings: embeddings can be layers too.
        check_finite: check every entry; False if the weights are not in memory.

    Raises:
        ModelError: as in `require_usable`, or adapters are not merged while `include` is None.
        LayerSelectionError: a pattern matches no layer, no layer is left, or a lazy layer was never called.
        NonFiniteError: a weight holds NaN or infinity.
    """
    require_usable(model, in_memory=check_finite)
    if include is None:
        require_merged(model)
    candidates = find_layers(model)
    if embeddings:
        candidates += embedding_layers(model, candidates)
    included, ignored = matching(candidates, include, "include"), matching(candidates, ignore, "ignore")
    defaults = _dense_by_default(model, candidates, depthwise)
    layers: list[Layer] = []
    again = overlapping(model)
    taken: set[Hashable] = set()  # matrices by their place, which names of a shared one have in common
    skipped = other_weights(model, candidates)
    for layer in candidates:
        if layer.slot in taken:
            skipped[layer.name] = defaults[layer.name]  # even if included: a shared matrix is pruned once
        elif layer.key in again:  # through another shape: zeros of one are zeros of both
            skipped[layer.name] = Reason("shared", f"shares the memory of {again[layer.key]}")
        elif layer.name in ignored:
            skipped[layer.name] = Reason("asked", "ignored by name")
        elif include is not None and layer.name not in included:
            skipped[layer.name] = Reason("asked", "not among the included names")
        elif include is None and layer.name in defaults:
            skipped[layer.name] = defaults[layer.name]
        else:
            layers.append(layer)
            taken.add(layer.slot)
    if not layers:
        raise LayerSelectionError(_nothing_left(model, candidates, skipped))
    if check_finite:
        require_finite(model, layers)
    return Selection(tuple(layers), skipped)


def _nothing_left(model: nn.Module, layers: list[Layer], skipped: dict[str, Reason]) -> str:
    """The error if no layer is selected: the weights that are there, and what to do."""
    there = listed([f"{name} ({reason})" for name, reason in skipped.items()], _LISTED)
    if layers:
        only_depthwise = {reason.kind for name, reason in skipped.items()} == {"depthwise"}
        advice = "depthwise=True prunes them." if only_depthwise else "Change include= or ignore=."
        count = "1 weight matrix and it is" if len(layers) == 1 else f"{len(layers)} weight matrices and all are"
        return f"Nothing is left to prune: the model has {count} skipped: {there}. {advice}"
    kinds: Counter[str] = Counter()
    for module in model.modules():
        entries = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if entries:
            kinds[type(module).__name__] += entries
    modules = ", ".join(f"{kind} ({entries:,} entries)" for kind, entries in kinds.most_common(_LISTED))
    weights = f"Its weights are {there}. " if there else ""
    return (
        f"Nothing is left to prune: the model has 0 weight matrices of supported layers ({_SUPPORTED}). "
        f"Its modules with parameters are: {modules or 'none'}. {weights}"
        "Replace them by supported layers, remove parametrisations and quantisation first, or give the module that "
        "holds such layers."
    )


def require_merged(model: nn.Module) -> None:
    """Raise if a matrix is the sum of a base matrix and an adapter: merging would undo the zeros of both.

    Raises:
        ModelError: one is.
    """
    for path, module in adapters_of(model):
        if not module.merged and not module.disable_adapters:
            raise ModelError(
                f"{path!r} has an adapter that is not merged; pruning the matrices one by one would be undone by a "
                "merge. Merge first (iobs.transformers.merge_adapters), or prune the base model and train adapters "
                "on it afterwards (iobs.transformers.mask_adapters). include= prunes the matrices that it names."
            )


def adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of PEFT that hold an adapter, merged or not, with their paths."""
    adapted = library_class("peft.tuners.tuners_utils", "BaseTunerLayer")
    return ((path, module) for path, module in model.named_modules() if isinstance(module, adapted))  # type: ignore[misc]


def require_finite(model: nn.Module, layers: Iterable[Layer]) -> None:
    """Raise unless every entry of the layers' weights is finite.

    Raises:
        NonFiniteError: an entry is NaN or infinite; names the layer.
    """
    for layer in layers:
        if not bool(torch.isfinite(layer.tensor(model)).all()):
            raise NonFiniteError(f"The weight of layer {layer.name!r} holds NaN or infinity; repair the model first.")


def matching(layers: Sequence[Layer], patterns: str | Sequence[str] | None, option: str) -> set[str]:
    """The names of the layers that match name patterns.

    Args:
        layers: all layers of the model.
        patterns: shell style ("model.layers.*.mlp.*") or "re:" and a regular expression for the whole name.
        option: name of the argument that holds the patterns, for the message.

    Raises:
        LayerSelectionError: a pattern is not a regular expression, or matches none of some layers.
    """
    chosen: set[str] = set()
    listed_patterns = [patterns] if isinstance(patterns, str) else [] if patterns is None else patterns
    if not isinstance(listed_patterns, Iterable) or not all(isinstance(pattern, str) for pattern in listed_patterns):
        raise LayerSelectionError(f"{option} takes a name pattern or a list of them, got {shown(patterns)}.")
    for pattern in listed_patterns:
        expression = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        try:
            matched = {layer.name for layer in layers if re.fullmatch(expression, layer.name)}
        except re.error as error:
            raise LayerSelectionError(f"{option}={pattern!r} is not a regular expression: {error}.") from None
        if not matched and layers:
            names = ", ".join(layer.name for layer in layers[:5])
            raise LayerSelectionError(
                f"{option}={pattern!r} matches none of the model's {len(layers)} layers (the first are {names}). "
                'Patterns are shell style, "*.mlp.*", or "re:" and a regular expression for the whole name.'
            )
        chosen |= matched
    return chosen


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The modules that give the scores of the vocabulary, in models of transformers; also inside a wrapper."""
    pretrained = library_class("transformers.modeling_utils", "PreTrainedModel")
    inner = [module for module in model.modules() if isinstance(module, pretrained)]
    heads = [module.get_output_embeddings() for module in inner]  # type: ignore[operator]
    return [head for head in heads if isinstance(head, nn.Module)]


def _dense_by_default(model: nn.Module, layers: list[Layer], depthwise: bool) -> dict[str, Reason]:
    """The layers that stay dense unless they are included, by name, with the reason."""
    reasons = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(head) for head in output_heads(model)}
    for layer in layers:
        module = model.get_submodule(layer.path)
        if isinstance(module, nn.Embedding):
            reasons[layer.name] = Reason("embedding", "embedding")
        elif id(layer.stored(model)) in embeddings:
            reasons[layer.name] = Reason("tied", "tied to an embedding")
        elif layer.stored_as is not None:
            reasons[layer.name] = Reason("shared", f"shares {layer.stored_as}")
        elif id(module) in heads:
            reasons[layer.name] = Reason("output head", "output head")
        elif layer.groups > 1 and layer.groups == getattr(module, "in_channels", None) and not depthwise:
            reasons[layer.name] = Reason("depthwise", "depthwise convolution")
    return reasons


@dataclass(frozen=True)
class Census:
    """Entries of the weights of a model.

    Args:
        parameters: entries of all parameters.
        entries: of every layer and of every other weight matrix, by name.
        slots: the part of a parameter behind each name; names that share it have equal slots.
    """

    parameters: int
    entries: dict[str, int]
    slots: dict[str, Hashable]

    @classmethod
    def of(cls, model: nn.Module) -> Census:
        """Count the entries of a model; its weights may be on the meta device."""
        entries: dict[str, int] = {}
        slots: dict[str, Hashable] = {}
        layers, again = find_layers(model), overlapping(model)
        for layer in layers:
            entries[layer.name] = 0 if layer.key in again else layer.weights
            slots[layer.name] = layer.slot
        doubled = {id(model.get_parameter(name)) for name in again}
        for name, _, parameter in other_parameters(model, layers):
            entries[name] = 0 if id(parameter) in doubled else parameter.numel()
            slots[name] = id(parameter)
        total = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in again)
        return cls(total, entries, slots)

    def coverage(self, selection: Selection, zeros: int) -> Coverage:
        """The coverage of a selection.

        Args:
            selection: the pruned layers, and the reasons of the other weights.
            zeros: number of zeros among all parameters.
        """
        counted = {self.slots[layer.name] for layer in selection.layers}
        pruned = sum(layer.weights for layer in selection.layers)
        dense: list[DenseWeight] = []
        for name, reason in selection.skipped.items():
            entries = 0 if self.slots[name] in counted else self.entries[name]
            counted.add(self.slots[name])
            dense.append(DenseWeight(name, reason.kind, reason.text, entries))
        return Coverage(self.parameters, pruned + sum(weight.entries for weight in dense), pruned, zeros, tuple(dense))
