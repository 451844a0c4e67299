"""Bits of every layer under one rate for all, in one sweep through the dense model.

A layer with an error of c^2 / 12 in each of its n entries has the damage n f c^2 / 24, f being the price of its rows.
So layers of equal slope have the same f c^2: one number divides the bits of a network. The bits of a layer follow from
the spreads of its columns in its own metric.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.core import exponents
from iobs.core.files import ENTRY_BYTES, JOINED_BYTES, compressed_text
from iobs.core.grids import stored_bits
from iobs.core.integers import least_bits
from iobs.core.late import library_class, library_object
from iobs.core.linalg import cholesky
from iobs.core.patterns import Budget, Pattern, Rate
from iobs.errors import PatternError, listed
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.coverage import Reason
from iobs.pruning.layerwise.patterns import patterns_of
from iobs.pruning.network.layers import Layer, same_tensors
from iobs.pruning.network.selection import Selection
from iobs.pruning.plan.curves import dense_sweep
from iobs.pruning.recipe import LayerSettings, Rule
from iobs.pruning.samples.batches import Samples
from iobs.pruning.workspace import Workspace
from iobs.solvers.successive_rounding import bits_at, level_at

_CLASSES = 16  # of rows of like size; the rows of rare tokens need fewer bits than those of frequent ones
_LEAST_DAMPING = 1e-4  # Grams of few samples are singular
_FEWEST = 0.05  # bits of an integer, on average, that no layer goes below
_MOST = 12.0  # bits of a layer
_MOST_SIDE = 6.0  # bits a weight that steps and tables of a matrix may take under a budget
_FRAME = 110  # bytes of the header of a file beside its tensors
_SUM_LETTERS = 5  # of the check sum of a tensor in the header
_HEAD = 15  # bytes of the head and the sum of a packed tensor, without its shape
_KNOWN_BITS = 6  # of a step that a power of two, as steps are in 16 bits, does without
_VALUES_HEAD = 9  # bytes of the head of its values


@torch.no_grad()
def divide_rate(workspace: Workspace, rate: Rate, layers: tuple[Layer, ...]) -> dict[Layer, float]:
    """Bits a weight of every layer that receives input; none if no layer does, which the projection reports.

    Args:
        workspace: state of the run; the model is dense.
        rate: of all layers together.
        layers: the layers.

    Raises:
        PatternError: the rate is less than the steps and tables of the layers need.
    """
    fisher = workspace.fisher  # before the sweep: its passes load and release blocks
    sweep = dense_sweep(workspace, layers, workspace.fit, Samples())
    settings = workspace.recipe.for_layers(layers)
    octaves: dict[Layer, Tensor] = {}
    for group in sweep.groups():
        statistics = group.statistics()
        for layer in group.layers:
            gram = statistics.calibration
            prices = fisher.price(layer, gram)
            weight = layer.read(workspace.store.model).double()
            metric = workspace.metric_of(layer)
            if prices is not None:
                if metric is not None and metric.moment is not None:
                    prices = prices.mean() * metric.factor(weight.device).diagonal().square()
                weight = weight * prices.to(weight.device).sqrt()[:, None]
            octaves[layer] = _octaves(weight, gram.own, settings[layer])
            workspace.callbacks.on_measure("spreads of layers", len(octaves), len(layers))
    rate, others = _left_for(workspace, rate, sweep, octaves)
    bits = divided(rate, {layer: layer.shape for layer in octaves}, octaves) if octaves else {}
    return {**bits, **dict.fromkeys(others, rate.bits)}


def equal_rate(workspace: Workspace, rate: Rate, layers: tuple[Layer, ...]) -> dict[Layer, float]:
    """The same bits a weight for every layer that receives input; arguments and errors as in `divide_rate`."""
    sweep = dense_sweep(workspace, layers, workspace.fit, Samples())
    reached = [layer for group in sweep.groups() for layer in group.layers]
    rate, others = _left_for(workspace, rate, sweep, reached)
    return dict.fromkeys([*reached, *others], rate.bits)


def _left_for(
    workspace: Workspace, rate: Rate, sweep: Sweep, reached: Collection[Layer]
) -> tuple[Rate, tuple[Layer, ...]]:
    """The rate of the layers that receive input: of a budget what is left beside the others, which stay dense.

    Args:
        workspace: state of the run.
        rate: of all layers together.
        sweep: of a part of the samples, at its end.
        reached: the layers that these reach.

    Returns:
        The rate, and the layers of a budget that only other samples of the run reach: they are coded too.
    """
    missed = tuple(sweep.without_input)
    others: tuple[Layer, ...] = ()
    if workspace.request.in_file and missed:
        rest = replace(sweep, calibration=workspace.portion(0), heldout=workspace.heldout, layers=missed, tables={})
        others = tuple(layer for group in rest.groups() for layer in group.layers)
    coded = [*reached, *others]
    dense = [layer for layer in workspace.request.in_file if layer not in coded]
    return (_beside(rate, dense, coded, workspace.store.model) if dense and coded else rate), others


def _beside(rate: Rate, dense: Sequence[Layer], coded: Collection[Layer], model: nn.Module) -> Rate:
    """The rate that is left for coded layers beside those that no calibration sample reaches, which stay dense.

    Raises:
        PatternError: that is less than their steps and tables need; says what the dense layers take.
    """
    weights = sum(layer.weights for layer in coded)
    least = sum(layer.weights * _least_bits(layer.shape) for layer in coded)
    kept = sum(min(16.0 * layer.weights, _dense_bits(layer.read(model))) for layer in dense)
    bits = rate.bits * (weights + sum(layer.weights for layer in dense)) - kept
    if bits < least:
        names = listed([layer.name for layer in dense])
        raise PatternError(
            f"No calibration sample reaches {names}, which stay dense and take {kept / 8e6:.4g} MB. The budget is "
            f"{(least - bits) / 8e6:.4g} MB too small for them and for the steps and tables of the other matrices: "
            "give more, or calibration data that reach them."
        )
    return replace(rate, bits=min(bits / weights, _MOST))


def rate_of(
    budget: Budget, model: nn.Module, selection: Selection, rules: Sequence[Rule] = ()
) -> tuple[Rate, Selection]:
    """The rate of the matrices of a network whose file has the bytes of a budget, and the matrices to prune.

    What stays dense has the bits of a code of its exponents, in bfloat16 if it is wider, at most 16 an entry; 16 where
    its values are not here, as in blocks in files, and in matrices to which a rule gives only zeros. Matrices whose
    steps and tables would take more than `_MOST_SIDE` bits a weight are left dense.

    Args:
        budget: of the file.
        model: whose weights may be on the meta device.
        selection: matrices that may be coded.
        rules: of the recipe; they leave matrices dense, or give them a pattern of their own.

    Raises:
        PatternError: the budget is less than the rest, the steps and the tables need; says what is the least. Or no
            matrix is large enough to be coded.
        LayerSelectionError: as `patterns_of`.
    """
    selection, patterns = patterns_of(selection, budget, rules)
    ruled = {layer: pattern for layer, pattern in patterns.items() if pattern is not budget}
    small = {layer for layer in patterns if layer not in ruled and least_bits(layer.shape) > _MOST_SIDE}
    coded = [layer for layer in patterns if layer not in ruled and layer not in small]
    if not coded:
        raise PatternError(
            f"{budget} has no matrix to divide bits among: rules have the others, or their steps and tables would take "
            "as many bits as their weights."
        )
    state = model.state_dict(keep_vars=True)
    weights = sum(layer.weights for layer in coded)
    codes = {id(layer.stored(model)) for layer in (*coded, *ruled)}
    bits = budget.bits(sum(tensor.numel() for tensor in model.parameters()))
    rest = 8.0 * _FRAME - 16 * weights  # which are among the tensors of codes
    joins = not _is_pretrained(model)
    joined: list[tuple[str, str, list[int]]] = []
    place = 0  # of the next tensor that is stored as it is: they come first in a file
    for names in same_tensors(state):
        name, tensor = names[0], state[names[0]]
        plain, is_code = tensor.numel() * _bits_per_entry(tensor), any(id(state[each]) in codes for each in names)
        kept = plain if is_code else min(plain, _dense_bits(tensor))
        joinable = joins and plain <= 8 * JOINED_BYTES
        if is_code or kept + 8 * (_HEAD + 4 * tensor.ndim + (ENTRY_BYTES if joinable else 0)) < plain:
            header = _header_bytes(name, "U8", [math.ceil(kept / 8)], math.ceil(bits / 8))
            rest += kept + 8 * (_HEAD + 4 * tensor.ndim + header)
        elif joinable:
            rest += plain + 8
            joined.append((name, "d", list(tensor.shape)))
        else:
            rest += plain + 8 * (_header_bytes(name, "BF16", tensor.shape, place) + _SUM_LETTERS)
            place += plain // 8
    if joined:
        rest += 8 * (_header_bytes("iobs:joined", "U8", [place], place) + _SUM_LETTERS + len(compressed_text(joined)))
    rest += sum(_bits_of(pattern, layer) - 16 * layer.weights for layer, pattern in ruled.items())
    rest += _bits_of_splitting(model, state, coded, math.ceil(bits / 8))
    least = rest + sum(layer.weights * _least_bits(layer.shape) for layer in coded)
    if bits < least:
        raise PatternError(
            f"{budget} is {bits / 8e6:.4g} MB. The least for this network is {least / 8e6:.4g} MB: {rest / 8e6:.4g} MB "
            "of the rest, which is dense in 16 bits or has rules, and the steps and tables of the coded matrices."
        )
    reason = Reason("asked", "its steps and tables would take as many bits as its weights")
    skipped = {**selection.skipped, **{layer.name: reason for layer in small}}
    kept_layers = tuple(layer for layer in selection.layers if layer not in small)
    return Rate(min((bits - rest) / weights, _MOST)), Selection(kept_layers, skipped)


def _is_pretrained(model: nn.Module) -> bool:
    return isinstance(model, library_class("transformers.modeling_utils", "PreTrainedModel"))


def _bits_of_splitting(model: nn.Module, state: Mapping[str, Tensor], coded: Iterable[Layer], size: int) -> float:
    """Bits that a file takes because transformers writes in several tensors what a model holds in one.

    Experts in one tensor are written one by one, and their gate and up projections apart: each has a place in the
    header, and steps and tables of its own.

    Args:
        model: any module.
        state: its tensors, by name.
        coded: matrices of integers.
        size: of the file in bytes.
    """
    if not _is_pretrained(model):
        return 0.0
    held = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    written = library_object("transformers.core_model_loading", "revert_weight_conversion")(model, held)
    kept = {id(tensor) for tensor in held.values()} & {id(tensor) for tensor in written.values()}

    def others(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if id(tensor) not in kept}

    def heads(tensors: Mapping[str, Tensor]) -> float:
        return sum(8 * (_HEAD + 4 * t.ndim + _header_bytes(name, "U8", [size], size)) for name, t in tensors.items())

    merged, parts = others(held), others(written)
    whole = [layer.shape for layer in coded if layer.key in merged]
    shapes = [(len(part), part.shape[1]) for part in parts.values() if part.ndim == 2]
    known = _KNOWN_BITS if any(tensor.element_size() == 2 for tensor in merged.values()) else 0

    def sides(shape: tuple[int, int]) -> float:
        return least_bits(shape) * math.prod(shape) - known * shape[1]

    return heads(parts) - heads(merged) + (sum(map(sides, shapes)) - sum(map(sides, whole)) if whole else 0.0)


def _bits_of(pattern: Pattern, layer: Layer) -> float:
    """Bits of a matrix under a pattern, at most."""
    if isinstance(pattern, Rate):
        return pattern.bits * layer.weights
    return stored_bits(pattern, layer.shape) or 16 * layer.weights


def _header_bytes(name: str, dtype: str, shape: Iterable[int], place: int) -> int:
    """Bytes of a tensor in the header of a file, and of the letter for its dtype, without its check sum.

    Args:
        name: of the tensor.
        dtype: as the file spells it.
        shape: as it is stored.
        place: its first byte in the file.
    """
    extents = ",".join(map(str, shape))
    return len(f'"{name}":{{"dtype":"{dtype}","shape":[{extents}],"data_offsets":[{place},{place}]}},') + 1


def _bits_per_entry(tensor: Tensor) -> int:
    """Bits of an entry of a tensor in a file whose floating numbers are rounded to 16 bits."""
    return 8 * min(tensor.element_size(), 2 if tensor.is_floating_point() else 16)


def _least_bits(shape: tuple[int, int]) -> float:
    """The least bits a weight of a coded matrix: its steps and tables, and a few for its integers."""
    return least_bits(shape) + _FEWEST


def _dense_bits(tensor: Tensor) -> float:
    """Bits of a tensor that keeps its numbers, by a code of their exponents; infinite where they are not here."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return math.inf
    half = tensor.to(exponents.half_of(tensor)) if tensor.element_size() > 2 else tensor
    return exponents.bits(half) + 8 * _VALUES_HEAD


def require_rates(patterns: Mapping[Layer, Pattern], divided: Pattern | None) -> None:
    """Raise unless every layer can have its rate, before any work.

    Args:
        patterns: of every layer.
        divided: the pattern whose bits the run divides, or None.

    Raises:
        PatternError: the steps and tables of a layer alone need more.
    """
    for layer, pattern in patterns.items():
        least = _least_bits(layer.shape)
        if isinstance(pattern, Rate) and least > (_MOST if pattern is divided else pattern.bits):
            shape = f"{layer.shape[0]} x {layer.shape[1]}"
            raise PatternError(
                f"The steps and tables of {layer.name!r} ({shape}) alone need {least:.2f} bits a weight: leave it "
                f'dense by ignore="{layer.name}", on the command line --ignore {layer.name}'
                + (", or give more." if least <= _MOST else ".")
            )


def _octaves(weight: Tensor, grams: Tensor, settings: LayerSettings) -> Tensor:
    """Logarithms of the spreads of entries in the metric of a layer, on the processor.

    Rows of like size are put together: (classes of rows, columns).

    Args:
        weight: (rows, columns) float64, its rows scaled by the roots of their prices.
        grams: (groups, columns, columns).
        settings: of the layer.
    """
    parts = weight.reshape(len(grams), -1, weight.shape[1])
    octaves = []
    for rows, gram in zip(parts, grams.to(weight.device).double(), strict=True):
        if not bool(gram.diagonal().any()):  # inputs that are all zero: weights count as they are
            gram = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        damping = max(settings.damping, _LEAST_DAMPING) * float(gram.diagonal().mean())
        shifted = gram + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        by_size = rows[rows.square().sum(1).argsort()]
        spreads = torch.stack([part.square().mean(0).sqrt() for part in by_size.chunk(_CLASSES)])
        octaves.append(torch.log2((spreads * cholesky(shifted).diagonal()).clamp_min(1e-30)))
    return torch.cat(octaves).cpu()


def divided(rate: Rate, shapes: Mapping[Layer, tuple[int, int]], octaves: Mapping[Layer, Tensor]) -> dict[Layer, float]:
    """Bits a weight of layers with one error for all, which on average are those of the rate.

    Args:
        rate: of all layers together.
        shapes: of the layers.
        octaves: logarithms of the spreads of their columns.

    Raises:
        PatternError: the rate is less than the steps and tables of the layers need.
    """
    weights = {layer: rows * columns for layer, (rows, columns) in shapes.items()}
    total = sum(weights.values())
    least = sum(weights[layer] * _least_bits(shape) for layer, shape in shapes.items()) / total
    if least > rate.bits:
        raise PatternError(
            f"Steps and tables of these layers alone need {least:.2f} bits a weight, more than {rate} has; give more, "
            "or leave small layers dense by a rule."
        )

    def bits(level: float) -> dict[Layer, float]:
        return {
            layer: min(least_bits(shapes[layer]) + max(float(bits_at(spread, level).mean()), _FEWEST), _MOST)
            for layer, spread in octaves.items()
        }

    def average(level: float) -> float:
        return sum(weights[layer] * of_layer for layer, of_layer in bits(level).items()) / total

    return bits(level_at(rate.bits, average, octaves.values()))
