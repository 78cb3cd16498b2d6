"""Models whose loss couples the rows of a batch, as methods in use do, and plain enough to read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.model_parts import generator
from tests.harness.models import Batch, Case

FEATURES, WIDTH, CLASSES = 5, 8, 3
COUPLED: dict[str, Case] = {}
"""Case of every model, by its name in the docs."""


def coupled(name: str, *inputs: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Decorator that registers a class with the names of its inputs."""

    def register(module: type[nn.Module]) -> type[nn.Module]:
        def make() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return module()

        def batch(rows: int, seed: int) -> Batch:
            drawn = generator(seed)
            return tuple(INPUTS[each](rows, drawn) for each in inputs), {}

        COUPLED[name] = Case(name, make, batch, lambda loss: loss)
        return module

    return register


INPUTS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "x": lambda rows, g: torch.randn(rows, FEATURES, generator=g),
    "other": lambda rows, g: torch.randn(rows, FEATURES, generator=g) + 0.5,
    "labels": lambda rows, g: torch.randint(CLASSES, (rows,), generator=g),
    "permutation": lambda rows, g: torch.randperm(rows, generator=g),
    "mixing": lambda rows, g: torch.rand(rows, 1, generator=g),
}


def encoder() -> nn.Sequential:
    """Two layers; a last bias would have no gradient where only distances between rows count."""
    last = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), last)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distances of every row of `a` to every row of `b`."""
    return (a[:, None] - b[None]).square().sum(-1)


@coupled("InfoNCE over the batch", "x", "other")
class InfoNce(nn.Module):
    """Every row is to find its own view among those of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query, key = F.normalize(self.query(x), dim=1), F.normalize(self.key(other), dim=1)
        return F.cross_entropy(query @ key.t() / 0.2, torch.arange(x.shape[0]))


@coupled("SimCLR, views as halves", "x")
class SimClr(nn.Module):
    """Rows i and i + n/2 are two views of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.normalize(self.encoder(x), dim=1).chunk(2)
        views = torch.cat([first, second])
        n = views.shape[0]
        itself = torch.eye(n, dtype=torch.bool)
        similar = (views @ views.t() / 0.2).masked_fill(itself, float("-inf"))
        return F.cross_entropy(similar, torch.arange(n).roll(n // 2))


@coupled("mixup by a reversed index", "x", "labels")
class ReversedMixup(nn.Module):
    """Rows and their labels are mixed with those of the batch in reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.encoder(0.7 * x + 0.3 * x.flip(0)))
        return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels.flip(0))


@coupled("mixup by a permutation", "x", "labels", "permutation", "mixing")
class Mixup(nn.Module):
    """Rows are mixed with those of a permutation, which is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, permutation: Tensor, mixing: Tensor) -> Tensor:
        logits = self.head(self.encoder(mixing * x + (1 - mixing) * x[permutation]))
        own = F.cross_entropy(logits, labels, reduction="none")
        others = F.cross_entropy(logits, labels[permutation], reduction="none")
        return (mixing[:, 0] * own + (1 - mixing[:, 0]) * others).mean()


@coupled("triplets, mined", "x", "labels")
class Triplets(nn.Module):
    """All valid triplets of the batch, averaged over those that violate the margin."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(x)
        apart = squared_distances(z, z)
        same = labels[:, None] == labels[None]
        valid = same[:, :, None] & ~same[:, None, :]
        loss = F.relu(apart[:, :, None] - apart[:, None, :] + 0.5) * valid
        return loss.sum() / (loss > 0).sum().clamp(min=1)


@coupled("triplets, batch-hard", "x", "labels")
class BatchHard(nn.Module):
    """The farthest row of the same class and the nearest of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(x)
        apart = squared_distances(z, z)
        same = labels[:, None] == labels[None]
        farthest = apart.masked_fill(~same, 0.0).max(dim=1).values
        nearest = apart.masked_fill(same, 1e3).min(dim=1).values
        return F.relu(farthest - nearest + 0.5).mean()


@coupled("MMD", "x", "other")
class Mmd(nn.Module):
    """The discrepancy of two samples under a Gaussian kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(other)
        return self.kernel(a, a) + self.kernel(b, b) - 2 * self.kernel(a, b)

    @staticmethod
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-squared_distances(a, b)).mean()


@coupled("a queue in a buffer (MoCo)", "x", "other")
class Moco(nn.Module):
    """Negatives come from a queue of the keys of batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder().requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, WIDTH), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query, key = F.normalize(self.query(x), dim=1), F.normalize(self.key(other), dim=1)
        negatives = query @ self.queue.clone().t()
        logits = torch.cat([(query * key).sum(1, keepdim=True), negatives], dim=1) / 0.2
        rows = x.shape[0]
        places = (self.pointer + torch.arange(rows)) % self.queue.shape[0]
        self.queue.index_copy_(0, places, key)
        self.pointer.copy_((self.pointer + rows) % self.queue.shape[0])
        return F.cross_entropy(logits, torch.zeros(rows, dtype=torch.long))


@coupled("an EMA buffer, in place", "x", "labels")
class EmaInPlace(nn.Module):
    """Features are centred by their moving mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * z.mean(0))
        return F.cross_entropy(self.head(z - self.mean), labels)


@coupled("an EMA buffer, rebound", "x", "labels")
class EmaRebound(nn.Module):
    """Features are centred by a moving mean that is a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(x)
        self.mean = 0.5 * self.mean + 0.5 * z.detach().mean(0)
        return F.cross_entropy(self.head(z - self.mean), labels)
