"""The parts of `benchmarks.gpu`, most telling first: each in processes and a time box of its own.

A part names its function by text and its module is imported in the part's process only. So a
module that cannot be imported costs one part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """One question to a GPU.

    Attributes:
        function: function of a `Setting`, as "module:name" below `benchmarks.gpu`.
        limit_s: seconds after which the part is stopped.
        ranks: number of processes.
        environment: further environment variables on a GPU.
    """

    question: str
    function: str
    limit_s: float
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Callable[[Any], None]:
        module, _, name = self.function.partition(":")
        loaded: Callable[[Any], None] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), name
        )
        return loaded


PARTS: Mapping[str, Part] = {
    "parity": Part("Does a rank train as the plain model does?", "training:parity", 75),
    "syncs": Part("Does a step synchronise host and device?", "training:syncs", 30),
    "steps": Part("Are time and memory of a step predicted?", "steps:run", 110),
    "attention": Part("Is attention's kernel the one that is priced?", "attention:run", 30),
    "rates": Part("Do products and bandwidth follow their curves?", "rates:run", 30),
    "operators": Part("What does each operator of a step take?", "operators:run", 50),
    "two-processes": Part(
        "Do two ranks on one GPU train right?", "training:two_processes", 60, ranks=2
    ),
    "offload": Part("Does offload train right, and is it hidden?", "offload:run", 60),
    "cuda-graphs": Part("Do CUDA graphs train right, and save host time?", "graphs:run", 40),
    "inductor": Part("Does inductor's code train right?", "training:inductor", 60),
    "nccl": Part("Does NCCL start, and keep its inputs?", "kernels:nccl", 30),
    "capture": Part("Are graphs and plans those of a laptop?", "capture:run", 90),
    "ranks": Part("Is a rank of eight as fast as predicted?", "ranks:run", 90),
    "stopwatch": Part("Are operators timed right?", "kernels:stopwatch", 60),
    "offload-order": Part(
        "Are copies beside compute ordered by events?",
        "offload:order",
        60,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
}
"""Parts by name, in the order in which they run."""
