"""Models of images, sounds, images with texts, and diffusion."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.language import of_kind
from benchmarks.architectures.sizes import (
    HEADS,
    IMAGE,
    LABELS,
    LAYERS,
    SEQ,
    SIZES,
    VOCAB,
    WIDTH,
    Architecture,
    Batch,
    images,
    large_images,
    pairs,
    sounds,
)

IMAGE_SIZES = {
    "image_size": IMAGE,
    "patch_size": 4,
    "num_labels": LABELS,
    "problem_type": "single_label_classification",
    "hidden_act": "gelu",
}

VISION = of_kind(
    "vision",
    images,
    "ForImageClassification",
    {
        name: (stem, {**IMAGE_SIZES, **more})
        for name, (stem, more) in {
            "vit": ("ViT", {}),
            "deit": ("DeiT", {}),
            "beit": ("Beit", {}),
            "data2vec_vision": ("Data2VecVision", {}),
            "dinov2": ("Dinov2", {"mlp_ratio": 2}),
            "vit_msn": ("ViTMSN", {}),
            "siglip": ("Siglip", {}),
            "ijepa": ("IJepa", {}),
        }.items()
    },
)
VISION += of_kind(
    "vision",
    large_images,
    "ForImageClassification",
    {
        name: (stem, {**IMAGE_SIZES, "image_size": 32, **more})
        for name, (stem, more) in {
            "swin": (
                "Swin",
                {
                    "embed_dim": 16,
                    "depths": [1, 1],
                    "num_attention_heads": [2, 4],
                    "window_size": 4,
                    "head_dim": None,
                },
            ),
            "convnext": ("ConvNext", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
            "convnextv2": (
                "ConvNextV2",
                {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
            ),
            "resnet": (
                "ResNet",
                {"embedding_size": 24, "hidden_sizes": [24, 48], "depths": [1, 1]},
            ),
            "poolformer": (
                "PoolFormer",
                {
                    "hidden_sizes": [8, 16, 16, 32],
                    "depths": [1, 1, 1, 1],
                },
            ),
            "focalnet": (
                "FocalNet",
                {
                    "embed_dim": 16,
                    "hidden_sizes": [16, 32],
                    "depths": [1, 1],
                    "focal_levels": [1, 1],
                    "focal_windows": [3, 3],
                },
            ),
            "segformer": (
                "Segformer",
                {
                    "hidden_sizes": [8, 16, 16, 32],
                    "depths": [1, 1, 1, 1],
                    "num_attention_heads": [1, 2, 2, 4],
                },
            ),
        }.items()
    },
)

SOUND_SIZES = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": LABELS,
    "apply_spec_augment": False,
}
AUDIO = of_kind(
    "audio",
    sounds,
    "ForSequenceClassification",
    {
        "wav2vec2": ("Wav2Vec2", SOUND_SIZES),
        "hubert": ("Hubert", SOUND_SIZES),
        "unispeech_sat": ("UniSpeechSat", SOUND_SIZES),
        "sew": ("SEW", {**SOUND_SIZES, "squeeze_factor": 1}),
    },
)


def _spectrograms(rows: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.rand(rows, 16, 32, generator=generator),
        "labels": torch.randint(5, VOCAB, (rows, SEQ), generator=generator),
    }


AUDIO.append(
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            **SIZES,
            "d_model": WIDTH,
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 2,
            **{
                f"{side}_{name}": size
                for side in ("encoder", "decoder")
                for name, size in {
                    "layers": LAYERS,
                    "attention_heads": HEADS,
                    "ffn_dim": 48,
                }.items()
            },
        },
        _spectrograms,
        "audio",
    )
)

# -- images with texts -------------------------------------------------------------------------

IMAGE_TOKEN = VOCAB - 2
_VISION: dict[str, Any] = {**SIZES, **IMAGE_SIZES, "num_hidden_layers": 2, "projection_dim": 16}
_TEXT: dict[str, Any] = {**SIZES, "projection_dim": 16, "eos_token_id": VOCAB - 1}


def _with_places(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Tokens of which the first `count` behind one stand for an image."""
    ids = torch.randint(5, IMAGE_TOKEN, (rows, SEQ + count), generator=generator)
    ids[:, 1 : 1 + count] = IMAGE_TOKEN
    return ids


def _llava(rows: int, generator: torch.Generator) -> Batch:
    ids = _with_places(rows, 16, generator)
    pixels = torch.rand(rows, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


def _paligemma(rows: int, generator: torch.Generator) -> Batch:
    """As its processor gives them; without `token_type_ids` it differs silently (works-with.md)."""
    given = _llava(rows, generator)
    prefix = (torch.arange(given["input_ids"].shape[1]) < 20).expand_as(given["input_ids"])
    labels = given["labels"].masked_fill(prefix, -100)
    return {**given, "labels": labels, "token_type_ids": (~prefix).long()}


def _qwen_vl(rows: int, generator: torch.Generator) -> Batch:
    ids = _with_places(rows, 4, generator)
    ids[:, 0] = VOCAB - 3
    return {
        "input_ids": ids,
        "pixel_values": torch.rand(rows * 16, 3 * 2 * 4 * 4, generator=generator),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(rows, 1),
        "position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape),
        "labels": ids.clone(),
    }


_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_TEXT = {**SIZES, "rope_scaling": _ROPE, "rope_parameters": _ROPE}
_QWEN_VISION = {
    "depth": 2,
    "embed_dim": WIDTH,
    "hidden_size": WIDTH,
    "num_heads": HEADS,
    "patch_size": 4,
    "mlp_ratio": 2,
    "in_channels": 3,
}
_QWEN = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VOCAB - 4,
    "vision_start_token_id": VOCAB - 3,
    "text_config": _QWEN_TEXT,
}
IMAGE_TEXTS = [
    Architecture(
        "clip",
        "CLIPModel",
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
        pairs,
        "image and text",
    ),
    Architecture(
        "siglip_pairs",
        "SiglipModel",
        {"text_config": _TEXT, "vision_config": _VISION},
        pairs,
        "image and text",
    ),
    Architecture(
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_layer": -1,
        },
        _llava,
        "image and text",
    ),
    Architecture(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "gemma"},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": WIDTH,
            "hidden_size": WIDTH,
        },
        _paligemma,
        "image and text",
    ),
    Architecture(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {**_QWEN, "vision_config": _QWEN_VISION},
        _qwen_vl,
        "image and text",
    ),
    Architecture(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_QWEN,
            "vision_config": {
                **_QWEN_VISION,
                "intermediate_size": 48,
                "out_hidden_size": WIDTH,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        _qwen_vl,
        "image and text",
    ),
]

# -- diffusion ---------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """A model of diffusers that returns the error of the noise that it finds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noise: Tensor, **given: Tensor) -> Any:
        """The mean squared error, as an output with a loss."""
        found = self.model(**given).sample
        return Found((found[:, : noise.shape[1]] - noise).square().mean())


class Found:
    """What `Loss` reads of a model's output."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def _diffusers(architecture: Architecture) -> nn.Module:
    cls: Any = getattr(importlib.import_module("diffusers"), architecture.model)
    return Denoiser(cls(**architecture.settings))


def _noisy(rows: int, generator: torch.Generator) -> Batch:
    shape = (rows, 3, 8, 8)
    return {
        "noise": torch.randn(shape, generator=generator),
        "hidden_states": torch.randn(shape, generator=generator),
        "timestep": torch.randint(0, 100, (rows,), generator=generator),
        "class_labels": torch.randint(0, LABELS, (rows,), generator=generator),
    }


def _noisy_images(rows: int, generator: torch.Generator) -> Batch:
    given = _noisy(rows, generator)
    return {
        "noise": given["noise"],
        "sample": given["hidden_states"],
        "timestep": given["timestep"],
    }


def _noisy_with_texts(rows: int, generator: torch.Generator) -> Batch:
    states = torch.randn(rows, SEQ, WIDTH, generator=generator)
    return {**_noisy_images(rows, generator), "encoder_hidden_states": states}


_UNET = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
DIFFUSION = [
    Architecture(
        "dit",
        "DiTTransformer2DModel",
        {
            "num_attention_heads": HEADS,
            "attention_head_dim": 8,
            "in_channels": 3,
            "num_layers": LAYERS,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 100,
            "norm_num_groups": 1,
        },
        _noisy,
        "diffusion",
        _diffusers,
    ),
    Architecture(
        "unet",
        "UNet2DModel",
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        _noisy_images,
        "diffusion",
        _diffusers,
    ),
    Architecture(
        "unet_condition",
        "UNet2DConditionModel",
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 4,
        },
        _noisy_with_texts,
        "diffusion",
        _diffusers,
    ),
]
