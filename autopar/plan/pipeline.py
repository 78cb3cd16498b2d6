"""`Pipeline`: which stage does what, and in which order, as a plan keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from autopar.common.documents import Count, Ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")

Schedule = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(SCHEDULES)})$")]


@dataclass(frozen=True)
class Pipeline:
    """What was decided along the axis of stages.

    Stages lie around the ranks: stage s runs on rank s % ranks. A stage is what the forward does
    from one use of a parameter to another: so it is known of any call of the model, at whatever
    rows and in whatever mode.

    Attributes:
        ranks: of the axis pp.
        schedule: one of `SCHEDULES`.
        micro_batches: into how many parts a rank's rows are cut; they pass one after the other.
        stages_per_rank: how many stages a rank runs.
        uses: for each parameter in the order of the model, the stage of each of its uses; one
            that is not used has the stage that holds it.
    """

    ranks: Ranks
    schedule: Schedule
    micro_batches: Ranks
    stages_per_rank: Ranks = 1
    uses: tuple[tuple[str, tuple[Count, ...]], ...] = ()
    rows: Count = 0

    def __str__(self) -> str:
        """The order, how many stages a rank runs if several, and micro-batches."""
        several = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        parts = f"{self.micro_batches} micro-batches"
        return f"{self.schedule}{several}, {parts}" if self.stages > 1 else parts

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> range:
        """The stages that a rank of the axis runs."""
        return range(rank, self.stages, self.ranks)

    def rank_of(self, stage: int) -> int:
        """The rank of the axis that runs a stage."""
        return stage % self.ranks

    @property
    def owners(self) -> dict[str, int]:
        """The stage that holds each parameter: that of its first use."""
        return {name: stages[0] for name, stages in self.uses}

    def held(self, rank: int) -> frozenset[str]:
        """The parameters that a rank of the axis holds."""
        owners = self.owners.items()
        return frozenset(name for name, stage in owners if self.rank_of(stage) == rank)

    @property
    def starts(self) -> tuple[str, ...]:
        """The parameter that each stage but the first begins with; "" where it holds none."""
        owners = self.owners.items()
        return tuple(
            next((name for name, owner in owners if owner == stage), "")
            for stage in range(1, self.stages)
        )
