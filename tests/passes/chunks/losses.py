"""A small language model under many losses, whose logits a pass may compute in chunks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH = 11, 6
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(**options: Any) -> Loss:
    """Cross-entropy of every token."""
    return lambda logits, y: F.cross_entropy(logits.flatten(0, -2), y.flatten(), **options)


def with_z_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, and the squares of the logarithms of its normalizers."""
    return cross_entropy()(logits, y) + 0.1 * torch.logsumexp(logits, -1).square().mean()


def each_row(logits: Tensor, y: Tensor) -> Tensor:
    """Losses of tokens, weighted by hand."""
    each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return (each * torch.arange(1, each.shape[0] + 1, dtype=each.dtype)).sum() / each.shape[0]


def in_double(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy in another dtype than the logits'."""
    return cross_entropy()(logits.double(), y)


def by_hand(logits: Tensor, y: Tensor) -> Tensor:
    """Log-probabilities gathered at the targets."""
    found = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    return -(found * (y != IGNORED)).sum() / (y != IGNORED).sum()


def to_uniform(logits: Tensor, y: Tensor) -> Tensor:
    """Distance from the uniform distribution, a mean over rows and words."""
    uniform = torch.full_like(logits, 1 / WORDS)
    return F.kl_div(logits.log_softmax(-1), uniform, reduction="none").mean()


WEIGHTS = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
LOSSES: Mapping[str, Loss] = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "each row": each_row,
    "ignored": cross_entropy(ignore_index=3),
    "smoothed": cross_entropy(label_smoothing=0.1),
    "class weights": lambda logits, y: cross_entropy(weight=WEIGHTS)(logits, y),
    "z-loss": with_z_loss,
    "in double": in_double,
    "by hand": by_hand,
    "uniform": to_uniform,
}


class Words(nn.Module):
    """An embedding, a layer and a head under a loss; returns the loss, and logits if asked to.

    Args:
        shift: "logits" to drop the last token's, as causal models did; "labels" to move labels.
    """

    def __init__(
        self,
        loss: str,
        *,
        bias: bool = False,
        tied: bool = False,
        shift: str = "",
        returns_logits: bool = False,
        narrow_head: bool = False,
        words: int = WORDS,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias)
        if tied:
            self.head.weight = self.words.weight
        self.loss, self.shift, self.returns_logits = LOSSES[loss], shift, returns_logits
        self.narrow_head = narrow_head

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.layer(self.words(x)))
        if self.narrow_head:
            logits = F.linear(hidden.bfloat16(), self.head.weight.bfloat16()).float()
        else:
            logits = self.head(hidden)
        if self.shift == "logits":
            loss = self.loss(logits[..., :-1, :].contiguous(), y[..., 1:].contiguous())
        elif self.shift == "labels":
            loss = self.loss(logits, F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous())
        else:
            loss = self.loss(logits, y)
        return (loss, logits) if self.returns_logits else loss


def batch(rows: int, length: int, seed: int = 0, ignored: float = 0.2) -> tuple[Any, Any]:
    """Tokens and targets, a part of which is ignored."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, WORDS, (rows, length), generator=draw) for _ in range(2))
    y[torch.rand(rows, length, generator=draw) < ignored] = IGNORED
    return (x, y), {}
