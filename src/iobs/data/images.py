"""Read images and their labels as tensors, transformed and normalised as a network states for its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from iobs.errors import DataError
from iobs.models import LoadedModel

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_READ = ", ".join(IMAGE_SUFFIXES)
_WRITE = "write it with numpy.savez(file, images=..., labels=...), both arrays of numbers."
# Folders with these names are splits of a data set, not classes.
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
# Channel statistics of ImageNet, used to train most public vision networks.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
_PREPROCESSOR = "preprocessor_config.json"  # written by Hugging Face for image models

Transform: TypeAlias = "Callable[[PILImage], Tensor]"
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


def read_arrays(file: Path, statistics: Statistics = IMAGENET) -> tuple[Tensor, Tensor | None]:
    """Read images (N, C, H, W) float32 and labels (None if absent) from an .npz file.

    The file holds `images` (N, H, W, C), (N, H, W) or (N, C, H, W), uint8 or floating, and `labels` (N, ...). uint8
    images are scaled to [0, 1], and normalised if they have as many channels as the statistics. Floating images are
    not changed. Labels are int64 classes if all are whole numbers, else float32.

    Args:
        file: the .npz file.
        statistics: mean and standard deviation of each channel.

    Raises:
        DataError: the file is damaged, has no array `images` or one of another dtype or shape, or its labels are not
            numbers, one or more for each image.
    """
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file} is not an .npz file, or is damaged; {_WRITE}")
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("images", "labels") if name in archive}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read as .npz ({error}); {_WRITE}") from error
    if "images" not in arrays:
        raise DataError(f"{file} has no array 'images'; save images under this name, and their labels as 'labels'.")
    images = arrays["images"]
    if images.ndim < 2:
        raise DataError(f"{file}: images have the shape {images.shape}; save an array (N, H, W, C) or (N, H, W).")
    labels = _as_labels(file, arrays["labels"]) if "labels" in arrays else None
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{file} has {len(images)} images and {len(labels)} labels.")
    if not len(images):
        raise DataError(f"{file} has no images.")
    if images.dtype != np.uint8 and images.dtype.kind != "f":  # their scale is unknown
        raise DataError(
            f"{file}: images are of type {images.dtype}; save bytes, 0 to 255, as images.astype(numpy.uint8), or "
            "floating numbers with the scale that the network expects."
        )
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and not _channels_first(*images.shape[1:]):
        images = images.transpose(0, 3, 1, 2)
    return _as_tensor(images, statistics), labels


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, read and transformed on access, so that the set may be larger than memory.

    Attributes:
        source: the folder or zip file of the images.
        names: name of each image inside `source`.
        read: returns the content of the file with a given name.
        transform: converts an RGB image to a (3, H, W) float32 tensor.
    """

    source: Path
    names: list[str]
    read: Callable[[str], bytes]
    transform: Transform

    def __len__(self) -> int:
        """Number of images."""
        return len(self.names)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Images (len(chosen), 3, H, W) at the positions `chosen`.

        Raises:
            DataError: an image is damaged.
        """
        names = [self.names[number] for number in chosen.tolist()]
        return torch.stack([self.transform(_opened(self.source, name, self.read)) for name in names])


def read_images(
    source: Path, transform: Transform | None = None, statistics: Statistics = IMAGENET
) -> tuple[Tensor | ImageFiles, Tensor | None]:
    """Read images (N, 3, H, W) float32 and labels (N,) int64 (None if absent) from a folder or zip file.

    With several folders, each is a class. Its label is its name if all names are numbers, else its position in
    alphabetical order. Images may lie deeper, at the same place in each class (`CLASS/images/1.png`). In a single
    folder the label is the number at the start of the file name (`207.jpg`, `207_1.png`). If a name has no number, or
    all numbers are equal, there are no labels. Longer numbers than int64 holds, such as times, are names like others.
    Hidden files and folders are ignored; links are followed.

    Args:
        source: a folder or zip file.
        transform: transform of the network. Images may then have any size, and are read one batch at a time.
        statistics: without a transform, all images must have one size and are normalised with these statistics.

    Raises:
        DataError: Pillow is missing, there are no images, their sizes differ, or a class folder is empty. Also if the
            class folders are ambiguous: images lie beside them or at several depths, or they are train and val.
    """
    if importlib.util.find_spec("PIL") is None:
        raise DataError("Reading images needs Pillow: pip install 'iobs[vision]'.")
    entries, read = _contents(source)
    names, labels = _labelled(source, entries)
    if transform is not None:
        return ImageFiles(source, names, read, transform), labels
    arrays: list[np.ndarray] = []
    for name in names:
        arrays.append(np.asarray(_opened(source, name, read)))
        if arrays[-1].shape != arrays[0].shape:
            raise DataError(f"{source}: {names[0]} and {name} differ in size; resize all images to one size.")
    return _as_tensor(np.stack(arrays).transpose(0, 3, 1, 2), statistics), labels


def _contents(source: Path) -> tuple[Iterable[str], Callable[[str], bytes]]:
    """The names of all entries of a folder or zip file, and a function that reads the file with a given name.

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
    """The names of all files and folders below a folder, written as in a zip file: folder names end with "/".

    Links are followed, except links to a folder that contains them.

    Args:
        folder: the folder.
        prefix: prefix of each name, ending with "/" if not empty.
        above: resolved paths of the folders that contain `folder`.

    Raises:
        DataError: a link is broken.
    """
    above |= {folder.resolve()}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if _hidden(name):
                continue
            if entry.is_symlink() and not os.path.exists(entry):
                raise DataError(f"{entry.path} is a broken link; repair it, or remove it.")
            if not entry.is_dir():
                yield name
            elif Path(entry).resolve() not in above:
                yield f"{name}/"
                yield from _entries(Path(entry), f"{name}/", above)


def _labelled(source: Path, entries: Iterable[str]) -> tuple[list[str], Tensor | None]:
    """The sorted names of the images among all entries of `source`, and their labels.

    Raises:
        DataError: there are no images, or images lie beside folders of images; or as `_require_classes`.
    """
    seen = [name for name in entries if not _hidden(name)]
    images = sorted(name for name in seen if name[-1] != "/" and PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise DataError(f"{source} has no images ({_READ}). Text files are named one by one: repeat --data.")
    folders, holding = set(map(_folder, seen)), set(map(_folder, images))
    root: tuple[str, ...] = ()
    while root not in holding and len(classes := _inside(root, folders)) == 1:  # as in a zip file of one folder
        root += (*classes,)
    if root not in holding:
        _require_classes(source.joinpath(*root), classes, [_folder(name)[len(root) :] for name in images])
        return images, _numbers([_folder(name)[len(root)] for name in images], sorted(classes))
    if len(holding) > 1:
        stray = next(name for name in images if _folder(name) == root)
        raise DataError(
            f"{source}: {stray} lies beside folders of images, whose names are classes; move it into a class "
            "folder, or remove it."
        )
    stems = [PurePosixPath(name).stem.split("_")[0].split(".")[0] for name in images]
    numbered = all(map(_is_number, stems)) and len(set(stems)) > 1
    return images, _numbers(stems, stems) if numbered else None


def _require_classes(place: Path, classes: set[str], images: Sequence[tuple[str, ...]]) -> None:
    """Raise unless folders are classes: each holds images, at the same place inside each folder.

    Args:
        place: parent of the folders.
        classes: names of the folders.
        images: for each image the folders that contain it, starting with the class folder.

    Raises:
        DataError: a folder is empty, images lie at different places, or the folders are splits of a data set.
    """
    parts = sorted(name for name in classes if name.lower() in _SPLITS)
    if len(parts) > 1:
        raise DataError(
            f"{place} holds {' and '.join(parts)}, which are splits of a data set, not classes; give only one of them."
        )
    empty = sorted(classes - {folders[0] for folders in images})
    if empty:  # ignoring it would shift the labels of the classes after it
        raise DataError(
            f"{place / empty[0]} has no images ({_READ}), but the folders beside it are classes; convert its files "
            "to these formats, or move the folder away."
        )
    unlike = {folders[1:]: "/".join(folders) for folders in images}
    if len(unlike) > 1:  # CLASS/images is unambiguous only if every class has it
        first, second = [*unlike.values()][:2]
        raise DataError(
            f"{place}: images lie in {first} and in {second}, so it is not clear which folders are the classes; "
            "give a folder whose direct subfolders are the classes."
        )


def _folder(name: str) -> tuple[str, ...]:
    """Path components of the folder of a file name, or of a folder name itself."""
    parts = PurePosixPath(name).parts
    return parts if name.endswith("/") else parts[:-1]


def _inside(folder: tuple[str, ...], folders: Iterable[tuple[str, ...]]) -> set[str]:
    """Names of the direct subfolders of `folder` among `folders`."""
    depth = len(folder)
    return {other[depth] for other in folders if len(other) > depth and other[:depth] == folder}


def _numbers(names: Sequence[str], order: Sequence[str]) -> Tensor:
    """Names as int64: their numbers if all names are numbers, else their positions in `order`."""
    if all(map(_is_number, names)):
        return torch.tensor([int(name) for name in names])
    places = {name: place for place, name in enumerate(order)}
    return torch.tensor([places[name] for name in names])


def _is_number(name: str) -> bool:
    return name.isdecimal() and int(name) <= torch.iinfo(torch.int64).max


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def _opened(source: Path, name: str, read: Callable[[str], bytes]) -> PILImage:
    """Read an image from a folder or zip file, and convert it to RGB.

    Raises:
        DataError: the file is damaged, or not an image.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read(name))) as opened:
            return _in_colour(opened)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{source}: {name} is not an image, or is damaged.") from error


def _in_colour(image: PILImage) -> PILImage:
    """Convert an image to 8-bit RGB; 16-bit grey is scaled to 8 bits first, since Pillow would clip it."""
    if image.mode.startswith("I"):
        from PIL import Image

        image = Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _as_labels(file: Path, labels: np.ndarray) -> Tensor:
    """Labels as int64 if all are whole numbers, else as float32.

    Raises:
        DataError: labels are not numbers, not finite, or a single number.
    """
    if labels.ndim == 0:
        raise DataError(f"{file}: labels are a single number; save one for each image.")
    if labels.dtype.kind in "biu":
        return torch.from_numpy(labels.astype(np.int64))
    if labels.dtype.kind != "f" or not np.isfinite(labels).all():
        wrong = "NaN or infinity in places" if labels.dtype.kind == "f" else f"no numbers (type {labels.dtype})"
        raise DataError(f"{file}: labels are {wrong}; save the number of each sample's class, or its real number.")
    whole = bool((labels == labels.round()).all())
    return torch.from_numpy(labels.astype(np.int64 if whole else np.float32))


def _as_tensor(images: np.ndarray, statistics: Statistics) -> Tensor:
    """Images (N, C, H, W) as float32; uint8 is scaled to [0, 1], and normalised if the statistics have C channels."""
    if images.dtype != np.uint8:
        with np.errstate(over="ignore"):  # numpy reads dtypes that torch does not, such as another byte order
            return torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
    tensor = torch.from_numpy(images).float().div(255)
    if tensor.ndim == 4 and tensor.shape[1] == len(statistics[0]):
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in statistics)
        tensor = (tensor - mean) / std
    return tensor.contiguous()


def _channels_first(second: int, third: int, last: int) -> bool:
    """Guess whether image dimensions are (C, H, W): C is 1 or 3, the images are square, or C <= W."""
    return second in (1, 3) or third == last or (second != third and second <= last)


def transform_of(model: LoadedModel) -> Transform | None:
    """The evaluation transform (resize, crop, normalise) of a timm network. Returns None for other networks."""
    if getattr(model.module, "pretrained_cfg", None) is None:
        return None
    timm = importlib.import_module("timm.data")
    transform: Transform = timm.create_transform(**timm.resolve_data_config({}, model=model.module), is_training=False)
    return transform


def statistics_of(model: LoadedModel) -> Statistics:
    """Mean and standard deviation of each channel for a network's inputs; those of ImageNet if it states none.

    Raises:
        DataError: preprocessor_config.json is damaged.
    """
    timm = getattr(model.module, "pretrained_cfg", None) or {}
    if "mean" in timm and "std" in timm:
        return tuple(timm["mean"]), tuple(timm["std"])
    file = _preprocessor(model)
    if file is None:
        return IMAGENET
    try:
        stated = json.loads(file.read_text(encoding="utf8"))
        if stated.get("do_normalize") is False:
            return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        if stated.get("image_mean") is None or stated.get("image_std") is None:
            return IMAGENET
        mean, std = (tuple(map(float, stated[name])) for name in ("image_mean", "image_std"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} cannot be read ({error}); copy it again, or correct it.") from error
    if len(mean) != len(std) or 0.0 in std:
        raise DataError(f"{file} states image_mean {mean} and image_std {std}, which do not go together; correct it.")
    return mean, std


def _preprocessor(model: LoadedModel) -> Path | None:
    """preprocessor_config.json beside the weights, in a directory or the hub cache. Returns None if it is missing."""
    config = getattr(model.module, "config", None)
    origin = getattr(config, "name_or_path", None)
    if not origin:
        return None
    if Path(origin).is_dir():
        beside = Path(origin) / _PREPROCESSOR
        return beside if beside.is_file() else None
    import huggingface_hub

    try:
        file = huggingface_hub.try_to_load_from_cache(
            origin, _PREPROCESSOR, revision=getattr(config, "_commit_hash", None)
        )
    except ValueError:  # not a hub name
        return None
    return Path(file) if isinstance(file, str) else None
