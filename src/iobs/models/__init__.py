"""Load a model from any source that MODEL can name on the command line: `load` returns a `LoadedModel`."""

from __future__ import annotations

from pathlib import Path

import torch

from iobs.core.files import expanded
from iobs.core.specs import CONFIG_NAME, is_function_spec, require_model
from iobs.models import factory
from iobs.models.loaded import LoadedModel as LoadedModel
from iobs.models.loaded import Tokenizer as Tokenizer
from iobs.models.loaded import parameter_count as parameter_count
from iobs.models.loaded import size_in_bytes as size_in_bytes
from iobs.models.output import output_directory as output_directory
from iobs.models.sixteen_bits import widen
from iobs.models.vision_shim import ensure_torchvision as ensure_torchvision

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded"


def load(
    spec: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    moved: bool = True,
) -> LoadedModel:
    """Load a model by its name.

    Args:
        spec: a directory, a Hugging Face name, `timm:NAME`, `FILE.py:function`, or None for the embedded model.
        dtype: dtype of the weights. None keeps the stored dtype, but 16-bit weights become float32 on a CPU that
            computes slowly in their dtype. This holds for float16 on every CPU, and for bfloat16 on a CPU without
            instructions for it.
        device: device of the weights.
        allow_pickle: also read pickled weights. Loading them can run arbitrary code.
        trust_remote_code: also run code that comes with the weights.
        moved: False leaves the weights in main memory, in the dtype that they have on the device.

    Raises:
        ModelError: the model does not exist, a file is damaged (the message names the file), or the model needs code of
            its own and `trust_remote_code` is False.
    """
    if spec is None:
        return load(EMBEDDED, dtype=dtype, device=device, moved=moved)
    text, place = str(spec), device if moved else "cpu"
    require_model(text)
    if text.startswith("timm:"):
        return _moved(factory.load_from_timm(text.removeprefix("timm:")), dtype, place)
    if is_function_spec(text):
        return _moved(factory.load_from_function(text), dtype, place)
    path = expanded(text)
    if path.is_dir() and (path / CONFIG_NAME).is_file():
        loaded = factory.load_directory(path, trust_remote_code)
        if dtype is None and torch.device(device).type == "cpu":
            widen(loaded.module)
        return _moved(loaded, dtype, place)
    from iobs.models.huggingface import load_pretrained

    return load_pretrained(
        path if path.is_dir() else text,
        dtype=dtype,
        device=device,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        moved=moved,
    )


def _moved(loaded: LoadedModel, dtype: torch.dtype | None, device: str) -> LoadedModel:
    loaded.module.to(device=device, dtype=dtype)
    return loaded
