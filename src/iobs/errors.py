"""Every exception and warning of iobs. Each message says what is wrong and what to do about it."""


class IOBSError(Exception):
    """Base of all errors that iobs raises on purpose."""


class PatternError(IOBSError, ValueError):
    """A sparsity pattern is impossible, or does not fit the matrix that it is asked of."""


class ProblemError(IOBSError, ValueError):
    """A quadratic or an objective is malformed: wrong shapes, wrong dtypes, k larger than d."""


class NonFiniteError(IOBSError, ValueError):
    """NaN or infinity in weights, inputs or gradients; the message names the layer and the batch."""


class NotPositiveDefiniteError(IOBSError, ArithmeticError):
    """A Hessian has no Cholesky factor, even after the damping was raised several times."""


class LayerSelectionError(IOBSError, ValueError):
    """A name pattern matches no layer, or nothing that can be pruned is left."""


class CalibrationError(IOBSError, ValueError):
    """The calibration data is empty, too short, or does not fit the model."""


class DataError(IOBSError, ValueError):
    """A data file or data source cannot be used; the message says which file to put where."""


class ModelError(IOBSError, ValueError):
    """A model cannot be found or loaded, or its files are damaged."""


class OutputError(IOBSError, OSError):
    """An output cannot be written: it exists already, or the disk is full."""


class CheckpointError(IOBSError, RuntimeError):
    """A checkpoint does not belong to this run; the message names the difference."""


class DistributedError(IOBSError, RuntimeError):
    """Another process of a run on several ranks is gone, or there is too little data to share out."""


class AuditError(IOBSError, RuntimeError):
    """Fewer real zeros were found than were asked for."""


class DampingWarning(UserWarning):
    """The damping of a Hessian was raised because its Cholesky factorisation failed."""


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """What an error of another library says, without the tables and lists that follow; its kind if it says nothing."""
    return (str(error).strip().splitlines() or [otherwise or type(error).__name__])[0]


def is_a(kind: type, *values: object) -> bool:
    """Whether all are such numbers: behind a function, since typing knows no numpy number as Real or Integral."""
    return all(isinstance(value, kind) for value in values)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether numpy, or torch on any device, asked for more memory than there is."""
    # The CPU's allocator raises a plain RuntimeError, which only its words tell apart.
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )
