"""Fisher information of the output rows of layers: one backward pass puts the errors of all layers on one scale.

To second order, errors e_t of a layer's output at positions t cost the model 1/2 sum_t e_t^T F_t e_t nats of KL
divergence. F_t = J_t^T F J_t is the Fisher information at that output: J_t is the Jacobian of the model's scores, and
F = diag(p) - p p^T their information, for chances p. Its diagonal, summed over positions, gives each row a price. With
it the quadratic of every layer is measured in nats of the model's loss, and layers, rows, zeros, bits and units
compete.

F = B B^T with B = diag(sqrt(p)) - p sqrt(p)^T: squares of J_t^T B z have this diagonal as their mean, for random signs
z. Squared gradients for labels drawn from p have it too, but one label of many classes says nothing of the others: of
the 384 numbers in an embedding of MiniLM, 130 sentences would price at most 130 (LOG.md).

Matrices whose output no module returns, such as experts in one parameter, have their price from the gradient of the
weight, G = sum_t g_t x_t^T: row i costs E[norm(G_i)^2] / E[norm(x_t)^2].

Rows share information: an error of one costs less where that of another cancels it. The second moment of g = J_t^T B z
says how much. Few positions have most of its energy (of the values in the attention of SmolLM2-135M, ten of a thousand
have nine tenths), so that it would be that of few samples: each g counts by 1 / norm(g), and entries off the diagonal
shrink by as much as their errors ask (Ledoit and Wolf 2004, A well-conditioned estimator for large-dimensional
covariance matrices). `solvers/row_metric.py` and `solvers/successive_rounding.py` solve the rows of a layer with it.

The table of an embedding has its tokens as rows. An error d of the row of token v costs 1/2 n_v d^T F d nats, where n_v
is the frequency of the token and F the Fisher information of the embedding's output. A head with the same table adds
1/2 f_v d^T H d, with the price f_v of its row and the Gram H of its inputs. Both together are close to one metric
for all rows, sum(f) H + F, and a price for each (`Lookup`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError, first_line, unless_out_of_memory
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Gram
from iobs.pruning.calibration.products import is_mapped, products
from iobs.pruning.calibration.replay import BEFORE, Residency, Stream
from iobs.pruning.network.calls import Args, Function, Interceptor, Kwargs, after_calls, first_argument, rows_read
from iobs.pruning.network.layers import CONVOLUTIONS, Layer, embeddings_of
from iobs.pruning.network.modes import requiring_gradients
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples, size
from iobs.pruning.samples.outputs import attended, attended_count, class_axis, is_by_position, logits, unpadded
from iobs.solvers.row_metric import RowMetric

# Most samples, and most positions of text, that prices and trials are measured on.
PROBE, PROBE_TOKENS = 300, 8192
# Positions of text that price rows: on SmolLM2-135M half of them leave 7 percent more divergence, twice as many gain
# nothing (LOG.md). Tables of embeddings, with a row for each token, need `PROBE_TOKENS`.
PRICED_TOKENS = 4096
# Share of the mean price that every row has at least, besides its own. Rows that a few samples leave without a gradient
# would otherwise be free.
_FLOOR = 0.1
_TINY = 1e-30  # norm of a gradient that is not zero
_PIECE = 2**22  # scores whose gradients are made at once
_BY_POSITION = "outputs by position"  # name in a checkpoint
_WITHOUT = 'Take curvature="layer" and allocation="uniform".'


@dataclass(frozen=True)
class Lookup:
    """The cost of errors of the table of an embedding: 1/2 sum_v prices[v] d_v^T metric d_v nats.

    Attributes:
        metric: (features, features) float64.
        prices: (tokens,) float64, positive.
        count: positions that the metric was measured on.
    """

    metric: Tensor
    prices: Tensor
    count: int

    def gram(self, device: torch.device) -> Gram:
        """The metric in place of the Gram of inputs, which is diagonal and has a column for every token."""
        return Gram(self.metric[None].to(device), count=self.count)


@dataclass
class RowFisher:
    """Prices of the squared errors of output rows.

    Attributes:
        outputs: (rows,) float64 by layer, squared gradients at the outputs of modules, for one output of the model.
        products: (rows,) float64 by layer, squared norms of the rows of the weight's gradient, for one output of the
            model. They are prices times the squared norm of an input.
        moments: (rows, rows) float32 by layer, what rows share, up to a factor. Of layers whose rows are solved
            together.
        lookups: by layer, of tables of embeddings.
        by_position: True if the model gives an output for every position of text; False: one for each sample, or no row
            has a price.
    """

    outputs: dict[Layer, Tensor] = field(default_factory=dict)
    products: dict[Layer, Tensor] = field(default_factory=dict)
    moments: dict[Layer, Tensor] = field(default_factory=dict)
    lookups: dict[Layer, Lookup] = field(default_factory=dict)
    by_position: bool = False

    @property
    def prices_rows(self) -> bool:
        """True if there is a price of any row."""
        return bool(self.outputs or self.products or self.lookups)

    def tensors(self) -> dict[str, Tensor]:
        """The prices by a name for each, for a checkpoint; without the moments, which are large."""
        named = [
            ("output", self.outputs),
            ("product", self.products),
            ("metric", {layer: lookup.metric for layer, lookup in self.lookups.items()}),
            ("price", {layer: lookup.prices for layer, lookup in self.lookups.items()}),
            ("count", {layer: torch.tensor(lookup.count) for layer, lookup in self.lookups.items()}),
        ]
        tensors = {f"{kind} {layer.name}": values for kind, of_layers in named for layer, values in of_layers.items()}
        return {**tensors, _BY_POSITION: torch.tensor(self.by_position)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], layers: Sequence[Layer]) -> RowFisher:
        """The prices of layers from the result of `tensors`."""

        def prices(kind: str) -> dict[Layer, Tensor]:
            return {layer: tensors[f"{kind} {layer.name}"] for layer in layers if f"{kind} {layer.name}" in tensors}

        metrics, of_tokens, counts = prices("metric"), prices("price"), prices("count")
        lookups = {layer: Lookup(metrics[layer], of_tokens[layer], int(counts[layer])) for layer in metrics}
        by_position = bool(tensors.get(_BY_POSITION, False))
        return cls(prices("output"), prices("product"), {}, lookups, by_position)

    def relative(self, layer: Layer) -> Tensor | None:
        """Prices of the rows of a layer relative to their mean, (rows,) float64; None if they are not known."""
        if layer in self.lookups:
            return self.lookups[layer].prices / self.lookups[layer].prices.mean()
        prices = self.outputs.get(layer, self.products.get(layer))
        return None if prices is None else (prices / prices.mean() + _FLOOR) / (1 + _FLOOR)

    def metric(self, layer: Layer) -> RowMetric | None:
        """The metric of a layer's output rows, with the mean 1 on its diagonal; None if it is not known."""
        diagonal, moment = self.relative(layer), self.moments.get(layer)
        if diagonal is None or moment is None:
            return None if diagonal is None else RowMetric(diagonal)
        scale = len(moment) / float(moment.trace()) / (1 + _FLOOR)
        return RowMetric(scale * moment.diagonal().double() + _FLOOR / (1 + _FLOOR), moment, scale)

    def price(self, layer: Layer, gram: Gram) -> Tensor | None:
        """Nats that a unit of squared error costs in each row, (rows,) float64; None if they are not known.

        Args:
            layer: the layer.
            gram: of its inputs; the error is the mean over these.
        """
        if layer in self.lookups:
            return 0.5 * self.lookups[layer].prices
        if layer in self.outputs:
            prices = self.outputs[layer]
        elif layer in self.products:
            energy = float(gram.own.diagonal(dim1=1, dim2=2).sum(1).mean())
            prices = self.products[layer] / max(energy, 1e-30)
        else:
            return None
        return 0.5 * (prices + _FLOOR * prices.mean()) / (1 + _FLOOR)


def row_fisher(
    model: nn.Module,
    layers: Sequence[Layer],
    chain: list[Block],
    part: Samples,
    *,
    seed: int,
    tables: Sequence[Layer] = (),
    coupled: Sequence[Layer] = (),
    ranks: Ranks = ALONE,
    residency: Residency | None = None,
) -> RowFisher:
    """Measure the prices of rows, with one block of the chain in memory at a time.

    The forward pass keeps the input of every block. The backward pass computes each block again.

    Args:
        model: the dense model, in eval mode; its parameters need not ask for gradients.
        layers: the layers to prune.
        chain: blocks along which the model can be run; empty: the model is run as a whole.
        part: samples; at most `PROBE` of them are used, and of text `PRICED_TOKENS`, or `PROBE_TOKENS` with tables. All
            of them count tokens.
        seed: of the random signs.
        tables: those of the layers whose price is that of a table of an embedding.
        coupled: those of the layers whose rows are solved together.
        ranks: processes that share the samples.
        residency: brings the blocks into memory, and keeps hidden states.

    Raises:
        ProblemError: the outputs of the model have no gradient.
    """
    share = ranks.share(part.first(PROBE, PROBE_TOKENS if tables else PRICED_TOKENS))
    data, draws = [], []
    for place, batch in enumerate(share.batches):
        # A seed for each batch, so that signs do not depend on the number of ranks.
        generator = torch.Generator().manual_seed(seed + place * ranks.size + ranks.rank)
        for piece in batches.pieces(batch):
            data.append(piece)
            draws.append(generator)
    residency = residency or Residency()
    squares = _Squares(model, layers, tables, coupled, residency.hold, ranks.size == 1)
    outputs = _Outputs(model, data, draws)
    if squares.embeddings:
        squares.count_tokens(chain, ranks.share(part).batches)
    failure: ProblemError | None = None
    try:
        if chain:
            _BlockwisePass(layers, chain, outputs, squares, residency).run()
        else:
            for index in range(len(data)):
                squares.add(layers, partial(outputs.probe, index))
            squares.store(layers)
    except ProblemError as error:
        failure = error
    if ranks.total(float(failure is not None)):  # all ranks alike: some may have no sample, which is no failure
        raise failure or ProblemError(f"The model's outputs have no gradient on another rank. {_WITHOUT}")
    return squares.result(outputs, ranks)


@dataclass
class _Outputs:
    """The outputs of the model, and random gradients at them.

    Args:
        model: the model.
        data: batches.
        generators: draw the signs, by batch.

    Attributes:
        samples: number of outputs so far, of models with one for each sample.
        positions: number of outputs so far, without padding, of models with one for each position of text.
    """

    model: nn.Module
    data: list[Batch]
    generators: list[torch.Generator]
    samples: int = 0
    positions: int = 0

    def probe(self, index: int, output: object = None) -> Tensor:
        """A scalar whose gradient at the scores of a batch has their Fisher information as its second moment.

        For outputs that are numbers, with normal errors of unit variance, it is their sum with random signs.

        Args:
            index: of the batch.
            output: of the model on this batch; None: the model is run.

        Raises:
            ProblemError: the outputs of the model have no gradient.
        """
        model, batch, generator = self.model, self.data[index], self.generators[index]
        scores = logits(batches.forward(model, batch) if output is None else output).float()
        if is_by_position(scores, batch):
            self.positions += attended_count(model, batch)
        else:
            self.samples += size(batch)
        axis = class_axis(scores, batch, model)
        if not scores.requires_grad:
            raise ProblemError(
                f"The model's outputs have no gradient: it computes under torch.no_grad, or detaches them. {_WITHOUT}"
            )
        scores = unpadded(scores if axis is None else scores.movedim(axis, -1), attended(model, batch))
        rows = scores.detach().reshape(-1, scores.shape[-1] if scores.ndim else 1)
        gradients = _signs(rows, generator) if axis is None else score_gradients(rows, generator)
        return scores.flatten() @ gradients.flatten()


class _Squares:
    """Sums of squared gradients by layer.

    Args:
        model: the model.
        layers: the layers to prune. The gradient is taken at the output of the module of a called layer, and at the
            weight of the others.
        tables: those of the layers whose price is that of a table of an embedding.
        coupled: those of the layers whose second moment is wanted too.
        hold: stores a tensor until the end of the run.
        alone: no other rank adds to the moments. Sums are float64, so that one rank and several round to the same
            float32.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tables: Sequence[Layer],
        coupled: Sequence[Layer],
        hold: Callable[[Tensor], Tensor],
        alone: bool,
    ) -> None:
        self.model, self._hold, self._alone = model, hold, alone
        sums = {layer: torch.zeros(layer.shape[0], dtype=torch.float64) for layer in layers}
        self.outputs = {layer: rows for layer, rows in sums.items() if layer.is_called}
        self.products = {layer: rows for layer, rows in sums.items() if not layer.is_called}
        self._coupled = dict.fromkeys(layer for layer in coupled if layer in self.outputs)  # in the order of layers
        self.moments: dict[Layer, Tensor] = {}
        self.embeddings = embeddings_of(model, tables)
        self.lookups = {layer: _LookupSums.empty(layer) for layer in self.embeddings.values()}

    @torch.no_grad()
    def count_tokens(self, chain: list[Block], data: list[Batch]) -> None:
        """Count how often the embeddings look up each of their rows, without padding.

        Args:
            chain: blocks of the model, of which none is run; without them the whole model is run, since it may look
                up a table several times, as that of an encoder and a decoder.
            data: batches.
        """

        def count(batch: Batch, path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
            assert isinstance(module, nn.Embedding)
            self.lookups[self.embeddings[path]].count(rows_read(module, args, kwargs), attended(self.model, batch))

        stream = Stream(self.model, data, chain)
        for index, batch in enumerate(data):
            with after_calls(self.model, self.embeddings, partial(count, batch)):
                stream.run(BEFORE, index)

    def add(
        self, layers: Sequence[Layer], compute: Callable[[], Tensor], *inputs: Tensor, pull: Tensor | None = None
    ) -> list[Tensor]:
        """Add the squared gradients that a computation gives its layers.

        Args:
            layers: those that the computation may use.
            compute: returns a tensor.
            inputs: of the computation, tensors that ask for gradients.
            pull: gradient of the computed tensor; None for a scalar.

        Returns:
            The gradients of the inputs.
        """
        calls: list[_RecordedCall] = []
        by_path = {layer.path: layer for layer in layers if layer in self.outputs and layer.path not in self.embeddings}
        looked_up = {path: layer for path, layer in self.embeddings.items() if layer in layers}
        by_weight = [layer for layer in layers if layer in self.products]
        stored = {layer.key: layer.stored(self.model) for layer in by_weight}

        def record(path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> object:
            read = rows_read(module, args, kwargs) if isinstance(module, nn.Embedding) else first_argument(args, kwargs)
            return _kept(calls, path, read, output)

        with requiring_gradients(stored.values()), torch.enable_grad():
            tables = {path: layer.stored(self.model) for path, layer in looked_up.items() if layer.path == path}
            with after_calls(self.model, {*by_path, *looked_up}, record), _recorded_products(tables, calls):
                value = compute()
            sources = [*inputs, *(call.output for call in calls), *stored.values()]
            gradients: list[Tensor | None] = [None] * len(sources)
            if value.requires_grad and sources:
                try:
                    gradients = list(torch.autograd.grad(value, sources, pull, allow_unused=True))
                except unless_out_of_memory(RuntimeError) as error:
                    raise ProblemError(
                        f"The model's outputs have no gradient ({first_line(error)}). {_WITHOUT}"
                    ) from error
        first, last = len(inputs), len(inputs) + len(calls)
        for call, gradient in zip(calls, gradients[first:last], strict=True):
            if gradient is None:
                continue
            layer = by_path[call.path] if call.path in by_path else looked_up[call.path]
            if call.path in looked_up and not call.input.is_floating_point():
                self.lookups[layer].add(call, gradient, layer.stored(self.model).detach())
                continue
            axis, module = gradient.ndim - 1, self.model.get_submodule(call.path)
            if isinstance(module, CONVOLUTIONS):
                axis -= len(module.kernel_size)
            if layer in self._coupled:
                rows = gradient.movedim(axis, -1)[None].flatten(0, -2).float()
                rows = rows * torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(_TINY).rsqrt()
                self._moment(layer).add_((rows.T @ rows).cpu())
            squares = gradient.double().square().movedim(axis, -1)
            self.outputs[layer] += squares[None].flatten(0, -2).sum(0).cpu()  # a layer may be called on one vector
            if layer in self.lookups:  # a head: padded positions have no gradient, and no part in the metric
                self.lookups[layer].add_inputs(call.input[squares.sum(-1) > 0])
        of_parameter = dict(zip(stored, gradients[last:], strict=True))
        for layer in by_weight:
            gradient = of_parameter[layer.key]
            if gradient is not None:
                self.products[layer] += layer.matrix(gradient.contiguous()).double().square().sum(1).cpu()
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, gradients[:first], strict=True)
        ]

    def _moment(self, layer: Layer) -> Tensor:
        """The sum of the second moments of a layer, zeros at first."""
        if layer not in self.moments:
            self.moments[layer] = torch.zeros(layer.shape[0], layer.shape[0], dtype=torch.float64)
        return self.moments[layer]

    def store(self, layers: Sequence[Layer]) -> None:
        """Store the second moments of layers that get no further gradient on this rank."""
        for layer in layers:
            if layer in self._coupled:
                moment = self._moment(layer)
                self.moments[layer] = self._hold(self._shared(layer, moment) if self._alone else moment)

    def _shared(self, layer: Layer, moment: Tensor) -> Tensor:
        """The shrunk second moment of a layer, (rows, rows) float32, from the sum over all positions.

        With weights 1 / norm(g) the squared error of the moment is the sum of the squared norms, if there are many.
        """
        diagonal = moment.diagonal().clone()
        beyond = float(moment.square().sum() - diagonal.square().sum())
        moment = moment * (1 - min(1.0, float(self.outputs[layer].sum()) / max(beyond, _TINY)))
        moment.diagonal().copy_(diagonal)
        return moment.float()

    def result(self, outputs: _Outputs, ranks: Ranks) -> RowFisher:
        """The prices, from sums over these outputs of the model on this rank.

        Layers without a finite gradient are left out.
        """
        positions = torch.tensor(float(outputs.positions), dtype=torch.float64)
        ranks.sum(positions)
        total = torch.tensor(float(outputs.positions + outputs.samples), dtype=torch.float64)
        of_lookups = [tensor for sums in self.lookups.values() for tensor in sums.tensors]
        for tensor in (
            total,
            *self.outputs.values(),
            *self.products.values(),
            *(self.moments[layer] for layer in self._coupled),  # in the same order on all ranks
            *of_lookups,
        ):
            ranks.sum(tensor)

        def usable(sums: dict[Layer, Tensor]) -> dict[Layer, Tensor]:
            means = {layer: rows / total.clamp_min(1.0) for layer, rows in sums.items()}
            return {layer: rows for layer, rows in means.items() if bool(rows.isfinite().all()) and bool(rows.any())}

        prices = usable(self.outputs)
        lookups = {layer: sums.result(prices.pop(layer, None), total) for layer, sums in self.lookups.items()}
        usable_lookups = {
            layer: lookup
            for layer, lookup in lookups.items()
            if bool(lookup.metric.isfinite().all()) and bool(lookup.metric.any())
        }
        moments = {}
        for layer in self._coupled:
            moment = self.moments.pop(layer)
            if layer in prices and bool(moment.isfinite().all()) and bool(moment.any()):
                moments[layer] = moment if self._alone else self._hold(self._shared(layer, moment))
        return RowFisher(prices, usable(self.products), moments, usable_lookups, bool(positions))


@dataclass(frozen=True)
class _RecordedCall:
    """One call of a module: its path, its first argument, and its output, a tensor that asks for a gradient."""

    path: str
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _LookupSums:
    """Sums that the price of a table of an embedding is made of.

    Args:
        counts: (tokens,) float64, how often each row is looked up in all samples.
        gradients: (features, features) float64, of products of gradients at looked-up rows.
        inputs: (features, features) float64, of products of the inputs of a head with the same table.
        calls: (1,) float64, number of the positions with inputs.
    """

    counts: Tensor
    gradients: Tensor
    inputs: Tensor
    calls: Tensor

    @classmethod
    def empty(cls, layer: Layer) -> _LookupSums:
        """Sums of nothing."""
        tokens, features = layer.shape

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(zeros(tokens), zeros(features, features), zeros(features, features), zeros(1))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All sums."""
        return self.counts, self.gradients, self.inputs, self.calls

    def count(self, indices: Tensor, attended: Tensor | None) -> None:
        """Count looked-up rows."""
        values = unpadded(indices[..., None], attended)
        self.counts.add_(torch.bincount(values.flatten().cpu(), minlength=len(self.counts)))

    def add(self, call: _RecordedCall, gradient: Tensor, table: Tensor) -> None:
        """Add the gradients at the output of an embedding, (..., features), for its indices (...).

        An embedding may multiply its rows by a number.
        """
        rows, output = table[call.input].double(), call.output.detach().double()
        scale = float((rows * output).sum() / rows.square().sum().clamp_min(1e-30))
        errors = (gradient.double() * scale).flatten(0, -2)
        self.gradients.add_((errors.T @ errors).cpu())

    def add_inputs(self, inputs: Tensor) -> None:
        """Add inputs of a head, (count, features)."""
        values = inputs.detach().double()
        self.inputs.add_((values.T @ values).cpu())
        self.calls.add_(len(values))

    def result(self, prices: Tensor | None, outputs: Tensor) -> Lookup:
        """The metric and the prices of the rows.

        Args:
            prices: (tokens,) of a head with the same table, for one output of the model; None without one.
            outputs: number of outputs of the model.
        """
        frequencies, metric = frequencies_of(self.counts), self.gradients / outputs.clamp_min(1.0)
        if prices is None or not bool(self.calls):
            return Lookup(metric, frequencies, int(outputs))
        prices, inputs = (prices + _FLOOR * prices.mean()) / (1 + _FLOOR), self.inputs / self.calls
        both = prices.sum() * inputs + metric
        of_rows = prices * inputs.trace() + frequencies * metric.trace()
        return Lookup(both, of_rows / both.trace().clamp_min(1e-300), int(outputs))


def frequencies_of(counts: Tensor) -> Tensor:
    """Expected frequencies of tokens, (tokens,) float64, positive, also of those that were never counted.

    A part of each count goes to all tokens alike: absolute discounting, with the discount that counts of one and two
    tell (Ney, Essen and Kneser 1994, On structuring probabilistic dependences in stochastic language modelling).
    """
    once, twice = float((counts == 1).sum()), float((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    spread = discount * float((counts > 0).sum()) / len(counts)
    smoothed = (counts - discount).clamp_min(0.0) + spread
    return smoothed / smoothed.sum() if bool(counts.any()) else torch.full_like(counts, 1 / len(counts))


@dataclass
class _BlockwisePass:
    """A forward and a backward pass along the blocks of a model.

    Args:
        layers: the layers to prune.
        chain: blocks of the model.
        outputs: of the model on the batches.
        squares: takes the gradients.
        residency: brings the blocks into memory, and keeps hidden states.
    """

    layers: Sequence[Layer]
    chain: list[Block]
    outputs: _Outputs
    squares: _Squares
    residency: Residency

    @property
    def data(self) -> list[Batch]:
        """The batches."""
        return self.outputs.data

    def run(self) -> None:
        """Run both passes."""
        stream = Stream(self.outputs.model, self.data, self.chain, fetch=self.residency.fetch)
        outside = [layer for layer in self.layers if stream.block_of(layer) is None]
        inputs = self._inputs(stream)
        pulls = []
        for index in range(len(self.data)):
            hidden = self.residency.fetch(inputs[-1][index]).requires_grad_()
            compute = partial(self._probe_behind, stream, index, hidden)
            pulls.append(self._keep(len(self.chain), index, *self.squares.add(outside, compute, hidden)))
        for stage in reversed(range(len(self.chain))):
            inside = stream.layers_of(stage, self.layers)
            self.residency.enter(stage)
            for index in range(len(self.data)):
                hidden = self.residency.fetch(inputs[stage][index]).requires_grad_()
                compute = partial(_through, stream, stage, index, hidden)
                pull = self.residency.fetch(pulls[index])
                pulls[index] = self._keep(stage, index, *self.squares.add(inside, compute, hidden, pull=pull))
            self.squares.store(inside)
            self.residency.release(stage)
        for index in range(len(self.data)) if outside else ():
            pull = self.residency.fetch(pulls[index])
            self.squares.add(outside, partial(stream.entry, index), pull=pull)
        self.squares.store(outside)

    @torch.no_grad()
    def _inputs(self, stream: Stream) -> list[list[Tensor]]:
        """The input of every block, by batch, and the output of the last one."""
        inputs = []
        for stage in range(BEFORE, len(self.chain)):
            stream.keep = partial(self._keep, stage + 1)
            self.residency.enter(stage)
            stream.advance(stage)
            self.residency.release(stage)
            if stage == BEFORE and self.residency.arithmetic is not None:
                stream.cast_arguments(self.residency.arithmetic)
            inputs.append([*stream.hidden])
        return inputs

    def _probe_behind(self, stream: Stream, index: int, hidden: Tensor) -> Tensor:
        """The probe from the output of the last block, which the modules behind it may change in place."""
        output = stream.output(index, hidden.clone())
        return self.outputs.probe(index, output)

    def _keep(self, stage: int, index: int, hidden: Tensor) -> Tensor:
        """Store what a batch has at the entry of a stage: its hidden state, and later the gradient of this state."""
        dtype = self.residency.arithmetic
        place = index * (len(self.chain) + 1) + stage
        return self.residency.keep(place, hidden if dtype is None else hidden.to(dtype))


def _through(stream: Stream, stage: int, index: int, hidden: Tensor) -> Tensor:
    """A hidden state after one block, which may change its input in place."""
    return stream.through([stage], index, hidden.clone())


def score_gradients(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Random gradients at scores whose second moment is their Fisher information, (rows, classes).

    They are diag(sqrt(p)) z - p (sqrt(p)^T z) for chances p of the classes and random signs z.

    Args:
        scores: (rows, classes).
        generator: draws the signs, on the processor.
    """
    gradients = torch.empty_like(scores)
    count = max(1, _PIECE // scores.shape[1])  # the scores of a large vocabulary are most of the memory here
    for start in range(0, len(scores), count):
        rows = slice(start, start + count)
        chances, into = scores[rows].softmax(-1), gradients[rows]
        torch.mul(chances.sqrt(), _signs(into, generator), out=into)
        into -= chances * into.sum(-1, keepdim=True)
    return gradients


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs of the shape, device and dtype of a tensor, drawn on the processor."""
    signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return signs.to(like.device, like.dtype)


@contextmanager
def _recorded_products(tables: Mapping[str, Tensor], calls: list[_RecordedCall]) -> Iterator[None]:
    """Append the products with tables of embeddings that functions compute, such as `F.linear(x, table.weight)`.

    Args:
        tables: by the paths of the embeddings.
        calls: the products are appended to it as calls of a head, with outputs that ask for gradients.
    """

    def compute(func: Function, args: Args, kwargs: Kwargs) -> object:
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.endswith("_") or not isinstance(output, Tensor):
            return output
        with torch._C.DisableTorchFunction():
            for product in products(name, args, kwargs):
                for path, table in tables.items():
                    if _same_matrix(product.factor, table) and product.inputs(()).shape[:-1] == output.shape[:-1]:
                        return _kept(calls, path, product.inputs(()), output)
        return output

    with Interceptor(compute) if tables else nullcontext():
        yield


def _same_matrix(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.stride() == second.stride() and first.data_ptr() == second.data_ptr()


def _kept(calls: list[_RecordedCall], path: str, argument: Tensor, output: object) -> object:
    """The output of a call, which is appended if the output can ask for a gradient."""
    if not isinstance(output, Tensor) or output.is_inference() or not output.is_floating_point():
        return output
    if is_mapped(output):  # inside torch.vmap no tensor can ask for gradients
        return output
    if not output.requires_grad:  # nothing before it asks for gradients, such as the parameters of a copy
        output = output.detach().requires_grad_()
    calls.append(_RecordedCall(path, argument, output))
    return output.clone()  # later operations may change it in place
