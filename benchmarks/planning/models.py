"""Models of `benchmarks.planning`, on the meta device, with the global batch of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.published import gpt

Made = tuple[nn.Module, Any]


def gpt2(rows: int) -> Made:
    return gpt.make(gpt.Sizes(1600, 48, 25, 50257, 1024, flash=True, dropout=False), rows)


def gpt_300m(rows: int) -> Made:
    return gpt.make(gpt.Sizes(1024, 24, 16, 50257, 1024, flash=True, dropout=False), rows)


def llama(size: str, rows: int, tokens: int = 4096) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "7b": (32000, 4096, 11008, 32, 32, 32),
        "70b": (32000, 8192, 28672, 80, 64, 8),
        "405b": (128256, 16384, 53248, 126, 128, 8),
    }
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    config = LlamaConfig(use_cache=False, **dict(zip(names, sizes[size], strict=True)))
    return language(lambda: LlamaForCausalLM(config), rows, tokens)


def mixtral(rows: int) -> Made:
    """Mixtral 8x7B by the defaults of its configuration."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(use_cache=False)
    return language(lambda: MixtralForCausalLM(config), rows, 4096)


def t5_xxl(rows: int) -> Made:
    """T5 v1.1 XXL: 24 encoder and 24 decoder blocks."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=4096,
        d_ff=10240,
        d_kv=64,
        num_heads=64,
        num_layers=24,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        use_cache=False,
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    return language(lambda: T5ForConditionalGeneration(config), rows, 512)


def vit_large(rows: int) -> Made:
    return vit(1024, 24, 16, rows)


def vit(width: int, depth: int, heads: int, rows: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=1000,
    )
    return images(lambda: ViTForImageClassification(config), rows)


def resnet(depth: int, rows: int) -> Made:
    """ResNet-34 or -50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    basic: dict[str, Any] = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
    config = ResNetConfig(num_labels=1000, **(basic if depth == 34 else {}))
    return images(lambda: ResNetForImageClassification(config), rows)


def asked() -> Made:
    """The model and rows that the script's arguments name, for `autopar plan`."""
    name, rows = sys.argv[1:]
    make: Mapping[str, Callable[[int], Made]] = {
        "llama-7b": partial(llama, "7b"),
        "llama-70b": partial(llama, "70b"),
        "mixtral": mixtral,
        "resnet34": partial(resnet, 34),
        "gpt-300m": gpt_300m,
    }
    return make[name](int(rows))


def language(make: Callable[[], nn.Module], rows: int, tokens: int) -> Made:
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        ids = torch.zeros(rows, tokens, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def images(make: Callable[[], nn.Module], rows: int) -> Made:
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        pixels = torch.zeros(rows, 3, 224, 224, dtype=torch.bfloat16)
        labels = torch.zeros(rows, dtype=torch.long)
    return model, {"pixel_values": pixels, "labels": labels}
