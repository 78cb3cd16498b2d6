"""Clocks of the recorder: marks in the time of the device that computes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


class HostClock:
    """Marks on a CPU: seconds of `time.perf_counter`."""

    def mark(self, before: Any = None) -> Any:
        """Now; `before` is the mark of the previous operator."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def is_pure(self, mark: Any) -> bool:
        """Whether the time since the mark before is that of an operator alone."""
        return True

    def synchronize(self) -> None:
        """Waits until all marks can be read."""


@dataclass(frozen=True)
class EventMark:
    """A CUDA event, and whether the device had not yet reached the one before it."""

    event: torch.cuda.Event
    queued: bool


class DeviceClock(HostClock):
    """Marks on a GPU: events in the current stream.

    Between two events lies what the device did for an operator. If it had nothing to do when the
    host issued the operator, that includes the launch. The earlier event is then over before the
    later one is recorded.
    """

    def mark(self, before: EventMark | None = None) -> EventMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return EventMark(event, before is not None and not before.event.query())

    def seconds(self, start: EventMark, end: EventMark) -> float:
        return start.event.elapsed_time(end.event) / 1e3

    def is_pure(self, mark: EventMark) -> bool:
        return mark.queued

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> HostClock:
    """The clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
