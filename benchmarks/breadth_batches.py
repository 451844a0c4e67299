"""Batches for tiny random networks: text, images, sounds, and text with the tokens of an image."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor] | Tensor

VOCABULARY, TEXT, IMAGE = 128, 16, 32
# Ids of the tokens that stand for images and sounds; texts have none of them.
MARKS = {"image_token": 126, "video_token": 125, "vision_start_token": 124, "vision_end_token": 123, "audio_token": 122}
MOST_TOKENS = 1024  # of an image: the forward pass on more takes minutes
# Batches that are tried for each kind of network, the most natural first.
KINDS: dict[str, tuple[str, ...]] = {
    "CausalLM": ("text",),
    "Seq2SeqLM": ("pairs",),
    "MaskedLM": ("text",),
    "ImageTextToText": (
        *("tokens and patches", "tokens and image", "tokens and sized image", "tokens and images"),
        *("tokens and tiles", "tokens and aspects", "tokens, image and text to write"),
        *("flattened patches", "text and image", "image and text to write", "text"),
    ),
    "ImageClassification": ("image", "rows of patches", "text"),
    "CTC": ("sound", "frames"),
    "SpeechSeq2Seq": ("spectrogram", "frames and text", "sound and text"),
    "ObjectDetection": ("image",),
    "SemanticSegmentation": ("image",),
}
_COUNTS = re.compile(r"features:? (\d+)")  # in the message of a network about tokens of images


@torch.no_grad()
def run(model: nn.Module, batch: Batch) -> Any:
    """The output of a network."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def fitting(kind: str, model: nn.Module, config: Any) -> tuple[list[Batch], list[str]]:
    """The first batches that a network takes, or none with the errors."""
    errors = []
    for make in _makers(kind, model, config):
        counts = [4]
        for count in counts:
            try:
                batches = [make(count) for _ in range(3)]
                for one in batches:
                    run(model, one)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error)[:90]}")
                told = _COUNTS.search(str(error))
                if told is not None and count == 4:  # features of four samples; some networks tell their entries
                    asked = (int(told[1]) // 4, int(told[1]) // 4 // 64)
                    counts += [one for one in asked if 0 < one <= MOST_TOKENS and one not in counts]
            else:
                return batches, errors
    return [], errors


def _makers(kind: str, model: nn.Module, config: Any) -> Iterator[Callable[[int], Batch]]:
    """Functions that draw a batch; their argument is the number of tokens of each image."""
    draw = torch.Generator().manual_seed(1)
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None) or IMAGE
    side = side[0] if isinstance(side, (list, tuple)) else side
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else 8
    taken = inspect.signature(model.forward).parameters
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None) or 0

    sizes = torch.tensor([[side, side]] * 4)

    def tokens(count: int = TEXT, samples: int = 4) -> Tensor:
        return torch.randint(3, VOCABULARY - 12, (samples, count), generator=draw)

    def shown(count: int) -> dict[str, Tensor]:
        begin, end = (getattr(config, f"vision_{name}_token_id", None) or 5 for name in ("start", "end"))
        image = torch.tensor([begin, *[token] * count, end]).expand(4, -1)
        words = torch.cat([tokens(3), image, tokens(6)], 1)
        marked = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
        extra = {name: (words == token).long() for name in marked if name in taken}
        extra |= {"qformer_input_ids": tokens()} if "qformer_input_ids" in taken else {}
        seen = torch.ones(*words.shape, 1, dtype=torch.long)  # the one image of each text
        extra |= {"image_attention_mask": seen} if "image_attention_mask" in taken else {}
        return {"input_ids": words, "attention_mask": torch.ones_like(words), **extra}

    def patches(count: int) -> Batch:
        depth = getattr(vision, "temporal_patch_size", 1) * getattr(vision, "in_channels", 3) * patch * patch
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 4)}
        return {**shown(count), "pixel_values": torch.randn(4 * 16, depth, generator=draw), **grid}

    def pixels(*shape: int) -> Tensor:
        return torch.randn(4, *shape, 3, side, side, generator=draw)

    makers: dict[str, Callable[[int], Batch]] = {
        "text": lambda _: {"input_ids": tokens()},
        "pairs": lambda _: {"input_ids": tokens(), "decoder_input_ids": tokens(8)},
        "image": lambda _: {"pixel_values": torch.randn(2, 3, side, side, generator=draw)},
        "tokens and patches": patches,
        "tokens and image": lambda count: {**shown(count), "pixel_values": pixels()},
        "tokens and images": lambda count: {**shown(count), "pixel_values": pixels(1)},
        "tokens and sized image": lambda count: {**shown(count), "pixel_values": pixels(), "image_sizes": sizes},
        "tokens and tiles": lambda count: {**shown(count), "pixel_values": pixels(2), "image_sizes": sizes},
        "tokens and aspects": lambda count: {
            **shown(count),
            "pixel_values": pixels(1, 1),
            "aspect_ratio_ids": torch.ones(4, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(4, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(4, 11 + count, 1, 1, dtype=torch.long),
        },
        "text and image": lambda _: {"input_ids": tokens(), "pixel_values": pixels()},
        "tokens, image and text to write": lambda count: {
            **shown(count),
            "pixel_values": pixels(),
            "decoder_input_ids": tokens(8),
        },
        "image and text to write": lambda _: {"pixel_values": pixels(), "decoder_input_ids": tokens(8)},
        "flattened patches": lambda _: {
            "flattened_patches": torch.cat(  # the row and the column of each, and its entries
                [
                    torch.stack([torch.arange(16) // 4 + 1, torch.arange(16) % 4 + 1], 1).expand(4, 16, 2).float(),
                    torch.randn(4, 16, getattr(vision, "patch_embed_hidden_size", 64), generator=draw),
                ],
                2,
            ),
            "decoder_input_ids": tokens(8),
        },
        "rows of patches": lambda _: {
            "pixel_values": torch.randn(2, 16, 3 * patch * patch, generator=draw),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * 2),
        },
        "frames and text": lambda _: {
            "input_features": torch.randn(2, 64, 16, generator=draw),
            "decoder_input_ids": tokens(8, 2),
        },
        "sound and text": lambda _: {
            "input_values": torch.randn(2, 4000, generator=draw),
            "decoder_input_ids": tokens(8, 2),
        },
        "frames": lambda _: {"input_features": torch.randn(2, 128, 16, generator=draw)},
        "sound": lambda _: {"input_values": torch.randn(2, 4000, generator=draw)},
        "spectrogram": lambda _: {
            "input_features": torch.randn(2, 16, 2 * getattr(config, "max_source_positions", 64), generator=draw),
            "decoder_input_ids": tokens(8, 2),
        },
    }
    for name in KINDS[kind]:
        needed = {"tokens and patches": "image_grid_thw", "tokens and sized image": "image_sizes"}
        needed |= {"tokens and aspects": "aspect_ratio_ids", "rows of patches": "spatial_shapes"}
        needed |= {"flattened patches": "flattened_patches"}
        needed |= dict.fromkeys(("tokens, image and text to write", "image and text to write"), "decoder_input_ids")
        if name not in needed or needed[name] in taken:
            yield makers[name]
