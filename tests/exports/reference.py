"""A slow Llama, written from the definitions of the layouts: the reference of files whose layers differ in width."""

import json

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, silu

PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
PARTS |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def rotated(x, theta, pairs):
    """Heads (batch, heads, tokens, width) at their positions; columns turn with their neighbour, or with the half."""
    width = x.shape[-1]
    angle = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else x.split(width // 2, dim=-1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)


def llama(ids, layers, ends, *, width, theta, eps, pairs):
    """Logits. `layers` has weights and biases by "q", "q.bias" and so on; `ends` the embedding and the last norm."""
    x = ends["embedding"][ids]

    def through(name, value):
        return linear(value, layer[name], layer.get(f"{name}.bias"))

    for layer in layers:
        y = rms_norm(x, x.shape[-1:], layer["norm1"], eps)
        q, k, v = (through(name, y).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv")
        assert q.shape[1] == layer["heads"]
        assert k.shape[1] == layer["kv_heads"]
        group = q.shape[1] // k.shape[1]
        k, v = rotated(k, theta, pairs).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = rotated(q, theta, pairs) @ k.mT / width**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        x = x + through("o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        y = rms_norm(x, x.shape[-1:], layer["norm2"], eps)
        assert layer["gate"].shape[0] == layer["neurons"]
        x = x + through("down", silu(through("gate", y)) * through("up", y))
    return rms_norm(x, x.shape[-1:], ends["norm"], eps) @ ends["head"].T


def from_nemotron_nas(folder, ids):
    """Logits of a nemotron-nas directory."""
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layers = []
    for number, block in enumerate(config["block_configs"]):
        layer = {}
        for name, value in tensors.items():
            *path, inner, kind = name.split(".")
            if path[:3] == ["model", "layers", str(number)]:
                layer[inner.removesuffix("_proj") + (".bias" if kind == "bias" else "")] = value
        layer |= {"norm1": layer.pop("input_layernorm"), "norm2": layer.pop("post_attention_layernorm")}
        neurons = int(2 * block["ffn"]["ffn_mult"] * hidden / 3)
        neurons += -neurons % 256
        sizes = {"heads": heads, "kv_heads": heads // block["attention"]["n_heads_in_group"], "neurons": neurons}
        layers.append(layer | sizes)
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    ends = {"embedding": embedding, "norm": tensors["model.norm.weight"], "head": head}
    numbers = {"width": hidden // heads, "theta": config["rope_theta"], "eps": config["rms_norm_eps"]}
    return llama(ids, layers, ends, **numbers, pairs=False)


def from_deci(file, ids):
    """Logits of a GGUF file of the architecture deci."""
    import gguf

    read = gguf.GGUFReader(file)
    assert read.fields["general.architecture"].contents() == "deci"
    tensors = {one.name: torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)) for one in read.tensors}
    values = {name.removeprefix("deci."): field.contents() for name, field in read.fields.items() if "deci." in name}
    count = values["block_count"]

    def each(name):
        return values[name] if isinstance(values[name], list) else [values[name]] * count

    counts = [each(name) for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")]
    layers = []
    for number, sizes in enumerate(zip(*counts, strict=True)):
        layer = {key: tensors[f"blk.{number}.{name}.weight"] for key, name in PARTS.items()}
        for key, name in PARTS.items():
            if f"blk.{number}.{name}.bias" in tensors:
                layer[f"{key}.bias"] = tensors[f"blk.{number}.{name}.bias"]
        norms = {
            key: tensors[f"blk.{number}.{name}_norm.weight"] for key, name in (("norm1", "attn"), ("norm2", "ffn"))
        }
        layers.append(layer | norms | dict(zip(("heads", "kv_heads", "neurons"), sizes, strict=True)))
    embedding = tensors["token_embd.weight"]
    ends = {"embedding": embedding, "norm": tensors["output_norm.weight"]}
    ends["head"] = tensors.get("output.weight", embedding)
    numbers = {"width": values["attention.key_length"], "theta": values["rope.freq_base"]}
    return llama(ids, layers, ends, **numbers, eps=values["attention.layer_norm_rms_epsilon"], pairs=True)
