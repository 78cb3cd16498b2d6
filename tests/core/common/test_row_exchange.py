"""Rows of all ranks over sockets, and over gloo where sockets are not used."""

import os
import signal
import socket
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from autopar.core.common import row_exchange
from autopar.core.common.row_exchange import RowExchange
from autopar.core.common.world import world
from tests.harness.worlds import run, run_isolated

ROWS = [[rank, -7, 2**62] for rank in range(3)]


def exchanged(rank: int, world_size: int) -> list[Any]:
    """Whether rows go over sockets, and two tables: over sockets, with gloo, around a ring."""
    found: list[Any] = []
    for most, master in ((8, None), (8, "no.such.host.invalid" if rank == 1 else None), (1, None)):
        environment = {} if master is None else {"MASTER_ADDR": master}
        with (
            mock.patch.object(row_exchange, "MAX_DIRECT_RANKS", most),
            mock.patch.dict(os.environ, environment),
        ):
            rows = RowExchange(world())
            found.append((rows.is_direct, [rows.start(ROWS[rank])() for _ in range(2)]))
    return found


@pytest.mark.slow
def test_rows_arrive_in_the_order_of_ranks_on_every_way() -> None:
    tables = [ROWS, ROWS]
    assert run(exchanged, 3) == [[(True, tables), (False, tables), (False, tables)]] * 3


def beside_a_stranger(rank: int, world_size: int) -> tuple[bool, list[list[int]]]:
    """A stranger connects first to the rank that accepts; it does not know the token."""
    made, create = [], socket.create_server

    def listen(*arguments: Any, **options: Any) -> socket.socket:
        listener = create(*arguments, **options)
        made.append(socket.create_connection(listener.getsockname()))
        made[0].sendall(bytes(100))
        return listener

    with mock.patch.object(socket, "create_server", listen):
        rows = RowExchange(world())
    return rows.is_direct, rows.start([rank])()


def test_a_stranger_is_turned_away() -> None:
    assert run(beside_a_stranger, 2) == [(True, [[0], [1]])] * 2


def exchange_thrice(rows: RowExchange) -> None:
    """A first row of a peer that is gone may still be there."""
    for _ in range(3):
        rows.start([rows.rank])()


def after_a_death(rank: int, world_size: int) -> tuple[str, bool]:
    rows = RowExchange(world())
    rows.start([rank])()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        exchange_thrice(rows)
    return str(caught.value), time.monotonic() - begun < 30.0


@pytest.mark.slow
def test_ranks_fail_at_once_where_a_peer_has_died() -> None:
    message, soon = run_isolated(after_a_death, 3, expect_errors=True)[0]
    assert "no row came from rank 1" in message
    assert soon


def interrupted(rank: int, world_size: int) -> str:
    """Rank 0 is interrupted while it waits: it fails, and so do the others."""
    rows = RowExchange(world())
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        signal.signal(signal.SIGUSR1, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            rows.start([0])()
        with pytest.raises(RuntimeError) as caught:
            rows.start([0])
        return str(caught.value)
    time.sleep(1.0)
    with pytest.raises(RuntimeError) as caught:
        exchange_thrice(rows)
    return str(caught.value)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_rank_closes_its_sockets() -> None:
    for message in run_isolated(interrupted, 2):
        assert "no row came from rank" in message
