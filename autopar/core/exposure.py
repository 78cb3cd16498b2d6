"""`Exposure`: time that compute stalls for a collective, by cause.

- *memory*: the input was ready and the axis idle, but the collective was issued later, to hold its
  buffers for less time;
- *the link*: the collective queued behind others of its axis, or shared links and cores with them;
- *data dependence*: the collective was issued as soon as possible and is needed at once. Time in
  which other ranks are late counts here, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.core.common.documents import Count, Seconds

CAUSES = ("the link", "memory", "data dependence")


@dataclass(frozen=True)
class Exposure:
    """One collective of a step, issued by the node `name` in a block of the model.

    `nbytes` is the message size in bytes, `seconds` its time alone. The stall is in three parts:
    `link_s` seconds because of other messages, `memory_s` because it was issued late to save
    memory, `dependence_s` for all other reasons.
    """

    name: str
    block: str
    collective: str
    axis: str
    nbytes: Count
    seconds: Seconds
    link_s: Seconds
    memory_s: Seconds
    dependence_s: Seconds

    @property
    def exposed_s(self) -> float:
        return self.link_s + self.memory_s + self.dependence_s

    @property
    def by_cause(self) -> dict[str, float]:
        parts = (self.link_s, self.memory_s, self.dependence_s)
        return dict(zip(CAUSES, parts, strict=True))


def apportion(
    exposed_s: float, *, delayed_s: float, postponed_s: float, late_s: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of a stall by cause: the link, memory, data dependence.

    Args:
        exposed_s: seconds that compute stalls for a collective.
        delayed_s: delay of its end by other messages, in seconds.
        postponed_s: seconds between its earliest issue on an idle axis and its issue.
        late_s: seconds of the stall after its end, waiting for late ranks.
    """
    stalled_s = max(0.0, exposed_s - late_s)
    memory_s = min(stalled_s, max(0.0, postponed_s))
    link_s = min(stalled_s - memory_s, max(0.0, delayed_s))
    return link_s, memory_s, exposed_s - link_s - memory_s


def by_cause(items: Iterable[Exposure]) -> dict[str, float]:
    """Seconds of each of CAUSES, over all collectives."""
    total = dict.fromkeys(CAUSES, 0.0)
    for item in items:
        for cause, seconds in item.by_cause.items():
            total[cause] += seconds
    return total


def worst(items: Iterable[Exposure], most: int) -> tuple[Exposure, ...]:
    """Up to `most` exposed collectives, the most exposed first."""
    exposed = (item for item in items if item.exposed_s > 0.0)
    return tuple(sorted(exposed, key=lambda item: -item.exposed_s)[:most])
