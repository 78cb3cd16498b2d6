"""`CandidateConfig`: choices of the planner. `Candidate`: a simulated plan with these choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.buckets import BUCKET_BYTES, Buckets
from autopar.core.plan.compression import Compression, Compressions
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.recompute import Level
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.memory.growth import Parts


@dataclass(frozen=True)
class CandidateConfig:
    """Choices of the planner on one mesh.

    Attributes:
        offload: blocks whose saved activations lie on a lower level of memory.
        offload_parameters: whether parameters lie there.
        loss_chunks: number of chunks in which logits and their loss are computed.
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
    offload: tuple[str, ...] = ()
    offload_parameters: bool = False
    loss_chunks: int = 1

    def named(self, mesh: Mapping[str, int]) -> str:
        """The name of its plan: axes of the mesh, ZeRO stages, and the other choices."""
        parts = [f"{axis}{size}" for axis, size in mesh.items() if axis != DATA_AXIS]
        if mesh[DATA_AXIS] > 1 or any(stage for _, stage in self.zero_stages):
            stages = (f"zero{stage}" if stage else "data parallel" for _, stage in self.zero_stages)
            parts.append(_counted(stages))
        parts = parts or ["single device"]
        if any(level != "none" for _, level in self.recompute):
            parts.append("recompute " + _counted(level for _, level in self.recompute))
        if self.offload:
            parts.append(f"offload x{len(self.offload)}")
        if self.offload_parameters:
            parts.append("parameters offloaded")
        if self.loss_chunks > 1:
            parts.append(f"loss in {self.loss_chunks} chunks")
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
        reduce = self.compress
        return Compressions(
            gather=(self.compress_gathers,) * len(buckets.gather),
            regather=(self.compress_gathers,) * len(buckets.regather),
            reduce=reduce * len(buckets.reduce) if len(reduce) == 1 else reduce,
            activations=self.compress_activations,
        )


@dataclass(frozen=True)
class Candidate:
    """A configuration, its plan, and the plan's prediction.

    Attributes:
        host_cap: bytes of host memory of a rank; None if unknown.
        parts: memory of the parts of a step; None if the plan has stages or was not lowered.
    """

    config: CandidateConfig
    plan: Plan
    prediction: Prediction
    host_cap: int | None = None
    parts: Parts | None = None

    def with_plan(self, **changes: Any) -> Candidate:
        """This candidate with changed fields of its plan."""
        return replace(self, plan=replace(self.plan, **changes))

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def needed_bytes(self) -> int:
        return self.prediction.needed_bytes

    def fits(self, cap: int | None) -> bool:
        """Whether it needs at most `cap` bytes, None for no cap, and at most `host_cap`."""
        if self.host_cap is not None and self.prediction.host_bytes > self.host_cap:
            return False
        return self.prediction.fits(cap)


def _counted(values: Iterable[str]) -> str:
    """The common value, or the count of each value if they differ."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return " + ".join(f"{value} x{count}" for value, count in counts.items())


def fixed_config(strategy: Strategy, blocks: Sequence[str]) -> CandidateConfig | None:
    """The configuration of a strategy that leaves nothing to search; None if it leaves anything."""
    fixed: list[object]
    fixed = [strategy.zero, strategy.recompute, strategy.gather_bytes, strategy.reduce_bytes]
    if strategy.stages > 1:
        interleaved = (strategy.stages_per_rank or 1) > 1
        fixed += [strategy.micro_batches, strategy.schedule or interleaved or None]
    open_to_loss = strategy.compress is None and strategy.lossy
    if open_to_loss or strategy.offload == "auto" or any(value is None for value in fixed):
        return None
    return default_config(strategy, blocks, 0)


def default_config(strategy: Strategy, blocks: Sequence[str], zero_stage: int) -> CandidateConfig:
    """The configuration of a strategy, with `zero_stage` for blocks for which it names none."""
    if isinstance(strategy.zero, int):
        zero_stages = dict.fromkeys(blocks, strategy.zero)
    else:
        zero_stages = {**dict.fromkeys(blocks, zero_stage), **(strategy.zero or {})}
    contents = (strategy.offload or "").split("+")
    return CandidateConfig(
        zero_stages=tuple((block, zero_stages[block]) for block in blocks),
        recompute=tuple((block, strategy.recompute or "none") for block in blocks),
        gather_bytes=strategy.gather_bytes or BUCKET_BYTES,
        reduce_bytes=strategy.reduce_bytes or BUCKET_BYTES,
        prefetch=1 if strategy.prefetch is None else strategy.prefetch,
        compress=(compression_of(strategy.compress),),
        compress_gathers=compression_of(strategy.compress_gathers),
        compress_activations=compression_of(strategy.compress_activations),
        hierarchical=bool(strategy.hierarchical),
        offload=tuple(blocks) if "activations" in contents else (),
        offload_parameters="parameters" in contents,
        loss_chunks=strategy.loss_chunks or 1,
    )


def compression_of(method: str | Compression | None) -> str:
    """A compression as a plan writes it; "" for none."""
    return "" if method in (None, "none") else str(Compression.of(method))
