"""Architectures of transformers that no other list here has: 12 of the first 18 in a random order.

GotOcr2, DeepseekV4, HYV3, Mllama, Flaubert and Nemotron3_5Transcribe came up too, and are left out.
"""

from __future__ import annotations

from benchmarks.architectures.language import BART, EXPERT_SIZES, of_kind
from benchmarks.architectures.pictures import IMAGE_SIZES, SOUND_SIZES
from benchmarks.architectures.sizes import (
    large_images,
    masked,
    sounds,
    tokens,
)

_JAMBA = {
    **EXPERT_SIZES,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_NLLB = {
    **BART,
    "num_experts": 4,
    "expert_capacity": 16,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

DRAWN = [
    *of_kind(
        "drawn",
        tokens,
        "ForCausalLM",
        {
            "granitemoeshared": (
                "GraniteMoeShared",
                {
                    **EXPERT_SIZES,
                    "shared_intermediate_size": 24,
                },
            ),
            "hunyuan_moe": ("HunYuanMoEV1", {**EXPERT_SIZES, "moe_topk": 2}),
            "jamba": ("Jamba", _JAMBA),
            "olmo_hybrid": ("OlmoHybrid", _LINEAR),
            "mvp": ("Mvp", BART),
            "blenderbot_small": ("BlenderbotSmall", BART),
        },
    ),
    *of_kind(
        "drawn",
        tokens,
        "ForConditionalGeneration",
        {"nllb_moe": ("NllbMoe", _NLLB)},
    ),
    *of_kind(
        "drawn",
        masked,
        "ForMaskedLM",
        {
            "rembert": ("RemBert", {"input_embedding_size": 16, "output_embedding_size": 24}),
            "roberta_prelayernorm": ("RobertaPreLayerNorm", {}),
        },
    ),
    *of_kind(
        "drawn",
        sounds,
        "ForSequenceClassification",
        {"unispeech": ("UniSpeech", SOUND_SIZES), "data2vec_audio": ("Data2VecAudio", SOUND_SIZES)},
    ),
    *of_kind(
        "drawn",
        large_images,
        "ForImageClassification",
        {
            "hgnet_v2": (
                "HGNetV2",
                {
                    **IMAGE_SIZES,
                    "stem_channels": [3, 8, 12],
                    "stage_in_channels": [12, 16],
                    "stage_mid_channels": [8, 8],
                    "stage_out_channels": [16, 24],
                    "stage_num_blocks": [1, 1],
                    "stage_numb_of_layers": [2, 2],
                    "stage_downsample": [False, True],
                    "stage_light_block": [False, True],
                    "stage_kernel_size": [3, 5],
                    "hidden_sizes": [16, 24],
                    "depths": [1, 1],
                },
            ),
        },
    ),
]
