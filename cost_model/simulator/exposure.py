"""`Exposure`: how long compute stands still for a collective, and why.

What a wait costs is told apart:

- *memory*: what it sends was there and its axis was idle, but it was issued later, so as to hold
  its buffers for less;
- *the link*: the collective queued behind others of its axis, or would have, had it been issued
  sooner; or it shared links and cores with others;
- *data dependence*: it was issued as soon as there was something to send, and is needed at once.
  Time in which other ranks come late counts here, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.common.documents import Count, Seconds

CAUSES = ("the link", "memory", "data dependence")


@dataclass(frozen=True)
class Exposure:
    """One collective of a step.

    Attributes:
        name: of the node that issues it.
        block: the block of the model that it belongs to, "" outside of any.
        collective: one of `collectives.COLLECTIVES`.
        axis: the mesh axis that it runs over.
        nbytes: size of the message.
        seconds: how long it takes alone.
        link_s: seconds that compute waits because of what else is sent.
        memory_s: seconds that it waits because the collective was held back.
        dependence_s: seconds that it waits for all other reasons.
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
        """Seconds that compute stands still for it."""
        return self.link_s + self.memory_s + self.dependence_s

    @property
    def by_cause(self) -> dict[str, float]:
        """The seconds of each of CAUSES."""
        parts = (self.link_s, self.memory_s, self.dependence_s)
        return dict(zip(CAUSES, parts, strict=True))


def apportion(
    exposed_s: float, *, delayed_s: float, held_s: float, late_s: float = 0.0
) -> tuple[float, float, float]:
    """What is exposed, by cause: the link, memory, data dependence.

    Args:
        exposed_s: seconds that compute stands still for a collective.
        delayed_s: by how much it would have ended earlier, had nothing else been sent.
        held_s: for how long it was not issued although it could have been, and its axis was idle.
        late_s: seconds of the wait in which it had ended, but other ranks had not come.
    """
    own_s = max(0.0, exposed_s - late_s)
    memory_s = min(own_s, max(0.0, held_s))
    link_s = min(own_s - memory_s, max(0.0, delayed_s))
    return link_s, memory_s, exposed_s - link_s - memory_s


def by_cause(items: Iterable[Exposure]) -> dict[str, float]:
    """The seconds of each of CAUSES, over all collectives."""
    total = dict.fromkeys(CAUSES, 0.0)
    for item in items:
        for cause, seconds in item.by_cause.items():
            total[cause] += seconds
    return total


def worst(items: Iterable[Exposure], most: int) -> tuple[Exposure, ...]:
    """The collectives that are exposed most, at most so many; none that is hidden."""
    exposed = (item for item in items if item.exposed_s > 0.0)
    return tuple(sorted(exposed, key=lambda item: -item.exposed_s)[:most])
