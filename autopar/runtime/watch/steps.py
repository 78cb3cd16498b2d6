"""`StepWatch`: the last training steps of a module, as this rank saw them."""

from __future__ import annotations

import resource
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch

from autopar.capture.call import BatchShard, TensorSpec
from autopar.core.operators.routing import LOADS, Loads
from autopar.core.plan.prediction import Prediction
from autopar.runtime.watch.collective_log import LOG
from autopar.runtime.watch.stragglers import Pace

WINDOW = 32
"""Steps that the figures are medians of."""


class Step(NamedTuple):
    """One training step: from one training call to the next.

    Attributes:
        seconds: duration in seconds.
        waited_s: seconds in which this rank waited for other ranks.
        rows: rows of the whole batch.
        own_rows: rows of this rank.
        tokens: tokens of the whole batch, 0 without any.
        imbalance: rows of the busiest rank over an even share, where rows go to their experts;
            None elsewhere.
    """

    seconds: float
    waited_s: float
    rows: int
    own_rows: int
    tokens: float
    imbalance: float | None = None


@dataclass
class StepWatch:
    """The last training steps of a module.

    Attributes:
        steps: the last `WINDOW` steps.
        start: time and seconds waited at the beginning of the step in progress, None outside.
        loads: `LOADS` at that time.
        rows: rows of the batch and of this rank, and tokens of the batch, in that step.
        untold: number of steps since the last `pace`.
    """

    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=WINDOW))
    start: tuple[float, float] | None = None
    loads: Loads = field(default_factory=Loads)
    rows: tuple[int, int, float] = (0, 0, 0.0)
    untold: int = 0

    def begin(self, *, trains: bool) -> None:
        """Begins a step; a call that does not train ends the one in progress uncounted."""
        now = perf_counter(), LOG.waited_s
        if trains and self.start is not None:
            seconds, waited_s = now[0] - self.start[0], now[1] - self.start[1]
            self.steps.append(Step(seconds, waited_s, *self.rows, self.imbalance))
            self.untold += 1
        self.start, self.loads = now if trains else None, replace(LOADS)

    @property
    def imbalance(self) -> float | None:
        """Mean of the busiest ranks' loads since the beginning of the step in progress."""
        layers = LOADS.layers - self.loads.layers
        return (LOADS.ratios - self.loads.ratios) / layers if layers else None

    def take(self, shard: BatchShard) -> None:
        """Remembers the numbers of rows and tokens of the step in progress."""
        rows = shard.slices.rows
        tokens = next((_size(x) for x in shard.call.leaves if _is_tokens(x)), 0)
        self.rows = rows, shard.rows, tokens * rows / max(shard.rows, 1)

    def restart(self) -> None:
        """Forgets all steps."""
        self.steps.clear()
        self.start, self.untold = None, 0

    def pace(self, stage: int) -> Pace | None:
        """Medians to compare with those of other ranks, once in `WINDOW` steps."""
        if self.untold < WINDOW:
            return None
        self.untold = 0
        waited_s, total_s = (
            median(s.waited_s for s in self.steps),
            sum(s.seconds for s in self.steps),
        )
        work_s = median(s.seconds - s.waited_s for s in self.steps)
        return Pace(work_s, self.seconds_per_row, waited_s, total_s, stage)

    @property
    def seconds_per_row(self) -> float:
        """Median seconds of this rank's own work for one of its rows; 0 before a step."""
        return median([(s.seconds - s.waited_s) / s.own_rows for s in self.steps] or [0.0])

    def metrics(
        self, predicted: Prediction | None, device: torch.device, ranks: int, *, sees_waits: bool
    ) -> dict[str, float]:
        """Figures of the last steps; see `DistributedModule.metrics`."""
        found = {"memory_bytes": float(_peak_bytes(device))}
        if self.steps:
            found["step_s"] = step_s = median(s.seconds for s in self.steps)
            found["rows_per_s"] = median(s.rows / s.seconds for s in self.steps)
            if any(s.tokens for s in self.steps):
                found["tokens_per_s"] = median(s.tokens / s.seconds for s in self.steps)
            if uneven := [s.imbalance for s in self.steps if s.imbalance is not None]:
                found["expert_imbalance"] = fmean(uneven)
            if sees_waits:
                found["exposed_s"] = median(s.waited_s for s in self.steps)
            if predicted is not None and predicted.work is not None and predicted.work.peak:
                work = predicted.work
                share = median(s.rows for s in self.steps) / work.rows if work.rows else 1.0
                found["mfu"] = work.utilisation(step_s, ranks) * share
        if predicted is not None:
            found["predicted_step_s"] = predicted.step_s
            found["predicted_exposed_s"] = predicted.exposed_s
            found["predicted_memory_bytes"] = float(predicted.needed_bytes)
            if predicted.work is not None:
                found["predicted_rows_per_s"] = predicted.work.rows / predicted.step_s
                if predicted.work.tokens:
                    found["predicted_tokens_per_s"] = predicted.work.tokens / predicted.step_s
                if predicted.work.peak:
                    found["predicted_mfu"] = predicted.work.utilisation(predicted.step_s, ranks)
        return found


def _is_tokens(leaf: object) -> bool:
    if not isinstance(leaf, TensorSpec):
        return False
    return len(leaf.shape) == 2 and not leaf.dtype.is_floating_point


def _size(leaf: TensorSpec) -> int:
    return leaf.shape[0] * leaf.shape[1]


def _peak_bytes(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU; on a CPU those that the process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
