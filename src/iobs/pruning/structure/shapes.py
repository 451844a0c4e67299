"""Shapes that the class of a model has for a configuration, and those that a removal gives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import nn

from iobs.errors import first_line
from iobs.pruning.structure.config_fields import Configuration, Field, config_inside
from iobs.pruning.structure.units import Site

Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of stored parameters and buffers, by full name


def is_configured(model: nn.Module) -> bool:
    """Check that a model is built from a configuration, as those of transformers are."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(getattr(model, "config", None), "to_dict")


def shapes_of(model: nn.Module) -> Shapes:
    """Shapes of the stored parameters and buffers of a model."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def built(model: nn.Module, config: Configuration) -> Shapes | str:
    """The shapes of the model's class for a configuration, or the reason why it cannot be built."""
    try:
        # As saving and loading do: some values are checked or derived anew. Infinite values stay numbers here.
        loaded = type(config).from_dict(json.loads(json.dumps(config.to_diff_dict())))
        with torch.device("meta"), torch.no_grad():
            return shapes_of(type(model)(loaded))
    except Exception as error:  # every class has its own checks
        return first_line(error)


def set_fields(config: Configuration, fields: Iterable[Field], units: int) -> dict[str, object]:
    """Set the fields for a number of units, and return the values by full name of the field."""
    values = {}
    for one in fields:
        place = config_inside(config, one.config)
        new: object = one.value(units)
        if one.place is not None:
            new = [new if index == one.place else old for index, old in enumerate(getattr(place, one.name))]
        setattr(place, one.name, new)
        values[f"{one.config}.{one.name}" if one.config else one.name] = new
    return values


def narrowed(before: Shapes, sites: Iterable[Site], units: int) -> Shapes:
    """The shapes after the removal of all but `units` units of every site."""
    shapes = {name: list(shape) for name, shape in before.items()}
    for site in sites:
        for one in site.slices:
            if one.key in shapes:  # otherwise a buffer that is not stored
                shapes[one.key][one.axis] -= len(one.index[0]) * (site.count - units)
    return {name: tuple(shape) for name, shape in shapes.items()}
