"""Large models of `benchmarks.planning.questions`, on the meta device, with a global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.planning.models import Made
from benchmarks.published import gpt

LLAMAS = {
    "8b": (4096, 14336, 32, 32, 8),
    "70b": (8192, 28672, 80, 64, 8),
    "405b": (16384, 53248, 126, 128, 8),
}
"""Width, inner width, layers, heads and key heads of Llama 3 (arXiv 2407.21783, table 3)."""


def llama(size: str, rows: int, tokens: int = 8192, layers: int | None = None) -> Made:
    """Llama 3 with 128,256 entries; with other `layers` if given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, depth, heads, groups = LLAMAS[size]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    with torch.device("meta"):
        return _language(LlamaForCausalLM(config), rows, tokens)


def gpt3(rows: int) -> Made:
    """GPT-3 of 175B (arXiv 2005.14165, table 2.1), in bfloat16."""
    return gpt.make(gpt.Sizes(12288, 96, 96, 51200, 2048, flash=True, dropout=False), rows)


def mixtral(rows: int, *, large: bool = False) -> Made:
    """Mixtral 8x7B, or 8x22B if `large` (its model card), in bfloat16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    larger: dict[str, Any] = {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    }
    config = MixtralConfig(use_cache=False, **(larger if large else {}))
    with torch.device("meta"):
        return _language(MixtralForCausalLM(config).to(torch.bfloat16), rows, 4096)


def qwen3_moe(rows: int) -> Made:
    """Qwen3 of 30B with 3B active (its model card), in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        use_cache=False,
    )
    with torch.device("meta"):
        return _language(Qwen3MoeForCausalLM(config).to(torch.bfloat16), rows, 4096)


def deepseek_v3(rows: int) -> Made:
    """DeepSeek-V3 (arXiv 2412.19437) without its head for two tokens, in bfloat16."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)).to(torch.bfloat16)
        return _language(model, rows, 4096)


def vit_22b(rows: int) -> Made:
    """ViT of 22B (arXiv 2302.05442, table 1) on 257 patches, in bfloat16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=6144,
        num_hidden_layers=48,
        num_attention_heads=48,
        intermediate_size=24576,
        num_labels=1000,
        patch_size=14,
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).to(torch.bfloat16)
        pixels = torch.zeros(rows, 3, 224, 224, dtype=torch.bfloat16)
        return model, {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.long)}


class Residual(nn.Module):
    """Two convolutions of a U-Net beside a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, before), nn.GroupNorm(32, after)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)]
        )
        self.short = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y)))
        return self.short(x) + y


class UNet(nn.Module):
    """Denoiser of latent images, in the widths of Stable Diffusion (arXiv 2112.10752)."""

    WIDTHS = (320, 640, 1280, 1280)

    def __init__(self) -> None:
        super().__init__()
        widths = self.WIDTHS
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(Residual(before, after), Residual(after, after))
            for before, after in zip((widths[0], *widths), widths, strict=False)
        )
        self.middle = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            nn.Sequential(Residual(below + same, same), Residual(same, same))
            for below, same in zip((widths[-1], *widths[:0:-1]), widths[::-1], strict=True)
        )
        self.last = nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        h, kept = self.first(x), []
        for blocks in self.down:
            h = blocks(h)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h)
        for blocks, same in zip(self.up, reversed(kept), strict=True):
            h = blocks(torch.cat([F.interpolate(h, scale_factor=2.0), same], 1))
        return F.mse_loss(self.last(h), noise)


def unet(rows: int) -> Made:
    with torch.device("meta"):
        x = torch.zeros(rows, 4, 64, 64)
        return UNet(), (x, x)


class DLRM(nn.Module):
    """Tables, products of their rows, and two networks (arXiv 1906.00091)."""

    def __init__(self, fields: int = 26, entries: int = 2_000_000, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(fields))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width)
        )
        pairs = (fields + 1) * (fields + 1)
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        low = self.bottom(dense)
        rows = [low, *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        both = torch.stack(rows, 1)
        products = (both @ both.transpose(1, 2)).flatten(1)
        scores = self.top(torch.cat([low, products], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(scores, clicks)


def dlrm(rows: int) -> Made:
    with torch.device("meta"):
        ids = torch.zeros(rows, 26, dtype=torch.long)
        return DLRM(), (torch.zeros(rows, 13), ids, torch.zeros(rows))


def _language(model: nn.Module, rows: int, tokens: int) -> Made:
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}
