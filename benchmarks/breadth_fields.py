"""Fields of configurations that single families need beside the general sizes, by model type."""

from __future__ import annotations

from typing import Any

from breadth_batches import MARKS, VOCABULARY


def sectioned(*sections: int) -> dict[str, Any]:
    """Rotary embeddings of images' three axes, in the configuration of the language model alone."""
    return {"text_config": {"rope_parameters": {**ROTARY, "mrope_section": list(sections)}}}


ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
FULL_ROTARY = {"rope_parameters": {"full_attention": ROTARY}}
SECTIONED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glm_ocr", "glmga"),
    "paddleocr_vl",
)
HYBRID = {
    **{"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    **{"num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
}
RT_DETR = {
    **{"backbone_config": {"out_features": ["stage2", "stage3", "stage4"]}, "decoder_in_channels": [64] * 3},
    **{"num_queries": 8},
}
FIELDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "mamba2": {"expand": 2, "num_heads": 4, "head_dim": 32, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "gemma3n_text": {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.0, 0.0]},
    "kimi_linear": HYBRID,
    "bailing_hybrid": {**HYBRID, "layer_group_size": 2},
    "cohere_compass_text": FULL_ROTARY,
    "cohere_compass": {"text_config": FULL_ROTARY, "deepstack_visual_indexes": [0]},
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"sliding_window": 8},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "qwen3_vl": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
    "efficientnet": {
        **{"in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2]},
        **{"num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": [], "hidden_dim": 2560},
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "xlm": {"emb_dim": 64},
    "flaubert": {"emb_dim": 64},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "mobilebert": {"intra_bottleneck_size": 64},
    "reformer": {
        **{"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh"]},
        **{"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2, "hash_seed": 0},
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 32},
    "zamba": {
        **{"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
        **{"attention_hidden_size": 128, "attention_head_dim": 32},
    },
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 32},
    },
    "longcat_flash": {
        **{"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"zero_expert_num": 1},
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "blip-2": {"image_token_index": MARKS["image_token"], "num_query_tokens": 4},
    "instructblip": {"image_token_index": MARKS["image_token"], "num_query_tokens": 4},
    "llama4": {
        "vision_config": {
            **{"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
            **{"intermediate_size": 256},  # the entries of four patches together
        }
    },
    "chameleon": {
        **{"vocabulary_map": {"<image>": MARKS["image_token"]}},
        **{"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]}},
    },
    "kosmos-2": {"latent_query_num": 4},
    "hunyuan_vl": {"head_dim": 16},
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]}},
    "levit": {"patch_size": 16, "image_size": 64},
    "cvt": {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3]},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4},
    "upernet": {"use_auxiliary_head": False},
    "mobilevitv2": {"aspp_out_channels": 64},
    "rt_detr": RT_DETR,
    "rt_detr_v2": RT_DETR,
    "rf_detr": {"num_queries": 4, "num_select": 4},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "wav2vec2-bert": {"vocab_size": VOCABULARY, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "speech_to_text": {"input_feat_per_channel": 16},
    "seamless_m4t": {"feature_projection_input_dim": 16},
    "seamless_m4t_v2": {"feature_projection_input_dim": 16},
    "glm4v_moe": sectioned(1, 1, 2),
    **dict.fromkeys(SECTIONED, sectioned(2, 3, 3)),
}
