"""`where_ranks_are`: after a failed wait, the ranks say through torch's store where they are.

A thread of each rank answers for it. It asks the store only while its rank makes no progress, so
that training pays nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import FrameType

from torch import distributed as dist

from autopar._torch import PrefixStore, Store, TCPStore, default_store
from autopar.core.common.notices import is_inside
from autopar.runtime.watch.collective_log import LOG, Wait

POLL_S = 0.4
"""Seconds between two looks of the thread."""

IDLE_S = 1.5
"""Seconds without progress after which the thread listens for questions."""

REPLY_S = 1.5
"""Seconds in which the other ranks answer."""

TELL_S = (5.0, 60.0)
"""Seconds between two lines about a wait: in its first minute, and later."""

SAME_QUESTION_S = 5.0
"""Seconds in which a rank uses the answers to another rank's question."""

_QUESTIONS = "autopar/hang"
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))


@dataclass(frozen=True)
class Whereabouts:
    """Place of a rank in its program.

    Attributes:
        wait: collective that it waits in, "" if in none.
        seconds: seconds since it began to wait, or since its last wait.
        line: line of the user's code that it runs, "" if unknown.
        last: its last finished wait.
        work: long work of autopar's own that it does, "" if none.
    """

    wait: str
    seconds: float
    line: str
    last: str
    work: str = ""

    @staticmethod
    def here() -> Whereabouts:
        """Place of this rank, read from any of its threads."""
        now, current = time.perf_counter(), LOG.current
        last = LOG.waits[-1] if LOG.waits else Wait("", now, now)
        what, since = current or ("", last.end)
        work = ""
        if LOG.work is not None:
            work = f"{LOG.work[0]} ({now - LOG.work[1]:.0f} s so far)"
        return Whereabouts(what, now - since, user_line(), last.what, work)

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        if self.wait:
            return f"waits in {self.wait} for {self.seconds:.0f} s{where}"
        if self.work:
            return f"{self.work}{where}"
        after = f", {self.seconds:.0f} s after {self.last}" if self.last else ""
        return f"is{where or ' elsewhere'}{after}"


def user_line() -> str:
    """The line of the user's code that the main thread runs, as `file:line in function`."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not (code.co_filename.startswith((*_LIBRARIES, "<")) or is_inside(frame)):
            file = code.co_filename.removeprefix(f"{os.getcwd()}{os.sep}")
            return f"{file}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


class Watcher(threading.Thread):
    """Answers other ranks' questions where this rank is, as long as the world lives.

    Attributes:
        answered: number and time of the last question that it answered, None before.
    """

    def __init__(self, world: dist.ProcessGroup, store: Store) -> None:
        super().__init__(name="autopar-watcher", daemon=True)
        self._world, self._store, self._rank = weakref.ref(world), store, dist.get_rank()
        self._next, self._ended = 0, threading.Event()
        self.answered: tuple[int, float] | None = None
        self._told_at, self._answering = 0.0, threading.Lock()

    def watches(self, world: dist.ProcessGroup) -> bool:
        return self._world() is world

    def run(self) -> None:
        seen, since = LOG.num_waits, time.monotonic()
        while not self._ended.wait(POLL_S) and self._world() is dist.group.WORLD:
            if LOG.num_waits != seen:
                seen, since = LOG.num_waits, time.monotonic()
            elif time.monotonic() - since >= IDLE_S:
                if not _is_there(self._store):  # torch would log a call to a store that is gone
                    return
                try:
                    self._answer()
                    self._tell()
                except RuntimeError:  # the store is gone, and the run with it
                    return

    def _tell(self) -> None:
        """Prints where ranks are, now and then while this one waits.

        The first two ranks of a host do it: one of them may be waited for.
        """
        if LOG.current is None or int(os.environ.get("LOCAL_RANK", "0")) > 1:
            return
        now = time.perf_counter()
        waited_s = now - LOG.current[1]
        if min(waited_s, now - self._told_at) >= TELL_S[waited_s >= TELL_S[1]]:
            self._told_at = now
            print(f"autopar: {where_ranks_are()}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the thread before the interpreter does, which must not meet it in the store."""
        self._ended.set()
        self.join(REPLY_S)

    def ask(self) -> dict[int, Whereabouts]:
        """Places of the ranks that answer, by rank."""
        store, recent = self._store, time.monotonic() - SAME_QUESTION_S
        # Ranks time out at about the same time: answers to one question serve them all.
        question = store.add(f"{_QUESTIONS}/count", 0) - 1  # another rank's
        if question < self._next and (self.answered is None or self.answered[1] < recent):
            question = store.add(f"{_QUESTIONS}/count", 1) - 1
            store.set(f"{_QUESTIONS}/{question}", str(self._rank))
        ranks, found = range(dist.get_world_size()), dict[int, Whereabouts]()
        deadline = time.monotonic() + REPLY_S
        while len(found) < len(ranks) and time.monotonic() < deadline:
            self._answer()
            for rank in set(ranks) - set(found):
                if store.check([key := f"{_QUESTIONS}/{question}/{rank}"]):
                    found[rank] = Whereabouts(**json.loads(store.get(key)))
            time.sleep(0.05)
        return dict(sorted(found.items()))

    def _answer(self) -> None:
        """Answers all open questions; the main thread asks and answers too."""
        with self._answering:
            while self._store.check([f"{_QUESTIONS}/{self._next}"]):
                here = json.dumps(asdict(Whereabouts.here()))
                self._store.set(f"{_QUESTIONS}/{self._next}/{self._rank}", here)
                self.answered = self._next, time.monotonic()
                self._next += 1


def _is_there(store: Store) -> bool:
    """Whether the rank that holds a store still serves it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), timeout=POLL_S).close()
    except OSError:
        return False
    return True


_WATCHER: Watcher | None = None


@atexit.register
def _end() -> None:
    if _WATCHER is not None:
        _WATCHER.end()


def watch() -> None:
    """Starts the thread of this rank, unless it watches already."""
    global _WATCHER
    world = dist.group.WORLD
    if world is not None and (_WATCHER is None or not _WATCHER.watches(world)):
        _WATCHER = Watcher(world, default_store())
        _WATCHER.start()


def where_ranks_are() -> str:
    """Sentences on where each rank is, after a wait of this rank has failed."""
    found: Mapping[int, Whereabouts] = {}
    if _WATCHER is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store may have died with its rank
            found = _WATCHER.ask()
    rank, size = dist.get_rank(), dist.get_world_size()
    own = found.get(rank) or Whereabouts.here()
    waiting = [r for r, each in found.items() if each.wait or r == rank]
    absent = sorted(set(range(size)) - set(waiting))
    lines = [f"rank {rank} {own}"]
    lines += [f"rank {r} {found[r]}" for r in waiting if r != rank]
    if absent:
        lines.append(f"rank(s) {absent} did not come")
    lines += [f"rank {r} {found[r]}" for r in absent if r in found]
    if silent := [r for r in absent if r not in found]:
        lines.append(f"rank(s) {silent} do not answer yet: busy, stopped or ended")
    return "; ".join(lines)
