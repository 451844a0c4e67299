"""Packed storage of weights in safetensors files: masks and nonzero values, or entropy codes (`bitmasks.py`).

Files that are ready to run (`models.ready`) round the weights instead, and need no unpacking.

At 50 % sparsity a bfloat16 matrix takes 1/16 + 1/2 = 56 % of its dense bytes. Tensors that packing would not shrink are
stored unchanged. Packing and unpacking hold one tensor at a time in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from iobs.core.files import expanded, weight_files
from iobs.errors import ModelError, ProblemError
from iobs.inference.choices import PRECISIONS, Precision
from iobs.models.bitmasks import SUFFIX, pack, scratch_beside, unpacked
from iobs.models.factory import CONFIG_NAME, WEIGHTS_NAME, build_directory
from iobs.models.loaded import LoadedModel, size_in_bytes, unwritable
from iobs.models.output import check_output, copy_companions, output_directory
from iobs.models.ready import ReadyFile, fill_packed, is_ready, read_ready, write_ready
from iobs.models.sixteen_bits import quick, stored_as_half, widen
from iobs.models.weights import DTYPES, unwrapped, write_weights
from iobs.pruning.network.layers import library_class
from iobs.pruning.network.usable import require_unstored


def save_packed(
    model: nn.Module | LoadedModel | str | Path,
    path: str | Path,
    replaceable: Collection[str] = (),
    precision: Precision | None = None,
) -> Path:
    """Write the packed weights of a model, with its other files, into a new directory.

    Args:
        model: a module, a `LoadedModel`, or a directory of safetensors files.
        path: the output directory; it must not exist, or must be empty.
        replaceable: names that may already be in the output directory and will be replaced.
        precision: the fewest bits of a weight, "bf16", "int8" or "int4": linear layers and convolutions of size 1 are
            rounded and stored ready to run. None: every weight is kept bit for bit.

    Raises:
        ModelError: the model directory holds no safetensors file, or a damaged one; no layer can be stored; or one is
            stored already.
        NonFiniteError: a weight that is rounded holds NaN or infinite entries.
        ProblemError: the precision is unknown.
        OutputError: the output directory is not empty or cannot be written, or its disk has too little room.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ProblemError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}.")
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    module = model.module if isinstance(model, LoadedModel) else model
    if isinstance(module, nn.Module):
        _require_real(module)
        require_unstored(module, "They cannot be packed. Pack the dense model; a packed file runs as it is.")
    with ExitStack() as stack:
        if isinstance(model, str | Path):
            source = expanded(model)
        else:
            check_output(Path(path), replaceable=replaceable)
            assert isinstance(module, nn.Module)
            source = _written(model, stack.enter_context(scratch_beside(path, size_in_bytes(module))))
        shards = weight_files(source)
        if not shards:
            raise ModelError(f"{source} holds no .safetensors file; give a directory that iobs prune wrote.")
        with output_directory(Path(path), replaceable) as temporary:
            copy_companions(source, temporary, keep_index=precision is None)
            if precision is not None:
                module = _module_of(model)
                with stored_as_half(module):
                    write_ready(module, temporary / f"model{SUFFIX}", precision)
                return expanded(path)
            for shard in shards:
                pack(shard, temporary / f"{shard.stem}{SUFFIX}")
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
    if ready is not None and _described(expanded(path)):
        return open_packed(path).module
    with unpacked(path) as scratch:
        if into is not None:
            return _filled(into, scratch)
        if not _described(scratch):
            raise ModelError(f"{path} does not say what module it holds; give one: load_packed(path, into=module).")
        from iobs.models import load

        return load(scratch).module


def _require_real(module: nn.Module) -> None:
    """Raise if a tensor has numbers that packed files do not have.

    Raises:
        ModelError: one does; names it.
    """
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor) and value.dtype not in DTYPES.values():
            dtype = str(value.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} holds {dtype} numbers, which a packed file cannot; convert it to real ones first."
            )


def is_packed(path: str | Path) -> bool:
    """True if a path is a directory with packed files and no dense ones."""
    directory = expanded(path)
    return directory.is_dir() and bool([*directory.glob(f"*{SUFFIX}")]) and not [*directory.glob("*.safetensors")]


def is_ready_to_run(path: str | Path) -> bool:
    """True if a path is a packed directory whose layers are stored matrices."""
    return is_packed(path) and _ready_file(expanded(path)) is not None


def open_packed(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a packed directory, with its tokenizer, to run it; it cannot be pruned or written.

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
        with unpacked(directory) as scratch:
            loaded = load(scratch, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    else:
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
    """Size of the packed weight files divided by the size of the dense weight files."""
    dense = sum(os.path.getsize(file) for file in weight_files(expanded(source)))
    return sum(os.path.getsize(file) for file in expanded(packed).glob(f"*{SUFFIX}")) / dense


def _written(model: nn.Module | LoadedModel, directory: Path) -> Path:
    if isinstance(model, LoadedModel):
        model.write(directory)
    elif isinstance(model, library_class("transformers.modeling_utils", "PreTrainedModel")):
        model.save_pretrained(directory)  # type: ignore[operator]
    else:
        write_weights(model, directory / WEIGHTS_NAME)
    return directory


def _filled(module: nn.Module, directory: Path) -> nn.Module:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        tensors |= load_file(file)
    fill_packed(module, tensors)
    return module
