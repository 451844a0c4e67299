"""Directories of the layout nemotron-nas, which transformers reads through code that comes with them."""

from __future__ import annotations

import json
from pathlib import Path


def know_nemotron_nas(path: Path) -> None:
    """Let transformers read a directory of this layout with our copy of its code; other ones change nothing."""
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf8")).get("model_type")
    except (OSError, ValueError, AttributeError):  # reading the configuration says what is wrong
        return
    if kind != "nemotron-nas":
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from iobs.models.modeling_decilm import DeciLMConfig, DeciLMForCausalLM

    AutoConfig.register("nemotron-nas", DeciLMConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM, exist_ok=True)
