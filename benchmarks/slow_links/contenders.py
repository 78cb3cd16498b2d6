"""Ways to train the example GPT on nodes between which links are slow."""

from __future__ import annotations

from collections.abc import Mapping

from autopar import Outer

DDP = {"ddp": None, "ddp, bf16 hook": "bf16"}
"""torch's DistributedDataParallel, and its hook that compresses gradients."""

LOCAL: Mapping[str, Outer] = {
    "local sgd": Outer(),
    "post-local sgd": Outer(warm_up=40),
    "diloco, warm-up": Outer(lr=0.7, momentum=0.6, warm_up=60),
    "diloco": Outer(lr=0.7, momentum=0.5),
    "diloco, int8": Outer(lr=0.7, momentum=0.5, compress="int8"),
    "diloco, 4 blocks": Outer(lr=0.7, momentum=0.5, blocks=4),
    "ring": Outer(over="ring"),
    "fedavg, 2 of 3": Outer(weights="rows", participants=2),
    "ring, warm-up": Outer(over="ring", warm_up=60),
    "ring, momentum, warm-up": Outer(lr=0.7, momentum=0.6, over="ring", warm_up=60),
    "fedavg, 2 of 3, warm-up": Outer(
        lr=0.7, momentum=0.6, weights="rows", participants=2, warm_up=60
    ),
    "late, warm-up": Outer(lr=0.7, momentum=0.7, late=True, warm_up=60),
}
"""Averages of autopar's local steps."""

NAMES = [*DDP, *LOCAL]
