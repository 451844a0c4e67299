"""Peak memory of a run: the model or its blocks, the Grams of one layer, what its solver declares, and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from iobs.core.files import expanded
from iobs.core.memory import resident
from iobs.core.outputs import existing
from iobs.core.patterns import Budget, Pattern, Rate, Unstructured
from iobs.pruning.calibration.gram import SEARCH_COLUMNS, STRIPE, WIDE
from iobs.pruning.calibration.losses import PIECE, WHOLE
from iobs.pruning.calibration.row_fisher import PRICED_TOKENS, PROBE_TOKENS
from iobs.pruning.cost.affordable import with_affordable_epochs
from iobs.pruning.cost.work import run_samples, solver_cost, stated_sizes
from iobs.pruning.descent import STEPS_BETWEEN_SAVES
from iobs.pruning.descent.batches import in_steps
from iobs.pruning.forecast import Forecast
from iobs.pruning.layerwise.problem import couples, weighs_rows
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import state
from iobs.pruning.plan.counts import divides
from iobs.pruning.plan.curves import CURVE_TOKENS
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.memory import mapped_bytes
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import AT_ONCE, Batch, Samples, split
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request

_CODE = 100 * 2**20  # bytes that compiled kernels and the linear algebra library allocate at their first use
_MASTER_BYTES = 9  # per fitted weight: a float32 master, its copy before the steps, and an entry of the mask
_FIT_BYTES = 9  # per weight of a fit: two float32 moments, and an entry of the mask
_COPY_BYTES = 4  # the same: a float32 master beside a parameter in 16 bits
_GRADIENT_BYTES = 4  # per weight of a fit during the update, when logits are gone
_STORED_MASTER = 4  # of a fitted weight in a checkpoint
_SCORES, _PIECES = 6, 8  # tensors (tokens, vocabulary) of a divergence and its gradient, in float32; of one piece
_SCORES_BESIDE = 3  # the same in the dtype of the model, if the divergence is computed in pieces
_FISHER_SCORES = 2  # scores of a piece of text in float32: themselves, and their gradient
_COMPARED = 4  # tensors (tokens, vocabulary) that a comparison with the dense model holds
_COMPARED_WHOLE, _COMPARED_PIECES = 8, 14  # further ones if it is computed at once; of one piece otherwise
_HALF = Unstructured(0.5)
_ACTIVATIONS = 6  # tensors of (tokens, widest columns) in memory at once in the forward pass of a block


@dataclass(frozen=True)
class Sizes:
    """Sizes that the peak memory depends on.

    Args:
        layers: the layers to prune.
        block: number of weights in the largest block.
        itemsize: bytes per number in a forward pass.
        tokens: most tokens of a forward pass, besides those of a reconstruction.
        step_tokens: most tokens of a gradient step of a reconstruction, and of its forward passes.
        vocabulary: number of outputs of the model per token.
        biased: True if layers have biases.
        score: bytes of one output of the model; None: as in a forward pass of the blocks.
        hidden: width of the residual stream; 0: the least number of columns of a layer.
        blocks: number of blocks.
        reading: bytes that a block takes while it is read, besides those of its weights.
        writing: the same while it is written.
        whole: the model is in memory, so that blocks take no more of it.
    """

    layers: Sequence[Layer]
    block: int
    itemsize: int
    tokens: int
    step_tokens: int
    vocabulary: int
    biased: bool = False
    score: int | None = None
    hidden: int = 0
    blocks: int = 1
    reading: int = 0
    writing: int = 0
    whole: bool = False

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.hidden or min(layer.shape[1] for layer in self.layers)


@dataclass(frozen=True)
class Held:
    """Blocks and hidden states that are in memory or in files at once.

    Args:
        blocks: number of blocks with weights.
        fitted: number of blocks whose parameters are fitted.
        streams: number of hidden states per token, with the stored inputs of shortcuts.
        masters: bytes per pruned weight that are kept for steps of the whole network.
    """

    blocks: int = 1
    fitted: int = 0
    streams: int = 2
    masters: int = 0


def held_blocks(recipe: Recipe) -> Held:
    """The blocks and hidden states of a recipe: a dense block beside the pruned one, and the blocks of a window."""
    fit = recipe.blocks
    if fit is None:
        return Held() if recipe.target == "layer" else Held(2, 0, 4)
    if fit.network_steps:
        return Held(fit.window + 1, fit.window, 7, _MASTER_BYTES)
    return Held(fit.window + 1, fit.window, 6)


@dataclass(frozen=True)
class GramSizes:
    """Sizes of the Grams of a layer.

    Args:
        parts: 2 if held-out samples have Grams of their own, otherwise 1.
        pairs: a dense model runs beside the pruned one, so that there are three Grams instead of one.
        width: columns of the residual stream; layers with this number of rows have target outputs. 0: no layer has.
        centred: a bias is refitted, so that Grams have a copy without means.
        parked: finished Grams of wide layers are in mapped files.
    """

    parts: int
    pairs: bool = False
    width: int = 0
    centred: bool = False
    parked: bool = False

    @classmethod
    def of(cls, sizes: Sizes, recipe: Recipe, heldout: bool, parked: bool) -> GramSizes:
        """The Grams that a recipe needs; see `peaks`."""
        width = sizes.width if recipe.target == "residual" else 0
        return cls(1 + heldout, recipe.target != "layer", width, sizes.biased and recipe.refits_biases, parked)

    def outputs(self, layer: Layer) -> bool:
        """True if a layer has target outputs in place of dense inputs."""
        return self.pairs and layer.shape[0] == self.width

    def entries(self, layer: Layer, dense: bool = True) -> int:
        """Entries of the matrices of one part; with the Gram of dense inputs or without it."""
        square = layer.groups * layer.shape[1] ** 2
        if self.outputs(layer):
            return square + layer.weights
        return square * (2 + dense if self.pairs else 1)

    def finished(self, layer: Layer, dense: bool = True) -> int:
        """Bytes of the finished `entries`."""
        return (4 if layer.shape[1] >= WIDE else 8) * self.entries(layer, dense)

    def parks(self, layer: Layer) -> bool:
        """True if the finished Grams of a layer are in files."""
        return self.parked and layer.shape[1] >= WIDE

    def parked_bytes(self, layer: Layer) -> int:
        """Bytes of the files of a layer's Grams."""
        return self.parts * self.finished(layer) if self.parks(layer) else 0

    def gathering(self, layer: Layer, tokens: int, itemsize: int, forward: int = 0) -> int:
        """Bytes while Grams are computed: sums in float64, the inputs of a batch, and the larger of two sizes.

        One is the activations of a forward pass, `forward`; the other a float32 product. The Grams of held-out samples
        come second, beside the finished ones of the others, unless these are in files.
        """
        rows, columns = layer.shape
        outputs = self.outputs(layer)
        sums = 8 * self.entries(layer)
        before = (self.parts - 1) * self.finished(layer) if not self.parks(layer) else 0
        inputs = tokens * ((2 if self.pairs else 1) * columns + (2 * rows if outputs else 0))
        copies = 4 * inputs if itemsize < 4 else 0
        product = 4 * max(layer.groups * columns * min(STRIPE, columns), layer.weights if outputs else 0)
        return before + sums + itemsize * inputs + max(product + copies, forward)

    def solving(self, layer: Layer, recipe: Recipe) -> int:
        """Bytes of a solve: its Grams, the weights, the problem and the solver; or the regression, or the errors.

        The Gram of dense inputs is gone by then. Grams in files take no memory, but copies without means do.
        """
        rows, columns = layer.shape[0] // layer.groups, layer.shape[1]
        number, square, matrix = 4 if columns >= WIDE else 8, columns**2, rows * columns
        copies = (0 if self.parks(layer) else 1) + self.centred
        kept = self.parts * copies * self.finished(layer, dense=False) + (8 if self.pairs else 4) * matrix
        regression = number * (2 * square + 8 * matrix) if self.pairs and self.parts > 1 else 0
        problem = number * square + (16 if self.pairs else 4) * matrix
        centre = 20 * square if self.pairs else 0  # the Hessian in float64 and its factor, beside the one in float32
        solver = problem + max(centre, round(solver_cost(recipe.for_layer(layer.name), rows, columns).bytes))
        errors = (12 if columns >= WIDE else 18 if columns >= SEARCH_COLUMNS else 44) * matrix + 4 * square
        together = problem + 4 * rows**2 + 56 * matrix if _couples(layer, recipe, _HALF) else 0
        return kept + max(regression, solver, errors, together)


def prices_rows(recipe: Recipe, pattern: Pattern) -> bool:
    """True if a run may need the Fisher information of rows."""
    return weighs_rows(recipe, pattern) or divides(recipe, pattern)


def moment_bytes(layers: Iterable[Layer], recipe: Recipe, pattern: Pattern) -> int:
    """Bytes of the second moments of output rows, with which rows are solved together."""
    return sum(4 * layer.shape[0] ** 2 for layer in layers if _couples(layer, recipe, pattern))


def _couples(layer: Layer, recipe: Recipe, pattern: Pattern) -> bool:
    """True if the rows of a layer may be solved together."""
    return recipe.may_weigh_rows and couples(layer, recipe.for_layer(layer.name), pattern)


def peaks(
    sizes: Sizes, recipe: Recipe, heldout: bool, parked: bool = False, pattern: Pattern = _HALF
) -> dict[str, int]:
    """Peak bytes of every phase, besides the weights outside the blocks and the hidden states between blocks.

    Args:
        sizes: of the model and the data.
        recipe: how to prune.
        heldout: samples are held out, which have Grams of their own; so have those that judge an allocation.
        parked: finished Grams of wide layers are in mapped files.
        pattern: of the run.
    """
    fit, held, layers, itemsize = recipe.blocks, held_blocks(recipe), sizes.layers, sizes.itemsize
    present = 0 if sizes.whole else itemsize * sizes.block  # of one block that is brought into memory
    moments = moment_bytes(layers, recipe, pattern) if sizes.whole else 0  # elsewhere with the hidden states
    weights, widest = held.blocks * present, max(layer.shape[1] for layer in layers)

    def largest(grams: GramSizes, tokens: int) -> tuple[int, int]:
        forward = itemsize * _ACTIVATIONS * tokens * widest
        gathering = max(grams.gathering(layer, tokens, itemsize, forward) for layer in layers)
        return weights + gathering, weights + max(grams.solving(layer, recipe) for layer in layers)

    grams = GramSizes.of(sizes, recipe, heldout, parked)
    gathering, solving = largest(grams, sizes.tokens if fit is None else sizes.step_tokens)
    predicted = {"Grams": gathering, "solves": solving}
    if sizes.reading or sizes.writing:
        predicted |= {"reading of blocks": weights + sizes.reading, "writing of blocks": weights + sizes.writing}
    if divides(recipe, pattern):
        # Other samples judge the solutions, which match the outputs of their own layer.
        predicted["allocation"] = max(largest(GramSizes(2, parked=parked), min(sizes.tokens, CURVE_TOKENS)))
    step = 2 * itemsize * _ACTIVATIONS * sizes.step_tokens * widest
    scores, of_score = sizes.step_tokens * sizes.vocabulary, sizes.score or itemsize
    logits = 4 * _SCORES * scores
    if scores > WHOLE:
        logits = min(logits, _SCORES_BESIDE * of_score * scores + 4 * _PIECES * PIECE)
    if prices_rows(recipe, pattern):
        piece = min(AT_ONCE, sizes.tokens)
        activations = 2 * itemsize * _ACTIVATIONS * piece * widest
        number = 4 * _FISHER_SCORES + (of_score if of_score < 4 else 0)  # beside their copy in float32
        predicted["prices of rows"] = present + max(activations, number * piece * sizes.vocabulary)
    if fit is not None:
        # The fitted blocks without their dense weights, their parameters at the start, and gradients.
        fitted = held.fitted * sizes.block
        copied = _COPY_BYTES if itemsize < 4 else 0
        kept = fitted * (_FIT_BYTES + copied + itemsize) + (held.blocks - 1) * present
        passes = itemsize * fitted + step + (logits if fit.last == "kl" else 0)
        predicted["steps of blocks"] = kept + max(passes, (itemsize + _GRADIENT_BYTES) * fitted)
    if fit is not None and fit.network_steps:
        # The block with its masters and gradients, and the input of every block for one batch.
        inputs = itemsize * sizes.blocks * sizes.step_tokens * sizes.width
        predicted["steps of the network"] = present + 8 * sizes.block + inputs + step + logits
    return {phase: moments + size for phase, size in predicted.items()}


def checkpoint_bytes(weights: int, block: int, itemsize: int, recipe: Recipe) -> int:
    """Most bytes of all entries of a checkpoint: at the end of the last block, or of the steps of the network.

    Every layer has its last projection, and every block its fit in a window. A block in work has its projections at
    lower sparsity with the fits between them. The window before it stays until the window of the block is stored. Steps
    of the network have two states while one is written, and then the last state and the result.

    Args:
        weights: number of pruned weights.
        block: the same in the largest block.
        itemsize: bytes of a weight in a forward pass.
        recipe: how to prune.
    """
    fit = recipe.blocks
    if fit is None:
        return itemsize * weights
    fitted = _STORED_MASTER * (fit.steps > 0 or fit.fits_levels)
    network = _STORED_MASTER * (2 if fit.network_steps > STEPS_BETWEEN_SAVES else 1) if fit.network_steps else 0
    levels = (fit.masks - 1) * (itemsize + _STORED_MASTER * (fit.between > 0))
    in_work = (levels + fitted * (fit.window - 1)) * block
    return (itemsize + fitted) * weights + max(in_work, network * weights)


@dataclass(frozen=True)
class Plan:
    """The predicted cost of a run by blocks.

    Attributes:
        peak_bytes: peak anonymous resident memory; on a GPU peak allocated memory.
        seconds: time of the run on this machine; 0 if it was not forecast.
        model_bytes: size of the whole model.
        spilled_bytes: size of the hidden states, fitted parameters and Grams that are kept in files.
        layers: number of matrices to prune.
        streams_bytes: size of the hidden states between blocks, and of the parameters that steps of the whole network
            change.
        grams_bytes: size of the Grams of wide layers that are kept in files.
        streams: the place of the hidden states: "device", "memory" or "disk".
        phases: seconds by phase.
        checkpoint_bytes: largest size of a checkpoint, if there is one.
        copied_bytes: size of copies of the dense weights in main memory, beside a model that is there.
        peaks: peak memory of every phase that has a prediction; the largest of them is `peak_bytes`.
        form: note on the form of the recipe that ends in the given time; empty without one.
    """

    peak_bytes: int
    seconds: float
    model_bytes: int
    spilled_bytes: int
    layers: int
    streams_bytes: int = 0
    grams_bytes: int = 0
    streams: str = "disk"
    phases: dict[str, float] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    copied_bytes: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    form: str = ""

    def placed(self, place: str, device: torch.device) -> Plan:
        """The plan with the hidden states in a place."""
        resident = place == "device" or (place == "memory" and device.type == "cpu")
        streams = self.streams_bytes if resident else 0
        return replace(
            self,
            streams=place,
            peak_bytes=self.peak_bytes + streams,
            peaks={phase: size + streams for phase, size in self.peaks.items()},
            spilled_bytes=self.grams_bytes + (self.streams_bytes if place == "disk" else 0),
        )

    def timed(self, forecast: Forecast) -> Plan:
        """The plan with the time of a forecast."""
        return replace(self, seconds=forecast.seconds, phases=forecast.phases)

    def left_of_checkpoint(self, folder: str | Path | None, place: Path) -> int:
        """Bytes that a checkpoint will still take on the disk of `place`, beside the files that are there.

        Args:
            folder: of the checkpoint, or None.
            place: a folder, which need not exist yet.
        """
        if folder is None or existing(folder).stat().st_dev != existing(place).stat().st_dev:
            return 0
        written = sum(entry.stat().st_size for entry in expanded(folder).glob("*") if entry.is_file())
        return max(0, self.checkpoint_bytes - written)


def streams_bytes(
    sizes: Sizes,
    recipe: Recipe,
    holdout: float,
    tokens: Sequence[int],
    steps: Sequence[int],
    samples: int,
    pattern: Pattern,
) -> int:
    """Bytes of the hidden states between blocks, and of parameters that are kept for steps of the whole network.

    The arguments are those of `plan`.
    """
    ranks, held = current(), held_blocks(recipe)
    hidden = sizes.itemsize * sum(steps[ranks.rank :: ranks.size]) * sizes.width
    hidden = hidden * run_samples(recipe, sizes.layers, samples, holdout, ranks.size) // samples
    # The prices of rows need the input of every block at once, and what follows has its own hidden states.
    measured = PROBE_TOKENS if isinstance(pattern, (Rate, Budget)) else PRICED_TOKENS
    positions = min(sum(tokens[ranks.rank :: ranks.size]), measured) if prices_rows(recipe, pattern) else 0
    priced = sizes.itemsize * positions * sizes.width * (sizes.blocks + 1)
    moments = 0 if sizes.whole else moment_bytes(sizes.layers, recipe, pattern)
    masters = held.masters * sum(layer.weights for layer in sizes.layers)
    return moments + max(held.streams * hidden + masters, priced)


def present_bytes(device: torch.device) -> int:
    """Bytes that a process takes before a run, with the code that a run loads."""
    return resident() + _CODE if device.type == "cpu" else torch.cuda.memory_allocated(device)


def peaks_in_memory(
    store: Store, request: Request, data: Sequence[Batch], present: int | None = None
) -> dict[str, int]:
    """Peak bytes of every phase of a run with the whole model in memory; empty where they are not foretold.

    They are foretold for language models and encoders of text, whose configuration says their sizes, and without
    fine-tuning of the whole network.

    Args:
        store: of the model.
        request: how to prune.
        data: calibration samples.
        present: `present_bytes`, when the model has been loaded; None: now.
    """
    layers, pattern = [*request.patterns], request.pattern
    recipe = with_affordable_epochs(request.recipe, layers, data, store.device)
    fit, heldout = split(Samples.of([*data]), request.holdout, request.seed)
    present = present_bytes(store.device) if present is None else present
    vocabulary, hidden, blocks = stated_sizes(store.model, "vocab_size", "hidden_size", "num_hidden_layers")
    fitting = recipe.blocks
    head = getattr(store.model, "get_output_embeddings", None)
    if head is None or head() is None:  # an encoder, whose outputs are hidden states
        vocabulary = hidden
    tuned = (recipe.finetune or recipe.rounds.count > 1) and not (fitting and fitting.network_steps)
    if not (store.whole and vocabulary and hidden and blocks) or tuned or recipe.network_solver is not None:
        return {}
    tensors = dict(state(store.model))
    bytes_of = {name: value.nbytes for name, value in tensors.items()}
    names = {layer.key for layer in layers}
    weights = sum(layer.weights for layer in layers)
    itemsize = next(tensors[name].itemsize for name in names)
    every = Samples.of(fit.batches + heldout.batches)
    tokens = [token_count(batch) for batch in every.batches]
    steps = [token_count(batch) for batch in in_steps(store.model, every, fitting).batches] if fitting else tokens
    sizes = Sizes(
        layers,
        block=weights // blocks,
        itemsize=itemsize,
        tokens=max(tokens),
        step_tokens=max(steps),
        vocabulary=vocabulary,
        biased=any(f"{layer.path}.bias" in tensors for layer in layers),
        hidden=hidden,
        blocks=blocks,
        whole=True,
    )
    whole, pruned = sum(bytes_of.values()), sum(bytes_of[name] for name in names)
    changed = whole if fitting else pruned
    copies = changed + (whole if recipe.needs_dense_model else 0)
    written = mapped_bytes(tensors[name] for name in (tensors if fitting else names))
    holdout = heldout.samples / every.samples
    streams = streams_bytes(sizes, recipe, holdout, tokens, steps, every.samples, pattern)
    before = {"allocation", "prices of rows"}
    phases = {
        phase: present + copies + streams + size + (0 if phase in before else written)
        for phase, size in peaks(sizes, recipe, heldout.samples > 0, pattern=pattern).items()
    }
    compared = max(token_count(batch) for batch in (heldout if heldout.batches else fit).batches)
    if heldout.batches:  # as many of the others are compared too
        compared = max(compared, min(sum(map(token_count, heldout.batches)), max(map(token_count, fit.batches))))
    scores = compared * vocabulary
    further = _COMPARED_WHOLE * scores if scores <= WHOLE else _COMPARED_PIECES * PIECE
    compares = itemsize * _COMPARED * scores + 4 * further
    phases["comparison"] = present + copies + written + pruned + moment_bytes(layers, recipe, pattern) + compares
    return phases


def token_count(batch: Batch) -> int:
    """Number of positions of a batch."""
    return max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch))
