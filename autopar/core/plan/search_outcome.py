"""`SearchOutcome`: extent of the search behind a plan, its proven bound, and torch's best."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.common.documents import Count, Seconds
from autopar.core.plan.prediction import RunnerUp

DDP, FSDP, RECOMPUTED = "DDP", "FSDP", "FSDP with recomputation"
"""Usual names: all-reduced gradients, and ZeRO 3 without and with recomputed activations."""

MEGATRONS = "Megatron's"
"""Name of tensor parallelism in a node, then as many pipeline stages as memory demands."""

ALWAYS_NAMED = (DDP, FSDP, RECOMPUTED, MEGATRONS)
"""Layouts that a verdict compares with."""


@dataclass(frozen=True)
class PracticePlan:
    """The plan of a layout that practitioners would choose.

    Attributes:
        name: usual name of the layout.
        plan: name of its fastest plan; "" if there is none.
        step_s: seconds of its predicted step; 0 if there is none.
        why: reason why there is none; "" if there is one.
        needed_bytes: bytes to compare with a memory cap; 0 if unknown.
    """

    name: str
    plan: str = ""
    step_s: Seconds = 0.0
    why: str = ""
    needed_bytes: Count = 0


@dataclass(frozen=True)
class SearchOutcome:
    """Extent of the search behind a plan.

    Attributes:
        looked: number of meshes, with their numbers of micro-batches, that were planned.
        left_out: number of others; each is slower by an estimate, or time ran out.
        bound_s: lower bound in seconds of the predicted step of every plan; 0 if there is none.
        baseline: name of the fastest plan of DDP or fully_shard that fits; "" if none was found.
        baseline_s: seconds of its predicted step.
        complete: whether the search ended before its time ran out.
        ddp: the fastest plan of DDP, whether it fits or not; None if it was not predicted.
        fsdp: the same of fully_shard.
        practice: plans of DDP, FSDP and other layouts that practitioners would choose.
    """

    looked: Count = 0
    left_out: Count = 0
    bound_s: Seconds = 0.0
    baseline: str = ""
    baseline_s: Seconds = 0.0
    complete: bool = True
    ddp: RunnerUp | None = None
    fsdp: RunnerUp | None = None
    practice: tuple[PracticePlan, ...] = ()

    def gap(self, step_s: float) -> float:
        """Largest fraction of a step in seconds that a better plan could save; 1 if unknown."""
        return max(0.0, 1.0 - self.bound_s / step_s) if step_s else 0.0

    def gain(self, step_s: float) -> float | None:
        """Speed over the baseline less 1; None without a baseline."""
        return self.baseline_s / step_s - 1.0 if self.baseline and step_s else None
