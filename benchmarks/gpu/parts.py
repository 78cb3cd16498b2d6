"""The parts of `benchmarks.gpu`, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.gpu import capture, kernels, offload, ranks, training
from benchmarks.gpu.setting import Setting


@dataclass(frozen=True)
class Part:
    question: str
    run: Callable[[Setting], None]
    limit_s: float
    ranks: int = 1  # processes
    environment: Mapping[str, str] = field(default_factory=dict)  # on a GPU


PARTS: Mapping[str, Part] = {
    "capture": Part("Are graphs and plans those of a laptop?", capture.run, 120),
    "parity": Part("Does a rank train as the plain model does?", training.parity, 180),
    "syncs": Part("Does a step synchronise host and device?", training.syncs, 60),
    "ranks": Part("Is a rank of eight as fast as predicted?", ranks.run, 180),
    "two-processes": Part("Do two ranks on one GPU train right?", training.two_processes, 180, 2),
    "nccl": Part("Does NCCL start, and keep its inputs?", kernels.nccl, 60),
    "stopwatch": Part("Are operators timed right?", kernels.stopwatch, 120),
    "offload": Part("Does offload train right, and is it hidden?", offload.run, 180),
    "offload-order": Part(
        "Are copies beside compute ordered by events?",
        offload.order,
        180,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
}
"""Parts by name; twelve minutes in all where nothing hangs."""
