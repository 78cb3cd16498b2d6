"""`Profile`: a recorded step, its prediction, and its bottlenecks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.core.common.documents import Count, Seconds, load, read, write_text
from autopar.cost_model.simulator.streams import Event
from autopar.errors import StrategyError
from autopar.formatting import duration

SMALL = 2.0  # maximum ratio of a small message's time to an empty message's
SATURATED = 0.8  # fraction of a step taken by collectives from which the link is saturated
WORTH_NAMING = 0.05  # minimum cost of a reported bottleneck, as a fraction of a step


@dataclass(frozen=True)
class Message:
    """One collective of a step.

    Attributes:
        name: name of the node that issues it.
        collective: kind of collective.
        nbytes: message size in bytes.
        seconds: predicted time without concurrent work, in seconds.
        empty_s: predicted time of the smallest message of its kind, in seconds.
        provenance: "measured", "imported" or "modelled".
    """

    name: str
    collective: str
    nbytes: Count
    seconds: Seconds
    empty_s: Seconds
    provenance: str

    @property
    def is_small(self) -> bool:
        """Whether latency dominates."""
        return self.seconds < SMALL * self.empty_s


@dataclass(frozen=True)
class Side:
    """One step, measured or predicted, on one rank.

    Attributes:
        step_s: duration of the step in seconds.
        operators: time of each kind of operator, in seconds.
        waits: stalls of compute for each kind of collective, in seconds.
        outside_s: time outside forward and backward (optimizer, data, Python), in seconds.
        events: timeline of the step.
        memory: (seconds, bytes) over the step; empty for a measured step.
    """

    step_s: Seconds
    operators: Mapping[str, Seconds]
    waits: Mapping[str, Seconds]
    outside_s: float
    events: tuple[Event, ...]
    memory: tuple[tuple[float, Count], ...] = ()


@dataclass(frozen=True)
class Again:
    """A plan made with calibrated times.

    Attributes:
        operators: ratio of recorded to known time of operators.
        collectives: ratio of recorded to known time, for each kind of collective with a known end.
        step_s: calibrated step time of the plan that ran, in seconds.
        best: name of the fastest plan after calibration; "" if none was searched.
        best_s: calibrated step time of the best plan, in seconds.
        same: whether the best plan is the one that ran, or is not faster.
        kept: file of the calibrated cluster; "" for none.
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
    """Recorded steps of one rank.

    Attributes:
        rank: rank of the process.
        steps_s: duration of each recorded step, in seconds.
        measured: median step, with mean waits and operators over all steps.
        predicted: simulated step on the machine, measured after the recorded steps.
        messages: collectives of the step.
        wait_of: node name of the collective, by node name of the wait.
        faster: predicted step time with collectives or operators twice as fast, in seconds.
        kinds: number of measured, imported and modelled figures in the prediction.
        cluster: origin of the times of collectives.
        again: plan made with calibrated times.
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
        """Writes the profile as JSON.

        Raises:
            StrategyError: The file cannot be written.
        """
        write_text(path, json.dumps(asdict(self)), StrategyError)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads a profile that `save` wrote.

        Raises:
            StrategyError: The file is not a profile; the message names the field.
        """
        document = load(path, "profile", StrategyError)
        return read(document, cls, str(path), StrategyError, "Record the steps again.")


@dataclass(frozen=True)
class Finding:
    """A bottleneck: its cost in seconds per step, the evidence and what would help."""

    name: str
    seconds: float
    why: str
    advice: str


def find(profiles: Sequence[Profile]) -> list[Finding]:
    """Bottlenecks in the profiles of all ranks, worst first; empty if computation dominates."""
    first = profiles[0]
    waits = [[e for e in p.measured.events if e.kind == "wait"] for p in profiles]
    mean_s = statistics.mean(sum(event.seconds for event in own) for own in waits)
    rows = [{event.name: event.seconds for event in own} for own in waits]
    least = {name: min(row.get(name, 0.0) for row in rows) for name in rows[0]}  # not late ranks
    messages = {message.name: message for message in first.messages}
    seconds = {True: 0.0, False: 0.0}
    for name, own_s in least.items():
        if message := messages.get(first.wait_of.get(name, "")):
            seconds[message.is_small] += own_s
    found = [
        _small(first, seconds[True]),
        _large(first, seconds[False]),
        _apart(mean_s, sum(least.values())),
        _idle(first.measured.outside_s, first.predicted.outside_s),
    ]
    found = [item for item in found if item.seconds >= WORTH_NAMING * first.measured.step_s]
    return sorted(found, key=lambda item: -item.seconds)


def _small(profile: Profile, seconds: float) -> Finding:
    count = sum(message.is_small for message in profile.messages)
    return Finding(
        "many small messages",
        seconds,
        f"{count} of {len(profile.messages)} collectives take less than {SMALL:g} times as long as "
        f"an empty one, and compute waits {duration(seconds)} for them (measured)",
        "larger buckets (Strategy.gather_bytes, reduce_bytes), fewer blocks in ZeRO 3, or more "
        "work a step",
    )


def _large(profile: Profile, seconds: float) -> Finding:
    total = sum(message.seconds for message in profile.messages)
    step_s = profile.measured.step_s
    faster_s = profile.predicted.step_s - profile.faster.get("collectives", 0.0)
    gain = f"collectives twice as fast would save {duration(faster_s)} (modelled)"
    waits = f"compute waits {duration(seconds)} for them (measured); {gain}"
    if total >= SATURATED * step_s:
        return Finding(
            "a saturated link",
            seconds,
            f"collectives take {duration(total)} of a step of {duration(step_s)} even alone, and "
            f"{waits}",
            "fewer bytes (a lower ZeRO stage, more rows a step, gradients kept over several "
            "batches), or a faster link",
        )
    return Finding(
        "exposed collectives",
        seconds,
        f"collectives take {duration(total)} alone and would fit beside compute, but {waits}",
        "earlier starts (Strategy.prefetch, smaller buckets), or a lower ZeRO stage where memory "
        "allows",
    )


def _apart(mean_s: float, own_s: float) -> Finding:
    """Finding on waits for late ranks, beyond the time of the collectives."""
    return Finding(
        "ranks out of step",
        max(0.0, mean_s - own_s),
        f"a rank waits {duration(mean_s)} on average, the last to come only {duration(own_s)} "
        "(measured)",
        "as many rows and as fast a device for every rank, and nothing else on their cores",
    )


def _idle(outside_s: float, update_s: float) -> Finding:
    """Finding on time outside of forward and backward, beyond the optimizer's step."""
    return Finding(
        "an idle device",
        max(0.0, outside_s - update_s),
        f"{duration(outside_s)} pass between the end of a backward and the next forward "
        f"(measured), of which the optimizer needs {duration(update_s)} (measured apart)",
        "data loaded ahead by workers, less Python between the steps, losses read less often",
    )
