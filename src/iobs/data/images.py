"""Pictures and their labels as tensors."""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iobs.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_READ = ", ".join(IMAGE_SUFFIXES)
# Folders of these names are parts of a set, each with all its classes.
_PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")
# The statistics of ImageNet, which most public vision networks were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)

Transform = Callable[[Any], Tensor]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


def read_arrays(file: Path, statistics: Statistics = IMAGENET) -> tuple[Tensor, Tensor | None]:
    """Images (N, C, H, W) float32 and labels of an .npz file; labels are None where it has none.

    The arrays are `images` (N, H, W, C) or (N, H, W) or (N, C, H, W), uint8 or floating, and `labels` (N, ...). Bytes
    are scaled to [0, 1] and normalised, if they have as many channels as the statistics. Floating images are taken as
    they are. Labels are classes, int64, where all of them are whole numbers, else real, float32.

    Args:
        file: the .npz file.
        statistics: what the network was trained with.

    Raises:
        DataError: the file is damaged, has no array `images` or one of another type, or its labels are not numbers.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("images", "labels") if name in archive}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{file} cannot be read as .npz ({error}); write it with numpy.savez(file, images=..., labels=...), both "
            "arrays of numbers."
        ) from error
    if "images" not in arrays:
        raise DataError(f"{file} has no array 'images'; name it so, and 'labels' beside it.")
    labels = _as_labels(file, arrays["labels"]) if "labels" in arrays else None
    images = arrays["images"]
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{file} has {len(images)} images and {len(labels)} labels.")
    if not len(images):
        raise DataError(f"{file} has no images.")
    if images.dtype != np.uint8 and images.dtype.kind != "f":  # which scale they have is not known
        raise DataError(
            f"{file}: images are of type {images.dtype}; save bytes, 0 to 255, as images.astype(numpy.uint8), and "
            "anything else as floating numbers, scaled as the network wants them."
        )
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and not _channels_first(*images.shape[1:]):
        images = images.transpose(0, 3, 1, 2)
    return _as_tensor(images, statistics), labels


@dataclass(frozen=True)
class Pictures:
    """Pictures in files, read and transformed when they are asked for: a set of them need not fit into memory.

    Args:
        source: the folder or zip file where they are.
        names: of each of them.
        read: the content of the file of a name.
        transform: makes a (3, H, W) float32 tensor of an RGB picture.
    """

    source: Path
    names: list[str]
    read: Callable[[str], bytes]
    transform: Transform

    def __len__(self) -> int:
        """How many."""
        return len(self.names)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Some of them, (len(chosen), 3, H, W).

        Raises:
            DataError: one is damaged.
        """
        names = [self.names[number] for number in chosen.tolist()]
        return torch.stack([self.transform(_picture(self.source, name, self.read)) for name in names])


def read_pictures(
    source: Path, transform: Transform | None = None, statistics: Statistics = IMAGENET
) -> tuple[Tensor | Pictures, Tensor | None]:
    """Pictures of a folder or zip file as (N, 3, H, W) float32, and their labels (N,) int64.

    Pictures in several folders are labelled by the folder: the number that its name is, or its place in alphabetical
    order. They may lie deeper if they do so alike in all (`CLASS/images/1.png`). In a single folder the label is the
    number that a picture's name starts with (`207.jpg`, `207_1.png`); names without numbers have none, and labels are
    None. Hidden files and folders are left out; links are followed.

    Args:
        source: a folder or zip file.
        transform: a network's own; pictures may then be of any size and are read one batch at a time.
        statistics: without a transform pictures are all of one size, and normalised with these.

    Raises:
        DataError: Pillow is missing, there are no pictures, they differ in size, a class folder has none, or it is not
            clear which folders are the classes: pictures lie beside them or at several depths, or they are train and
            val.
    """
    if importlib.util.find_spec("PIL") is None:
        raise DataError("Reading pictures needs Pillow: pip install 'iobs[vision]'.")
    entries, read = _contents(source)
    names, labels = _labelled(source, entries)
    if transform is not None:
        return Pictures(source, names, read, transform), labels
    arrays: list[np.ndarray] = []
    for name in names:
        arrays.append(np.asarray(_picture(source, name, read)))
        if arrays[-1].shape != arrays[0].shape:
            raise DataError(f"{source}: {names[0]} and {name} differ in size; resize all pictures to one size.")
    return _as_tensor(np.stack(arrays).transpose(0, 3, 1, 2), statistics), labels


def _contents(source: Path) -> tuple[Iterable[str], Callable[[str], bytes]]:
    """The names of what a folder or zip file holds, and what reads a file of such a name.

    Raises:
        DataError: the zip file is damaged.
    """
    if source.is_dir():
        return _entries(source), lambda name: (source / name).read_bytes()
    try:
        archive = zipfile.ZipFile(source)
    except zipfile.BadZipFile as error:
        raise DataError(f"{source} is not a zip file, or is damaged.") from error
    return archive.namelist(), archive.read


def _entries(folder: Path, prefix: str = "", above: frozenset[Path] = frozenset()) -> Iterator[str]:
    """The names of all that lies below a folder, written as in a zip file: those of folders end with "/".

    Links are followed, but for those back to a folder that they lie in.

    Raises:
        DataError: a link leads nowhere.
    """
    above |= {folder.resolve()}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if _hidden(name):
                continue
            if entry.is_symlink() and not os.path.exists(entry):
                raise DataError(f"{entry.path} is a link that leads nowhere; repair it, or remove it.")
            if not entry.is_dir():
                yield name
            elif Path(entry).resolve() not in above:
                yield f"{name}/"
                yield from _entries(Path(entry), f"{name}/", above)


def _labelled(source: Path, entries: Iterable[str]) -> tuple[list[str], Tensor | None]:
    """The names of pictures, in order, and their labels, out of the names of all that `source` holds.

    Raises:
        DataError: there are no pictures, or some lie beside the folders of others; or as `_require_classes`.
    """
    seen = [name for name in entries if not _hidden(name)]
    found = sorted(name for name in seen if name[-1] != "/" and PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise DataError(f"{source} has no pictures ({_READ}). Text files are named one by one: repeat --data.")
    folders, holding = set(map(_folder, seen)), set(map(_folder, found))
    root: tuple[str, ...] = ()
    while root not in holding and len(classes := _inside(root, folders)) == 1:  # as in a zip file of one folder
        root += (*classes,)
    if root not in holding:
        _require_classes(source.joinpath(*root), classes, [_folder(name)[len(root) :] for name in found])
        return found, _numbers([_folder(name)[len(root)] for name in found], sorted(classes))
    if len(holding) > 1:
        stray = next(name for name in found if _folder(name) == root)
        raise DataError(
            f"{source}: {stray} lies beside folders of pictures, whose names are classes; move it into one, or away."
        )
    stems = [PurePosixPath(name).stem.split("_")[0].split(".")[0] for name in found]
    numbered = all(stem.isdigit() for stem in stems) and len(set(stems)) > 1
    return found, _numbers(stems, stems) if numbered else None


def _require_classes(place: Path, classes: set[str], pictures: Sequence[tuple[str, ...]]) -> None:
    """Whether folders are classes: all hold pictures, all at the same place inside.

    Args:
        place: where the folders are.
        classes: their names.
        pictures: of each picture the folders that it lies in, from the class on.

    Raises:
        DataError: they are not, or are the parts of a set.
    """
    parts = sorted(name for name in classes if name.lower() in _PARTS)
    if len(parts) > 1:
        raise DataError(f"{place} holds {' and '.join(parts)}, which are no classes: give only one of them.")
    empty = sorted(classes - {folders[0] for folders in pictures})
    if empty:  # left out, it would shift the labels of those after it
        raise DataError(
            f"{place / empty[0]} has no pictures ({_READ}), and would be a class as the folders beside it are: convert "
            "what it holds, or move it away."
        )
    unlike = {folders[1:]: "/".join(folders) for folders in pictures}
    if len(unlike) > 1:  # CLASS/images is clear, where every class has it
        one, other = [*unlike.values()][:2]
        raise DataError(
            f"{place}: pictures lie in {one} and in {other}, so it is not clear which folders are the classes: give "
            "one whose own folders are."
        )


def _folder(name: str) -> tuple[str, ...]:
    """The folder that a file lies in, or that is meant itself, part by part."""
    parts = PurePosixPath(name).parts
    return parts if name.endswith("/") else parts[:-1]


def _inside(folder: tuple[str, ...], folders: Iterable[tuple[str, ...]]) -> set[str]:
    """The names of the folders directly in one of them."""
    depth = len(folder)
    return {other[depth] for other in folders if len(other) > depth and other[:depth] == folder}


def _numbers(names: Sequence[str], order: Sequence[str]) -> Tensor:
    """The numbers that names are, or else their places."""
    if all(name.isdigit() for name in names):
        return torch.tensor([int(name) for name in names])
    places = {name: place for place, name in enumerate(order)}
    return torch.tensor([places[name] for name in names])


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def _picture(source: Path, name: str, read: Callable[[str], bytes]) -> Any:
    """A picture of a folder or zip file, in colour.

    Raises:
        DataError: it is damaged.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read(name))) as opened:
            return _in_colour(opened)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{source}: {name} is not a picture, or is damaged.") from error


def _in_colour(picture: Any) -> Any:
    """A picture as RGB of 8 bits; grey of 16 bits is scaled first, since Pillow would only clip it."""
    if picture.mode.startswith("I"):
        from PIL import Image

        picture = Image.fromarray((np.asarray(picture) / 257).round().clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")


def _as_labels(file: Path, labels: np.ndarray) -> Tensor:
    """Classes as int64, real numbers as float32.

    Raises:
        DataError: neither.
    """
    if labels.dtype.kind in "biu":
        return torch.from_numpy(labels.astype(np.int64))
    if labels.dtype.kind != "f" or not np.isfinite(labels).all():
        wrong = "NaN or infinity in places" if labels.dtype.kind == "f" else f"no numbers (type {labels.dtype})"
        raise DataError(f"{file}: labels are {wrong}; save the number of each sample's class, or its real number.")
    whole = bool((labels == labels.round()).all())
    return torch.from_numpy(labels.astype(np.int64 if whole else np.float32))


def _as_tensor(images: np.ndarray, statistics: Statistics) -> Tensor:
    """Pictures (N, C, H, W) as float32; bytes scaled to [0, 1], and normalised if the statistics are of as many C."""
    tensor = torch.from_numpy(images)
    if images.dtype != np.uint8:
        return tensor.float().contiguous()
    tensor = tensor.float().div(255)
    if tensor.shape[1] == len(statistics[0]):
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in statistics)
        tensor = (tensor - mean) / std
    return tensor.contiguous()


def _channels_first(second: int, third: int, last: int) -> bool:
    """Whether pictures of these dimensions are (C, H, W): one or three channels, square pictures, or fewer than W."""
    return second in (1, 3) or third == last or (second != third and second <= last)
