"""A GPU that is not there: queues, a clock of each and one of the host.

Kernels are Python functions that `launch`. Tensors stay on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NAME = "NVIDIA H100 80GB HBM3"
GIB = 2**30


class FakeCuda:
    """Times in seconds: `now` of the host, `free_at` when a stream has done all it was given.

    Attributes:
        stream: the current stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        """Replaces torch.cuda's functions, and `sleep_on_gpu` of these modules."""
        self.now = 0.0
        self.stream = SimpleNamespace(free_at=0.0)
        self.streams = [self.stream]
        self.name, self.free, self.reserved, self.allocated = NAME, 70 * GIB, 0, 0
        self.properties = SimpleNamespace(
            L2_cache_size=50 * 2**20, total_memory=80 * GIB, multi_processor_count=132, major=9
        )
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any = None) -> None:
                fake.now += 1e-6
                stream = stream or fake.stream
                self.at = stream.free_at = max(stream.free_at, fake.now)

            def query(self) -> bool:
                return self.at <= fake.now

            def synchronize(self) -> None:
                fake.now = max(fake.now, self.at)

            def elapsed_time(self, other: Event) -> float:
                assert self.query(), "an event is read before the device has reached it"
                assert other.query(), "an event is read before the device has reached it"
                return (other.at - self.at) * 1e3

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.free_at = 0.0
                fake.streams.append(self)

            def wait_event(self, event: Event) -> None:
                self.free_at = max(self.free_at, event.at)

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, fake.stream = fake.stream, chosen
            yield
            fake.stream = before

        functions = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_name": lambda device=None: self.name,
            "get_device_properties": lambda device=None: self.properties,
            "mem_get_info": lambda device=None: (self.free, self.properties.total_memory),
            "memory_reserved": lambda device=None: self.reserved,
            "memory_allocated": lambda device=None: self.allocated,
            "synchronize": lambda device=None: self.synchronize(),
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
            "Event": Event,
            "Stream": Stream,
            "stream": stream,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        for module in modules:
            monkeypatch.setattr(module, "sleep_on_gpu", lambda cycles: self.launch(cycles / 1.5e9))

    @property
    def free_at(self) -> float:
        return self.stream.free_at

    @free_at.setter
    def free_at(self, at_s: float) -> None:
        self.stream.free_at = at_s

    def launch(self, device_s: float, host_s: float = 0.0) -> None:
        """Issues a kernel: it starts once the host has issued it and its stream is free."""
        self.now += host_s
        self.free_at = max(self.free_at, self.now) + device_s

    def synchronize(self) -> None:
        self.now = max(self.now, *(stream.free_at for stream in self.streams))
