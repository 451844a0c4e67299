"""Samples with the outputs of the dense and of the pruned model: continued text, or images with predicted labels."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iobs.pruning.callbacks import Callback
from iobs.pruning.descent.augment import continued, takes_cache
from iobs.pruning.report import Report, Sample
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import REFUSALS, Batch
from iobs.pruning.samples.outputs import logits, targets

_IMAGES, _TEXTS = 8, 2  # samples that are shown
_PROMPT, _MOST_TOKENS, _FEWEST_TOKENS = 24, 40, 4
_SECONDS = 10.0  # time for the continuations of one model; slow models continue for fewer tokens
_SIDE = 96  # pixels of an image's longer side


class BeforeAfter(Callback):
    """Adds samples with the outputs of both models to the report of a run.

    Token ids are continued by the most likely tokens, if there is a tokenizer. A prompt begins where a text begins,
    with the tokenizer's first token: many dense models continue the middle of a text badly. Images get the predicted
    classes. Other data, and models that are not entirely in memory, give no samples.

    Args:
        batches: the first batch is used.
        tokenizer: decodes token ids; None: no texts.
    """

    def __init__(self, batches: Sequence[Batch], tokenizer: Any = None) -> None:
        self._batch = batches[0] if batches else None
        self._tokenizer = tokenizer
        self._model: nn.Module | None = None
        self._length = 0  # tokens of a continuation
        self._dense: list[str] = []

    def on_start(self, model: nn.Module, layers: Sequence[str], rounds: int) -> None:
        """Store the outputs of the dense model."""
        self._model = None if any(parameter.is_meta for parameter in model.parameters()) else model
        self._length = 0  # of another run, whose models may be slower
        self._dense = self._outputs()

    def on_end(self, report: Report) -> None:
        """Add the samples to the report."""
        for number, (dense, pruned) in enumerate(zip(self._dense, self._outputs(), strict=False)):
            shown, label = self._shown(number)
            report.samples.append(Sample(shown, dense, pruned, label))

    @property
    def _tokens(self) -> Tensor | None:
        """The token ids, if they can be shown."""
        inputs = None if self._batch is None or self._tokenizer is None else data_batches.inputs(self._batch)
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        return tokens if isinstance(tokens, Tensor) and tokens.ndim == 2 else None

    @property
    def _images(self) -> Tensor | None:
        inputs = None if self._batch is None else data_batches.inputs(self._batch)
        pixels = inputs.get("pixel_values") if isinstance(inputs, Mapping) else inputs
        is_image = isinstance(pixels, Tensor) and pixels.ndim == 4 and pixels.shape[1] in (1, 3)
        return pixels if is_image and isinstance(pixels, Tensor) else None

    @torch.no_grad()
    def _outputs(self) -> list[str]:
        """The outputs of the present model for the samples."""
        if self._model is None or self._batch is None:
            return []
        try:
            if self._tokens is not None:
                return [self._decoded(self._continued(self._model, prompt)) for prompt in self._prompts()]
            if self._images is not None:
                rows = torch.arange(min(_IMAGES, len(self._images)))
                values = logits(data_batches.forward(self._model, data_batches.take(self._batch, rows)))
                if values.ndim == 2 and values.shape[1] > 1:
                    return [self._name(int(best)) for best in values.argmax(1)]
        except REFUSALS:  # a model of another kind; a sample is no reason to stop a run
            pass
        return []

    def _prompts(self) -> list[Tensor]:
        """The beginnings of texts, (tokens,) each."""
        assert self._tokens is not None
        first, prompts = getattr(self._tokenizer, "bos_token_id", None), []
        for row in self._tokens:
            starts = (row == first).nonzero().flatten().tolist() if first is not None else []
            whole = [start for start in starts if start + _PROMPT <= len(row)]
            prompts += [row[start : start + _PROMPT] for start in whole[:_TEXTS]]
        if first is not None and not prompts:  # windows from the middle of long texts
            return [torch.cat([row.new_tensor([first]), row[: _PROMPT - 1]]) for row in self._tokens[:_TEXTS]]
        return prompts[:_TEXTS] or [row[:_PROMPT] for row in self._tokens[:_TEXTS]]

    def _continued(self, model: nn.Module, prompt: Tensor) -> Tensor:
        """The most likely next tokens after a prompt, (tokens,)."""
        tokens = prompt[None].to(next(model.parameters()).device)
        if not self._length:  # both models continue for the same number of tokens
            began = time.monotonic()
            _most_likely(model, tokens, _FEWEST_TOKENS)
            affordable = int(_FEWEST_TOKENS * _SECONDS / _TEXTS / max(1e-6, time.monotonic() - began))
            self._length = min(_MOST_TOKENS, max(_FEWEST_TOKENS, affordable))
        return _most_likely(model, tokens, self._length)[0, len(prompt) :]

    def _decoded(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def _name(self, number: int) -> str:
        """The name of a class, or its number."""
        names = getattr(getattr(self._model, "config", None), "id2label", None) or {}
        return str(names.get(number, number))

    def _shown(self, number: int) -> tuple[str, str | None]:
        """The input of a sample as it is shown, and its label."""
        assert self._batch is not None
        if self._tokens is not None:
            return self._decoded(self._prompts()[number]), None
        assert self._images is not None
        labels = targets(self._batch)
        if labels is None or labels.ndim != 1 or labels.is_floating_point():
            return as_png(self._images[number]), None
        return as_png(self._images[number]), self._name(int(labels[number]))


def _most_likely(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Tokens (1, positions), and the `count` most likely ones after them."""
    length = tokens.shape[1] + count
    cached = continued(model, tokens, length) if takes_cache(model) else None
    if cached is not None:
        return cached
    while tokens.shape[1] < length:
        best = logits(model(input_ids=tokens))[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], 1)
    return tokens


def as_png(image: Tensor) -> str:
    """An image (channels, height, width) as the address of a PNG; its values are scaled to the range of colours."""
    from PIL import Image

    values = image.detach().float().cpu()
    low, high = values.min(), values.max()
    pixels = ((values - low) / (high - low).clamp_min(1e-12) * 255).byte().permute(1, 2, 0).numpy()
    shown = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    shown.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
