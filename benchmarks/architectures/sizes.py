"""Small models of any configuration class, without dropout, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS, SEQ, IMAGE, LABELS = 64, 32, 4, 2, 8, 16, 4

Batch = dict[str, Any]
Inputs = Callable[[int, torch.Generator], Batch]

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 32,
    **{f"{name}_token_id": place for place, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
}
"""Settings that most configurations have under these names."""


@dataclass(frozen=True)
class Architecture:
    """A model class and the sizes of a small configuration of it.

    Attributes:
        name: its row in the results.
        model: name of the class in its library.
        settings: of the configuration, beside `SIZES`.
        inputs: what the model reads.
        kind: heading of the row: decoder, experts, encoder, ...
        build: the model of a class and settings; by its configuration class if it is left out.
    """

    name: str
    model: str
    settings: Mapping[str, Any]
    inputs: Inputs
    kind: str
    build: Callable[[Architecture], nn.Module] | None = None

    def make(self) -> nn.Module:
        """The model in float64 and training mode, with the weights of one seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = (self.build or by_configuration)(self)
        return without_dropout(model).double().train()

    def batch(self, rows: int, seed: int) -> Batch:
        """Keyword arguments of a call."""
        given = self.inputs(rows, torch.Generator().manual_seed(seed))
        doubled = (isinstance(v, Tensor) and v.is_floating_point() for v in given.values())
        return {k: v.double() if d else v for (k, v), d in zip(given.items(), doubled, strict=True)}


def by_configuration(architecture: Architecture) -> nn.Module:
    """A model of transformers from its configuration class."""
    import transformers

    cls: Any = getattr(transformers, architecture.model)
    settings = {k: v for k, v in architecture.settings.items() if v is not None}
    config = cls.config_class(**settings)
    quiet(config)
    model: nn.Module = cls(config)
    return model


def quiet(config: Any) -> None:
    """Sets every probability of dropout, of dropped layers and of masks to zero."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and value is not config and not isinstance(value, nn.Module):
            quiet(value)
        hides = name.startswith("mask_") and name.endswith("_prob")
        if (hides or "drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with probabilities of dropout that keep everything."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        quiet(module)
    return model


# -- batches -----------------------------------------------------------------------------------


def tokens(rows: int, generator: torch.Generator) -> Batch:
    """Tokens, of which each predicts the next."""
    ids = torch.randint(5, VOCAB, (rows, SEQ), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(rows: int, generator: torch.Generator) -> Batch:
    """Tokens of rows of different lengths, of which some are to be found."""
    ids = torch.randint(5, VOCAB, (rows, SEQ), generator=generator)
    mask = torch.arange(SEQ) < SEQ - torch.arange(rows)[:, None] % 3
    hidden = torch.rand(rows, SEQ, generator=generator) < 0.5
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": torch.where(hidden & mask, ids, -100),
    }


def images(rows: int, generator: torch.Generator, size: int = IMAGE) -> Batch:
    """Images and their classes."""
    pixels = torch.rand(rows, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": classes(rows, generator)}


def large_images(rows: int, generator: torch.Generator) -> Batch:
    """Images of 32 pixels and their classes."""
    return images(rows, generator, 32)


def sounds(rows: int, generator: torch.Generator) -> Batch:
    """Waves and their classes."""
    return {
        "input_values": torch.rand(rows, 400, generator=generator),
        "labels": classes(rows, generator),
    }


def pairs(rows: int, generator: torch.Generator) -> Batch:
    """Images and texts that belong together."""
    return {
        "input_ids": torch.randint(5, VOCAB - 1, (rows, SEQ), generator=generator),
        "pixel_values": torch.rand(rows, 3, IMAGE, IMAGE, generator=generator),
        "return_loss": True,
    }


def classes(rows: int, generator: torch.Generator) -> Tensor:
    """A class for each row."""
    return torch.randint(0, LABELS, (rows,), generator=generator)
