"""Tiny random networks of every family of transformers, from the library's own configurations, and timm's by name."""

from __future__ import annotations

import re
from typing import Any

import torch
from breadth_batches import IMAGE, KINDS, MARKS, VOCABULARY, Batch, fitting, run
from breadth_fields import FIELDS
from torch import nn

from iobs.models import ensure_torchvision

Built = tuple[nn.Module, list[Batch]]

MOST = 6_000_000  # parameters of a tiny network

# Sizes of a tiny network by the words in a field's name; the first that fits is taken.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size", 2),
    (r"vocab", VOCABULARY),
    (r"per_tok|top_?k\b|topk$|num_selected|moe_k$|top_k_experts", 2),
    (r"(n_|num_)(routed_|local_|moe_)?experts$|moe_num_experts|num_experts$", 4),
    (r"shared_experts$", 1),
    (r"n_group$|topk_group|num_expert_group", 1),
    (r"first_k_dense|layer_start_index|num_dense", 1),
    (r"nextn|num_mtp|kv_shared_layers", 0),
    (r"head_?dim|d_head|d_kv$|kv_channels|nope_head|v_head|head_size$", 16),
    (r"rope_head", 16),
    (r"lora_rank$", 16),
    (r"linear_num_(key|value)_heads", 2),
    (r"mamba.*heads|n_mamba_heads", 4),
    (r"(key_value|kv)_heads|head_kv|num_key_value_groups", 2),
    (r"heads?$", 4),
    (r"(num|n|encoder|decoder)(?!.*extract).*layers?$|^depth$|num_blocks", 2),
    (r"moe_intermediate|expert.*(size|dim)$", 32),
    (r"intermediate|ffn_dim|ffn_hidden|d_ff|d_inner|n_inner|dim_ff|mlp_dim|feedforward|ff_dim", 96),
    (r"per_layer_input$|laurel_rank", 16),
    (r"hidden_size|d_model|n_embd|embed_dim|^dim$|embedding_size|embed_size|projection_dim|lru_width|hidden_dim$", 64),
    (
        r"(?<!conv_)pos(ition)?_embeddings$|n_positions|n_ctx|max_seq|max_(source|target)_positions|model_max_length|seq_length",
        64,
    ),
    (r"sliding_window|local_window|attention_window|chunk", 8),
    (r"image_size|img_size", IMAGE),
    (r"patch_size$", 8),
    (r"state_size|d_state", 8),
    (r"time_step_rank|dt_rank", 4),
    (r"mel_bins", 16),
    (r"num_conv_pos_embeddings$", 16),
    (r"num_conv_pos_embedding_groups", 4),
    (r"index_topk", 4),
)
# Further sizes, for families that a first form does not fit.
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1, "mamba_head_dim": 32, "mamba_d_head": 32},
    {"num_hidden_layers": 4, "num_layers": 4},
    {"mamba_head_dim": 32, "mamba_d_head": 32, "num_key_value_heads": 4, "rotary_dim": 8, "expand": 2, "num_heads": 4},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2], "image_size": 64},
    {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2},
    {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 1], "image_size": 64, "num_groups": 4},
    {"rope_head_dim": 8, "head_dim": 8},
)
TIMM = [
    "resnet10t",
    "resnet18",
    "resnet26",
    "resnet26d",
    "resnext26ts",
    "seresnet18",
    "seresnext26d_32x4d",
    "skresnet18",
    "ecaresnet26t",
    "botnet26t_256",
    "eca_botnext26ts_256",
    "halonet26t",
    "lambda_resnet26t",
    "gernet_s",
    "regnetx_002",
    "regnety_002",
    "regnetz_005",
    "densenet121",
    "dla34",
    "dla46_c",
    "hrnet_w18_small",
    "mobilenetv1_100",
    "mobilenetv2_035",
    "mobilenetv2_050",
    "mobilenetv3_small_050",
    "mobilenetv3_large_075",
    "mobilenetv4_conv_small_035",
    "efficientnet_b0",
    "efficientnet_lite0",
    "tf_efficientnet_b0",
    "tf_efficientnet_lite0",
    "tf_mobilenetv3_small_075",
    "test_efficientnet",
    "test_efficientnet_gn",
    "test_efficientnet_ln",
    "mnasnet_050",
    "fbnetc_100",
    "spnasnet_100",
    "ghostnet_050",
    "ghostnetv2_100",
    "hardcorenas_a",
    "lcnet_035",
    "tinynet_e",
    "rexnet_100",
    "semnasnet_050",
    "convnext_atto",
    "convnextv2_atto",
    "convnext_femto",
    "test_convnext",
    "test_convnext2",
    "test_convnext3",
    "convmixer_768_32",
    "inception_next_atto",
    "test_vit",
    "test_vit2",
    "test_vit3",
    "test_vit4",
    "vit_tiny_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "crossvit_tiny_240",
    "pit_ti_224",
    "tiny_vit_5m_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224",
    "test_mambaout",
    "mambaout_femto",
    "levit_128s",
    "levit_conv_128s",
    "mixer_s32_224",
    "mixer_s16_224",
    "gmlp_ti16_224",
    "resmlp_12_224",
    "poolformer_s12",
    "poolformerv2_s12",
    "edgenext_xx_small",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "maxvit_rmlp_pico_rw_256",
    "coatnet_pico_rw_224",
    "davit_tiny",
    "hiera_tiny_224",
    "twins_pcpvt_small",
    "nest_tiny",
    "visformer_tiny",
    "coat_lite_tiny",
    "pvt_v2_b0",
    "sequencer2d_s",
    "gcvit_xxtiny",
    "focalnet_tiny_srf",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientvit_m0",
    "efficientvit_b0",
    "fastvit_t8",
    "repvit_m0_9",
    "repvgg_a0",
    "repghostnet_050",
    "starnet_s050",
    "shvit_s1",
    "mobileone_s0",
    "test_nfnet",
    "nfnet_l0",
    "eca_nfnet_l0",
    "cspresnet50",
    "cs3darknet_s",
    "vovnet39a",
    "ese_vovnet19b_dw",
    "selecsls42",
    "xception41",
    "tresnet_m",
    "volo_d1_224",
    "tnt_s_legacy_patch16_224",
]


def names() -> dict[str, list[str]]:
    """The names of all networks, by kind; a model type of transformers may be there in several kinds."""
    ensure_torchvision()
    found = {kind: list(_mapping(kind)) for kind in KINDS}
    causal = set(found["CausalLM"])
    found["MaskedLM"] = [name for name in found["MaskedLM"] if name not in causal] + ["bert", "roberta", "electra"]
    return {**found, "timm": TIMM}


def _mapping(kind: str) -> dict[str, str | tuple[str, ...]]:
    """Classes of a kind by model type."""
    from transformers.models.auto import modeling_auto

    tried = [f"MODEL_FOR_{_spaced(kind, long)}_MAPPING_NAMES" for long in (False, True)]
    return next(getattr(modeling_auto, name) for name in tried if hasattr(modeling_auto, name))


def _spaced(kind: str, long: bool = False) -> str:
    names = {"CausalLM": "CAUSAL_LM", "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM", "MaskedLM": "MASKED_LM", "CTC": "CTC"}
    names |= {"SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ"}
    return names.get(kind) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).upper()


def build(kind: str, name: str) -> Built:
    """A network in eval mode without special values, and its batches.

    Raises:
        RuntimeError: no form of the configuration gives a small network whose forward pass runs.
    """
    torch.manual_seed(0)
    if kind == "timm":
        return _timm(name)
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto, errors = getattr(transformers, f"AutoModelFor{kind}"), []
    classes = _mapping(kind)[name]
    for form in FORMS:
        try:
            config = _tiny(CONFIG_MAPPING[name], {**form, **FIELDS.get(name, {})}, kind)
            config.architectures = [classes if isinstance(classes, str) else classes[0]]
            with torch.device("meta"):
                size = sum(one.numel() for one in auto.from_config(config).parameters())
            if size > MOST:
                errors.append(f"{size:,} parameters")
                continue
            torch.manual_seed(0)
            model = auto.from_config(config).eval()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:90]}")
            continue
        _fill(model)
        for cached in (True, False):
            config.use_cache = model.config.use_cache = cached and getattr(config, "use_cache", True)
            batches, refused = fitting(kind, model, config)
            if batches:
                return model, batches
            errors += refused
    raise RuntimeError("; ".join(dict.fromkeys(errors))[:400])


def _timm(name: str) -> Built:
    ensure_torchvision()
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=8).eval()
    size = model.default_cfg.get("input_size", (3, 224, 224))[-1]
    least = size if model.default_cfg.get("fixed_input_size") else min(size, 64)
    for side in dict.fromkeys((least, size)):
        batches: list[Batch] = [torch.randn(2, 3, side, side) for _ in range(2)]
        try:
            run(model, batches[0])
        except Exception:
            continue
        _fill(model)
        return model, batches
    raise RuntimeError("no size of images fits")


def _tiny(kind: Any, form: dict[str, Any], task: str) -> Any:
    """The configuration of a class with small sizes, also in the configurations within it."""
    fields = _small(kind(), form)
    if task == "CausalLM" and "is_decoder" in vars(kind()):
        fields["is_decoder"] = True
    if task == "Seq2SeqLM":
        fields.setdefault("decoder_start_token_id", 1)
    return kind(**fields)


def _small(config: Any, form: dict[str, Any]) -> dict[str, Any]:
    from transformers import PretrainedConfig

    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            own = form.get(name, {})  # fields of this configuration alone
            fields[name] = {"model_type": value.model_type, **_small(value, {**form, **own}), **own}
            if "backbone" in vars(value):
                fields[name]["backbone"] = "test_resnet"  # of timm
        elif name in form:
            fields[name] = form[name]
        elif isinstance(value, dict) and "mrope_section" in value:
            fields[name] = {**value, "mrope_section": [2, 3, 3]}
        elif isinstance(value, float) and "drop" in name:
            fields[name] = type(value)(0)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and "token" not in name:
            size = next((size for words, size in SIZES if re.search(words, name)), None)
            fields |= {} if size is None else {name: size if size == 0 else min(size, value)}
        elif isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
            if "depths" in name or name == "num_layers":
                fields[name] = [1] * len(value)
            elif re.search(r"dims?$|hidden_sizes|channels$", name) and min(value) >= 16:
                fields[name] = [max(16, one // 16) for one in value]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            fields[name] = MARKS.get(name.rsplit("_", 1)[0], value % VOCABULARY)
    return fields


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Replace constant or missing values, such as scales that begin with 0, and exact zeros."""
    for one in model.parameters():
        if one.is_floating_point() and (not bool(torch.isfinite(one).all()) or (one.ndim > 1 and not one.std() > 0)):
            nn.init.normal_(one, std=0.05)
        if one.is_floating_point():
            one[one == 0] = 1e-3
