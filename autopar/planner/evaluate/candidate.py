"""`CandidateConfig`: choices of the planner. `Candidate`: a simulated plan with these choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plan.buckets import Buckets
from autopar.plan.compression import Compressions
from autopar.plan.prediction import Prediction
from autopar.plan.recompute import Level
from autopar.report.plan import Plan


@dataclass(frozen=True)
class CandidateConfig:
    """Choices of the planner on one mesh.

    Attributes:
        zero_stages: ZeRO stage of each block.
        recompute: checkpointing level of each block.
        gather_bytes: size of gather buckets, in bytes.
        reduce_bytes: size of gradient buckets, in bytes.
        prefetch: number of buckets gathered ahead.
        scheduled: whether each collective is scheduled individually, instead of by `prefetch`.
        prefetch_budget_bytes: bytes that scheduled collectives may gather ahead, in addition to
            one bucket; None for no limit.
        compress: compression of each gradient bucket, or a single one for all; "" for none.
        compress_gathers: compression of gathered parameters; "" for none.
        compress_activations: compression of activations between ranks; "" for none.
        hierarchical: whether large collectives are hierarchical.
    """

    zero_stages: tuple[tuple[str, int], ...]
    recompute: tuple[tuple[str, Level], ...]
    gather_bytes: int
    reduce_bytes: int
    prefetch: int
    scheduled: bool = False
    prefetch_budget_bytes: int | None = None
    compress: tuple[str, ...] = ("",)
    compress_gathers: str = ""
    compress_activations: str = ""
    hierarchical: bool = False

    def __str__(self) -> str:
        parts = [_counted(f"zero{stage}" if stage else "ddp" for _, stage in self.zero_stages)]
        if any(level != "none" for _, level in self.recompute):
            parts.append("recompute " + _counted(level for _, level in self.recompute))
        parts.append(f"buckets {max(self.gather_bytes, self.reduce_bytes) / 2**20:g} MiB")
        if self.prefetch != 1:
            parts.append(f"prefetch {self.prefetch}")
        if self.scheduled:
            limited = self.prefetch_budget_bytes is not None
            parts.append("scheduled" + (", little ahead" if limited else ""))
        if any(self.compress):
            parts.append("gradients " + _counted(method or "whole" for method in self.compress))
        if self.compress_gathers:
            parts.append(f"parameters {self.compress_gathers}")
        if self.compress_activations:
            parts.append(f"activations {self.compress_activations}")
        if self.hierarchical:
            parts.append("by level")
        return ", ".join(parts)

    def compressions(self, buckets: Buckets) -> Compressions:
        """Compression of each bucket."""
        reduce = self.compress
        return Compressions(
            gather=(self.compress_gathers,) * len(buckets.gather),
            regather=(self.compress_gathers,) * len(buckets.regather),
            reduce=reduce * len(buckets.reduce) if len(reduce) == 1 else reduce,
            activations=self.compress_activations,
        )


@dataclass(frozen=True)
class Candidate:
    """A configuration, its plan, and the plan's prediction."""

    config: CandidateConfig
    plan: Plan
    prediction: Prediction


def _counted(values: Iterable[str]) -> str:
    """The common value, or the count of each value if they differ."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return " + ".join(f"{value} x{count}" for value, count in counts.items())
