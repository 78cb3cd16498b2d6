"""Warm starts: ranks are forked from a process that has imported torch, so that trials are short.

The launcher starts `stub.py` as each rank. A stub imports nothing: it has the `Nursery` fork the
real rank, and ends as that rank ends. A rank whose stub is killed dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

SOCKET = "FAULTS_NURSERY"  # environment variable: path of the nursery's socket
NAMESPACE = "FAULTS_NAMESPACE"  # environment variable: network namespace of a rank
STUB = Path(__file__).with_name("stub.py")


class Nursery:
    """A process that forks ranks; it lives inside the `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = 0

    def __enter__(self) -> Self:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(self.path))
        server.listen(64)
        os.environ[SOCKET] = str(self.path)
        self._pid = os.fork()
        if not self._pid:
            _serve(server)
        server.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def enter_namespace(name: str) -> None:
    """Move this process into a network namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.close(descriptor)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _serve(server: socket.socket) -> None:
    """Answer every stub in a thread of its own, which forks and waits."""
    die_with_parent()
    while True:
        stub, _ = server.accept()
        threading.Thread(target=_raise_rank, args=(stub,), daemon=True).start()


def _raise_rank(stub: socket.socket) -> None:
    message, streams, _, _ = socket.recv_fds(stub, 1 << 20, 2)
    pid = os.fork()
    if not pid:
        _become(json.loads(message), streams, stub)
    for each in streams:
        os.close(each)
    with contextlib.suppress(OSError):  # the stub is gone
        stub.sendall(f"{pid:16}".encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        stub.sendall(f"{os.waitstatus_to_exitcode(status):16}".encode())
    stub.close()


def _become(call: dict[str, object], streams: list[int], stub: socket.socket) -> None:
    """Run a script as the rank of a stub."""
    status = 1
    try:
        for target, source in zip((1, 2), streams, strict=True):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(call["env"])  # type: ignore[call-overload]
        if name := os.environ.get(NAMESPACE):
            enter_namespace(name)
        threading.Thread(target=_die_with_stub, args=(stub,), daemon=True).start()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = call["argv"]  # type: ignore[assignment]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_stub(stub: socket.socket) -> None:
    stub.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
