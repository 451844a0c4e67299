"""Fused forward of a Llama-like model: in `generate`, one call of compiled code computes each new token.

A forward of one token with the keys and values of those before goes through `Decoder.step`. Every other forward is that
of the model: prompts, batches, masks, hooks, hidden states.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iobs.inference.decodable import LONGEST, Cache, CausalModel, changed, heard_by_all, most_tokens, undecodable
from iobs.inference.modules import StoredLinear

if TYPE_CHECKING:
    from iobs.inference.decoder import Decoder

Reals = NDArray[np.float32]

_ROOM = 32  # least number of positions of the first memory for keys and values; the system clears every page of it
_PLAIN_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")  # classes that hold keys and values unrounded
_PLAIN = ("use_cache", "logits_to_keep", "return_dict")  # arguments that may be given beside those that are checked
_KNOWN = {*_PLAIN, "input_ids", "past_key_values", "attention_mask", "position_ids"}


@dataclass
class _Session:
    """One text: the decoder, and the keys and values of its cache.

    Attributes:
        cache: the cache of transformers, by a weak reference.
        decoder: reads the weights that the model had when the text began.
        inside: the modules that the model had then.
        keys: (layers, key heads, positions, head size).
        values: the same shape.
        count: positions that were written.
    """

    cache: weakref.ref[Cache]
    decoder: Decoder
    inside: Sequence[nn.Module]
    keys: Reals
    values: Reals
    count: int

    def holds(self, cache: Cache, position: int) -> bool:
        """True if the cache still has the first `position` keys and values of this session, and room is left."""
        current = self.cache()
        if current is None or current is not cache or position == self.decoder.longest:
            return False
        return all(
            cached.data_ptr() == memory.ctypes.data + number * memory.strides[0] and cached.shape[-2] == position
            for number, layer in enumerate(current.layers)
            for cached, memory in ((layer.keys, self.keys), (layer.values, self.values))
        )

    def step(self, token: int, position: int) -> Reals:
        """Logits after one more token."""
        if position < self.count:  # the cache was cropped: others may hold the keys behind
            self._move(self.keys.shape[2])
        elif position >= self.keys.shape[2]:
            self._move(min(2 * self.keys.shape[2], self.decoder.longest))
        self.count = position + 1
        return self.decoder.step(token, position, self.keys, self.values)

    def _move(self, room: int) -> None:
        """Take new memory for a number of positions."""
        for name in ("keys", "values"):
            before: Reals = getattr(self, name)
            after = np.zeros((*before.shape[:2], room, before.shape[3]), np.float32)
            after[:, :, : before.shape[2]] = before
            setattr(self, name, after)

    def write(self, cache: Cache) -> None:
        """Give the cache the keys and values, as views."""
        keys, values = torch.from_numpy(self.keys), torch.from_numpy(self.values)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = keys[number, None, :, : self.count], values[number, None, :, : self.count]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = self.count


class FusedForward:
    """The forward of a model after `fuse`.

    Args:
        model: a model that `can_fuse`.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.__signature__ = inspect.signature(model.forward)  # `generate` reads the names of the arguments
        self._session: _Session | None = None
        self._result: Callable[..., object] | None = None  # the class of the results of the model's own forwards

    def __getstate__(self) -> dict[str, object]:
        # The memory of a text belongs to this copy.
        return {**self.__dict__, "_session": None}

    def __call__(self, *args: object, **keywords: object) -> object:
        """One forward, with the arguments and the result of the model's own."""
        if torch.compiler.is_compiling():
            return type(self.model).forward(self.model, *args, **keywords)
        by_position = dict(zip(self.__signature__.parameters, args))  # noqa: B905 - too many are the model's error
        named = by_position | keywords
        ids, cache = named.get("input_ids"), named.get("past_key_values")
        position = None if self._result is None else self._position(named)
        session = None if position is None else self._session_at(cache, position)
        if position is None or session is None:
            self._leave(cache)
            result = type(self.model).forward(self.model, *args, **keywords)
            self._result = type(result) if hasattr(result, "past_key_values") else self._result
            return result
        logits = session.step(int(cast(Tensor, ids)), position)
        session.write(cache)
        assert self._result is not None
        dtype = self.model.model.norm.weight.dtype
        return self._result(logits=torch.from_numpy(logits.copy())[None, None].to(dtype), past_key_values=cache)

    def _position(self, arguments: dict[str, object]) -> int | None:
        """The position of the new token; None if the model itself must compute this forward."""
        ids = arguments.get("input_ids")
        if torch.is_grad_enabled() or not isinstance(ids, Tensor) or ids.shape != (1, 1):
            return None
        position = _cached(arguments.get("past_key_values"))
        if not 0 < position < most_tokens(self.model) or any(arguments.get(name) is False for name in _PLAIN):
            return None
        mask, places = arguments.get("attention_mask"), arguments.get("position_ids")
        if not (mask is None or (isinstance(mask, Tensor) and mask.shape == (1, position + 1) and bool(mask.all()))):
            return None
        if not (places is None or (isinstance(places, Tensor) and places.numel() == 1 and int(places) == position)):
            return None
        if any(value is not None and value is not False for name, value in arguments.items() if name not in _KNOWN):
            return None
        config = self.model.config
        return None if config.output_attentions or config.output_hidden_states else position

    def _session_at(self, cache: Cache, position: int) -> _Session | None:
        """The session of a cache, which may begin here; None if the model itself must compute this forward."""
        if heard_by_all():
            return None
        session = self._session
        if session is not None and session.holds(cache, position):
            return None if any(changed(module) or module.training for module in session.inside) else session
        if not _computable(self.model) or any(module.training for module in self.model.modules()):
            return None
        self._session = self._begin(cache, position)
        return self._session

    def _begin(self, cache: Cache, position: int) -> _Session:
        """Read the weights of the model, and the keys and values of a cache."""
        decoder = self._decoder(position)
        first = cache.layers[0].keys
        room = min(max(_ROOM, 2 * position), decoder.longest)
        shape = (len(cache.layers), first.shape[1], room, first.shape[3])
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for number, layer in enumerate(cache.layers):
            keys[number, :, :position] = layer.keys[0].float().numpy()
            values[number, :, :position] = layer.values[0].float().numpy()
        inside = [module for module in self.model.modules() if module is not self.model]
        return _Session(weakref.ref(cache, self._forget), decoder, inside, keys, values, position)

    def _decoder(self, position: int) -> Decoder:
        """The compiled step of a text that has `position` tokens now."""
        from iobs.inference.decoder import Decoder  # imports numba, which `import iobs.inference` need not

        longest = min(max(LONGEST, 2 * position), most_tokens(self.model))
        return Decoder(self.model, longest, compiled=False)  # each text would pay for a token more

    def own_bytes(self, position: int) -> int:
        """Bytes that a text of `position` tokens keeps beside the model, its keys and its values."""
        taken = position < most_tokens(self.model) and _computable(self.model)
        return self._decoder(position).own_bytes if taken else 0

    def _forget(self, cache: weakref.ref[Cache]) -> None:
        """Free the memory of a text whose cache is gone."""
        if self._session is not None and self._session.cache is cache:
            self._session = None

    def _leave(self, cache: Cache | None) -> None:
        """End the session, and give the model keys and values in its own dtype."""
        self._session = None
        for layer in _layers(cache):
            layer.keys, layer.values = (tensor.to(layer.dtype) for tensor in (layer.keys, layer.values))


def can_fuse(model: nn.Module) -> bool:
    """True if a model is Llama-like, and that all its matrices are stored for one thread."""
    return "forward" not in vars(model) and _computable(model)


def _computable(model: CausalModel) -> bool:
    """True if the compiled step computes what the modules do: the same matrices, by as many threads."""
    if undecodable(model) is not None:
        return False
    parts = (*model.model.modules(), model.lm_head)
    linear = [module for module in parts if isinstance(module, (nn.Linear, StoredLinear))]
    return all(isinstance(module, StoredLinear) and module.threads == 1 for module in linear)


def fuse(model: nn.Module) -> None:
    """Let a model that `can_fuse` compute each new token of `generate` by one call of compiled code, in place."""
    model.forward = FusedForward(model)


def _layers(cache: object) -> Sequence[Cache]:
    """The layers of a cache that holds keys and values unrounded; none of another kind of cache."""
    layers: Sequence[Cache] = getattr(cache, "layers", ())
    plain = all(type(layer).__name__ in _PLAIN_CACHES and layer.is_initialized for layer in layers)
    return layers if plain else ()


def _cached(cache: object) -> int:
    """Number of tokens in a cache of one text; 0 for another kind of cache, or if the next token is out of a window."""
    lengths = {_held(layer) for layer in _layers(cache)}
    return lengths.pop() if len(lengths) == 1 else 0


def _held(layer: Cache) -> int:
    """Number of tokens in a layer of a cache; 0 if it has forgotten some, or would forget one with the next token."""
    if len(layer.keys) != 1:
        return 0
    length = int(layer.keys.shape[-2])
    slides = hasattr(layer, "cumulative_length")
    whole = not slides or (layer.cumulative_length == length and length + 1 < layer.sliding_window)
    return length if whole else 0
