"""`StageBlocks`: the blocks of each stage of a pipeline, and the stages of all parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.errors import StrategyError
from autopar.passes.pipeline_parallel.stage_dependence import parameter_uses
from autopar.planner.evaluate.cut_points import CutPoints, Uses
from autopar.planner.extended.reduced_models import ReducedModel, ReducedModels
from autopar.planner.extended.whole_setup import whole_table

FEWEST = 2
"""Blocks of each stage of a reduced model; of another one it has one more."""

ROLES = 3
"""Stages of a reduced model: the first, one in the middle, and the last."""


class UnevenStagesError(StrategyError):
    """The stages of a model do not follow from few of its blocks."""


@dataclass(frozen=True)
class StageBlocks:
    """Blocks of a kind in each stage, in the order of the forward.

    Attributes:
        stages: names of the blocks of each stage.
    """

    stages: tuple[tuple[str, ...], ...]

    @staticmethod
    def balanced(
        blocks: Sequence[str], rank_of: Sequence[int], loads: Sequence[float], block_s: float
    ) -> StageBlocks:
        """The blocks such that the slowest rank takes as little time as possible.

        Args:
            blocks: names of all blocks of the kind, at least as many as stages.
            rank_of: rank of each stage.
            loads: seconds of each stage without such blocks.
            block_s: seconds of a block.
        """
        counts = [1] * len(rank_of)
        busy_s = [0.0] * (max(rank_of) + 1)
        for stage, rank in enumerate(rank_of):
            busy_s[rank] += loads[stage] + block_s
        for _ in range(len(blocks) - len(counts)):
            rank = min(range(len(busy_s)), key=lambda each: busy_s[each])
            own = (stage for stage, at in enumerate(rank_of) if at == rank)
            stage = min(own, key=lambda each: loads[each] + counts[each] * block_s)
            counts[stage] += 1
            busy_s[rank] += block_s
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        starts = [0, *ends[:-1]]
        return StageBlocks(tuple(tuple(blocks[a:b]) for a, b in zip(starts, ends, strict=True)))

    def uses(
        self,
        models: ReducedModels,
        reduced: ReducedModel,
        uses: Uses,
        parameters: Mapping[str, ParameterInfo],
    ) -> Uses:
        """Stages of all uses of the whole model's `parameters`, from those of a reduced model."""
        stage_of = {block: stage for stage, own in enumerate(self.stages) for block in own}
        last, stages = len(self.stages) - 1, dict[str, tuple[int, ...]]()
        for name, at in whole_table(models, reduced, uses):
            block = parameters[name].block
            stages[name] = tuple(
                stage_of.get(block, last if stage == ROLES - 1 else 0)
                for stage in at  # type: ignore[attr-defined]
            )
        return tuple((name, stages[name]) for name in parameters if name in stages)


def reduced_stages(reduced: ReducedModel, graph: TrainingGraph, alike: Sequence[str]) -> Uses:
    """Uses of a reduced model's parameters by its three stages of equally many blocks.

    Raises:
        UnevenStagesError: a block is used in several places, or what is shared lies between blocks.
    """
    points = CutPoints.of(parameter_uses(graph), graph.parameters)
    own = {name: block for name, block in _blocks(reduced) if block in alike}
    order = list(dict.fromkeys(own[n] for names in points.names for n in names if n in own))
    each = len(order) // ROLES
    if each < FEWEST:
        raise UnevenStagesError("the model has too few blocks of one kind for stages of them")
    places = [{own.get(name) for name in names} for names in points.names]
    at = {block: [i for i, found in enumerate(places) if block in found] for block in order}
    first, last = min(at[order[0]]), max(at[order[-1]])
    runs = [span for block in order for span in (min(at[block]), max(at[block]))]
    if runs != sorted(runs) or any(found == {None} for found in places[first : last + 1]):
        raise UnevenStagesError("the blocks of a kind do not follow one another")
    return points.stages((min(at[order[each]]), min(at[order[-each]])))


def _blocks(reduced: ReducedModel) -> Iterator[tuple[str, str]]:
    for name, info in reduced.parameters.items():
        yield name, reduced.blocks[info.block]
