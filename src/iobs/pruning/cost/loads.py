"""Operations and bytes of the parts of a run, counted from the shapes of matrices, and the rates of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from iobs.pruning.calibration.gram import STRIPE, WIDE
from iobs.pruning.recipe import Recipe, is_magnitude
from iobs.solvers.admm import ADMM, SCHEDULES

_SUM_BYTES = 20  # of one entry of a Gram when a product is added: float32 read, float64 read and written
_DRIFT_BYTES = 20  # the same of one entry of the two moments of drift
_SEARCH_BYTES = 40  # of one entry in the entrywise half of an iteration
_ACCURATE = 2048  # columns up to which SparseGPT factorises in float64
_HALVES = 4 / 3  # operations of an inverse by halves, in cubes of the columns
_LAPACK = 2.0  # the same of an inverse by a factorisation, which runs at half of the speed of products


class Matrix(Protocol):
    """A weight matrix, of which only the shape is needed."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def weights(self) -> int:
        """Number of entries."""
        ...

    @property
    def groups(self) -> int:
        """Number of groups of a convolution, otherwise 1."""
        ...

    @property
    def expert(self) -> int | None:
        """Number of an expert, otherwise None."""
        ...


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine.

    Args:
        product: floating-point operations per second of a product in the dtype of the blocks.
        solve: the same in float32, as solvers need it.
        transfer: bytes per second from the place of the weights to the device; infinite if they stay there.
        double: operations per second of a product in float64; None: half of `solve`.
        memory: bytes per second of entrywise work; infinite: not counted.
        inner: operations per second of the products of layer inputs for Grams; None: `solve`.
    """

    product: float
    solve: float
    transfer: float = float("inf")
    double: float | None = None
    memory: float = float("inf")
    inner: float | None = None


@dataclass(frozen=True)
class Load:
    """Operations of products by their dtype, and bytes of entrywise work.

    Attributes:
        block: operations in the dtype of the blocks.
        single: operations in float32.
        double: operations in float64.
        moved: bytes.
        inner: operations of the products of layer inputs.
    """

    block: float = 0.0
    single: float = 0.0
    double: float = 0.0
    moved: float = 0.0
    inner: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """The values of all fields; `dataclasses.astuple` copies each of them, most of the time of a plan."""
        return tuple(vars(self).values())

    def __add__(self, other: Load) -> Load:
        return Load(*(own + its for own, its in zip(self.parts, other.parts, strict=True)))

    def __mul__(self, factor: float) -> Load:
        return Load(*(own * factor for own in self.parts))

    def seconds(self, rates: Rates) -> float:
        """Time at the rates of a machine."""
        double = rates.solve / 2 if rates.double is None else rates.double
        inner = rates.solve if rates.inner is None else rates.inner
        speeds = rates.product, rates.solve, double, rates.memory, inner
        return float(sum(part / speed for part, speed in zip(self.parts, speeds, strict=True)))


def is_admm(recipe: Recipe) -> bool:
    """Check that the solver is ADMM, whose memory and time differ from those of the others."""
    return recipe.solver == "admm" or isinstance(recipe.solver, ADMM)


def in_gram_dtype(layer: Matrix, operations: float) -> Load:
    """Operations in the dtype of a layer's finished Grams."""
    return Load(single=operations) if layer.shape[1] >= WIDE else Load(double=operations)


def sum_load(columns: int, tokens: float, products: int, passes: float) -> Load:
    """Products of inputs (tokens, columns) for Grams, and their sums in float64.

    Of symmetric products, all but one of inputs with dense inputs, only the stripes up to the diagonal are computed.

    Args:
        columns: of the Grams.
        tokens: number of inputs.
        products: number of Grams, 1 or 3.
        passes: number of batches.
    """
    lower = (1 + min(1.0, STRIPE / columns)) / 2
    square = columns**2 * (lower * products if products == 1 else 1 + lower * (products - 1))
    return Load(inner=2.0 * tokens * square, moved=_SUM_BYTES * passes * square)


def drift_load(layer: Matrix, tokens: float, passes: float) -> Load:
    """Two moments of the drift of the residual that a layer adds to."""
    return Load(inner=4.0 * tokens * layer.weights, moved=_DRIFT_BYTES * 2 * passes * layer.weights)


def search_load(layer: Matrix, recipe: Recipe, ranks: int = 1) -> Load:
    """One call of the solver on a centred problem, on a rank that has its share of the rows.

    ADMM takes one product of the rows with a square of columns for each iteration, and one inverse for each stage.
    SparseGPT takes one factor, and a product with a triangle. Magnitude takes no product.
    """
    rows, columns = layer.shape[0] / ranks, layer.shape[1]
    square, cube = columns**2, columns**3
    if is_magnitude(recipe.solver):
        return Load(moved=_SEARCH_BYTES * rows * columns)
    if not is_admm(recipe):
        factor = cube / 3
        accurate = columns <= _ACCURATE
        found = Load(double=factor) if accurate else Load(single=factor)
        return found + Load(single=rows * square, moved=_SEARCH_BYTES * rows * columns)
    schedule = SCHEDULES[recipe.solver.budget if isinstance(recipe.solver, ADMM) else "default"]
    stages = schedule.stages if 2 * layer.shape[0] >= columns else max(2, schedule.stages * 5 // 8)
    products = schedule.iterations + schedule.refit + 1
    return Load(
        single=2.0 * rows * square * products + (_HALVES * stages + _LAPACK) * cube,
        moved=_SEARCH_BYTES * rows * columns * products,
    )


def problem_load(layer: Matrix, pairs: bool, ranks: int = 1) -> Load:
    """The linear term of a layer's problem; with a dense model beside it also the centre, in float64."""
    rows, columns = layer.shape[0] / ranks, layer.shape[1]
    product = 2.0 * rows * columns**2
    if not pairs:
        return Load(single=product)
    return in_gram_dtype(layer, product) + Load(double=columns**3 / 3 + product)


def error_load(layer: Matrix, pairs: bool, count: int, ranks: int = 1) -> Load:
    """`count` errors of a layer from its Grams: three products with a dense model beside it, otherwise two."""
    return in_gram_dtype(layer, 2.0 * layer.shape[0] / ranks * layer.shape[1] ** 2 * (3 if pairs else 2) * count)


def solve_operations(layer: Matrix, recipe: Recipe) -> float:
    """Operations of a solver on a centred problem; float64 counts twice."""
    found = search_load(layer, recipe) + problem_load(layer, False)
    return found.single + 2 * found.double
