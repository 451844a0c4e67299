"""Load models and calibration batches as the options of a command say."""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from torch import nn

from iobs import models
from iobs.cli import console
from iobs.cli.options import Loading
from iobs.cli.run_file import RunOptions
from iobs.core.files import expanded
from iobs.data import Batch, BatchSource, Source, TextSource, calibration_batches, open_source
from iobs.errors import ModelError, first_line
from iobs.inference import StoredLinear
from iobs.models import LoadedModel
from iobs.models.packed import is_packed, is_ready_to_run, open_packed
from iobs.pruning.samples.batches import Samples

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(spec: str | None, loading: Loading, moved: bool = True) -> LoadedModel:
    """Load MODEL with the options of a command; with `moved` False it stays in main memory.

    Raises:
        typer.BadParameter: an unknown dtype or device.
        ModelError: the model cannot be loaded.
    """
    return models.load(
        spec,
        dtype=checked_dtype(loading.dtype),
        device=checked_device(loading.device),
        allow_pickle=loading.allow_pickle,
        trust_remote_code=loading.trust_remote_code,
        moved=moved,
    )


def load_to_run(spec: str | None, loading: Loading) -> LoadedModel:
    """Load MODEL as `load_model` does, or a packed directory; it is not pruned or written.

    Raises:
        typer.BadParameter: an unknown dtype or device.
        ModelError: the model cannot be loaded.
    """
    if spec is None or not is_packed(spec):
        return load_model(spec, loading)
    device = "cpu" if loading.device is None else checked_device(loading.device)
    dtype = checked_dtype(loading.dtype)
    return open_packed(spec, dtype=dtype, device=device, trust_remote_code=loading.trust_remote_code)


def local_directory(model: str | None) -> Path:
    """The directory of MODEL with --low-memory, which reads its files.

    Raises:
        ModelError: it is no directory.
    """
    if model is None or not expanded(model).is_dir():
        raise ModelError("--low-memory needs a local model directory with safetensors; download the model first.")
    return expanded(model)


def checked_precision(precision: str | None, spec: str) -> str:
    """The value of --precision, by default int8.

    Raises:
        typer.BadParameter: the model is a packed file that is ready to run.
    """
    if precision is not None and is_ready_to_run(spec):
        reason = f"{spec} is packed ready to run, and keeps its own precision"
        raise typer.BadParameter(reason, param_hint="--precision")
    return precision or "int8"


def use_threads(module: nn.Module, threads: int | None) -> None:
    """Let the products of stored layers take a number of threads; None leaves theirs."""
    for child in module.modules():
        if threads is not None and isinstance(child, StoredLinear):
            child.use_threads(threads)


def draw_batches(
    source: Source, loaded: LoadedModel, *, samples: int, length: int, seed: int, batch: int
) -> list[Batch]:
    """`calibration_batches`, with a message if the source has fewer samples than requested."""
    batches = calibration_batches(source, loaded, samples=samples, length=length, seed=seed, batch=batch)
    drawn = Samples.of(batches).samples
    if isinstance(source, BatchSource):
        console.say(f"{drawn} samples to calibrate on: all of {source.name}, as it gives them.")
    elif drawn < samples:
        kind, what = ("windows", "text") if isinstance(source, TextSource) else ("samples", "data")
        console.say(f"{drawn} of {samples} {kind} to calibrate on: the {what} has no more.")
    return batches


def checked_dtype(dtype: str | None) -> torch.dtype | None:
    """The dtype of a name. Returns None for None.

    Raises:
        typer.BadParameter: the name is unknown.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
    return None if dtype is None else _DTYPES[dtype]


def checked_device(device: str | None) -> str:
    """The named device; for None the first GPU if there is one, else the CPU.

    Raises:
        typer.BadParameter: the device cannot be used.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        reason = "it holds no numbers" if torch.empty(0, device=device).is_meta else ""
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error).rstrip(".")
    if reason:
        raise typer.BadParameter(f"{device!r} cannot be used here: {reason}", param_hint="--device")
    return device


def batches_of_run(loaded: LoadedModel, options: RunOptions) -> tuple[str, int, list[Batch]]:
    """The name of the calibration data, the tokens per sample, and the batches."""
    source = open_source([*options.data], "calibration", loaded)
    window = loaded.window_length(options.seq_len) if isinstance(source, TextSource) else options.seq_len
    batches = draw_batches(
        source, loaded, samples=options.samples, length=options.seq_len, seed=options.seed, batch=options.batch_size
    )
    return source.name, window, batches
