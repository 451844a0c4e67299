"""Packed files without loss, written and read one tensor at a time.

A packed file is a safetensors file. Its tensors have the names of the dense ones: packed tensors (`packed_tensors`) are
lists of uint8, the others are stored as they are. A float32 tensor whose numbers are all exact in bfloat16 or float16
is stored so. The metadata tell the version, and of the tensors in the order of their names: a letter for the dtype that
each has when it is dense, a capital if it is stored as it is; and the check sums of those that are. They repeat no
name: small networks have short files. A directory has the files of the dense model otherwise; its config.json names
the quantiser with which transformers reads it (`iobs.quantizer`). Without a config.json the small tensors that are
stored as they are, such as those of batch norms, are joined to one, and the metadata list their names, dtypes and
shapes: the header would take more bytes for each than its numbers.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from iobs.core import exponents
from iobs.core.files import (
    ENTRY_BYTES,
    JOINED_BYTES,
    PACKED,
    compressed_text,
    expanded,
    from_compressed_text,
    is_packed_file,
    weight_files,
)
from iobs.core.slices import is_exact, slices
from iobs.errors import ModelError, NonFiniteError
from iobs.models.output import copy_companions
from iobs.models.packed_tensors import MOST_HEAD, entry_of, pack_code, parts_of, shortest, unpack_tensor
from iobs.models.ready import fill_packed, read_ready, weight_of
from iobs.models.weights import DTYPES, Entry, ShardWriter, plain_names, read_entries
from iobs.pruning.runtime.scratch import scratch_folder

SUFFIX = ".packed"  # of files that are ready to run
_VERSION = 3  # 1 has no code of exponents; 1 and 2 name the tensors in the metadata
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_LETTERS = dict(zip("abcdefghijklmno", DTYPES.values(), strict=True))  # new ones go to the end
_LETTER_OF = {dtype: letter for letter, dtype in _LETTERS.items()}
_NOTHING = torch.empty(0, dtype=torch.uint8)
_HALVES = (torch.bfloat16, torch.float16)
_SUM = struct.Struct("<I")
_JOINED = "iobs:joined"  # the name of the joined tensors; they lie in it in the order of their list
_CONFIG, _QUANTIZATION = "config.json", "quantization_config"
_QUANTIZER = {"quant_method": "iobs", "dequantize": True}


# ---- Reading


@dataclass
class PackedFile:
    """A packed file without loss.

    Args:
        file: its path.

    Attributes:
        entries: of the dense tensors, by name.
        metadata: of the dense file.

    Raises:
        ModelError: it is no packed file, of another version, or damaged.
    """

    file: Path
    entries: dict[str, Entry] = field(init=False)
    metadata: dict[str, str] = field(init=False)
    _sums: dict[str, int] = field(init=False)  # of tensors that are stored as they are
    _stored: dict[str, Entry] = field(init=False)
    _joined: dict[str, slice] = field(init=False, default_factory=dict)  # bytes of the joined tensors

    def __post_init__(self) -> None:
        self._stored, self.metadata = read_entries(self.file)
        try:
            stated = json.loads(self.metadata.pop(PACKED))
            version = stated["version"]
            if version in (1, 2):
                self._sums = {str(name): int(value) for name, value in stated["sums"].items()}
                dtypes = {str(name): _DTYPES[value] for name, value in stated["dtypes"].items()}
            elif version == _VERSION:
                self._join(stated)
                self._sums, dtypes = _read_stated(stated, sorted(self._stored), self._joined)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise ModelError(
                f"{self.file} is no packed file of iobs; give a directory that iobs pack wrote."
            ) from error
        if version not in range(1, _VERSION + 1):
            raise ModelError(f"{self.file} is a packed file of version {version}; install the iobs that wrote it.")
        if lost := [name for name in (*self._sums, *dtypes) if name not in {**self._stored, _JOINED: None}]:
            raise ModelError(f"{self.file} is damaged ({lost[0]!r} is not there); copy or pack it again.")
        with self._opened() as opened:
            entries = {
                name: entry if self._is_plain(name) else entry_of(_bytes(opened.get_slice(name)[:MOST_HEAD]), name)
                for name, entry in self._stored.items()
            }
        self.entries = {name: Entry(dtypes.get(name, entry.dtype), entry.shape) for name, entry in entries.items()}

    def _join(self, stated: Mapping[str, str]) -> None:
        """Put the joined tensors in the place of the one that holds them; raises ValueError if they do not fill it."""
        if "joined" not in stated:
            return
        stop, whole = 0, self._stored.pop(_JOINED)
        for name, letter, shape in from_compressed_text(stated["joined"]):
            entry = Entry(_LETTERS[letter], tuple(shape))
            start, stop = stop, stop + entry.bytes
            self._stored[name], self._joined[name] = entry, slice(start, stop)
        if stop != whole.bytes:
            raise ValueError("the joined tensors have other bytes than their shapes")

    def _is_plain(self, name: str) -> bool:
        """True if a tensor is stored as it is."""
        return name in self._sums or name in self._joined

    def _raw(self, opened: Any, name: str) -> Tensor:
        """A tensor as it is stored."""
        if name not in self._joined:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
        whole: Tensor = opened.get_tensor(_JOINED)
        entry = self._stored[name]
        self._check_plain(_JOINED, _bytes(whole))
        return whole[self._joined[name]].clone().view(entry.dtype).reshape(entry.shape)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, dense; as many are decoded at once as torch has threads.

        Raises:
            ModelError: the file is damaged.
        """
        workers = torch.get_num_threads()
        with self._opened() as opened, ThreadPoolExecutor(workers) as pool:
            coming: deque[tuple[str, Future[Tensor]]] = deque()
            for name in self._stored:
                coming.append((name, pool.submit(self._dense, name, self._raw(opened, name))))
                if len(coming) > workers:
                    first, future = coming.popleft()
                    yield first, future.result()
            for name, future in coming:
                yield name, future.result()

    def check(self) -> None:
        """Check every sum, without decoding.

        Raises:
            ModelError: the file is damaged.
        """
        for name, data in self._each():
            if not self._is_plain(name):
                parts_of(data, name)

    def parts(self) -> dict[str, dict[str, int]]:
        """Bytes of the parts of every tensor, by name; their sum is that of all tensors.

        Raises:
            ModelError: the file is damaged.
        """
        return {
            name: {"dense": len(data)} if self._is_plain(name) else parts_of(data, name) for name, data in self._each()
        }

    def _each(self) -> Iterator[tuple[str, memoryview]]:
        """The checked bytes of every tensor."""
        with self._opened() as opened:
            for name in self._stored:
                data = _bytes(self._raw(opened, name))
                self._check_plain(name, data)
                yield name, data

    def _dense(self, name: str, stored: Tensor) -> Tensor:
        if self._is_plain(name):
            self._check_plain(name, _bytes(stored))
        else:
            stored = unpack_tensor(_bytes(stored), name)
        return stored.to(self.entries[name].dtype)

    def _check_plain(self, name: str, data: memoryview) -> None:
        if self._sums.get(name, zlib.crc32(data)) != zlib.crc32(data):
            raise ModelError(f"{self.file} is damaged ({name!r} has changed); copy or pack it again.")

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.file, framework="pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.file} is damaged ({error}); copy or pack it again.") from error


def _stated(dtypes: Mapping[str, torch.dtype], sums: Mapping[str, int], joined: Mapping[str, Entry]) -> str:
    """The metadata of a packed file.

    Args:
        dtypes: of all tensors, dense.
        sums: of those that are stored as they are, and of the joined ones together.
        joined: the joined tensors.
    """
    letters = {name: _LETTER_OF[dtype] for name, dtype in sorted(dtypes.items())}
    tensors = "".join(letter.upper() if name in sums or name in joined else letter for name, letter in letters.items())
    numbers = b"".join(_SUM.pack(sums[name]) for name in sorted(sums))
    stated = {"version": _VERSION, "tensors": tensors, "sums": base64.b85encode(numbers).decode("ascii")}
    if joined:
        listed = [(name, _LETTER_OF[entry.dtype], entry.shape) for name, entry in joined.items()]
        stated["joined"] = compressed_text(listed)
    return json.dumps(stated, separators=(",", ":"))


def _read_stated(
    stated: Mapping[str, str], names: Sequence[str], joined: Collection[str]
) -> tuple[dict[str, int], dict[str, torch.dtype]]:
    """Sums and dtypes that `_stated` wrote; raises LookupError, ValueError or struct.error if there are none.

    Args:
        stated: the metadata.
        names: of the tensors, in order.
        joined: names of the joined ones.
    """
    letters = dict(zip(names, stated["tensors"], strict=True))
    plain = [name for name, letter in letters.items() if letter.isupper() and name not in joined]
    plain = sorted([*plain, _JOINED]) if joined else plain
    numbers = _SUM.iter_unpack(base64.b85decode(stated["sums"]))
    sums = {name: number for name, (number,) in zip(plain, numbers, strict=True)}
    return sums, {name: _LETTERS[letter.lower()] for name, letter in letters.items()}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def dense_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file of weights by name, as they are when they are dense.

    Raises:
        ModelError: the file is damaged.
    """
    return PackedFile(file).entries if is_packed_file(file) else read_entries(file)[0]


def files_with_codes(path: str | Path) -> list[Path]:
    """The files of a packed directory without loss; empty for other directories.

    Raises:
        ModelError: a file is missing, or not packed as the others are.
    """
    directory = expanded(path)
    files = weight_files(directory) if directory.is_dir() else []
    packed = [file for file in files if is_packed_file(file)]
    if packed and len(packed) < len(files):
        other = next(file for file in files if file not in packed)
        raise ModelError(f"{other} is not packed, but others beside it are; pack the whole directory again.")
    return packed


def require_quantizer(directory: Path) -> None:
    """Raise if transformers would take the packed weights of a directory for dense ones.

    Raises:
        ModelError: there are packed files, and config.json does not name their quantiser.
    """
    config = directory / _CONFIG
    if not files_with_codes(directory):
        return
    stated = _settings(config).get(_QUANTIZATION)
    if not isinstance(stated, dict) or stated.get("quant_method") != _QUANTIZER["quant_method"]:
        missing = json.dumps({_QUANTIZATION: _QUANTIZER})[1:-1]
        raise ModelError(f"{config} does not say that the weights beside it are packed; add {missing} to it.")


def fill_from_files(module: nn.Module, files: Sequence[Path]) -> nn.Module:
    """Fill a module of the same architecture with the tensors of packed files, few at a time, in their floating dtypes.

    Raises:
        ModelError: names or shapes differ, or a file is damaged; the module is unchanged then.
    """
    packed = [PackedFile(file) for file in files]
    for each in packed:
        each.check()
    entries = {name: entry for each in packed for name, entry in each.entries.items()}
    fill_packed(module, {name: torch.zeros((), dtype=e.dtype).expand(e.shape) for name, e in entries.items()})
    stored_names = {plain: name for name, plain in plain_names(module).items()}
    state = module.state_dict()
    for each in packed:
        for name, tensor in each.read():
            state[stored_names.get(name, name)].copy_(tensor)
    return module


# ---- Writing


def pack(shard: Path, target: Path, dtype: torch.dtype | None = None, joins: bool = False) -> None:
    """Write a file of weights as a packed file, one tensor at a time.

    Args:
        shard: the file of weights.
        target: the packed file.
        dtype: to which numbers without codes are rounded, vectors by `half_of`; None: nothing is rounded.
        joins: join small tensors that are stored as they are. transformers cannot read such a file.

    Raises:
        ModelError: the file is damaged, or packed already.
        NonFiniteError: a number is too large for the dtype.
    """
    entries, metadata = read_entries(shard)
    if PACKED in metadata:
        raise ModelError(f"{shard} is packed already; unpack it first: iobs pack --unpack.")
    packed: dict[str, Entry] = {}
    plain: dict[str, Entry] = {}
    body = target.with_name(f"{target.name}.body")
    try:
        with body.open("wb") as written:
            for name in entries:
                tensor = _mapped(shard, name)
                data, stored = _shortest(tensor, name, dtype, joins)
                if data is None:
                    plain[name] = Entry(stored.dtype, tuple(stored.shape))
                else:
                    packed[name] = Entry(torch.uint8, (len(data),))
                    written.write(data)
            # Wide elements first, packed tensors last: each then begins at a multiple of the size of its element.
            plain = dict(sorted(plain.items(), key=lambda item: -item[1].dtype.itemsize))
            joined = {name: entry for name, entry in plain.items() if joins and entry.bytes <= JOINED_BYTES}
            alone = {name: entry for name, entry in plain.items() if name not in joined}
            sums = {name: zlib.crc32(_bytes(_mapped(shard, name).to(entry.dtype))) for name, entry in alone.items()}
            parts = [bytes(_bytes(_mapped(shard, name).to(entry.dtype))) for name, entry in joined.items()]
            if joined:
                whole = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if any(parts) else _NOTHING
                sums[_JOINED] = zlib.crc32(_bytes(whole))
            stated = _stated({name: entry.dtype for name, entry in entries.items()}, sums, joined)
        together = {_JOINED: Entry(torch.uint8, tuple(whole.shape))} if joined else {}
        with ShardWriter(target, {**alone, **together, **packed}, {**metadata, PACKED: stated}) as writer:
            for name, entry in alone.items():
                writer.put(name, _mapped(shard, name).to(entry.dtype))
            if joined:
                writer.put(_JOINED, whole)
            writer.append(body, packed)
    except SafetensorError as error:
        raise ModelError(f"{shard} is damaged ({error}); copy it again.") from error
    finally:
        body.unlink(missing_ok=True)


def _mapped(file: Path, name: str) -> Tensor:
    """A tensor of a file, which is mapped for as long as the tensor is there: a whole file would count as memory."""
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _shortest(tensor: Tensor, name: str, dtype: torch.dtype | None, joins: bool) -> tuple[bytes | None, Tensor]:
    """The packed tensor, None if it is stored as it is; and the tensor in the dtype that is stored.

    A code is looked for first, since it takes no other dtype. Of tensors that may be joined, which take little of the
    header, only those that packing makes shorter by more than that are packed.
    """
    code = pack_code(tensor)
    if code is None and dtype is not None and _is_wider(tensor, dtype):
        dtype = exponents.half_of(tensor, dtype)
        flat = tensor.flatten()
        parts = (flat[part] for part in slices(flat.shape))
        if any(bool((part.to(dtype).isinf() & ~part.isinf()).any()) for part in parts):
            raise NonFiniteError(f"{name} has numbers that are too large for {dtype}; bfloat16 holds them.")
        tensor = tensor.to(dtype)
    halves = [half for half in _HALVES if _is_wider(tensor, half) and is_exact(tensor, half)]
    narrow = tensor.to(halves[0]) if halves else tensor
    data = shortest(code, narrow, ENTRY_BYTES if joins and narrow.nbytes <= JOINED_BYTES else 0)
    return data, tensor if data is not None and data is code else narrow


def _is_wider(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize


def pack_directory(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Write the packed files of a model directory, with its other files, into an existing directory.

    Raises:
        ModelError: the directory has no safetensors file or is quantised; a file is damaged.
        NonFiniteError: as `pack`.
    """
    shards = weight_files(source)
    if not shards:
        raise ModelError(f"{source} holds no .safetensors file; give a directory that iobs prune wrote.")
    copy_companions(source, target, keep_index=True)
    config = target / _CONFIG
    if config.is_file():
        settings = _settings(config)
        if _QUANTIZATION in settings:
            reason = "it is packed already" if settings[_QUANTIZATION] == _QUANTIZER else "another tool quantised it"
            raise ModelError(f"{source} cannot be packed: {reason}. Pack the dense model.")
        _write_settings(config, {**settings, _QUANTIZATION: _QUANTIZER})
    for shard in shards:
        pack(shard, target / shard.name, dtype, joins=not config.is_file())


def unpack(path: str | Path, directory: Path) -> None:
    """Write the dense files of a packed directory into an existing directory.

    Raises:
        ModelError: the packed directory holds no packed file, or one is damaged or missing.
    """
    source = expanded(path)
    ready = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else []
    files = [] if ready else files_with_codes(source)
    if not ready and not files:
        raise ModelError(f"{source} holds no packed file; give a directory that iobs pack wrote.")
    copy_companions(source, directory, keep_index=True)
    for file in ready:
        _unround(file, directory / f"{file.stem}.safetensors")
    config = directory / _CONFIG
    if files and config.is_file():
        _write_settings(config, {name: value for name, value in _settings(config).items() if name != _QUANTIZATION})
    for file in files:
        packed = PackedFile(file)
        packed.check()  # no room is taken for a shape that is not true
        with ShardWriter(directory / file.name, packed.entries, packed.metadata) as writer:
            for name, tensor in packed.read():
                writer.put(name, tensor)


def _settings(config: Path) -> dict[str, object]:
    try:
        return dict(json.loads(config.read_text(encoding="utf8")))
    except ValueError as error:
        raise ModelError(f"{config} is damaged; copy it again.") from error


def _write_settings(config: Path, settings: dict[str, object]) -> None:
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


@contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside a packed directory with its dense files; it is removed at the end.

    Raises:
        ModelError: as `unpack`.
        OutputError: the disk has too little room for the dense files.
    """
    with scratch_beside(path, unpacked_bytes(path)) as folder:
        unpack(path, folder)
        yield folder


def unpacked_bytes(path: str | Path) -> int:
    """Bytes of the dense tensors of a packed directory.

    Raises:
        ModelError: a packed file is damaged.
    """
    ready = sorted(expanded(path).glob(f"*{SUFFIX}"))
    if ready:
        return sum(tensor.nbytes for file in ready for tensor in read_ready(file).state.values())
    return sum(entry.bytes for file in files_with_codes(path) for entry in PackedFile(file).entries.values())


def scratch_beside(path: str | Path, needed_bytes: int) -> AbstractContextManager[Path]:
    """A temporary folder on the disk of a packed directory."""
    place = Path(os.path.realpath(expanded(path)))
    return scratch_folder(place.parent, place.name, needed_bytes)


def _unround(file: Path, target: Path) -> None:
    """Write the dense weights of a file that is ready to run."""
    contents = read_ready(file)
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.state.items()}
    layers = {weight_of(name): layer for name, layer in contents.layers.items()}
    with ShardWriter(target, entries, {"format": "pt"}) as writer:
        for name in entries:
            writer.put(name, contents.tensors[name] if name in contents.tensors else layers[name].dense())
