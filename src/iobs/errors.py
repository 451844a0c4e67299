"""Exceptions and warnings of iobs. Each message names the fault and its remedy."""

import sys
from collections.abc import Iterable, Sequence


class IOBSError(Exception):
    """Base class of all errors that iobs raises."""


class PatternError(IOBSError, ValueError):
    """A sparsity pattern is impossible or does not fit the shape of the matrix."""


class ProblemError(IOBSError, ValueError):
    """A quadratic, an objective or an option is invalid: wrong shape, wrong dtype, k larger than d, unknown name."""


class NonFiniteError(IOBSError, ValueError):
    """Weights, inputs or gradients hold NaN or infinity; the message names the layer and the batch."""


class NotPositiveDefiniteError(IOBSError, ArithmeticError):
    """A Hessian has no Cholesky factor, even after the damping was raised several times."""


class LayerSelectionError(IOBSError, ValueError):
    """A name pattern matches no layer, or no layer that can be pruned is left."""


class CalibrationError(IOBSError, ValueError):
    """The calibration data is empty, too short or does not fit the model."""


class DataError(IOBSError, ValueError):
    """A data file or data source cannot be used; the message names the missing file and its place."""


class ModelError(IOBSError, ValueError):
    """A model cannot be found or loaded, or its files are damaged."""


class OutputError(IOBSError, OSError):
    """An output cannot be written, for example because the disk is full."""


class UnusableOutputError(OutputError, ValueError):
    """An output cannot be where the user wants it, found before any work: it exists, or its folder is read-only."""


class CheckpointError(IOBSError, RuntimeError):
    """A checkpoint belongs to another run, is damaged, or cannot be written."""


class OtherRunError(CheckpointError, ValueError):
    """A checkpoint belongs to another run; the message names the differing settings."""


class DistributedError(IOBSError, RuntimeError):
    """Another rank has stopped, the calibration data is too small to share, or the run needs a single process."""


class AuditError(IOBSError, RuntimeError):
    """A pruned model has fewer zeros than requested."""


class DampingWarning(UserWarning):
    """The damping of a Hessian was raised because its Cholesky factorisation failed."""


class SeparationWarning(UserWarning):
    """A column tells the outcomes apart, so that its coefficient has no finite best value."""


class CoverageWarning(UserWarning):
    """Much of a model stayed dense for a reason that can surprise."""


def require_values(tensors: Iterable[tuple[str, object]], further: str = "") -> None:
    """Raise if a named tensor is on the meta device; `further` are more sentences on what to do.

    Raises:
        ModelError: one is; names it.
    """
    for name, tensor in tensors:
        if getattr(tensor, "is_meta", False):
            raise ModelError(
                f"{name} has no values here (meta device; accelerate's offload, or an empty model): load the whole "
                f"model into main memory, without device_map.{further}"
            )


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """First line of an exception's message; `otherwise`, or else the type's name, if the message is empty."""
    return (str(error).strip().splitlines() or [otherwise or type(error).__name__])[0]


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names between commas, at most `most`, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: object, most: int = 100) -> str:
    """A value in one line of an error, cut to `most` characters: swapped arguments may be whole data sets."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}... ({type(value).__name__})"


def is_a(kind: type, *values: object) -> bool:
    """Check that all values are of a type; a function, because mypy takes no numpy number for a Real.

    True and False are no numbers: in a setting they stand for a mistake.
    """
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


# Words of allocators: torch on a CPU and on a GPU, the CUDA runtime, and its libraries such as cuBLAS.
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "alloc_failed", "allocation_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Check that an exception of numpy, torch or CUDA means that the memory of a device ran out."""
    # Most of them are plain RuntimeErrors, recognised by their messages.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY)


def unless_out_of_memory(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """The kinds of exceptions that an `except` clause catches; none if the memory of a device ran out.

    An `except` clause evaluates its expression while the exception is handled, so that `sys.exception` returns it. Who
    takes an error for the refusal of a model writes `except unless_out_of_memory(RuntimeError) as error`.
    """
    error = sys.exception()
    return () if error is not None and is_out_of_memory(error) else kinds
