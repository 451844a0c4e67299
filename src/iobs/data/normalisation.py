"""Image transforms and normalisation that a network states for its inputs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from iobs.data.images import IMAGENET, Statistics, Transform
from iobs.errors import DataError
from iobs.models import LoadedModel

_PREPROCESSOR = "preprocessor_config.json"  # written by Hugging Face for image models


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
        file = Path(origin) / _PREPROCESSOR
        return file if file.is_file() else None
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(
            origin, _PREPROCESSOR, revision=getattr(config, "_commit_hash", None)
        )
    except ValueError:  # not a hub name
        return None
    return Path(found) if isinstance(found, str) else None
