"""`Network`: nodes as network namespaces, a switch between them, and counts of bytes sent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TOOLS = ("ip", "tc", "unshare", "setpriv", "sh")  # required tools of iproute2 and util-linux

_PREFIX = "autopar"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_QUEUE = "4mb"
_BURST_BYTES = 32 * 1024  # least data that passes an idle link at once
_SETTINGS = """
cd /proc/sys/net/ipv4
echo cubic > tcp_congestion_control || echo reno > tcp_congestion_control
set -e
echo 0 > tcp_slow_start_after_idle
echo 4096 131072 33554432 > tcp_rmem
echo 4096 131072 33554432 > tcp_wmem
"""
"""Settings of every node. Unlike bbr, neither cubic nor reno probes for the rate, and the queue is
too long for losses."""


class Unavailable(RuntimeError):
    """Nodes cannot be emulated here; the message says why."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node has sent and received over its link; large frames count one header."""

    sent: int
    received: int


class Network:
    """Nodes joined by a switch, which exist inside the `with` and are always removed after it.

    Attributes:
        nodes: number of nodes.
        rate: rate of each link in each direction, such as "1gbit"; None leaves the links unshaped.

    Raises:
        Unavailable: on entering, where namespaces cannot be made.
    """

    def __init__(self, nodes: int, rate: str | None = None) -> None:
        if not 1 <= nodes <= 250:
            raise ValueError(f"a network has 1 to 250 nodes, not {nodes}")
        self.nodes = nodes
        if rate is not None:
            bits_per_second(rate)
        self.rate = rate
        self._name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"

    def namespace(self, node: int) -> str:
        return f"{self._name}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def host_name(self, node: int) -> str:
        """Return the host name of a node; it contains the rate."""
        return f"node{node}-{self.rate or 'unshaped'}"

    def traffic(self) -> list[Traffic]:
        found = []
        for node in range(self.nodes):
            name = self.namespace(node)
            text = _run("ip", "-n", name, "-s", "-j", "link", "show", "dev", "eth0")
            counters = json.loads(text)[0]["stats64"]
            found.append(Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"]))
        return found

    def __enter__(self) -> Self:
        _check_tools()
        sweep()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _delete(name)

    def _make(self) -> None:
        switch = f"{self._name}-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for node in range(self.nodes):
            self._make_node(node, switch)

    def _make_node(self, node: int, switch: str) -> None:
        name, port = self.namespace(node), f"port{node}"
        _run("ip", "netns", "add", name)
        link = ("link", "add", "eth0", "netns", name, "type", "veth")
        _run("ip", *link, "peer", "name", port, "netns", switch)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "netns", "exec", name, "sh", "-c", _SETTINGS)
        _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        if self.rate is not None:
            self.limit(node, self.rate)

    def limit(self, node: int, rate: str) -> None:
        """Limit what a node sends to a rate."""
        bits = bits_per_second(rate)
        burst = max(_BURST_BYTES, int(bits / 8 * 1e-3))  # a millisecond's worth
        shape = ("tbf", "rate", f"{bits:.0f}bit", "burst", f"{burst}b", "limit", _QUEUE)
        _run("tc", "-n", self.namespace(node), "qdisc", "replace", "dev", "eth0", "root", *shape)


def sent_bytes() -> int:
    """Return the bytes sent by the node of this process; large frames count one header."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def bits_per_second(rate: str) -> float:
    """Return the value of a rate such as "100mbit" or "2.5gbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"rate {rate!r} is not one such as 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def sweep() -> None:
    """Remove namespaces of ended processes, and all processes in them."""
    for name in _namespaces():
        match = re.match(rf"{_PREFIX}-(\d+)-", name)
        if match and not Path("/proc", match[1]).exists():
            _delete(name)


def _namespaces() -> Iterator[str]:
    folder = Path("/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return (name for name in names if name.startswith(f"{_PREFIX}-"))


def _delete(name: str) -> None:
    """Remove a namespace and end the processes in it, unless another process does so."""
    with contextlib.suppress(Unavailable):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)


def _check_tools() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not installed (iproute2, util-linux)")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
