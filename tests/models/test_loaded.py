"""Loaded models: size and window length."""

from torch import nn

from iobs import models
from iobs.models.loaded import LoadedModel


def test_loaded_model_knows_its_size():
    module = nn.Linear(3, 2)
    loaded = LoadedModel(module, None, "here", "other", None, lambda model, directory: None)
    assert (models.parameter_count(loaded.module), models.size_in_bytes(module)) == (8, 32)
    assert loaded.window_length(77) == 77
