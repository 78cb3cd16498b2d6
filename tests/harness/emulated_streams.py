"""Streams of a GPU on a CPU: copies beside compute run as late as their events allow.

with emulated_streams() as gpu:
    ...                          # tensors of the CPU stand for a GPU's
assert not gpu.errors

Compute runs at once. A copy on another stream runs when an event after it is waited for, so that
a missing wait leaves old numbers. torch's CUDA sanitizer checks that accesses to the same memory
are ordered by events, and memory that goes while a copy needs it is an error.
"""

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.common.block_storage import round_up
from autopar.core.operators import host_copies, offload, parameters
from autopar.core.operators.host_copies import HostCopies
from autopar.train.offload import state_transfers

KERNELS: dict[Any, Callable[..., Tensor]] = {
    offload.offload: offload._offload,
    offload.offloaded: offload._offloaded,
    offload.prefetch: offload._prefetch,
    offload.prefetched: offload._prefetched,
    parameters.fetch: parameters._fetch,
    parameters.fetched: parameters._fetched,
}
"""autopar's operators, whose own calls are emulated, too."""

COMPUTE = 0


class EmulatedStreams(TorchDispatchMode):
    """Emulates torch.cuda's streams and events, and pinned memory.

    Attributes:
        errors: accesses that no event orders, and memory that went too early.
        copies: number of copies beside compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.copies = 0
        self._order, self._lock = EventHandler(), threading.RLock()
        self._numbers = itertools.count(1)
        self.compute = Stream(self, COMPUTE)
        self.current = self.compute

    def next_number(self) -> int:
        return next(self._numbers)

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KERNELS and _tensors(args):
            with self:
                return KERNELS[func](*args, **kwargs)
        if self.current is not self.compute:
            assert func is torch.ops.aten.copy_.default, f"{func} runs beside compute"
            return self._copy_later(*args)
        result = func(*args, **kwargs)
        self._check(func, args, kwargs, result)
        return result

    def _copy_later(self, target: Tensor, source: Tensor, _: bool = False) -> Tensor:
        self.copies += 1
        self._launch("copy", reads={_memory(source)}, writes={_memory(target)})
        self.current.queue.append(Copy(self, target, source))
        return target

    def _check(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Checks the accesses of an operator of compute; views have none."""
        given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        reads, writes = set[int](), set[int]()
        for argument in func._schema.arguments:
            info, found = argument.alias_info, _tensors(given.get(argument.name))
            if info is None:
                reads.update(map(_memory, found))
            elif info.is_write:
                writes.update(map(_memory, found))
        inside = set(map(_memory, _tensors((args, kwargs))))  # of views, also undeclared ones
        writes.update(set(map(_memory, _tensors(result))) - inside)
        self._launch(str(func), reads - writes, writes)

    def _launch(self, name: str, reads: set[int], writes: set[int]) -> None:
        names = {memory: [name] for memory in reads | writes}
        given = self.current.number, reads, writes, set[int](), name, names
        self.errors += map(str, self._order._handle_kernel_launch(*given))


class Stream:
    """Copies that wait to be run, and events that they wait for, in order."""

    def __init__(self, gpu: EmulatedStreams, number: int) -> None:
        self.gpu, self.number = gpu, number
        self.queue: deque[Any] = deque()
        self.done = 0
        gpu._order._handle_stream_creation(number)

    def wait_event(self, event: "Event") -> None:
        self.gpu._order._handle_event_wait(event.number, self.number)
        if self is self.gpu.compute:
            event.reach()
        else:
            self.queue.append(event)

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.gpu, self.gpu.next_number())
        event.record(other)
        self.wait_event(event)

    def run_until(self, count: int) -> None:
        """Runs the first entries of the queue, up to a count since the start."""
        while self.done < count:
            self.done += 1
            self.queue.popleft().reach()


class Event:
    """A point of a stream."""

    def __init__(self, gpu: EmulatedStreams, number: int) -> None:
        self.gpu, self.number = gpu, number
        self.stream, self.count = gpu.compute, 0
        gpu._order._handle_event_creation(number)

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, stream.done + len(stream.queue)
        self.gpu._order._handle_event_record(self.number, stream.number)

    def reach(self) -> None:
        with self.gpu._lock:
            self.stream.run_until(self.count)

    def synchronize(self) -> None:
        self.gpu._order._handle_event_synchronization(self.number)
        self.reach()


class Copy:
    """A copy that keeps no memory alive, as on a GPU."""

    def __init__(self, gpu: EmulatedStreams, target: Tensor, source: Tensor) -> None:
        self.gpu = gpu
        self.ends = _weak(target), _weak(source)

    def reach(self) -> None:
        target, source = (_again(end) for end in self.ends)
        if target is None or source is None:
            self.gpu.errors.append("memory went before the copy that needs it")
            return
        target.copy_(source)


@contextmanager
def emulated_streams() -> Iterator[EmulatedStreams]:
    """Lets the CPU be a GPU whose host is the same CPU."""
    gpu = EmulatedStreams()

    class OwnStream(Stream):  # classes, as imports may use them in annotations
        def __init__(self, device: Any = None) -> None:
            super().__init__(gpu, gpu.next_number())

    class OwnEvent(Event):
        def __init__(self) -> None:
            super().__init__(gpu, gpu.next_number())

    cuda = {
        "Stream": OwnStream,
        "Event": OwnEvent,
        "current_stream": lambda device=None: gpu.current,
        "stream": gpu.on,
    }
    patches = [mock.patch.object(torch.cuda, name, new) for name, new in cuda.items()]
    patches.append(mock.patch.object(host_copies, "pinned_memory", pinned_memory))
    patches.append(mock.patch.object(parameters, "on_device", on_device))
    copies_of = functools.cache(HostCopies)
    for module in (host_copies, offload, parameters, state_transfers):
        patches.append(mock.patch.object(module, "copies_of", copies_of))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        with gpu:
            yield gpu


def pinned_memory(size: int, device: torch.device) -> Tensor:
    """Plain memory in place of pinned memory, from a page's start."""
    return offload.empty_pages(round_up(size))


def on_device(memory: Tensor, device: torch.device) -> tuple[Tensor, object]:
    """Memory of the host, which is the device's, too."""
    owner = memoryview(memory.numpy())  # type: ignore[arg-type]
    return torch.frombuffer(owner, dtype=torch.uint8), owner


def _tensors(value: Any) -> list[Tensor]:
    """The tensors that have memory: neither fake nor distributed ones."""
    return [
        x for x in pytree.tree_leaves(value) if type(x) in (Tensor, Parameter) and not x.is_meta
    ]


def _memory(tensor: Tensor) -> int:
    """Identity of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _weak(tensor: Tensor) -> tuple[Any, ...]:
    storage = weakref.ref(tensor.untyped_storage())
    return storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _again(end: tuple[Any, ...]) -> Tensor | None:
    storage, dtype, *place = end
    if (memory := storage()) is None:
        return None
    return torch.empty(0, dtype=dtype).set_(memory, *place)
