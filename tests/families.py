"""Small random networks of every supported family of transformers and timm, built from the library's configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import iobs
from iobs.core.patterns import as_pattern
from iobs.models import ensure_torchvision
from iobs.models.streamed import StreamedStore
from iobs.pruning.recipe import Recipe
from iobs.pruning.workspace import Request

ensure_torchvision()

import transformers as hf  # noqa: E402 - torchvision must be importable first

LANGUAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 48}
DECODER = {
    **LANGUAGE,
    "intermediate_size": 24,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "experts_implementation": "eager"}
PICTURE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}


def _language(config: str, **values: object) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(getattr(hf, config)(**values))


def _pictures(config: str, architecture: str) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, architecture)(getattr(hf, config)(**PICTURE))


def _timm(name: str, **values: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, pretrained=False, num_classes=5, **values)

    return build


def _resnet() -> nn.Module:
    resnet = pytest.importorskip("timm.models.resnet")
    return resnet.ResNet(resnet.BasicBlock, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), num_classes=5, in_chans=4)


# name -> (builder, number of weight matrices pruned by default)
LANGUAGE_MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "opt": (
        _language("OPTConfig", **LANGUAGE, ffn_dim=24, max_position_embeddings=64, word_embed_proj_dim=16),
        2 * 6,
    ),
    "llama": (_language("LlamaConfig", **DECODER), 2 * 7),
    "mistral": (_language("MistralConfig", **DECODER), 2 * 7),
    "qwen2": (_language("Qwen2Config", **DECODER), 2 * 7),
    "qwen3": (_language("Qwen3Config", **DECODER, head_dim=8), 2 * 7),
    "gemma3": (_language("Gemma3TextConfig", **DECODER, head_dim=8), 2 * 7),
    "phi": (_language("PhiConfig", **DECODER), 2 * 6),
    "phi3": (_language("Phi3Config", **DECODER), 2 * 4),
    "mixtral": (_language("MixtralConfig", **EXPERTS, num_local_experts=4), 2 * (5 + 2 * 4)),
    "qwen3_moe": (
        _language("Qwen3MoeConfig", **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=12),
        2 * (5 + 2 * 4),
    ),
    "gpt2": (_language("GPT2Config", n_embd=16, n_layer=2, n_head=2, vocab_size=48, n_positions=64, **TOKENS), 2 * 4),
    "gpt_neox": (
        _language("GPTNeoXConfig", **LANGUAGE, intermediate_size=24, max_position_embeddings=64),
        2 * 4,
    ),
    "bloom": (_language("BloomConfig", hidden_size=16, n_layer=2, n_head=2, vocab_size=48), 2 * 4),
    "falcon": (_language("FalconConfig", **LANGUAGE), 2 * 4),
    "mamba": (
        _language(
            "MambaConfig", hidden_size=16, num_hidden_layers=2, vocab_size=48, state_size=4, expand=2, time_step_rank=4
        ),
        2 * 4,
    ),
    "mamba2": (
        _language(
            "Mamba2Config",
            hidden_size=16,
            num_hidden_layers=2,
            vocab_size=48,
            state_size=4,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=8,
        ),
        2 * 2,
    ),
}
PICTURE_MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (_pictures("ViTConfig", "ViTForImageClassification"), 2 * 6 + 2),
    "deit": (_pictures("DeiTConfig", "DeiTForImageClassification"), 2 * 6 + 2),
    "timm_vit": (
        _timm("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2),
        2 * 4 + 2,
    ),
    "timm_deit": (
        _timm("deit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2),
        2 * 4 + 2,
    ),
    "timm_convnext": (_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), 4 * 2 + 3 + 2),
    "timm_swin": (
        _timm("swin_tiny_patch4_window7_224", img_size=16, window_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2)),
        2 * 4 + 3,
    ),
    "timm_resnet": (_resnet, 1 + 4 * 2 + 4 + 1),
}


def language_batches(batch: int = 4, length: int = 16, count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 48, (batch, length), generator=generator)} for _ in range(count)]


def picture_batches(name: str, batch: int = 8, count: int = 3, dtype: torch.dtype = torch.float32) -> list:
    size = 32 if name in ("timm_convnext", "timm_resnet") else 16
    generator = torch.Generator().manual_seed(0)
    channels = 4 if name == "timm_resnet" else 3
    pixels = [torch.randn(batch, channels, size, size, generator=generator).to(dtype) for _ in range(count)]
    return [{"pixel_values": values} for values in pixels] if name in ("vit", "deit") else pixels


MODELS = LANGUAGE_MODELS | PICTURE_MODELS


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list]:
    """A seeded network of a family in evaluation mode, and its batches."""
    torch.manual_seed(0)
    model = MODELS[name][0]().to(dtype).eval()
    return model, language_batches() if name in LANGUAGE_MODELS else picture_batches(name, dtype=dtype)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Write a seeded language model of a family to a folder."""
    torch.manual_seed(0)
    model = LANGUAGE_MODELS[name][0]().to(dtype).eval()
    model.save_pretrained(folder)
    return model


def converted(file: Path, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Convert the tensors of a file whose name contains a word to the dtype of that word; the last word counts."""
    stored = load_file(file)
    tensors = dict(stored)
    for word, dtype in dtypes.items():
        tensors |= {name: tensor.to(dtype) for name, tensor in stored.items() if word in name}
    save_file(tensors, file, {"format": "pt"})
    return tensors


def prune_directory(
    source: Path,
    output: Path,
    data: list,
    pattern: iobs.Unstructured | iobs.NM | float | str = 0.5,
    arithmetic: torch.dtype | None = None,
    holdout: float = 0.0,
    **options,
) -> iobs.Report:
    """Prune a model directory into another one with one block in memory at a time, every layer to the same sparsity."""
    with StreamedStore.open(source, output, arithmetic=arithmetic) as store:
        return iobs.prune(store, data, pattern, iobs.Recipe(target="residual"), holdout=holdout, **options)


def request_of(store, recipe=None, holdout=0.0, pattern=0.5):
    """The request of a run that prunes all layers of a store to one pattern."""
    pattern = as_pattern(pattern)
    patterns = dict.fromkeys(store.select(None, None, False).layers, pattern)
    return Request(recipe or Recipe(), patterns, pattern, holdout, 0, None)
