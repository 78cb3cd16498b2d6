"""`Profile`: a recorded step beside the predicted one, and what holds it up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.common.documents import Count, Seconds, load, read
from autopar.cost_model.simulator.streams import Event
from autopar.errors import StrategyError

SMALL = 2.0  # a message is small if it takes less than so many times as long as an empty one
SATURATED = 0.8  # part of a step in which one stream of collectives is under way
WORTH_NAMING = 0.05  # part of a step


@dataclass(frozen=True)
class Message:
    """One collective of a step.

    Attributes:
        name: of the node that issues it.
        collective: its kind.
        nbytes: the message size in bytes.
        seconds: its price, alone.
        empty_s: the price of the smallest message of its kind.
        provenance: of the price: "measured", "imported" or "modelled".
    """

    name: str
    collective: str
    nbytes: Count
    seconds: Seconds
    empty_s: Seconds
    provenance: str

    @property
    def is_small(self) -> bool:
        """Whether latency is most of it."""
        return self.seconds < SMALL * self.empty_s


@dataclass(frozen=True)
class Side:
    """One step, measured or predicted, on one rank.

    Attributes:
        step_s: the whole.
        operators: seconds of each kind of operator.
        waits: seconds that compute stands still, by the collective that it waits for.
        outside_s: seconds outside of forward and backward: the optimizer, data, other Python.
        events: what ran when.
        memory: bytes over seconds; only predicted.
    """

    step_s: Seconds
    operators: Mapping[str, Seconds]
    waits: Mapping[str, Seconds]
    outside_s: float
    events: tuple[Event, ...]
    memory: tuple[tuple[float, Count], ...] = ()

    @property
    def waiting_s(self) -> float:
        """Seconds of all waits."""
        return sum(self.waits.values())


@dataclass(frozen=True)
class Again:
    """What would be planned after the steps, with the figures that they showed.

    Attributes:
        operators: by which factor operators took longer than was known before.
        collectives: the same for each kind of collective that the step waited for.
        step_s: the step that ran, as predicted now.
        best: name of the plan that is now predicted to be the fastest; "" if none was looked for.
        best_s: its step, as predicted now.
        same: whether it is the plan that ran, or is not faster.
        kept: the file that the cluster was written to, if any.
    """

    operators: float
    collectives: Mapping[str, float]
    step_s: float
    best: str
    best_s: float
    same: bool
    kept: str = ""


@dataclass(frozen=True)
class Profile:
    """What one rank recorded.

    Attributes:
        rank: which.
        steps_s: seconds of each recorded step.
        measured: the middling step; waits and operators are means over all recorded.
        predicted: the same step, simulated on what was measured of this machine just after.
        messages: the collectives of the step.
        wait_of: the collective that each wait waits for, by names of nodes.
        faster: predicted seconds of the step if something were twice as fast.
        kinds: how many of the figures of the prediction are measured, imported and modelled.
        cluster: where those of collectives come from.
        again: what would be planned with what the steps showed.
    """

    rank: Count
    steps_s: tuple[Seconds, ...]
    measured: Side
    predicted: Side
    messages: tuple[Message, ...]
    wait_of: Mapping[str, str]
    faster: Mapping[str, float]
    kinds: Mapping[str, Count]
    cluster: str
    again: Again | None = None

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
            StrategyError: the file is no profile; names the field.
        """
        document = load(path, "profile", StrategyError)
        return read(document, cls, str(path), StrategyError, "Record the steps again.")


@dataclass(frozen=True)
class Finding:
    """Something that holds a step up.

    Attributes:
        name: what.
        seconds: measured seconds of the step that it costs.
        why: the figures.
        advice: what would move it.
    """

    name: str
    seconds: float
    why: str
    advice: str


def find(profiles: Sequence[Profile]) -> list[Finding]:
    """What holds the step up, worst first; empty if nothing but computing does.

    Args:
        profiles: of all ranks.
    """
    first = profiles[0]
    least = _least_waits(profiles)
    found = [*_waiting(first, least), _apart(profiles, sum(least.values())), _idle(first)]
    found = [item for item in found if item.seconds >= WORTH_NAMING * first.measured.step_s]
    return sorted(found, key=lambda item: -item.seconds)


def _least_waits(profiles: Sequence[Profile]) -> dict[str, float]:
    """Seconds that even the last rank waits, by the node that waits: the collective's own."""
    rows = [{e.name: e.seconds for e in p.measured.events if e.kind == "wait"} for p in profiles]
    return {name: min(row.get(name, 0.0) for row in rows) for name in rows[0]}


def _waiting(profile: Profile, waits: Mapping[str, float]) -> list[Finding]:
    """Waits for small messages apart from all others."""
    messages = {message.name: message for message in profile.messages}
    small_s = other_s = 0.0
    for name, seconds in waits.items():
        message = messages.get(profile.wait_of.get(name, ""))
        if message is not None:
            small_s += seconds * message.is_small
            other_s += seconds * (not message.is_small)
    return [_small(profile, small_s), _large(profile, other_s)]


def _apart(profiles: Sequence[Profile], own_s: float) -> Finding:
    """What ranks wait for each other, beyond what the collectives themselves take."""
    mean_s = statistics.mean(
        sum(e.seconds for e in p.measured.events if e.kind == "wait") for p in profiles
    )
    return Finding(
        "ranks out of step",
        max(0.0, mean_s - own_s),
        f"a rank waits {_ms(mean_s)} on average, the last to come only {_ms(own_s)} (measured)",
        "as many rows and as fast a device for every rank, and nothing else on their cores",
    )


def _small(profile: Profile, seconds: float) -> Finding:
    count = sum(message.is_small for message in profile.messages)
    return Finding(
        "many small messages",
        seconds,
        f"{count} of {len(profile.messages)} collectives take less than {SMALL:g} times as long as "
        f"an empty one, and compute waits {_ms(seconds)} for them (measured)",
        "larger buckets (Strategy.gather_bytes, reduce_bytes), fewer blocks in ZeRO 3, or more "
        "work a step",
    )


def _large(profile: Profile, seconds: float) -> Finding:
    total = sum(message.seconds for message in profile.messages)
    step_s = profile.measured.step_s
    faster_s = profile.predicted.step_s - profile.faster.get("collectives", 0.0)
    gain = f"collectives twice as fast would save {_ms(faster_s)} (modelled)"
    if total >= SATURATED * step_s:
        return Finding(
            "a saturated link",
            seconds,
            f"collectives take {_ms(total)} of a step of {_ms(step_s)} even alone, and compute "
            f"waits {_ms(seconds)} for them (measured); {gain}",
            "fewer bytes (a lower ZeRO stage, more rows a step, gradients kept over several "
            "batches), or a faster link",
        )
    return Finding(
        "exposed collectives",
        seconds,
        f"collectives take {_ms(total)} alone and would fit beside compute, but compute waits "
        f"{_ms(seconds)} for them (measured); {gain}",
        "earlier starts (Strategy.prefetch, smaller buckets), or a lower ZeRO stage where memory "
        "allows",
    )


def _idle(profile: Profile) -> Finding:
    """What the step has outside of the program, beyond the optimizer's predicted step."""
    outside_s, update_s = profile.measured.outside_s, profile.predicted.outside_s
    return Finding(
        "an idle device",
        max(0.0, outside_s - update_s),
        f"{_ms(outside_s)} pass between the end of a backward and the next forward (measured), of "
        f"which the optimizer needs {_ms(update_s)} (measured apart)",
        "data loaded ahead by workers, less Python between the steps, losses read less often",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
