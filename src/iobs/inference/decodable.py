"""Models that the compiled step computes: Llama-like ones of transformers, whose layers have equal widths."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import module as of_torch

from iobs.inference import cpu
from iobs.inference.formats import FormatName
from iobs.inference.modules import StoredLinear

# A Llama-like model of transformers and its caches, for which transformers has no useful types. The code reads
# `model.layers`, `embed_tokens`, `norm`, `rotary_emb` and `lm_head`, and of a cache the keys and values of every layer.
CausalModel: TypeAlias = Any
Cache: TypeAlias = Any

# Numbers of the formats that the compiled step multiplies, see `decode_step._multiply`.
CODES: dict[FormatName, int] = {
    "bf16": 0,
    "bitmask-bf16": 1,
    "index-bf16": 2,
    "int8": 3,
    "bitmask-int8": 4,
    "bitmask-int4": 5,
}
LONGEST = 2048  # tokens of a text, unless more are asked for: bounds the memory of keys and values
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_KNOWN_CODE = ("transformers.", "torch.nn.", "iobs.")  # modules inside that compute as the compiled step does


def undecodable(model: nn.Module) -> str | None:
    """The reason why `Decoder` cannot run a model, or None."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if cpu.level() == "none":
        return "its compiled step needs an x86 CPU with AVX-512 (VBMI2 and VNNI) or AVX2"
    if kind not in _TYPES:
        return f"its compiled step knows {', '.join(_TYPES)}, not {kind or type(model).__name__}"
    if not type(model).__module__.startswith(f"transformers.models.{kind}."):
        return f"its class {type(model).__name__} is not that of transformers, and may compute something else"
    for name, module in model.named_modules():
        if name and (changed(module) or not type(module).__module__.startswith(_KNOWN_CODE)):
            return f"{name} has a hook, a forward or a class of its own"
        if isinstance(module, StoredLinear) and module.format not in CODES:
            return f"{name} is stored as {module.format}, which its compiled step does not multiply"
    if heard_by_all():
        return "hooks on all modules are registered, which its compiled step would not call"
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not hasattr(model, "lm_head") or not layers:
        return "it has no layers, or no head for text"
    return _unknown_setting(model) or _uneven(model)


def changed(module: nn.Module) -> bool:
    """True if a module computes more than its class says: it has a hook or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def heard_by_all() -> bool:
    """True if there are hooks on the forward of all modules: `torch.nn.modules.module.register_module_forward_hook`."""
    return bool(of_torch._global_forward_hooks or of_torch._global_forward_pre_hooks)


def most_tokens(model: CausalModel) -> int:
    """Number of tokens that a Llama-like model attends to at most."""
    config = model.config
    longest: int = config.max_position_embeddings
    return min(longest, window_of(model) or longest)


def window_of(model: CausalModel) -> int | None:
    """Tokens in the sliding window of a Llama-like model; None: it has none."""
    config = model.config
    slides = getattr(config, "use_sliding_window", True)
    return (getattr(config, "sliding_window", None) or None) if slides else None


def _unknown_setting(model: CausalModel) -> str | None:
    """The setting of a model of a known type that the compiled step does not know, or None."""
    config = model.config
    if config.hidden_act != "silu":
        return f"its compiled step knows the activation silu, not {config.hidden_act}"
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding ({scaling['rope_type']}) changes with the length of the text"
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding turns a part of each head only"
    return None


def _uneven(model: CausalModel) -> str | None:
    """The place where widths differ between layers, or from the configuration; None: nowhere.

    The compiled step has one vector for the outputs of each kind of matrix, and checks no bounds.
    """
    config, body = model.config, model.model
    hidden, first = len(body.norm.weight), body.layers[0]
    size, width = first.self_attn.head_dim, _shape(first.mlp.gate_proj)[0]
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    attention: dict[str, tuple[int, ...]] = {"q_proj": (queries, hidden), "o_proj": (hidden, queries)}
    attention |= {"k_proj": (keys, hidden), "v_proj": (keys, hidden), "q_norm": (size,), "k_norm": (size,)}
    mlp = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    for number, layer in enumerate(body.layers):
        for part, expected in ((layer.self_attn, attention), (layer.mlp, mlp)):
            shapes = {name: _shape(getattr(part, name)) for name in expected if hasattr(part, name)}
            for name, shape in shapes.items():
                if shape != expected[name]:
                    return f"its layers, or its configuration, differ in width: {name} of layer {number}"
        if layer.self_attn.head_dim != size:
            return f"its layers differ in width: heads of layer {number}"
    same = _shape(model.lm_head) == (config.vocab_size, hidden)
    return None if same else "its head for text differs from its configuration in width"


def _shape(part: nn.Module) -> tuple[int, ...]:
    """The shape of a linear layer or a norm; of no entries for another module."""
    if isinstance(part, StoredLinear):
        return part.out_features, part.in_features
    weight = part.weight
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()
