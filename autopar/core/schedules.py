"""Pipeline schedules: the order of stages and micro-batches on each rank.

GPipe: Huang et al. 2019 (arXiv 1811.06965). 1F1B: PipeDream-Flush, Narayanan et al. 2021 (arXiv
2006.09503). Interleaved: Megatron-LM (arXiv 2104.04473), here for any number of micro-batches. Zero
bubble: ZB-H1 of Qi et al. 2023 (arXiv 2401.10241), which holds no more activations than 1F1B does
on its first rank. ZB-V: its section 6, and Qi et al. 2024 (arXiv 2405.15362). DualPipe-V: of
DeepSeek-V3 (arXiv 2412.19437), cut in half. torch has the orders of these two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
ENDS = ("B", "W")
"""Kinds after which a stage needs nothing of a micro-batch any more."""

V_SCHEDULES = ("zbv", "dualpipe_v")
"""Schedules whose ranks have two stages each, in a V: the first and the last are on rank 0."""

SPLIT_SCHEDULES = ("zero_bubble", *V_SCHEDULES)
"""Schedules that compute input and weight gradients apart."""


class Action(NamedTuple):
    """One step of a rank's order.

    Attributes:
        kind: "F" forward, "B" backward, "I" input gradients, "W" weight gradients: B is I and W.
        stage: stage of the pipeline.
        micro: micro-batch.
    """

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Order = tuple[Action, ...]
Orders = tuple[Order, ...]


def stage_ranks(schedule: str, ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank of each stage: stage s is on rank s % ranks, or in a V."""
    if schedule in V_SCHEDULES:
        return (*range(ranks), *reversed(range(ranks)))
    return (*range(ranks),) * stages_per_rank


def ranks_in(orders: Orders) -> tuple[int, ...]:
    """The rank of each stage, of which each has an action at least."""
    found = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    return tuple(found[stage] for stage in range(len(found)))


def orders(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Orders:
    """The actions of each rank, in order.

    The schedule is "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv" or "dualpipe_v". "gpipe"
    and "interleaved" allow several stages on a rank; the last two have two.

    Raises:
        ValueError: the schedule is unknown, or does not allow that many stages on a rank.
    """
    if schedule in V_SCHEDULES:
        if stages_per_rank != 2:
            raise ValueError(f"{schedule!r} has two stages on a rank, not {stages_per_rank}")
        return _in_a_v(schedule, ranks, micro_batches)
    if schedule == "gpipe":
        forwards, backwards = split_orders(schedule, ranks, micro_batches, stages_per_rank)
        return tuple(map(tuple.__add__, forwards, backwards))
    if schedule == "interleaved":
        each = (_interleaved(r, ranks, micro_batches, stages_per_rank) for r in range(ranks))
    elif stages_per_rank > 1:
        raise ValueError(f"{schedule!r} has one stage on a rank, not {stages_per_rank}")
    elif schedule == "1f1b":
        each = (_interleaved(r, ranks, micro_batches, 1) for r in range(ranks))
    elif schedule == "zero_bubble":
        each = (_zero_bubble(r, ranks, micro_batches) for r in range(ranks))
    else:
        raise ValueError(f"{schedule!r} is no schedule")
    return tuple(map(tuple, each))


def split_orders(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> tuple[Orders, Orders]:
    """GPipe's forwards and its backwards, for a loss that is computed between them.

    Stages lie as they do under `schedule`.
    """
    micros, places = range(micro_batches), stage_ranks(schedule, ranks, stages_per_rank)
    stages = [[stage for stage, at in enumerate(places) if at == r] for r in range(ranks)]
    forwards = tuple(tuple(Action("F", s, m) for s in own for m in micros) for own in stages)
    backwards = tuple(
        tuple(Action("B", s, m) for s in reversed(own) for m in micros) for own in stages
    )
    return forwards, backwards


def in_flight(order: Order, stage: int) -> int:
    """Most micro-batches for which a stage holds activations at once."""
    steps = (
        1 if action.kind == "F" else -(action.kind in ENDS)
        for action in order
        if action.stage == stage
    )
    return max(accumulate(steps), default=0)


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B over the stages of a rank: warm-up forwards, then one backward after each forward.

    A group of micro-batches passes through one stage of the rank, then through its next one. Groups
    have at least as many micro-batches as there are ranks, so that the next stage need not wait.
    """
    number = max(1, micro_batches // ranks)
    sizes = sorted(((micro_batches + i) // number for i in range(number)), reverse=True)
    starts = accumulate(sizes, initial=0)
    groups = [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action("F", s, m) for group in groups for s in stages for m in group]
    backwards = [Action("B", s, m) for group in groups for s in reversed(stages) for m in group]
    ahead = ranks - rank - 1
    warm_up = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * len(groups[0])
    yield from _alternate(forwards, backwards, warm_up)


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """ZB-H1: 1F1B with weight gradients deferred to idle time.

    Rank r defers r of them, because it has that many fewer micro-batches in flight than the first
    rank. All ranks then hold equally many.
    """
    micros = range(micro_batches)
    forwards = [Action("F", rank, m) for m in micros]
    inputs = [Action("I", rank, m) for m in micros]
    for action in _alternate(forwards, inputs, ranks - rank - 1):
        yield action
        if action.kind == "I" and action.micro >= rank:
            yield Action("W", rank, action.micro - rank)
    yield from (Action("W", rank, m) for m in micros[max(0, micro_batches - rank) :])


def _in_a_v(schedule: str, ranks: int, micro_batches: int) -> Orders:
    """Torch's order for two stages a rank, without the micro-batches that it has and the call not.

    It keeps its order without any of them, since micro-batches do not wait for each other.
    """
    from autopar._torch_dynamo import v_schedule  # loads Dynamo

    every = v_schedule(schedule, ranks, max(micro_batches, 2 * ranks))
    return tuple(
        tuple(Action(kind, s, m) for kind, s, m in order if m < micro_batches)  # type: ignore[arg-type]
        for order in every
    )


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> Iterator[Action]:
    """`warm_up` forwards, then one backward after each forward, then the other backwards."""
    yield from forwards[:warm_up]
    for pair in zip_longest(forwards[warm_up:], backwards):
        yield from (action for action in pair if action is not None)
