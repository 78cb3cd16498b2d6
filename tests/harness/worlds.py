"""Real gloo worlds for tests: `run(fn, world_size=3)` calls `fn(rank, world_size)` on three ranks.

The ranks are spawned processes that live for the whole session, so that torch is imported once in
each. Every run gets a process group of its own and leaves the workers as it found them. A test
that kills ranks uses `run_isolated`, whose processes are thrown away.

`fn` is a module-level function; it and its arguments travel by pickle, and so does what it returns
(tensors by value: return plain tensors, not DTensors).
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TIMEOUT = 300.0
"""Seconds that one run may take."""

GROUP_TIMEOUT = timedelta(seconds=120)
"""How long a collective waits for the other ranks."""

GRACE = 5.0
"""Seconds that the other ranks of the pool have left once one has died."""

RankFunction = Callable[..., Any]


class Raised(NamedTuple):
    """What a rank answers, under `expect_errors`, when it raised."""

    type: str
    message: str


class RankError(AssertionError):
    """Some ranks failed; `errors` maps each to its traceback or to how it ended."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("".join(f"\n--- rank {r} ---\n{errors[r]}" for r in sorted(errors)))


RUNS_OF_A_POOL = 40
"""After so many runs workers are replaced: sockets and threads of past groups pile up in them."""


def run(
    fn: RankFunction,
    world_size: int,
    *,
    timeout: float = TIMEOUT,
    expect_errors: bool = False,
    init: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, **kwargs)` on every rank and return the answers by rank.

    Raises `RankError` when a rank raises; with `expect_errors` its answer is a `Raised` instead.
    A rank that dies, or a run longer than `timeout` seconds, fails either way and costs the pool.
    `init=False` leaves `init_process_group` to `fn`; the environment is torchrun's in any case,
    with `env` and the parent's AUTOPAR_* variables on top.
    """
    call = _Call(fn, kwargs, init, env or {})
    outcomes = _perform_in_pool(world_size, call, timeout)
    if any(o.error and o.error.type == "DistStoreError" for o in outcomes.values()):
        _POOL.close()  # gloo could not connect old workers (seen after hundreds of runs): new ones
        outcomes = _perform_in_pool(world_size, call, timeout)
    return _answers(outcomes, expect_errors)


def _perform_in_pool(world_size: int, call: "_Call", timeout: float) -> "dict[int, _Outcome]":
    _POOL.runs += 1
    if _POOL.runs % RUNS_OF_A_POOL == 0:
        _POOL.close()
    workers = _POOL.take(world_size)
    try:
        outcomes = _perform(workers, call, timeout, grace=GRACE)
        if any(outcome.lost for outcome in outcomes.values()):
            _raise_failures(outcomes)
    except BaseException:  # what is still in the pipes must not answer the next run
        _POOL.close()
        raise
    return outcomes


def run_isolated(
    fn: RankFunction,
    world_size: int,
    *,
    timeout: float = TIMEOUT,
    expect_errors: bool = False,
    init: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """As `run`, in processes of its own, so that a rank may die.

    With `expect_errors` a rank that died answers `Raised("Died", "exit code -9")`, and one that
    was still busy after `timeout` seconds `Raised("TimedOut", <its stacks>)`.
    """
    pool = _Pool()
    try:
        workers = pool.take(world_size)
        outcomes = _perform(workers, _Call(fn, kwargs, init, env or {}), timeout, grace=timeout)
    finally:
        pool.close()
    return _answers(outcomes, expect_errors)


def close() -> None:
    """End the session's workers; the next `run` starts new ones."""
    _POOL.close()


# -- in the parent -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    fn: RankFunction
    kwargs: dict[str, Any]
    init: bool
    env: dict[str, str]

    def packed(self, rank: int, world_size: int, port: int) -> bytes:
        settings = {k: v for k, v in os.environ.items() if k.startswith("AUTOPAR_")}
        settings |= _torchrun_environment(rank, world_size, port) | self.env
        return pickle.dumps((settings, self.init, pickle.dumps((self.fn, self.kwargs))))


@dataclass(frozen=True)
class _Outcome:
    """How one rank ended: an answer, an exception, or `lost` (died, or was still busy)."""

    value: Any = None
    error: Raised | None = None
    trace: str = ""
    lost: bool = False


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def busy_stacks(self) -> str:
        """The Python stacks of all its threads, now."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return self.stacks.read_text()


@dataclass
class _Pool:
    workers: list[_Worker] = field(default_factory=list)
    folder: str = ""
    runs: int = 0

    def take(self, world_size: int) -> list[_Worker]:
        """The first `world_size` workers, started where there are fewer or one has ended."""
        if any(not worker.process.is_alive() for worker in self.workers):
            self.close()
        self.folder = self.folder or tempfile.mkdtemp(prefix="autopar-worlds-")
        new = [self._start(i) for i in range(len(self.workers), world_size)]
        self.workers += new
        for worker in new:
            worker.pipe.recv_bytes()  # ready
        return self.workers[:world_size]

    def _start(self, index: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        stacks = Path(self.folder, f"stacks-{index}-{time.monotonic_ns()}.txt")
        process = context.Process(target=_serve, args=(theirs, str(stacks)), name=f"rank{index}")
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


_POOL = _Pool()
atexit.register(close)


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _perform(
    workers: list[_Worker], call: _Call, timeout: float, grace: float
) -> dict[int, _Outcome]:
    """Send the call to every rank and gather how each ended.

    The parent keeps the store, as torchrun's agent does: no port is ever raced for, and the
    death of rank 0 does not take the store along.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    packed = [call.packed(rank, len(workers), store.port) for rank in range(len(workers))]
    for worker, message in zip(workers, packed, strict=True):
        with contextlib.suppress(BrokenPipeError):  # it died: _gather will say so
            worker.pipe.send_bytes(message)
    outcomes = _gather(workers, time.monotonic() + timeout, grace)
    return outcomes | _still_busy(workers, set(outcomes), timeout)


def _gather(workers: list[_Worker], deadline: float, grace: float) -> dict[int, _Outcome]:
    """Receive until every rank has ended or the deadline, which a death brings nearer."""
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    outcomes = {}
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(pending), timeout=left):
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            outcomes[rank] = _receive(workers[rank])
            if outcomes[rank].lost:
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _receive(worker: _Worker) -> _Outcome:
    """The answer of a worker that has one; a closed pipe means that it died."""
    try:
        return _Outcome(*pickle.loads(worker.pipe.recv_bytes()))
    except (EOFError, ConnectionResetError):
        worker.process.join(10)
        died = Raised("Died", f"exit code {worker.process.exitcode}")
        return _Outcome(error=died, trace=f"died with {died.message}", lost=True)


def _still_busy(workers: list[_Worker], ended: set[int], timeout: float) -> dict[int, _Outcome]:
    outcomes = {}
    for rank, worker in enumerate(workers):
        if rank not in ended:
            stacks = worker.busy_stacks()
            trace = f"still busy (a run may take {timeout:g} s); its stacks:\n{stacks}"
            outcomes[rank] = _Outcome(error=Raised("TimedOut", stacks), trace=trace, lost=True)
    return outcomes


def _raise_failures(outcomes: dict[int, _Outcome]) -> None:
    errors = {rank: outcome.trace for rank, outcome in outcomes.items() if outcome.error}
    if errors:
        raise RankError(errors)


def _answers(outcomes: dict[int, _Outcome], expect_errors: bool) -> list[Any]:
    if not expect_errors:
        _raise_failures(outcomes)
    return [outcomes[rank].error or outcomes[rank].value for rank in sorted(outcomes)]


# -- in a worker -------------------------------------------------------------------------------


def _serve(pipe: Connection, stacks: str) -> None:
    """Answer calls until the parent closes the pipe or ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    gc.set_threshold(100_000, 50, 100)  # traces hold many objects, few of them garbage
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                call = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            pipe.send_bytes(_answer(call))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(call: bytes) -> bytes:
    """Perform one call and pack `(value, error, trace)`."""
    settings, init, target = pickle.loads(call)
    with _environment(settings):
        try:
            _fresh_state()
            answer = pickle.dumps((_call_in_group(target, init), None, ""))
        except BaseException as error:
            raised = Raised(type(error).__name__, str(error))
            answer = pickle.dumps((None, raised, traceback.format_exc()))
            traceback.clear_frames(error.__traceback__)
        _leave_group()
        return answer


def _call_in_group(target: bytes, init: bool) -> Any:
    fn, kwargs = pickle.loads(target)
    if init:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    return fn(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), **kwargs)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Put the settings into the environment, in place of inherited AUTOPAR_*; restore it after."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("AUTOPAR_")]:
        del os.environ[name]
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _fresh_state() -> None:
    """Torch as a new process has it, apart from one thread and the seed."""
    gc.freeze()  # what is imported by now: collecting the rest takes a moment
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    if notices := sys.modules.get("autopar.core.common.notices"):
        notices.ISSUED.clear()


def _leave_group() -> None:
    """Destroy the group, so that ranks waiting for this one stop, and what remembers it.

    The last to refer to it is this function. Where DDP's reducer is the last, it joins gloo's
    threads and holds the interpreter's lock, for which one of them may wait: neither ever ends.
    """
    group = dist.group.WORLD
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    _close_channels()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _forget_meshes()
    gc.collect()
    del group


def _close_channels() -> None:
    """Close autopar's sockets to the other ranks; what still refers to the group keeps them."""
    if channels := sys.modules.get("autopar.runtime.agreement.channel"):
        for channel in channels._OPEN.values():
            channel.rows.close()
        channels._OPEN.clear()


def _forget_meshes() -> None:
    """Empty DTensor's caches: meshes of two runs compare equal though their groups differ."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug = __import__("torch.distributed.tensor.debug", fromlist=["debug"])
    debug._clear_sharding_prop_cache()
    for cached in _cached_functions("torch.distributed.tensor"):
        cached.cache_clear()


def _cached_functions(package: str) -> Iterable[Any]:
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            kind = functools._lru_cache_wrapper
            yield from (value for value in vars(module).values() if isinstance(value, kind))
