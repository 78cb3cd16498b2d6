"""`Pipeline`: the stages of a plan and their schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from autopar.core.common.documents import Count, Ranks
from autopar.core.schedules import V_SCHEDULES, stage_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", *V_SCHEDULES)

Schedule = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SCHEDULES)})$")]


@dataclass(frozen=True)
class Pipeline:
    """Stages of a model along the axis "pp", and their schedule.

    Stages are delimited by uses of parameters, so they apply to every call of the model, with any
    number of rows.

    Attributes:
        ranks: size of the axis "pp".
        schedule: one of `SCHEDULES`.
        micro_batches: number of micro-batches of a rank's rows.
        stages_per_rank: number of stages of a rank.
        uses: stage of each use of each parameter, in execution order; an unused parameter has the
            stage that stores it.
        rows: rows of the first rank's batch, rounded up to micro-batches of equal size.
    """

    ranks: Ranks
    schedule: Schedule
    micro_batches: Ranks
    stages_per_rank: Ranks = 1
    uses: tuple[tuple[str, tuple[Count, ...]], ...] = ()
    rows: Count = 0

    def __str__(self) -> str:
        """Schedule, stages per rank if several, and micro-batches."""
        several = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        parts = f"{self.micro_batches} micro-batch{'es' if self.micro_batches != 1 else ''}"
        return f"{self.schedule}{several}, {parts}" if self.stages > 1 else parts

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.stages_per_rank

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank of the axis that runs each stage."""
        return stage_ranks(self.schedule, self.ranks, self.stages_per_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank of the axis."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    def rank_of(self, stage: int) -> int:
        """Rank of the axis that runs a stage."""
        return self.stage_ranks[stage]

    @property
    def owners(self) -> dict[str, int]:
        """Stage that stores each parameter: the stage of its first use."""
        return {name: stages[0] for name, stages in self.uses}

    def held(self, rank: int) -> frozenset[str]:
        """Parameters that a rank of the axis stores."""
        owners = self.owners.items()
        return frozenset(name for name, stage in owners if self.rank_of(stage) == rank)

    @property
    def starts(self) -> tuple[str, ...]:
        """First parameter of each stage but the first; "" for a stage without parameters."""
        owners = self.owners.items()
        return tuple(
            next((name for name, owner in owners if owner == stage), "")
            for stage in range(1, self.stages)
        )
