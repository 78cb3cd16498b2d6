"""torch's own Transformer layers under masks train as on one device, and evaluate so."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.training import Pair, close
from tests.harness.worlds import run

ROWS, SEQ, WIDTH, HEADS = 5, 4, 8, 2


def causal(like: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(SEQ, like.device, like.dtype)


class Encoder(nn.Module):
    """An encoder that makes its own causal mask unless it is given one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 16, dropout=0.0, batch_first=True, **options
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Any = None) -> Tensor:
        if mask is None and padding is None:
            mask = causal(x)
        y = self.layers(x, mask=mask, src_key_padding_mask=padding)
        weight = 1.0 if padding is None else (~padding)[..., None]
        return (y * weight).square().mean()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.layers(x, x.flip(1), tgt_mask=causal(x), memory_key_padding_mask=padding)
        return y.square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        y, weights = self.layer(x, x, x, attn_mask=mask, key_padding_mask=padding)
        z, _ = self.layer(y, y, y, attn_mask=mask, need_weights=False)
        return z.square().mean() + weights.square().sum(-1).mean()


def given(name: str, step: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64, generator=generator)
    padding = torch.arange(SEQ) >= (torch.arange(ROWS) % 3 + 2)[:, None]
    forbidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    return {
        "own mask": (x,),
        "norm first": (x,),
        "given mask": (x, causal(x)),
        "mask and padding": (x, forbidden, padding),
        "padding": (x, None, padding),
        "decoder": (x, padding),
        "attention": (x, forbidden, padding),
    }[name]


def make(name: str) -> nn.Module:
    if name in ("decoder", "attention"):
        return {"decoder": Decoder, "attention": Attention}[name]()
    return Encoder(**({"norm_first": True} if name == "norm first" else {}))


def train(rank: int, world_size: int, name: str) -> None:
    """A step in training mode, one in evaluation mode, and an evaluation without gradients."""
    pair = Pair(lambda: make(name), zero=0)
    for step, training in enumerate((True, False)):
        args = given(name, step)
        want, have = (model.train(training)(*args) for model in pair.models)
        close(have, want)
        want.backward()
        have.backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()
    with torch.no_grad():
        want, have = (model(*args) for model in pair.models)
    close(have, want)


CASES = ("own mask", "norm first", "given mask", "mask and padding", "padding", "decoder")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "attention"])
def test_they_train_exactly(name: str) -> None:
    run(train, 2, name=name)


@pytest.mark.parametrize("name", ["own mask", "padding"])
def test_they_do_alone(name: str) -> None:
    run(train, 1, name=name)
