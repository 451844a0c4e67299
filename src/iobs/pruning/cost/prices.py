"""Prices of the work of a run on this machine, measured with the real model, layers and solver.

The model runs on a few samples; a model whose blocks are in memory one at a time runs one block of each kind. The
solver of the run solves one layer on made-up inputs. All of it takes a few percent of a run, however deep the model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.integers import least_bits
from iobs.core.modes import full_precision
from iobs.core.patterns import Pattern, Rate, Unstructured
from iobs.core.structured import Structured
from iobs.errors import CalibrationError, IOBSError, PatternError, ProblemError
from iobs.pruning.baselines import BlockFisher, gradient_rows, method_of
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import POSITIONS, WIDE, Gram, Statistics, relative_output_error
from iobs.pruning.calibration.replay import BEFORE, Stream
from iobs.pruning.calibration.row_fisher import row_fisher
from iobs.pruning.cost.affordable import ObservedInput, observing_inputs
from iobs.pruning.cost.work import LayerInput, Prices, Solves, Work, stated_sizes
from iobs.pruning.descent.batches import in_steps
from iobs.pruning.layerwise.problem import Task, solve_layer, solver_of_groups
from iobs.pruning.network.layers import Layer, embeddings_of
from iobs.pruning.plan.counts import divides
from iobs.pruning.plan.curves import recipe_of_curves
from iobs.pruning.recipe import BlockFit, GlobalMagnitude, LayerSettings, NetworkSolver, Recipe
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.samples.outputs import is_by_position, logits, tensors_of
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request

UPDATE_BYTES = 80  # of one weight in a step of Adam: gradient, master, moments, mask, and the copy into the model
_SHARE = 0.02  # of the operations of all solves that the trial of one may take
_SIDE, _SIDE_ON_GPU = 1024, 4096  # most rows and columns of a trial; a GPU mostly waits during smaller ones
_FEW = 1e9  # operations that any trial may take: less than a second
_SMALL = 8, 128  # most rows and columns of a layer whose solve takes hardly any operations
_STRONG = 64  # directions of the made-up inputs that are stronger than the others
_TOKENS = 1024  # most inputs of a Gram that is timed
_ENTRIES = 2**22  # of a sum that is timed
_FEW_GRADIENTS, _BLOCKS = 4, 8  # samples and blocks of a trial of a solver of the whole network
_TRIALS = 1.5  # seconds of solves of single layers, besides the one that gives the price of an operation
_CALLS, _MOST_CALLS, _ENOUGH = 3, 20, 0.3  # calls, and seconds of enough of them; the fastest counts
_LAST = 8  # layers, of which one usually has a gradient if any has
_LONG = 1.0  # seconds after which a call is not repeated


def measure(
    store: Store, request: Request, chain: list[Block], data: Samples, held_out: float, fit: Samples | None = None
) -> tuple[Work, Prices]:
    """Measure the sizes of a run and the prices of its work, on the first calibration samples.

    Args:
        store: of the dense model, in eval mode.
        request: its solvers are timed on its layers.
        chain: blocks along which the model can be run, possibly none.
        data: all samples.
        held_out: share of the samples that is held out.
        fit: samples of the fine-tuning, if there is any.
    """
    layers, blocks = [*request.patterns], request.recipe.blocks or BlockFit()
    steps = in_steps(store.model, data, blocks).batches
    batch = steps[0]
    positions, count = sum(map(batches.position_count, data.batches)), batches.position_count(batch)
    with torch.no_grad(), full_precision():
        passes = (
            _pass_whole(store, layers, chain, batch) if store.whole else _pass_by_blocks(store, layers, chain, batch)
        )
        vocabulary, width = stated_sizes(store.model, "vocab_size", "hidden_size")
        needs_prices = store.whole and divides(request.recipe, request.pattern)
        workload = Work(
            layers,
            samples=data.samples,
            positions=positions,
            held_out=held_out,
            blocks=len(chain),
            step=sum(map(batches.position_count, steps)) / len(steps),
            inputs=passes.inputs(layers, count),
            model_bytes=sum(value.nbytes for _, value in store.state()),
            whole=store.whole,
            by_position=passes.by_position,
            priced=not needs_prices or _has_gradient(store, layers, chain, batch),
            fit=fit,
            ranks=current().size,
            sites=len(request.sites.sites),
            grouped={layer.name for layer, pattern in request.patterns.items() if isinstance(pattern, Groups)},
            ruled={layer.name for layer in layers} - {layer.name for layer in request.sharing},
            batches=len(data.batches),
        )
        if (solver := request.recipe.network_solver) is None:
            prices = _prices_of_solves(workload, request, store.device)
        else:
            prices = Prices(0.0, 0.0, 0.0, 0.0, stage=_price_of_stage(store, request, solver, data, held_out))
    byte = passes.bringing / workload.model_bytes
    forward = (passes.seconds - passes.outside) / count
    head = passes.outside / count if store.whole else forward * vocabulary * width / workload.weights
    return workload, replace(prices, forward=forward, head=head, byte=byte)


def _has_gradient(store: Store, layers: Sequence[Layer], chain: list[Block], batch: Batch) -> bool:
    """True if the outputs of a model in memory have gradients, which one sample shows.

    Mostly those at the last layers do, for a quarter of the time that those at all layers take.
    """
    sample = Samples.of([batches.first_sample(batch)])
    tables = embeddings_of(store.model, layers)
    products = [layer for layer in layers if layer.path not in tables]  # outputs of a table are no products with it
    for some, blocks in ((products[-_LAST:], []), (products, chain)):
        with suppress(ProblemError):
            row_fisher(store.model, some, blocks, sample, seed=0, residency=store)
            return True
    return False


def timed(call: Callable[[], object], device: torch.device, least: int | None = None, most: int = 0) -> float:
    """Seconds of the fastest of `least` calls, by default a few; of at most `most` as long as they take little time.

    Calls that take seconds are not repeated: their noise is small.
    """
    times: list[float] = []
    while (len(times) < (least or _CALLS) and sum(times) < _LONG) or (len(times) < most and sum(times) < _ENOUGH):
        began = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass
class Passes:
    """Forward passes of one batch.

    Attributes:
        seconds: of a pass through all blocks, or through the whole model if it is in memory.
        outside: of these, those outside the blocks.
        bringing: seconds to bring all blocks to the device.
        observed: inputs of the layers, by path of the module.
        by_position: True if a model in memory gives an output for every position of text.
    """

    seconds: float = 0.0
    outside: float = 0.0
    bringing: float = 0.0
    observed: dict[str, ObservedInput] = field(default_factory=dict)
    by_position: bool = False

    def inputs(self, layers: Sequence[Layer], positions: int) -> dict[str, LayerInput]:
        """The inputs of the layers that were reached, by name; `positions` is the number of positions of the batch."""
        reached = [layer for layer in layers if layer.path in self.observed]
        groups = [self.observed[layer.path].group for layer in reached]
        experts = max((layer.expert + 1 for layer in layers if layer.expert is not None), default=1)
        inputs = {}
        for layer, group in zip(reached, groups, strict=True):
            entry = self.observed[layer.path]
            rows = entry.rows / positions
            if layer.expert is None:
                inputs[layer.name] = LayerInput(rows, groups.count(group), entry.unfolded, entry.added)
            else:  # a token goes to about two experts
                inputs[layer.name] = LayerInput(rows * min(1.0, 2 / experts))
        return inputs


def _pass_whole(store: Store, layers: Sequence[Layer], chain: list[Block], batch: Batch) -> Passes:
    """A pass of the whole model."""
    outputs: list[object] = []
    outside: list[float] = []
    with _timing_outside(store, chain, outside):
        with _observing(store.model, layers) as observed:
            seconds = timed(lambda: outputs.append(batches.forward(store.model, batch)), store.device, 1)
        output = outputs.pop()
        by_position = bool(tensors_of(output)) and is_by_position(logits(output), batch)
        del output  # scores of a large vocabulary
        if seconds < _LONG or store.device.type != "cpu":  # otherwise a further pass says little more
            seconds = timed(lambda: batches.forward(store.model, batch), store.device, most=_MOST_CALLS)
    return Passes(seconds, min(outside, default=0.0), 0.0, observed, by_position)


@contextmanager
def _observing(model: nn.Module, layers: Sequence[Layer]) -> Iterator[dict[str, ObservedInput]]:
    """Observe the inputs of layers, by path of their module, and which outputs are added to a residual stream."""
    with observing_inputs(model, layers, POSITIONS) as observed:

        def note(layer: Layer, _: Tensor) -> None:
            if layer.path in observed:
                observed[layer.path].added = True

        with captured_additions(model, layers, note):
            yield observed


@contextmanager
def _timing_outside(store: Store, chain: list[Block], seconds: list[float]) -> Iterator[None]:
    """Append the seconds that every forward pass inside the context takes before and after the blocks; if there are."""
    if not chain:
        yield
        return
    moments: list[float] = []

    def note(*_: object) -> None:
        if store.device.type != "cpu":
            torch.accelerator.synchronize(store.device)
        moments.append(time.perf_counter())

    def end(*_: object) -> None:
        note()
        if len(moments) > 3:  # a block may be called several times
            began, entered, left, ended = moments[0], moments[1], moments[-2], moments[-1]
            seconds.append(entered - began + ended - left)
        moments.clear()

    first, last = (store.model.get_submodule(block.path) for block in (chain[0], chain[-1]))
    with ExitStack() as stack:
        for handle in (
            store.model.register_forward_pre_hook(note),
            first.register_forward_pre_hook(note),
            last.register_forward_hook(note),
            store.model.register_forward_hook(end),
        ):
            stack.callback(handle.remove)
        yield


def _pass_by_blocks(store: Store, layers: Sequence[Layer], chain: list[Block], batch: Batch) -> Passes:
    """A pass of one block of each kind, which stands for the others; all blocks run if they change the shape."""
    dtype = store.arithmetic
    stream = Stream(
        store.model, [batch], chain, keep=lambda index, hidden: hidden if dtype is None else hidden.to(dtype)
    )
    stream.advance(BEFORE)
    if dtype is not None:
        stream.cast_arguments(dtype)
    shapes = [(name, tuple(value.shape)) for name, value in store.model.named_parameters()]
    images = stream.hidden[0].ndim == 4
    total, first = Passes(), {}
    for stage, block in enumerate(chain):
        held = [(name, shape) for name, shape in shapes if block.holds(name)]
        kind = tuple((name.removeprefix(block.path), shape) for name, shape in held)
        members = [layer for layer in layers if block.holds(layer.path)]
        if images or kind not in first:
            bringing = timed(partial(store.enter, stage), store.device, 1)
            with _observing(store.model, members) as observed:
                output = stream.run(stage, 0)
            seconds = timed(partial(stream.run, stage, 0), store.device)
            store.release(stage)
            first[kind] = block, seconds, bringing, observed
            stream.pass_on(0, output)
        alike, seconds, bringing, observed = first[kind]
        total.seconds, total.bringing = total.seconds + seconds, total.bringing + bringing
        for path, entry in observed.items():
            place = block.path + path.removeprefix(alike.path)
            total.observed[place] = replace(entry, group=(stage, entry.group))
    return total


# ---- solves
def _prices_of_solves(workload: Work, request: Request, device: torch.device) -> Prices:
    """Prices of Grams, solves and updates, from solves on made-up inputs."""
    recipe, patterns = request.recipe, request.patterns
    pairs, held_out = recipe.target != "layer", workload.held_out > 0
    side = _SIDE if device.type == "cpu" else _SIDE_ON_GPU
    gram = _price_of_grams(workload, side, pairs, device)
    entries, part = (torch.zeros(_ENTRIES, dtype=dtype, device=device) for dtype in (torch.float64, torch.float32))
    byte = timed(lambda: entries.add_(part), device) / (20 * _ENTRIES)  # float32 read, float64 read and written
    rest = Prices(0.0, gram, gram, 2 * gram, loop=gram, update=UPDATE_BYTES * byte)

    def priced(recipe: Recipe, patterns: Mapping[Layer, Pattern], pairs: bool, held_out: bool) -> Prices:
        try:
            with warnings.catch_warnings(action="ignore"):
                layer, solve, measured = _price_of_solves(recipe, patterns, side, pairs, held_out, device)
        except (IOBSError, RuntimeError):  # made-up layers do not suit the solver; if its own do not, the run says why
            return rest
        return replace(rest, solve=solve, double=2 * solve, layer=layer, loop=solve, measured=measured)

    prices = priced(recipe, patterns, pairs, held_out)
    if isinstance(request.pattern, (Rate, Structured)) or not divides(recipe, request.pattern):
        return prices  # bits are divided without solves, and units with those of the run
    measured = dict.fromkeys(patterns, Unstructured(0.5))
    return replace(prices, of_curves=priced(recipe_of_curves(recipe), measured, False, False))


def _price_of_solves(
    recipe: Recipe,
    patterns: Mapping[Layer, Pattern],
    side: int,
    pairs: bool,
    held_out: bool,
    device: torch.device,
) -> tuple[float, float, dict[str, float]]:
    """Seconds of a solve besides its operations, and of an operation in float32; seconds of small layers, by name.

    Small layers are solved in other ways than large ones, which no count of operations says.

    Args:
        recipe: its solver is timed.
        patterns: of the layers.
        side: most rows and columns of a made-up layer.
        pairs: a dense model runs beside the pruned one.
        held_out: held-out samples have Grams of their own.
        device: of the computations.

    Raises:
        IOBSError, RuntimeError: made-up layers do not suit the solver.
    """
    unit = Prices(0.0, 1.0, 1.0, 2.0, loop=1.0)  # so that seconds are operations

    def operations(shape: tuple[int, int], layer: Layer) -> float:
        grouped = isinstance(patterns[layer], Groups)
        return Solves(recipe.for_layer(layer.name), unit, pairs, held_out, grouped=grouped).seconds(
            Layer(layer.name, shape)
        )

    total = sum(operations(layer.shape, layer) for layer in patterns)
    shapes = {}
    for layer, pattern in patterns.items():
        if isinstance(pattern, Groups):
            shapes[layer] = layer.shape
        else:
            shapes[layer] = min(side, layer.shape[0] // layer.groups), min(side, layer.shape[1])
    takes = {layer: operations(shape, layer) for layer, shape in shapes.items()}
    few = [layer for layer in patterns if takes[layer] <= max(_SHARE * total, _FEW)]
    layer = max(few, key=takes.__getitem__) if few else min(patterns, key=takes.__getitem__)
    settings = _settings_of_trial(recipe.for_layer(layer.name), patterns[layer])

    def trial(shape: tuple[int, int]) -> TrialSolve:
        fitting = _pattern_of_trial(patterns[layer], shape)
        return TrialSolve(shape, fitting, settings, pairs=pairs, held_out=held_out, device=device)

    per_operation = takes[layer]
    small_shape = _SMALL[0], min(_SMALL[1], *(layer.shape[1] for layer in patterns))
    small, large = trial(small_shape), trial(shapes[layer])
    small.solve()  # may compile kernels, which takes up to half a minute
    seconds = timed(small.solve, device)
    whole = timed(large.solve, device, 1)
    measured: dict[tuple[object, ...], float] = {(shapes[layer], patterns[layer], settings): whole}
    names: dict[str, float] = {}
    for layer in sorted(few, key=takes.__getitem__):
        settings = _settings_of_trial(recipe.for_layer(layer.name), patterns[layer])
        kind = shapes[layer], patterns[layer], settings
        if kind not in measured and sum(measured.values()) - whole < _TRIALS:
            measured[kind] = timed(trial(shapes[layer]).solve, device, 1)
        if kind in measured and shapes[layer] == (layer.shape[0] // layer.groups, layer.shape[1]):
            names[layer.name] = measured[kind]
    return seconds, max(whole - seconds, 0.1 * whole) / per_operation, names


def _price_of_stage(store: Store, request: Request, solver: NetworkSolver, data: Samples, held_out: float) -> float:
    """Seconds of a stage of a solver of the whole network: gradients of a few samples, and blocks of one layer.

    0 if the samples have no labels.
    """
    layers, samples = tuple(request.patterns), round(data.samples * (1 - held_out))
    few, gradients = data.first(_FEW_GRADIENTS), 0.0
    rows = torch.zeros(few.samples, sum(layer.weights for layer in layers), device=store.device)
    weights = torch.cat([layer.read(store.model).flatten().float() for layer in layers])
    if not isinstance(solver, GlobalMagnitude):
        try:
            results: list[Tensor] = []
            seconds = timed(lambda: results.append(gradient_rows(store.model, layers, few)), store.device, 1)
        except CalibrationError:
            return 0.0
        rows, gradients = results[0], seconds / few.samples * samples
    part = min(len(weights), _BLOCKS * solver.block)
    # Mixtures of the few gradients stand for those of all samples.
    mixed = torch.randn(samples, few.samples, generator=torch.Generator().manual_seed(0)).to(rows.device)
    fisher = BlockFisher(mixed @ rows[:, :part], solver.damping, solver.block, (part,))
    keep = max(1, part // 2)
    solve = timed(lambda: method_of(solver)(weights[:part], fisher, keep), store.device, 1)
    return gradients + solve * len(weights) / part


def _price_of_grams(workload: Work, side: int, pairs: bool, device: torch.device) -> float:
    """Seconds of an operation in the Gram of the layer with the largest one, on the inputs of one step."""
    sizes = {
        layer: (round(workload.step * workload.inputs[layer.name].rows), min(side, layer.shape[1]))
        for layer in workload.layers
        if layer.name in workload.inputs
    }
    if not sizes:
        return 0.0
    layer = max(sizes, key=lambda layer: sizes[layer][0] * sizes[layer][1] ** 2)
    count, columns = max(1, min(_TOKENS, sizes[layer][0])), sizes[layer][1]
    rows = torch.randn(1, count, columns, generator=torch.Generator().manual_seed(0)).to(device)
    gram = Gram.empty(Layer("trial", (1, columns)), device, with_dense=pairs)
    seconds = timed(lambda: gram.add(rows, rows if pairs else None), device)
    return seconds / (2.0 * rows.numel() * columns * (3 if pairs else 1))


def _settings_of_trial(settings: LayerSettings, pattern: Pattern) -> LayerSettings:
    """The settings of a layer; a solver of the user is not called with made-up layers, SparseGPT stands in for it."""
    if _is_foreign(settings.solver):
        settings = replace(settings, solver="sparsegpt")
    if isinstance(pattern, Groups) and solver_of_groups(settings.solver) in (None, "search"):
        settings = replace(settings, solver="greedy")  # made-up layers need far more exchanges than real ones
    return replace(settings, refine=None) if _is_foreign(settings.refine) else settings


def _is_foreign(solver: object) -> bool:
    """True if a solver or refinement is code of the user, not a name, None, or a class of this library."""
    return not (solver is None or isinstance(solver, str) or type(solver).__module__.startswith("iobs."))


def _pattern_of_trial(pattern: Pattern, shape: tuple[int, int]) -> Pattern:
    """The pattern of a layer if it fits a shape."""
    if isinstance(pattern, Groups):
        index = pattern.index
        if isinstance(index, int) or len(index) != shape[1]:
            index = (0,) * shape[1] if pattern.keep == 1 else tuple(range(shape[1]))
        return Groups(index, keep=-(-3 * (max(index) + 1) // 4))  # all columns, if they are one group
    if isinstance(pattern, Rate):  # steps of the columns of a small matrix need many bits
        pattern = replace(pattern, bits=min(max(pattern.bits, least_bits(shape) + 1), 12))
    try:
        pattern.groups(shape)
    except PatternError:
        return Rate(pattern.bits) if isinstance(pattern, Rate) else Unstructured(0.5)
    return pattern


class TrialSolve:
    """The solve of one layer with made-up weights and inputs, and its errors.

    Args:
        shape: rows and columns.
        pattern: of the layer.
        settings: of the layer.
        pairs: a dense model runs beside the pruned one.
        held_out: held-out samples have a Gram of their own.
        device: of the computations.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        pattern: Pattern,
        settings: LayerSettings,
        *,
        pairs: bool,
        held_out: bool,
        device: torch.device,
    ) -> None:
        self._random, self._device = torch.Generator().manual_seed(0), device
        weight = self._draw(*shape)
        target = weight + 0.01 * self._draw(*shape) if pairs else None
        self._task = Task(Layer("trial", shape), pattern, weight, target, settings)
        grams = [self._gram(shape[1], target is not None) for _ in range(2 if held_out else 1)]
        self._statistics = Statistics(grams[0], grams[1] if held_out else None)

    def _draw(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._random).to(self._device)

    def _gram(self, columns: int, pairs: bool) -> Gram:
        """A Gram with a few strong directions, of which some are far stronger, as inputs of real layers have."""
        decay = (_STRONG / torch.arange(1.0, _STRONG + 1)).sqrt().to(self._device)
        strong = self._draw(_STRONG, columns) * decay[:, None]
        product = strong.T @ strong / _STRONG + 0.03 * torch.eye(columns, device=self._device)
        product = product[None] if columns >= WIDE else product.double()[None]
        return Gram(product, product.clone() if pairs else None, product.clone() if pairs else None, count=columns)

    def solve(self) -> None:
        """Solve the layer and measure its errors."""
        task, statistics = self._task, self._statistics
        weight = torch.cat([solution.weight for solution in solve_layer(task, statistics)])
        for gram in (statistics.calibration, statistics.heldout):
            if gram is not None:
                relative_output_error(gram, weight, task.current if task.target is None else task.target)
