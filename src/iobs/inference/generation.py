"""Greedy generation of text, token by token, by the fastest way that a model allows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from iobs.inference.decodable import most_tokens, undecodable
from iobs.inference.decoder import Decoder, require_prompt
from iobs.inference.formats import FormatName


def generated(
    model: nn.Module, prompt: Tensor, tokens: int, stop: tuple[int, ...] = (), form: FormatName | None = None
) -> Iterator[int]:
    """Yield the most likely next tokens of a causal model of transformers.

    Args:
        model: the model, dense or after `iobs.accelerate`.
        prompt: token ids, (1, length).
        tokens: greatest number of new tokens.
        stop: ids that end the text; they are yielded too.
        form: format of the layers that stayed dense. Each token is one compiled call, if the model allows it (see
            `decodable.undecodable`) and attends to the whole text. None: the model computes each token itself.

    Raises:
        ProblemError: the prompt is empty, or of another shape.
    """
    require_prompt(prompt)
    length = prompt.shape[1] + tokens
    if form is not None and undecodable(model) is None and length <= most_tokens(model):
        decoder = Decoder(model, length, form)
        yield from decoder.generate(prompt, tokens, stop)
        return
    yield from _by_modules(model, prompt, tokens, stop)


def _by_modules(model: nn.Module, prompt: Tensor, tokens: int, stop: tuple[int, ...]) -> Iterator[int]:
    """Tokens computed by the modules of the model."""
    ids, past = prompt, None
    for _ in range(tokens):
        with torch.no_grad():
            output = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        token, past = int(output.logits[0, -1].argmax()), output.past_key_values
        yield token
        if token in stop:
            return
        ids = torch.tensor([[token]], device=prompt.device)
