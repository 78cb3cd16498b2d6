"""Sixteen architectures of transformers, small and with random weights, and a batch for each.

Built from their configuration classes: nothing is downloaded. Every `make` gives the same weights.
Models that compute norms and softmax in float32 whatever they are given do so in float64 here if
they are in float64, or nothing could be compared to 1e-9.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch import GROUPED_MM
from tests.harness.models import Batch, Case

VOCAB, WIDTH, INNER, LAYERS, HEADS, SEQ = 96, 48, 96, 2, 12, 12
IMAGE, LABELS = 16, 12


class Double(TorchFunctionMode):
    """Has float64 wherever float32 is asked for."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def double(leaf: Any) -> Any:
            return torch.float64 if leaf is torch.float32 else leaf

        args, kwargs = pytree.tree_map(double, (args, kwargs or {}))
        if function is GROUPED_MM and not torch.compiler.is_compiling():
            function = _grouped_mm
        return (Tensor.double if function is Tensor.float else function)(*args, **kwargs)


def _grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor, **unused: None) -> Tensor:
    """Products of groups of rows, one after another; torch's kernels know no float64."""
    groups = torch.tensor_split(rows, offs[:-1].long())
    return torch.cat([group @ matrix for group, matrix in zip(groups, weight, strict=True)])


class Loss(nn.Module):
    """A model of transformers that computes in the dtype of its parameters and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        is_double = next(self.parameters()).dtype == torch.float64
        with Double() if is_double else contextlib.nullcontext():
            loss: Tensor = self.model(**batch).loss
        return loss


@dataclass(frozen=True)
class Architecture:
    """A model class, what its small configuration says, and what it is given.

    Attributes:
        name: as transformers calls its folder.
        model: its class, which says which configuration it takes.
        settings: of the configuration.
        dropouts: names of its probabilities of dropout.
        inputs: what it reads.
    """

    name: str
    model: str
    settings: Mapping[str, Any]
    dropouts: tuple[str, ...]
    inputs: Callable[[int, torch.Generator], dict[str, Tensor]]

    def make(self, dropout: float = 0.0, **changes: Any) -> nn.Module:
        """The model in float64 and training mode.

        Args:
            dropout: every probability of dropout.
            changes: other settings of the configuration.
        """
        import transformers

        cls = getattr(transformers, self.model)
        settings = dict(self.settings) | dict.fromkeys(self.dropouts, dropout) | changes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Loss(cls(cls.config_class(**settings))).double().train()

    def batch(self, rows: int, seed: int = 0) -> dict[str, Tensor]:
        """Keyword arguments of a call."""
        return self.inputs(rows, torch.Generator().manual_seed(seed))

    @property
    def case(self) -> Case:
        """As one of the parity models."""

        def batch(rows: int, seed: int) -> Batch:
            return (), self.batch(rows, seed)

        return Case(self.name, self.make, batch, lambda loss: loss)


def _next_tokens(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, SEQ), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_tokens(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, SEQ), generator=generator)
    hidden = torch.rand(rows, SEQ, generator=generator) < 0.4
    mask = torch.arange(SEQ) < SEQ - torch.arange(rows)[:, None] % 3
    labels = torch.where(hidden & mask, ids, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def _images(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.rand(rows, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, LABELS, (rows,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    **{f"{name}_token_id": place for place, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
}
_DECODER = {**_SIZES, "num_key_value_heads": HEADS // 2, "use_cache": False}
_IMAGES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": 4,
    "num_labels": LABELS,
    "problem_type": "single_label_classification",
}
_BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

ARCHITECTURES = {
    it.name: it
    for it in (
        Architecture("llama", "LlamaForCausalLM", _DECODER, ("attention_dropout",), _next_tokens),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            {**_DECODER, "head_dim": 4},
            ("attention_dropout",),
            _next_tokens,
        ),
        Architecture(
            "gemma2",
            "Gemma2ForCausalLM",
            {**_DECODER, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8},
            ("attention_dropout",),
            _next_tokens,
        ),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _DECODER,
            ("attention_dropout", "resid_pdrop", "embd_pdrop"),
            _next_tokens,
        ),
        Architecture(
            "bloom",
            "BloomForCausalLM",
            {
                "vocab_size": VOCAB,
                "hidden_size": WIDTH,
                "n_layer": LAYERS,
                "n_head": HEADS,
                "use_cache": False,
            },
            ("hidden_dropout", "attention_dropout"),
            _next_tokens,
        ),
        Architecture(
            "falcon",
            "FalconForCausalLM",
            {**_SIZES, "use_cache": False},
            ("hidden_dropout", "attention_dropout"),
            _next_tokens,
        ),
        Architecture(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            {**_SIZES, "use_cache": False},
            ("attention_dropout", "hidden_dropout"),
            _next_tokens,
        ),
        Architecture("bert", "BertForMaskedLM", _SIZES, _BERT_DROPOUTS, _masked_tokens),
        Architecture(
            "modernbert",
            "ModernBertForMaskedLM",
            {**_SIZES, "global_attn_every_n_layers": 2, "local_attention": 8},
            ("attention_dropout", "embedding_dropout", "mlp_dropout"),
            _masked_tokens,
        ),
        Architecture(
            "deberta-v2",
            "DebertaV2ForMaskedLM",
            {
                **_SIZES,
                "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"],
                "position_buckets": 8,
                "max_relative_positions": 16,
            },
            _BERT_DROPOUTS,
            _masked_tokens,
        ),
        Architecture(
            "t5",
            "T5ForConditionalGeneration",
            {
                "vocab_size": VOCAB,
                "d_model": WIDTH,
                "d_kv": WIDTH // HEADS,
                "d_ff": INNER,
                "num_layers": LAYERS,
                "num_heads": HEADS,
                "use_cache": False,
                "pad_token_id": 0,
                "decoder_start_token_id": 0,
            },
            ("dropout_rate",),
            _next_tokens,
        ),
        Architecture(
            "vit",
            "ViTForImageClassification",
            {**_IMAGES, "intermediate_size": INNER},
            _BERT_DROPOUTS,
            _images,
        ),
        Architecture(
            "dinov2",
            "Dinov2ForImageClassification",
            {**_IMAGES, "mlp_ratio": 2},
            _BERT_DROPOUTS,
            _images,
        ),
        Architecture(
            "resnet",
            "ResNetForImageClassification",
            {
                "embedding_size": 24,  # with 12, rolled rows alone make a difference of 2e-9
                "hidden_sizes": [24, 48],
                "depths": [1, 1],
                "num_labels": LABELS,
                "problem_type": "single_label_classification",
            },
            (),
            _images,
        ),
        Architecture(
            "mamba",
            "MambaForCausalLM",
            {
                "vocab_size": VOCAB,
                "hidden_size": WIDTH,
                "state_size": 4,
                "num_hidden_layers": LAYERS,
                "time_step_rank": 6,
                "use_cache": False,
            },
            (),
            _next_tokens,
        ),
        Architecture(
            "mixtral",
            "MixtralForCausalLM",
            {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
            ("attention_dropout",),
            _next_tokens,
        ),
    )
}
"""Every architecture, by name."""


_EXPERTS = {
    **_DECODER,
    "num_hidden_layers": 1,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": INNER // 2,
}
_LATENT = {
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    **{f"{name}_lora_rank": 8 for name in ("q", "kv")},
    **{f"{name}_head_dim": 4 for name in ("qk_rope", "qk_nope", "v")},
}

EXPERTS = {
    name: Architecture(name, model, {**_EXPERTS, **more}, ("attention_dropout",), _next_tokens)
    for name, model, more in (
        ("mixtral", "MixtralForCausalLM", {}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
        ("deepseek_v3", "DeepseekV3ForCausalLM", _LATENT),
        ("gpt_oss", "GptOssForCausalLM", {"sliding_window": 8}),
    )
}
"""Mixtures of experts, which sort tokens by expert and multiply groups of them."""
