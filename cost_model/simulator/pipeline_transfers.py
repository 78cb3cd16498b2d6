"""`with_transfers`: the actions of a pipeline's ranks, with the transfers between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from autopar.core.schedules import Kind, Orders, ranks_in

if TYPE_CHECKING:
    from autopar._torch_dynamo import PipelineAction

# by the values of torch's kinds, whose module is loaded for pipelines only
RECEIVES: Mapping[str, Kind] = {"RECV_F": "F", "RECV_B": "B"}
TRANSFERS = (*RECEIVES, "SEND_F", "SEND_B")

Actions = tuple["PipelineAction", ...]
Input = tuple[Kind, int]
"""An input of a forward or a backward, "F" or "B", of a stage."""


@lru_cache(maxsize=4)  # those of hundreds of stages take 100 MB
def with_transfers(orders: Orders, *, hoisted: bool) -> tuple[Actions, ...]:
    """Adds the sends and receives of torch's runtime to the actions of each rank.

    A receive stands where the peer sends, which can be several actions before its use. `hoisted`
    receives stand before the preceding work too, so that transfers overlap with it: gloo sends only
    what the peer has asked for.
    """
    from autopar._torch_dynamo import PipelineAction, PipelineWork, add_transfers

    places = ranks_in(orders)
    actions = {
        rank: [PipelineAction(a.stage, PipelineWork(a.kind), a.micro) for a in order]
        for rank, order in enumerate(orders)
    }
    found = add_transfers(actions, places.__getitem__, len(places))
    each = (found[rank] for rank in range(len(orders)))
    return tuple(hoist_receives(own) if hoisted else tuple(own) for own in each)


def hoist_receives(actions: Iterable[PipelineAction]) -> Actions:
    """Moves each receive before the preceding work. Receives from one rank keep their order."""
    found: list[PipelineAction] = []
    for action in actions:
        place = len(found)
        if action.computation_type.value in RECEIVES:
            before = ((i, found[i].computation_type.value) for i in reversed(range(place)))
            place = next((i for i, kind in before if kind not in TRANSFERS), place)
        found.insert(place, action)
    return tuple(found)


def inputs_ahead(actions: Iterable[PipelineAction]) -> list[list[Input]]:
    """Inputs of later actions for which a rank has made room, at each of its actions.

    Those that another stage of the rank has computed count from then on.
    """
    found: list[list[Input]] = []
    waiting: dict[tuple[str, int, int | None], Input] = {}
    actions = tuple(actions)
    stages = {action.stage_index for action in actions}
    for action in actions:
        kind, stage = action.computation_type.value, action.stage_index
        micro = action.microbatch_index
        if kind in RECEIVES:
            waiting[RECEIVES[kind], stage, micro] = RECEIVES[kind], stage
        elif kind not in TRANSFERS:
            of: Kind = "F" if kind == "F" else "B"
            waiting.pop((of, stage, micro), None)
            found.append(list(waiting.values()))
            peer = stage + (1 if of == "F" else -1)
            if kind != "W" and peer in stages:
                waiting[of, peer, micro] = of, peer
    return found
