"""Language models: decoders, mixtures of experts, state spaces, encoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.architectures.sizes import (
    HEADS,
    LAYERS,
    SIZES,
    WIDTH,
    Architecture,
    Inputs,
    masked,
    tokens,
)


def of_kind(
    kind: str, inputs: Inputs, suffix: str, models: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> list[Architecture]:
    """Architectures from names, stems of class names, and settings beside `SIZES`."""
    return [
        Architecture(name, stem + suffix, {**SIZES, **more}, inputs, kind)
        for name, (stem, more) in models.items()
    ]


_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "n_inner": 48}

DECODERS = of_kind(
    "decoder",
    tokens,
    "ForCausalLM",
    {
        "llama": ("Llama", {}),
        "mistral": ("Mistral", {"sliding_window": 4}),
        "ministral": ("Ministral", {"sliding_window": 4}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {}),
        "gemma": ("Gemma", {}),
        "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 4}),
        "gemma3_text": ("Gemma3", {"query_pre_attn_scalar": 8, "sliding_window": 4}),
        "phi": ("Phi", {}),
        "phi3": ("Phi3", {}),
        "stablelm": ("StableLm", {}),
        "starcoder2": ("Starcoder2", {}),
        "olmo": ("Olmo", {}),
        "olmo2": ("Olmo2", {}),
        "olmo3": ("Olmo3", {"sliding_window": 4}),
        "cohere": ("Cohere", {}),
        "cohere2": ("Cohere2", {"sliding_window": 4}),
        "granite": ("Granite", {}),
        "glm": ("Glm", {}),
        "glm4": ("Glm4", {}),
        "helium": ("Helium", {}),
        "smollm3": ("SmolLM3", {}),
        "nemotron": ("Nemotron", {}),
        "persimmon": ("Persimmon", {}),
        "ernie4_5": ("Ernie4_5", {}),
        "exaone4": ("Exaone4", {"sliding_window": 4}),
        "seed_oss": ("SeedOss", {}),
        "arcee": ("Arcee", {}),
        "hunyuan_dense": ("HunYuanDenseV1", {}),
        "gpt_neox": ("GPTNeoX", {}),
        "gptj": ("GPTJ", {**_GPT, "rotary_dim": 4}),
        "codegen": ("CodeGen", {**_GPT, "rotary_dim": 4}),
        "gpt_bigcode": ("GPTBigCode", _GPT),
        "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": WIDTH}),
        "bloom": ("Bloom", {"n_layer": LAYERS, "n_head": HEADS}),
        "falcon": ("Falcon", {"head_dim": None}),
        "mpt": ("Mpt", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}),
        "biogpt": ("BioGpt", {}),
        "gpt_neo": (
            "GPTNeo",
            {
                "num_layers": LAYERS,
                "num_heads": HEADS,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 4,
            },
        ),
    },
)
DECODERS += of_kind("decoder", tokens, "LMHeadModel", {"gpt2": ("GPT2", _GPT)})

EXPERT_SIZES = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_k": 2,
}
LATENT = {
    "num_key_value_heads": HEADS,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **{f"{name}_lora_rank": 8 for name in ("q", "kv")},
    **{f"{name}_head_dim": 4 for name in ("qk_rope", "qk_nope", "v")},
}
_DENSE_FIRST = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

EXPERTS = of_kind(
    "experts",
    tokens,
    "ForCausalLM",
    {
        name: (stem, {**EXPERT_SIZES, **more})
        for name, (stem, more) in {
            "mixtral": ("Mixtral", {}),
            "qwen2_moe": ("Qwen2Moe", {}),
            "qwen3_moe": ("Qwen3Moe", {"norm_topk_prob": True}),
            "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
            "deepseek_v3": ("DeepseekV3", {**LATENT, "head_dim": 4}),
            "gpt_oss": ("GptOss", {"sliding_window": 4}),
            "olmoe": ("Olmoe", {}),
            "granitemoe": ("GraniteMoe", {}),
            "phimoe": ("Phimoe", {}),
            "glm4_moe": ("Glm4Moe", _DENSE_FIRST),
            "dots1": ("Dots1", _DENSE_FIRST),
            "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_shared_experts": 1}),
            "flex_olmo": ("FlexOlmo", {}),
            "minimax": ("MiniMax", {"block_size": 4}),
            "jetmoe": ("JetMoe", {"kv_channels": 8, "num_key_value_heads": 2}),
        }.items()
    },
)

STATE_SPACES = of_kind(
    "state space",
    tokens,
    "ForCausalLM",
    {
        "mamba": ("Mamba", {"state_size": 4, "time_step_rank": 4}),
        "falcon_mamba": ("FalconMamba", {"state_size": 4, "time_step_rank": 4}),
        "mamba2": (
            "Mamba2",
            {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        ),
        "recurrent_gemma": (
            "RecurrentGemma",
            {"lru_width": WIDTH, "attention_window_size": 4, "num_hidden_layers": 3},
        ),
        "qwen3_next": (
            "Qwen3Next",
            {
                **EXPERT_SIZES,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
        ),
    },
)
STATE_SPACES += of_kind(
    "state space", tokens, "ForCausalLM", {"rwkv": ("Rwkv", {"attention_hidden_size": WIDTH})}
)

ENCODERS = of_kind(
    "encoder",
    masked,
    "ForMaskedLM",
    {
        "bert": ("Bert", {}),
        "roberta": ("Roberta", {}),
        "xlm_roberta": ("XLMRoberta", {}),
        "electra": ("Electra", {"embedding_size": WIDTH}),
        "albert": ("Albert", {"embedding_size": 16}),
        "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "deberta_v2": (
            "DebertaV2",
            {
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_buckets": 4,
                "max_relative_positions": 8,
            },
        ),
        "mpnet": ("MPNet", {}),
        "modernbert": ("ModernBert", {"global_attn_every_n_layers": 2, "local_attention": 4}),
        "roformer": ("RoFormer", {"embedding_size": WIDTH}),
        "squeezebert": ("SqueezeBert", {"embedding_size": WIDTH}),
        "mobilebert": ("MobileBert", {"embedding_size": 16, "intra_bottleneck_size": 16}),
        "convbert": ("ConvBert", {"embedding_size": WIDTH, "head_ratio": 2}),
        "megatron_bert": ("MegatronBert", {}),
        "distilbert": (
            "DistilBert",
            {"dim": WIDTH, "hidden_dim": 48, "n_layers": LAYERS, "n_heads": HEADS},
        ),
    },
)

BART = {
    "d_model": WIDTH,
    "decoder_start_token_id": 2,
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 48}.items()
    },
}
_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}

ENCODER_DECODERS = of_kind(
    "encoder-decoder",
    tokens,
    "ForConditionalGeneration",
    {
        "t5": ("T5", _T5),
        "mt5": ("MT5", _T5),
        "umt5": ("UMT5", _T5),
        "longt5": ("LongT5", {**_T5, "local_radius": 3}),
        "bart": ("Bart", BART),
        "mbart": ("MBart", BART),
        "pegasus": ("Pegasus", BART),
        "blenderbot": ("Blenderbot", BART),
        "m2m_100": ("M2M100", BART),
    },
)
ENCODER_DECODERS += of_kind("encoder-decoder", tokens, "MTModel", {"marian": ("Marian", BART)})
