"""Packed storage of weights: entropy codes, grids with their scales, masks and values (`packed_files`).

Files that are ready to run (`models.ready`) round the weights instead, and need no unpacking.

At 50 % sparsity a bfloat16 matrix takes 40 % of its dense bytes, dense 67 %. Tensors that packing would not shrink are
stored unchanged. Packing and unpacking hold few tensors at a time in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from iobs.core.files import expanded, is_packed_file, weight_files
from iobs.core.late import library_class
from iobs.core.outputs import check_output
from iobs.core.specs import CONFIG_NAME
from iobs.errors import ModelError, ProblemError, require_values
from iobs.inference.choices import PRECISIONS, Precision
from iobs.inference.storing import fewest_bits
from iobs.models.factory import WEIGHTS_NAME, build_directory
from iobs.models.loaded import LoadedModel, size_in_bytes, unwritable
from iobs.models.output import copy_companions, output_directory
from iobs.models.packed_files import (
    SUFFIX,
    dense_entries,
    files_with_codes,
    fill_from_files,
    pack_directory,
    scratch_beside,
)
from iobs.models.ready import ReadyFile, is_ready, read_ready, write_ready
from iobs.models.sixteen_bits import quick, stored_as_half, widen
from iobs.models.weights import DTYPES, unwrapped, write_weights
from iobs.pruning.network.selection import require_module, require_unstored


def save_packed(
    model: nn.Module | LoadedModel | str | Path,
    path: str | Path,
    replaceable: Collection[str] = (),
    precision: Precision | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the packed weights of a model, with its other files, into a new directory.

    Without a precision, weights that are integers times steps (`iobs.Rate`) are stored as their entropy code, weights
    on a grid as their multiples and scales, and other weights with zeros as a mask and the rest. A float32 tensor of
    which all numbers are exact in 16 bits, as of a checkpoint in bfloat16, is stored so. Every tensor comes back bit
    for bit, in its own dtype. `transformers` loads the directory with `from_pretrained` after `import iobs`.

    Args:
        model: a module, a `LoadedModel`, or a directory of safetensors files.
        path: the output directory; it must not exist, or must be empty.
        replaceable: names that may already be in the output directory and will be replaced.
        precision: the fewest bits of a weight, "bf16", "int8" or "int4": linear layers and convolutions of size 1 are
            rounded and stored ready to run. None: every weight is kept bit for bit.
        dtype: `torch.bfloat16` or `torch.float16`, to which numbers without a code are rounded: embeddings that stayed
            dense, norms, biases, weights with free values. Beside bfloat16, vectors whose numbers float16 has nearer
            are rounded to it. All keep their dtype when they are loaded. None: nothing is rounded.

    Raises:
        ModelError: the model directory holds no safetensors file, or a damaged one; no layer can be stored; or one is
            stored already, or quantised.
        NonFiniteError: a weight that is rounded holds NaN or infinite entries, or is too large.
        ProblemError: the precision or the dtype is unknown, or both are given.
        OutputError: the output directory is not empty or cannot be written, or its disk has too little room.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ProblemError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}.")
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ProblemError(f"dtype must be torch.bfloat16, torch.float16 or None, got {dtype!r}.")
    if precision is not None and dtype is not None:
        raise ProblemError("Give precision or dtype, not both: a precision rounds every layer.")
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    module = model.module if isinstance(model, LoadedModel) else model
    if not isinstance(module, str | Path):
        require_module(module)
        _require_real(module)
        require_unstored(module, "They cannot be packed. Pack the dense model; a packed file runs as it is.")
    with ExitStack() as stack:
        if isinstance(model, str | Path):
            source = expanded(model)
        else:
            check_output(Path(path), replaceable=replaceable)
            assert isinstance(module, nn.Module)
            source = _written(model, stack.enter_context(scratch_beside(path, size_in_bytes(module))))
        with output_directory(Path(path), replaceable) as temporary:
            if precision is None:
                pack_directory(source, temporary, dtype)
            else:
                if not weight_files(source):
                    raise ModelError(f"{source} holds no .safetensors file; give a directory that iobs prune wrote.")
                copy_companions(source, temporary)
                module = _module_of(model)
                with stored_as_half(module):
                    write_ready(module, temporary / f"model{SUFFIX}", precision)
    return expanded(path)


def load_packed(path: str | Path, into: nn.Module | None = None) -> nn.Module:
    """Load a model that `save_packed` wrote: bit for bit, or ready to run on the CPU.

    Args:
        path: a packed directory.
        into: a module to fill with the weights, whose names and shapes must match. Required if the directory has
            neither config.json nor iobs.json, which describe the module. Default: build the module.

    Returns:
        `into`, or the new module.

    Raises:
        ModelError: the directory holds no packed file, a packed file is damaged or missing, or the weights do not fit.
    """
    ready = _ready_file(expanded(path))
    if ready is not None and into is not None:
        return read_ready(ready).fill(into)
    if into is not None:
        return fill_from_files(into, _required_files(path))
    if not _described(expanded(path)):
        if ready is None:
            _required_files(path)
        raise ModelError(f"{path} does not say what module it holds; give one: load_packed(path, into=module).")
    return open_packed(path).module


def _require_real(module: nn.Module) -> None:
    """Raise if a tensor has no numbers, or numbers that packed files do not have.

    Raises:
        ModelError: one does; names it.
    """
    state = module.state_dict()
    require_values(state.items())
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype not in DTYPES.values():
            dtype = str(value.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} holds {dtype} numbers, which a packed file cannot; convert it to real ones first."
            )


def _required_files(path: str | Path) -> list[Path]:
    """The files of a packed directory without loss.

    Raises:
        ModelError: there are none.
    """
    files = files_with_codes(path)
    if not files:
        raise ModelError(f"{path} holds no packed file; give a directory that iobs pack wrote.")
    return files


def is_packed(path: str | Path) -> bool:
    """True if a path is a directory with packed files and no dense ones."""
    directory = expanded(path)
    if not directory.is_dir():
        return False
    dense = [*directory.glob("*.safetensors")]
    return any(map(is_packed_file, dense)) or (bool([*directory.glob(f"*{SUFFIX}")]) and not dense)


def is_ready_to_run(path: str | Path) -> bool:
    """True if a path is a packed directory whose layers are stored matrices."""
    return is_packed(path) and _ready_file(expanded(path)) is not None


def packed_precision(path: str | Path) -> Precision | None:
    """The fewest bits of a packed directory that is ready to run; None for other paths."""
    ready = _ready_file(expanded(path)) if is_packed(path) else None
    return None if ready is None else fewest_bits({layer.matrix.format for layer in read_ready(ready).layers.values()})


def open_packed(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a packed directory, with its tokenizer, to run it. One that is ready to run cannot be pruned or written.

    Args:
        path: a directory of `save_packed` with config.json or iobs.json.
        dtype: dtype of the weights that are not stored matrices; None keeps theirs.
        device: device of the weights. Stored matrices need "cpu".
        trust_remote_code: also run code that comes with the weights.

    Raises:
        ModelError: a packed file is damaged or missing, or the model cannot be built.
        ProblemError: the file is ready to run, and the device is not the CPU.
    """
    from iobs.models import load

    directory = expanded(path)
    ready = _ready_file(directory)
    if ready is None:
        _required_files(path)
        return load(directory, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if torch.device(device).type != "cpu":
        raise ProblemError(f"{path} is stored for the CPU, not for {device}; unpack it first: iobs pack --unpack.")
    contents = read_ready(ready)
    if (directory / CONFIG_NAME).is_file():
        loaded = build_directory(directory, trust_remote_code)
        contents.fill(loaded.module).to(dtype=dtype)
        if dtype is None:
            widen(loaded.module)
    else:
        loaded = _with_matrices(directory, contents, dtype, trust_remote_code)
    reason = f"{path} is packed and cannot be written again; unpack it first: iobs pack --unpack."
    return replace(loaded, source=str(path), writer=unwritable(reason))


def _with_matrices(
    directory: Path, contents: ReadyFile, dtype: torch.dtype | None, trust_remote_code: bool
) -> LoadedModel:
    """A Hugging Face model with stored layers."""
    from iobs.models.huggingface import load_pretrained

    stored = Counter(layer.dtype for layer in contents.layers.values()).most_common(1)[0][0]
    loaded = load_pretrained(
        directory,
        dtype=dtype or quick(stored),
        device="cpu",
        allow_pickle=False,
        trust_remote_code=trust_remote_code,
        weights=contents.state,
    )
    contents.place(loaded.module)
    return loaded


def _ready_file(directory: Path) -> Path | None:
    """The packed file of a directory that is ready to run; None if its files are exact."""
    files = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    return files[0] if len(files) == 1 and is_ready(files[0]) else None


def _described(directory: Path) -> bool:
    """True if a directory says what module it holds."""
    return any((directory / name).is_file() for name in ("config.json", CONFIG_NAME))


def _module_of(model: nn.Module | LoadedModel | str | Path) -> nn.Module:
    """The module of a model, which is loaded if it is a directory."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, LoadedModel):
        return model.module
    from iobs.models import load

    return load(expanded(model)).module


def packed_share(source: str | Path, packed: str | Path) -> float:
    """Size of the packed weight files divided by that of the dense weights, also where the source is packed itself."""
    files = weight_files(expanded(source))
    dense = sum(entry.bytes for file in files for entry in dense_entries(file).values())
    written = [*expanded(packed).glob(f"*{SUFFIX}")] or files_with_codes(packed)
    return sum(map(os.path.getsize, written)) / dense


def _written(model: nn.Module | LoadedModel, directory: Path) -> Path:
    if isinstance(model, LoadedModel):
        model.write(directory)
    elif isinstance(model, library_class("transformers.modeling_utils", "PreTrainedModel")):
        model.save_pretrained(directory)  # type: ignore[operator]
    else:
        write_weights(model, directory / WEIGHTS_NAME)
    return directory
