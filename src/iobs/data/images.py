"""Pictures and their labels as tensors."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iobs.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# The statistics of ImageNet, which most public vision networks were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def read_arrays(file: Path) -> tuple[Tensor, Tensor | None]:
    """Images (N, C, H, W) float32 and labels of an .npz file; labels are None where it has none.

    The arrays are `images` (N, H, W, C) or (N, H, W) or (N, C, H, W), uint8 or floating, and `labels` (N, ...). Bytes
    are scaled to [0, 1] and, where there are three channels, normalised with the statistics of ImageNet. Floating
    images are taken as they are. Labels are classes, int64, where all of them are whole numbers, else real, float32.

    Raises:
        DataError: the file is damaged, has no array `images`, or its labels are not numbers.
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
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and not _channels_first(*images.shape[1:]):
        images = images.transpose(0, 3, 1, 2)
    return _as_tensor(images), labels


Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Pictures:
    """Pictures in files, read and transformed when they are asked for: a set of them need not fit into memory.

    Args:
        folder: where they are.
        names: their paths below it.
        transform: makes a (3, H, W) float32 tensor of an RGB picture.
    """

    folder: Path
    names: list[str]
    transform: Transform

    def __len__(self) -> int:
        """How many."""
        return len(self.names)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Some of them, (len(chosen), 3, H, W).

        Raises:
            DataError: one is damaged.
        """
        from PIL import Image

        tensors = []
        for number in chosen.tolist():
            try:
                with Image.open(self.folder / self.names[number]) as opened:
                    tensors.append(self.transform(_in_colour(opened)))
            except OSError as error:
                raise _damaged(self.folder, self.names[number]) from error
        return torch.stack(tensors)


def read_pictures(source: Path, transform: Transform | None = None) -> tuple[Tensor | Pictures, Tensor | None]:
    """Pictures of a folder or zip file as (N, 3, H, W) float32, and their labels (N,) int64.

    Pictures in several folders are labelled by the folder: the number that its name is, or its place in alphabetical
    order. In a single folder the label is the number that a picture's name starts with (`207.jpg`, `207_1.png`); names
    without numbers have none, and labels are None.

    Args:
        source: a folder or zip file.
        transform: a network's own; a folder's pictures may then be of any size and are read one batch at a time.
            Without it they are all of one size, and normalised as most networks want it.

    Raises:
        DataError: Pillow is missing, there are no pictures, they differ in size, or some lie beside class folders.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Reading pictures needs Pillow: pip install 'iobs[vision]'.") from error
    if source.is_dir():
        names = _named_pictures(source, (path.relative_to(source).as_posix() for path in source.rglob("*")))
        if transform is not None:
            return Pictures(source, names, transform), _labels(names)
        return _pictures(Image, source, names, ((source / name).read_bytes() for name in names))
    try:
        with zipfile.ZipFile(source) as archive:
            names = _named_pictures(source, archive.namelist())
            return _pictures(Image, source, names, (archive.read(name) for name in names))
    except zipfile.BadZipFile as error:
        raise DataError(f"{source} is not a zip file, or is damaged.") from error


def _named_pictures(source: Path, names: Iterable[str]) -> list[str]:
    """The names of pictures, in order, without those that programs hide for themselves.

    Raises:
        DataError: there are none, or some lie beside the folders of the others, which would make a class of them.
    """
    found = sorted(name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES and not _hidden(name))
    if not found:
        raise DataError(
            f"{source} has no pictures ({', '.join(IMAGE_SUFFIXES)}). Text files are named one by one: repeat --data."
        )
    folders = {Path(name).parent for name in found}
    outer = {parent for folder in folders for parent in folder.parents} & folders
    if outer:
        stray = next(name for name in found if Path(name).parent in outer)
        raise DataError(
            f"{source}: {stray} lies beside folders of pictures, whose names are classes; move it into one, or away."
        )
    return found


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in Path(name).parts)


def _pictures(image: Any, source: Path, names: list[str], contents: Iterable[bytes]) -> tuple[Tensor, Tensor | None]:
    arrays = []
    for name, content in zip(names, contents, strict=True):
        try:
            with image.open(io.BytesIO(content)) as opened:
                arrays.append(np.asarray(_in_colour(opened)))
        except OSError as error:
            raise _damaged(source, name) from error
        if arrays[-1].shape != arrays[0].shape:
            raise DataError(f"{source}: {names[0]} and {name} differ in size; resize all pictures to one size.")
    return _as_tensor(np.stack(arrays).transpose(0, 3, 1, 2)), _labels(names)


def _damaged(source: Path, name: str) -> DataError:
    return DataError(f"{source}: {name} is not a picture, or is damaged.")


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


def _as_tensor(images: np.ndarray) -> Tensor:
    """Pictures (N, C, H, W) as float32; bytes scaled to [0, 1], and normalised where there are three channels."""
    tensor = torch.from_numpy(images)
    if images.dtype != np.uint8:
        return tensor.float().contiguous()
    tensor = tensor.float().div(255)
    if tensor.shape[1] == 3:
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        tensor = (tensor - mean) / std
    return tensor.contiguous()


def _channels_first(second: int, third: int, last: int) -> bool:
    """Whether pictures of these dimensions are (C, H, W): one or three channels, square pictures, or fewer than W."""
    return second in (1, 3) or third == last or (second != third and second <= last)


def _labels(names: list[str]) -> Tensor | None:
    folders = [Path(name).parent.name for name in names]
    if len(set(folders)) < 2:
        stems = [Path(name).stem.split("_")[0].split(".")[0] for name in names]
        numbered = all(stem.isdigit() for stem in stems) and len(set(stems)) > 1
        return torch.tensor([int(stem) for stem in stems]) if numbered else None
    if all(folder.isdigit() for folder in folders):
        return torch.tensor([int(folder) for folder in folders])
    order = {folder: index for index, folder in enumerate(sorted(set(folders)))}
    return torch.tensor([order[folder] for folder in folders])
