"""`Rounds`: the meetings of nodes that start ranks, each with a store of its own.

torchrun's agents keep one store for all rounds. Ranks of a later round then read the addresses of
dead ones, and nodes that join later never hear of the store. Here the first node of every round
opens a new store, and all nodes hear of it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from autopar._torch import PrefixStore, TCPStore, nodes_present, skip_rendezvous_stacks
from autopar.core.waiting import awaited

DEFAULT_PORT = 29400
HEARTBEAT_S = 1
LAST_CALL_S = 3  # least seconds that a round waits for further nodes once there are enough
STORE_TIMEOUT_S = 15

T = TypeVar("T")

NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable: torch tells the address of a round's first node in every round. Otherwise
it does so once, and a node that joins later waits for it in vain."""


def say(text: str) -> None:
    """Prints a line of the launcher."""
    print(f"autopar run: {text}", file=sys.stderr, flush=True)


class Rounds(RendezvousHandler):
    """Torch's rendezvous of a varying number of nodes.

    Attributes:
        address: address of this node.
        is_host: whether nodes meet here.
        is_single_node: whether other nodes never join.
        number: number of the running round, from 0.
        rejoin: whether this node wants another round.
        limit_s: seconds that a meeting takes at most.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        nodes: tuple[int, int],
        *,
        address: str,
        join_s: int,
        silence_s: int,
    ) -> None:
        last_call_s = max(LAST_CALL_S, silence_s // 2)
        params = RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            local_addr=address,
            join_timeout=join_s,
            last_call_timeout=last_call_s,
            keep_alive_interval=HEARTBEAT_S,
            keep_alive_max_attempt=silence_s // HEARTBEAT_S,
        )
        skip_rendezvous_stacks()
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        listener = listen_at(host, port)
        self.is_host = listener is not None
        store = serve(host, listener) if listener is not None else connect(host, port)
        self._meeting = create_handler(store, C10dRendezvousBackend(store, run_id), params)
        self.address, self._endpoint, self._nodes, self._size = address, endpoint, nodes, 0
        self._server: TCPStore | None = None
        self.is_single_node = nodes == (1, 1)
        self.number, self.rejoin = -1, False
        self.limit_s = float(join_s + last_call_s + 2 * STORE_TIMEOUT_S)

    def missing(self) -> str:
        """The nodes that a meeting waits for, for a line of the launcher."""
        there = f"{nodes_present(self._meeting)} of {self._nodes[0]} are there"
        return f"machines at {self._endpoint} ({there})"

    @property
    def use_agent_store(self) -> bool:
        # Otherwise rank 0 would open a store at the port where the agent serves that of the round.
        return True

    def get_backend(self) -> str:
        return self._meeting.get_backend()

    def get_run_id(self) -> str:
        return self._meeting.get_run_id()

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the nodes of the next round, and opens its store on the first of them."""
        os.environ[NOT_SHARED] = "1"
        met = self._meeting.next_rendezvous()
        del os.environ[NOT_SHARED]  # ranks use the store of the round
        if met.rank == 0:
            listener = listen_at(self.address, 0)
            assert listener is not None, "the address of this machine, at a free port"
            self._server = serve(self.address, listener)
        of_round = RendezvousStoreInfo.build(
            met.rank,
            PrefixStore("autopar", met.store),
            local_addr=self.address,
            server_port=self._server.port if met.rank == 0 and self._server else None,
        )
        self.number, self.rejoin, self._size = self.number + 1, False, met.world_size
        return RendezvousInfo(met.store, met.rank, met.world_size, of_round)

    def num_nodes_waiting(self) -> int:
        """Number of nodes that ask for another round: new ones, and gaps that others left."""
        if self.is_single_node:
            return int(self.rejoin)
        waiting = self._asked(self._meeting.num_nodes_waiting)
        return waiting + self.nodes_gone() + self.rejoin

    def nodes_gone(self) -> int:
        """Number of nodes of this round that have left it, or are silent."""
        if self.is_single_node:
            return 0
        return max(0, self._size - nodes_present(self._meeting))

    def is_closed(self) -> bool:
        return self._asked(self._meeting.is_closed)

    def set_closed(self) -> None:
        self._asked(self._meeting.set_closed)

    def shutdown(self) -> bool:
        return self._asked(self._meeting.shutdown)

    def _asked(self, ask: Callable[[], T]) -> T:
        """The answer of the meeting, which may hang with the machine that holds it."""
        what = f"an answer from {self._endpoint}"
        return awaited(ask, lambda: what, 2 * STORE_TIMEOUT_S, say)


def listen_at(host: str, port: int) -> socket.socket | None:
    """A socket that listens at this address alone; None if it is another machine's, or in use.

    torch's own stores listen on all interfaces.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise
    return listener


def serve(host: str, listener: socket.socket) -> TCPStore:
    """A store that listens on a socket of this process, and owns it."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )


def connect(host: str, port: int) -> TCPStore:
    """A store of another process. A server that never answers blocks for ever."""
    return TCPStore(host, port, timeout=timedelta(seconds=STORE_TIMEOUT_S))


def address_towards(endpoint: str) -> str:
    """Address of this machine as nodes at an endpoint see it."""
    host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    found: list[Any] = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[0][4])  # sends nothing
        return str(probe.getsockname()[0])
