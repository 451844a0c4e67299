"""Units removed from networks of every family: found, removed, saved, loaded by transformers, exported to ONNX.

    python benchmarks/structured_families.py                  the families below
    python benchmarks/structured_families.py --all            every causal language model of transformers as well
    python benchmarks/structured_families.py --only llama vit

Networks are small and random, built from configurations: the question is which units are found, and whether the
narrower network is what it should be. 25 % of the units are removed at random, equally in layers of one width.

- transformers: a removal that the class can say is saved, loaded by `from_pretrained`, and the outputs are compared.
- timm (needs timm, onnx, onnxruntime): all units are removed, the network is exported to ONNX, and the outputs are
  compared.

Both compare with the wide network whose readers have zero columns for the removed units.
"""

from __future__ import annotations

import copy
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rows import Row, Rows, measured, parser, stamp
from torch import Tensor, nn

from iobs.models import ensure_torchvision
from iobs.pruning.network.modes import evaluating
from iobs.pruning.samples import batches
from iobs.pruning.structure.removal import remove
from iobs.pruning.structure.sites import Site, traced_sites
from iobs.pruning.structure.verification import verify
from iobs.pruning.structure.widths import Widths, configure, widths_of
from iobs.pruning.widths.clock import Example, called_in

ensure_torchvision()

SHARE = 0.25
SECONDS = 60  # processor time for one network
LIMIT = 30_000_000  # parameters of a network that is built
KINDS = ("neurons", "heads", "channels")
SIZES: tuple[tuple[str, int], ...] = (  # names of fields of configurations and small values for them
    (r"(.*_)?vocab_size|n_vocab|vocab_size_per_layer_input", 128),
    (r"embed_dim", 48),
    (r"hidden_size|d_model|n_embd|dim|embedding_size|word_embed_proj_dim|model_dim|dim_model", 64),
    (r"projection_dim|text_hidden_size|emb_dim|embed_size|hidden_dim|lru_width|attention_hidden_size", 64),
    (r"intermediate_size|.*ffn_dim|d_ff|ffn_hidden_size|dim_ff|d_inner|mlp_dim|ffn_intermediate_size", 96),
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_dim|.*shared_intermediate_size", 32),
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|depth", 2),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|num_key_value_groups", 2),
    (r"head_dim|attention_head_dim|kv_channels|d_kv|attention_head_size|v_head_dim|qk_.*head_dim", 16),
    (r"rotary_dim", 8),
    (r"(q|kv|o)_lora_rank", 16),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk?|num_selected_experts|moe_k|moe_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_(target|source)_positions", 64),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins", 16),
)
# fmt: off
CAUSAL = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj",
    "opt", "bloom", "falcon", "stablelm", "olmo", "olmo2", "cohere", "starcoder2", "smollm3", "granite", "glm4",
    "codegen", "gpt_neo", "gpt_bigcode", "xglm", "nemotron", "helium", "exaone4", "seed_oss", "ministral", "biogpt",
    "mixtral", "qwen3_moe", "olmoe", "persimmon", "apertus", "cohere2", "gpt_oss", "internlm3", "mpt",
]
ENCODERS = [
    "bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta", "deberta-v2", "camembert", "ernie",
    "roformer", "xlm-roberta", "mobilebert", "squeezebert", "nystromformer", "big_bird", "yoso", "convbert", "ibert",
    "modernbert", "nomic_bert", "rembert", "funnel", "megatron-bert",
]
SEQUENCES = ["t5", "mt5", "umt5", "bart", "mbart", "pegasus", "blenderbot", "marian", "m2m_100", "longt5", "led"]
PICTURES = [
    "vit", "deit", "beit", "dinov2", "dinov2_with_registers", "swin", "swinv2", "convnext", "convnextv2", "resnet",
    "regnet", "mobilenet_v1", "mobilenet_v2", "segformer", "poolformer", "vit_msn", "ijepa", "levit", "pvt", "cvt",
    "efficientnet", "dinov3_vit",
]
OTHERS = ["clip", "siglip", "whisper", "wav2vec2", "hubert"]
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {}, "resnet18": {}, "resnet50": {}, "resnext26ts": {}, "seresnet18": {}, "mobilenetv1_100": {},
    "mobilenetv2_035": {}, "mobilenetv3_small_050": {}, "mobilenetv4_conv_small_035": {}, "efficientnet_b0": {},
    "tf_efficientnetv2_b0": {}, "convnext_atto": {}, "convnextv2_atto": {}, "densenet121": {}, "vgg11": {},
    "regnetx_002": {}, "regnety_002": {}, "repvgg_a0": {}, "ghostnet_050": {}, "mobilevit_xxs": {},
    "hrnet_w18_small": {},
    "inception_v3": {}, "dla46_c": {}, "cspresnet50": {}, "darknet17": {}, "res2net50_14w_8s": {}, "mnasnet_small": {},
    "lcnet_035": {}, "rexnet_100": {}, "fbnetc_100": {}, "test_vit": {}, "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_patch16_224": {"depth": 2}, "beit_base_patch16_224": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "eva02_tiny_patch14_224": {"depth": 2}, "swin_tiny_patch4_window7_224": {"embed_dim": 24, "depths": (1, 1, 1, 1)},
    "mixer_s32_224": {"num_blocks": 2, "embed_dim": 64}, "resmlp_12_224": {"num_blocks": 2, "embed_dim": 64},
    "gmixer_12_224": {"num_blocks": 2, "embed_dim": 64}, "poolformer_s12": {}, "caformer_s18": {},
    "edgenext_xx_small": {},
    "cait_xxs24_224": {"depth": 2}, "xcit_nano_12_p16_224": {"depth": 2}, "pit_ti_224": {}, "levit_128s": {},
    "fastvit_t8": {}, "starnet_s050": {}, "repvit_m0_9": {}, "test_nfnet": {},
}
# fmt: on
QUICK = ("llama", "qwen3", "gpt2", "phi3", "opt", "bert", "t5", "vit", "resnet18", "mobilenetv3_small_050", "test_vit")


def small(config: Any, layers: int) -> Any:
    """A configuration of the same class with small values; nested ones too."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            values[name] = small(value, layers).to_dict()
        elif name.endswith("token_id") and isinstance(value, int):
            values[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], 3)
        elif type(value) is int and value > 0:
            found = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if found is not None:
                values[name] = layers if name.endswith(("layers", "n_layer", "depth")) else min(found, value)
        elif name == "layer_types" and value:
            values[name] = (sorted(set(value)) * layers)[:layers]
        elif name == "n_inner" and value is None:
            values[name] = 96
    return type(config)(**values)


def batch_for(kind: str, config: Any) -> dict[str, Tensor]:
    """Inputs of a random network."""
    text = torch.arange(4, 4 + 2 * 12).view(2, 12)
    if kind == "pictures":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 64
        return {"pixel_values": torch.randn(2, 3, size, size)}
    if kind == "sequences":
        return {"input_ids": text, "decoder_input_ids": text[:, :8]}
    if config.model_type in ("clip", "siglip"):
        size = config.vision_config.image_size
        return {"input_ids": text, "pixel_values": torch.randn(2, 3, size, size)}
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        return {"input_features": torch.randn(2, config.num_mel_bins, frames), "decoder_input_ids": text[:, :8]}
    if config.model_type in ("wav2vec2", "hubert"):
        return {"input_values": torch.randn(2, 4000)}
    return {"input_ids": text}


def hugging_face(kind: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small random network of a family of transformers, and a batch."""
    import transformers as hf
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = {
        "causal": hf.AutoModelForCausalLM,
        "sequences": hf.AutoModelForSeq2SeqLM,
        "pictures": hf.AutoModelForImageClassification,
    }.get(kind, hf.AutoModel)
    error: Exception | None = None
    for layers in (2, 4, 6):
        try:
            config = small(CONFIG_MAPPING[name](), layers)
            with torch.device("meta"):
                weights = sum(value.numel() for value in auto.from_config(config).parameters())
            if weights > LIMIT:
                raise ValueError(f"{weights} parameters")
            torch.manual_seed(0)
            model = auto.from_config(config).eval()
            batch = batch_for(kind, config)
            with torch.no_grad():
                for value in (value for value in model.parameters() if value.requires_grad):
                    value.add_(0.02 * torch.randn_like(value))
                outputs(model, batch)
            return model, batch
        except Exception as found:  # other numbers of layers may fit
            error = error or found
    raise RuntimeError(f"not built: {type(error).__name__}: {error}"[:300])


def timm_network(name: str) -> tuple[nn.Module, Tensor]:
    """A random network of timm, and a batch."""
    import timm

    for size in (64, 96, 128, 224, 256):
        for more in ({"img_size": size}, {}):
            try:
                torch.manual_seed(0)
                model = timm.create_model(name, pretrained=False, num_classes=10, **TIMM[name], **more).eval()
                batch = torch.randn(2, 3, size, size)
                with torch.no_grad():
                    model(batch)
                    for value in model.parameters():
                        value.add_(0.02 * torch.randn_like(value))
                return model, batch
            except Exception:  # another size may fit
                continue
    raise RuntimeError(f"timm builds no {name} for a picture of 64 to 256 pixels")


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """All tensors of numbers that the model returns, without a cache."""
    with evaluating(model), torch.no_grad():
        found = batches.forward(model, batch)
    values = [found] if isinstance(found, Tensor) else batches.tensors(found)
    return [value for value in values if value.is_floating_point()]


def chosen(sites: Sequence[Site], widths: Widths) -> dict[str, list[int]]:
    """Random units to keep, equal numbers in layers of one width; none of the refused."""
    draw = random.Random(0)
    counts = {site.name: site.count for site in sites}
    kept = {}
    for group in widths.groups:
        count = counts[group.sites[0]]
        keep = max(1, count - max(1, round(SHARE * count)))
        if keep < count:
            kept |= {name: sorted(draw.sample(range(count), keep)) for name in group.sites}
    return kept


def zeroed(model: nn.Module, sites: Sequence[Site], kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy whose readers have zero columns for the units that go."""
    model = copy.deepcopy(model)
    for site in sites:
        gone = set(range(site.count)) - set(kept.get(site.name, range(site.count)))
        for reader in site.readers:
            positions = torch.tensor(reader.weight.of(gone), dtype=torch.int64)
            reader.weight.stored(model).data.index_fill_(reader.weight.axis, positions, 0)
    return model


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value."""
    scale = max(float(one.abs().max()) for one in expected) or 1.0
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) / scale


def reasons(widths: Widths, sites: Sequence[Site]) -> dict[str, str]:
    """One reason for each kind of units that the class cannot remove."""
    kinds = {site.name: site.kind for site in sites}
    found: dict[str, str] = {}
    for name, reason in widths.refused.items():
        found.setdefault(kinds[name], re.sub(r"gives \S+ fewer", "gives fewer", reason))
    return found


def measure(library: str, kind: str, name: str) -> Row:
    """One row: units found, the share of weights removed, and the differences of the outputs."""
    model, batch = timm_network(name) if library == "timm" else hugging_face(kind, name)
    with measured() as work:
        checked = verify(model, batch, traced_sites(model, batch))
        sites = checked.sites
        widths = widths_of(model, sites)
    kept = chosen(sites, widths)
    units = Counter(site.kind for site in sites)
    row: Row = {
        "library": library,
        "kind": kind,
        "network": name,
        "sites": {one: units[one] for one in KINDS if units[one]},
        "loadable": dict(Counter(site.kind for site in sites if site.name in kept)),
        "refused": reasons(widths, sites),
        "failed": sorted(set(checked.refused.values())),
        "biases": sorted({group.bias for group in widths.groups if group.bias}),
        **work.fields(),
    }
    before = sum(value.numel() for value in model.parameters())
    wide, dense = outputs(zeroed(model, sites, kept), batch), outputs(model, batch)
    remove(model, sites, kept)
    row["fields"] = configure(model, widths, {name: len(units) for name, units in kept.items()})
    row["removed"] = 1 - sum(value.numel() for value in model.parameters()) / before
    narrow = outputs(model, batch)
    row["difference"], row["effect"] = difference(wide, narrow), difference(dense, narrow)
    row["reloaded"] = (
        onnx_difference(model, batch, narrow) if library == "timm" else load_difference(model, batch, narrow)
    )
    return row


def load_difference(model: nn.Module, batch: Any, expected: Sequence[Tensor]) -> float:
    """Difference of the outputs after saving and loading by transformers."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded, report = type(model).from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"parameters do not fit after loading: {report}")
    return difference(expected, outputs(loaded.eval(), batch))


def onnx_difference(model: nn.Module, batch: Tensor, expected: Sequence[Tensor]) -> float:
    """Difference of the outputs of ONNX Runtime."""
    found = called_in("onnx", Example(model, (batch,), {}))()
    return difference(expected, [torch.from_numpy(value) for value in found])  # type: ignore[attr-defined]


def cases(everything: bool) -> list[tuple[str, str, str]]:
    """Library, kind and name of every network."""
    named = {"causal": CAUSAL, "encoders": ENCODERS, "sequences": SEQUENCES, "pictures": PICTURES, "others": OTHERS}
    found = [("transformers", kind, name) for kind, names in named.items() for name in names]
    found += [("timm", "pictures", name) for name in TIMM]
    if everything:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        several = {name for names in named.values() for name in names}
        found += [("transformers", "causal", name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in several]
    return found


def tables(rows: list[Row]) -> str:
    """Summary and one line for each network."""
    lines = [
        "# Units of networks of every family",
        "",
        "Made by `python benchmarks/structured_families.py`: small random networks, a quarter of the units removed.",
        "",
    ]
    for library in ("transformers", "timm"):
        own = [row for row in rows if row["library"] == library]
        right = [row for row in own if row.get("loadable") and max(row["difference"], row["reloaded"]) < 1e-4]
        again = "loaded by transformers" if library == "transformers" else "exported to ONNX"
        lines += [
            f"**{library}**: {len(own)} networks; units removed and {again} with equal outputs: {len(right)}.",
            "",
        ]
        lines += ["| network | sites | loadable | weights removed | difference | after reload | refused |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in own:
            if "error" in row:
                lines.append(f"| {row['network']} | | | | | | {row['error']} |")
                continue
            shown = [", ".join(f"{count} {kind}" for kind, count in row[key].items()) for key in ("sites", "loadable")]
            refused = "; ".join([*(f"{kind}: {reason}" for kind, reason in row["refused"].items()), *row["failed"]])
            gaps = f"{row['difference']:.0e} | {row['reloaded']:.0e}"
            lines.append(f"| {row['network']} | {shown[0]} | {shown[1]} | {row['removed']:.1%} | {gaps} | {refused} |")
        lines.append("")
    return "\n".join(lines)


def _stop(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} processor seconds")


def main() -> None:
    """Measure all rows that are missing."""
    options = parser(__doc__, data=False)
    options.add_argument("--only", nargs="*", help="names of networks")
    options.add_argument("--all", action="store_true", help="every causal language model of transformers as well")
    given = options.parse_args()
    signal.signal(signal.SIGVTALRM, _stop)
    torch.set_num_threads(1)
    rows = Rows("structured_families", ("library", "kind", "network"), given.again)
    for library, kind, name in cases(given.all):
        wanted = name in given.only if given.only else name in QUICK or not given.quick
        if not wanted or rows.has(library=library, kind=kind, network=name):
            continue
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            row = measure(library, kind, name)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            row = {"library": library, "kind": kind, "network": name, "error": text, "processor_seconds": 0.0}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        rows.put({**row, **stamp(0)})


if __name__ == "__main__":
    main()
