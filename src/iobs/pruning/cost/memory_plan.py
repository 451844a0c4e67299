"""Prediction of peak memory and time of block-by-block pruning, from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from iobs.core.files import expanded
from iobs.pruning.allocation.sensitivity import CURVE_TOKENS
from iobs.pruning.calibration.gram import STRIPE, WIDE
from iobs.pruning.calibration.losses import PIECE
from iobs.pruning.cost.checkpoint_size import checkpoint_bytes
from iobs.pruning.cost.loads import Matrix, Rates, is_admm
from iobs.pruning.cost.phases import Work, phases, swept
from iobs.pruning.recipe import Recipe, as_allocation
from iobs.pruning.runtime.memory import resident
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import existing
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch

_CODE = 100 * 2**20  # bytes that compiled kernels and the linear algebra library allocate at their first use
_MASTER_BYTES = 9  # per fitted weight: a float32 master, its copy before the steps, and an entry of the mask
_FIT_BYTES = 9  # per weight of a fit: two float32 moments, and an entry of the mask
_COPY_BYTES = 4  # the same: a float32 master beside a parameter in 16 bits
_GRADIENT_BYTES = 4  # per weight of a fit during the update, when logits are gone
_SCORES = 6  # tensors (tokens, vocabulary), in the model's dtype or float32, of a divergence and its gradient
_ACTIVATIONS = 6  # tensors of (tokens, widest columns) in memory at once in the forward pass of a block


@dataclass(frozen=True)
class Plan:
    """The predicted cost of a run.

    Attributes:
        peak_bytes: peak anonymous resident memory; on a GPU peak allocated memory.
        seconds: time of the run, at the measured speed of this machine.
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
    """

    layers: Sequence[Matrix]
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

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.hidden or min(layer.shape[1] for layer in self.layers)


@dataclass(frozen=True)
class GramKind:
    """The Gram matrices of a sweep.

    Args:
        parts: 2 if held-out samples have Grams of their own, otherwise 1.
        pairs: a dense model runs beside the pruned one, so that there are three Grams instead of one.
        width: columns of the residual stream; layers with this number of rows have moments of its drift. 0: no drift.
        centred: a bias is refitted, so that Grams have a copy without means.
        parked: finished Grams of wide layers are in mapped files.
    """

    parts: int
    pairs: bool = False
    width: int = 0
    centred: bool = False
    parked: bool = False

    def drift(self, layer: Matrix) -> int:
        """Bytes of the moments of the drift, or 0: two matrices of float64 (rows, columns) in each part."""
        return 16 * self.parts * layer.weights if self.pairs and layer.shape[0] == self.width else 0

    def parks(self, layer: Matrix) -> bool:
        """Check that the finished Grams of a layer are in files."""
        return self.parked and layer.shape[1] >= WIDE

    def parked_bytes(self, layer: Matrix) -> int:
        """Bytes of the files of a layer's Grams."""
        return 4 * self.squares * layer.groups * layer.shape[1] ** 2 + self.drift(layer) if self.parks(layer) else 0

    @property
    def squares(self) -> int:
        """Number of Grams of one layer."""
        return self.parts * (3 if self.pairs else 1)


def kind_of(sizes: Sizes, recipe: Recipe, holdout: bool, parked: bool) -> GramKind:
    """The Gram matrices that a recipe needs; see `peaks`."""
    width = sizes.width if recipe.target == "residual" else 0
    centred = sizes.biased and recipe.refits_biases
    return GramKind(2 if holdout else 1, recipe.target != "layer", width, centred, parked)


def peaks(sizes: Sizes, recipe: Recipe, holdout: bool, parked: bool = False, on_gpu: bool = False) -> dict[str, int]:
    """Peak bytes of every phase, besides the weights outside the blocks and the hidden states between blocks.

    Args:
        sizes: of the model and the data.
        recipe: how to prune.
        holdout: True if samples are held out, which have Grams of their own; so have those that judge an allocation.
        parked: finished Grams of wide layers are in mapped files.
        on_gpu: the device of the computations is a GPU.
    """
    fit, held, layers, itemsize = recipe.blocks, held_blocks(recipe), sizes.layers, sizes.itemsize
    kind = kind_of(sizes, recipe, holdout, parked)
    weights, tokens = held.blocks * itemsize * sizes.block, sizes.tokens if fit is None else sizes.step_tokens
    found = {
        "Grams": weights + max(_gathering(layer, layers, kind, tokens, itemsize) for layer in layers),
        "solves": weights + max(solving_bytes(layer, recipe, kind, on_gpu) for layer in layers),
    }
    if sizes.reading or sizes.writing:
        found |= {"reading of blocks": weights + sizes.reading, "writing of blocks": weights + sizes.writing}
    if as_allocation(recipe.allocation).criterion != "uniform":
        curves = GramKind(2, parked=parked)  # other samples judge the solutions, which match their own outputs
        tokens = min(sizes.tokens, CURVE_TOKENS)
        gathering = max(_gathering(layer, layers, curves, tokens, itemsize) for layer in layers)
        solving = max(solving_bytes(layer, recipe, curves, on_gpu) for layer in layers)
        found["allocation"] = weights + max(gathering, solving)
    step = 2 * forward_bytes(layers, sizes.step_tokens, itemsize)
    scores = sizes.step_tokens * sizes.vocabulary
    logits = _SCORES * min(4 * scores, (sizes.score or itemsize) * scores + 4 * PIECE)
    if fit is not None:
        # The fitted blocks without their dense weights, their parameters at the start, and gradients.
        fitted = held.fitted * sizes.block
        copied = _COPY_BYTES if itemsize < 4 else 0
        kept = fitted * (_FIT_BYTES + copied + itemsize) + (held.blocks - 1) * itemsize * sizes.block
        passes = itemsize * fitted + step + (logits if fit.last == "kl" else 0)
        found["steps of blocks"] = kept + max(passes, (itemsize + _GRADIENT_BYTES) * fitted)
    if fit is not None and fit.network_steps:
        # The block with its masters and gradients, and the input of every block for one batch.
        inputs = itemsize * sizes.blocks * sizes.step_tokens * sizes.width
        found["steps of the network"] = (itemsize + 8) * sizes.block + inputs + step + logits
    return found


def plan(
    sizes: Sizes,
    outside_bytes: int,
    model_bytes: int,
    batches: Sequence[Batch],
    steps: Sequence[int],
    recipe: Recipe,
    holdout: float,
    device: torch.device,
    rates: Rates | None,
    parked: bool = False,
    tokens: Sequence[int] | None = None,
) -> Plan:
    """Predict peak memory and time of block-by-block pruning.

    Call it after the modules outside the blocks (embeddings, head) have been loaded.

    Args:
        sizes: of the model; the tokens are those of `batches` and `steps`.
        outside_bytes: size of the weights that are dropped before the first block is loaded.
        model_bytes: size of the weights of the whole model.
        batches: calibration data.
        steps: number of positions of the batches of one gradient step; without a reconstruction those of `batches`.
        recipe: how to prune.
        holdout: share of the samples that is held out.
        device: of the computations.
        rates: of this machine; None: no time is predicted.
        parked: finished Grams of wide layers are in mapped files.
        tokens: number of positions of the hidden state, by batch; None: the batches are text.
    """
    present = resident() + _CODE if device.type == "cpu" else torch.cuda.memory_allocated(device)
    counts = tokens or [*map(token_count, batches)]
    sizes = replace(sizes, tokens=max(counts), step_tokens=max(steps))
    ranks, held = current(), held_blocks(recipe)
    work = Work(
        sizes.layers,
        sum(counts),
        model_bytes,
        ranks.size,
        sizes.vocabulary,
        sum(counts) // len(counts),
        sum(map(data_batches.size, batches)),
        holdout,
        sizes.hidden,
        sum(steps) / len(steps),
        sizes.blocks,
    )
    hidden = sizes.itemsize * sum(steps[ranks.rank :: ranks.size]) * sizes.width
    hidden = hidden * swept(work, recipe).tokens // work.tokens
    found = {} if rates is None else phases(work, recipe, rates)
    kind = kind_of(sizes, recipe, holdout > 0, parked)
    shapes = {layer.shape: layer for layer in sizes.layers}
    phase_bytes = peaks(sizes, recipe, holdout > 0, parked, device.type != "cpu")
    phase_bytes = {phase: present - outside_bytes + size for phase, size in phase_bytes.items()}
    phase_bytes = {"before the blocks": present, **phase_bytes}
    return Plan(
        peak_bytes=max(phase_bytes.values()),
        seconds=sum(found.values()),
        model_bytes=model_bytes,
        spilled_bytes=0,
        layers=len(sizes.layers),
        streams_bytes=held.streams * hidden + held.masters * work.weights,
        grams_bytes=sum(map(kind.parked_bytes, shapes.values())),
        phases=found,
        checkpoint_bytes=checkpoint_bytes(work.weights, sizes.block, sizes.itemsize, recipe),
        peaks=phase_bytes,
    )


def token_count(batch: Batch) -> int:
    """Number of positions of a batch."""
    return max(tensor.shape[:2].numel() for tensor in data_batches.tensors(batch))


def _gathering(layer: Matrix, layers: Sequence[Matrix], kind: GramKind, tokens: int, itemsize: int) -> int:
    """Bytes to compute the Grams of a layer, with the forward passes of its block."""
    return gathering_bytes(layer, kind, tokens, itemsize, forward_bytes(layers, tokens, itemsize))


def forward_bytes(layers: Sequence[Matrix], tokens: int, itemsize: int) -> int:
    """Bytes of the activations of a block in a forward pass of `tokens`."""
    return itemsize * _ACTIVATIONS * tokens * max(layer.shape[1] for layer in layers)


def gathering_bytes(layer: Matrix, kind: GramKind, tokens: int, itemsize: int, forward: int = 0) -> int:
    """Bytes to compute Grams: float64 sums, and the captured inputs of a batch.

    The larger of two sizes is added. One is the activations of a forward pass, `forward`. The other is a stripe of a
    float32 product, with float32 copies of inputs in 16 bits.

    Drift has moments in float64, a product in float32, and residuals of the batch. The first finished Gram of a wide
    layer is in float32 beside its sum. Grams of held-out samples come second, beside the finished ones of the others,
    unless these are in files.
    """
    rows, columns = layer.shape
    parked = kind.parks(layer)
    square, drift = layer.groups * columns**2, kind.drift(layer) // (kind.parts if parked else 1)
    widest = columns if kind.pairs or columns < STRIPE else columns // STRIPE * STRIPE
    stripe = 4 * layer.groups * min(STRIPE, columns) * widest
    product = max(stripe, 4 * layer.weights if drift else 0, 4 * square if columns >= WIDE else 0)
    inputs = tokens * ((2 if kind.pairs else 1) * columns + (rows if drift else 0))
    copies = 4 * inputs if itemsize < 4 else 0
    own = kind.squares // kind.parts
    finished = (4 if columns >= WIDE else 8) * own * square if kind.parts > 1 and not parked else 0
    return finished + 8 * own * square + drift + itemsize * inputs + max(product + copies, forward)


def solving_bytes(layer: Matrix, recipe: Recipe, kind: GramKind, on_gpu: bool = False) -> int:
    """Bytes of a solve: squares (columns, columns) and matrices (rows, columns) that are in memory at once.

    Grams stay but for those of the target's energy, and the current weights with those of the target. Grams in files
    take no memory, but copies without means do. Then come, one after another:

    - with a dense model and held-out samples the ridge regression: the damped Hessian, its factor and eight matrices;
    - the solver, with a damped Hessian, the linear term and the anchor in float32. ADMM's search has the scaled
      Hessian, an inverse with half of its size besides, the masks and five matrices. On a GPU a projection takes three
      more matrices than on a CPU, while the inverse is there alone. ADMM's refit has one square and
      seven matrices; on a GPU eleven, or nine with a dense model. With a dense model a GPU has the scaled Hessian
      beside another in float64 and its factor, where a CPU factorises in place. Exact elimination has the Hessian, its
      factor and a copy in float64, or one square and six matrices;
    - the errors: products of matrices in the dtype of the Grams.
    """
    square, matrix = layer.shape[1] ** 2, layer.weights // layer.groups
    wide = layer.shape[1] >= WIDE
    number = 4 if wide else 8
    kept = kind.parts * (2 if kind.pairs else 1)
    parked = kind.parks(layer)
    copies = (0 if parked else 1) + (1 if kind.centred else 0)
    grams = copies * (number * kept * layer.groups * square + kind.drift(layer) // 2)
    given = (8 if kind.pairs else 4) * matrix
    regression = number * (2 * square + 8 * matrix) if kind.pairs and kind.parts > 1 else 0
    problem = (4 if wide else 8) * square + (16 if kind.pairs else 4) * matrix
    if is_admm(recipe):
        search = max(10 * square + 21 * matrix, 4 * square + 29 * matrix)
        if on_gpu:
            refit = 4 * square + (38 if kind.pairs else 46) * matrix
            search = max(search, 8 * square + 33 * matrix, refit, 20 * square if kind.pairs else 0)
    else:
        search = max(24 * square, 6 * square + 21 * matrix)
    errors = 12 * matrix if wide else 4 * square + 44 * matrix
    return grams + given + max(regression, problem + search, errors)
