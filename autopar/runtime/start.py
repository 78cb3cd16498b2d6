"""`ensure_process_group`: the ranks of a model, by its device."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopar._torch import PrefixStore, Store, high_priority_nccl
from autopar.core.common.groups import backends_of
from autopar.core.environment import check_launch
from autopar.core.waiting import awaited
from autopar.cost_model.host import boot_id
from autopar.errors import CommunicationError, StrategyError
from autopar.formatting import first_line
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.lost_peers import wait_for_launcher

POLL_S = 0.1
"""Seconds between two looks at how many ranks are there."""

LOOKS = 20
"""Looks after which a rank asks which others are not."""

NUM_TOLD = "autopar/devices"
"""Key of the number of ranks that have told their devices."""

LAUNCH_COMMAND = "autopar run SCRIPT --nproc {n}   (or: torchrun --nproc-per-node {n} SCRIPT)"


def ensure_process_group(device: torch.device, world_size: int | None, timeout_s: float) -> int:
    """The number of ranks; initializes torch.distributed if torchrun launched this process.

    The model's device decides the backends: gloo for the CPU; gloo and NCCL for a GPU, which
    becomes the current one.

    Raises:
        StrategyError: another number of ranks is running, two of them use one GPU, or their group
            has no backend for the device.
    """
    initialized = dist.is_available() and dist.is_initialized()
    launched = not initialized and "RANK" in os.environ
    running = dist.get_world_size() if initialized else 1
    if launched:
        check_launch()
        running = int(os.environ["WORLD_SIZE"])
    if world_size is not None and world_size != running:
        what = "but this is one process outside of torchrun. Launch"
        if running > 1:
            what = f"but {running} ranks are running. Leave world_size out, or launch"
        launch = LAUNCH_COMMAND.format(n=world_size)
        raise StrategyError(f"world_size={world_size}, {what} with: {launch}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched and running > 1:
        _initialize(device, datetime.timedelta(seconds=timeout_s))
    elif running > 1:
        check_ranks(gather_objects(RankDevice.of(device, backends_of())))
    if running > 1:
        wait_for_launcher()
    return running


def _initialize(device: torch.device, timeout: datetime.timedelta) -> None:
    """Initializes torch.distributed for a device, after all ranks have told theirs."""
    limit_s = timeout.total_seconds()
    where = f"the store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        meet = partial(next, rendezvous("env://", timeout=timeout))
        store, rank, ranks = awaited(meet, lambda: where, limit_s, say_on_first_ranks)
    except (TimeoutError, RuntimeError) as error:
        raise CommunicationError(
            f"rank {os.environ['RANK']} did not reach {where} within {limit_s:g} s: is rank 0 "
            f"running there? ({first_line(error)})"
        ) from error
    store.set_timeout(timeout)
    store = _of_this_attempt(store)
    on_gpu = device.type == "cuda"
    own = RankDevice.of(device, {"cpu": "gloo", **({"cuda": "nccl"} if on_gpu else {})})
    store.set(f"autopar/device/{rank}", json.dumps(asdict(own)))
    keys = [f"autopar/device/{rank}" for rank in range(ranks)]
    _wait_for_all(store, keys, limit_s)
    check_ranks([RankDevice(**json.loads(text)) for text in store.multi_get(keys)])

    def connect() -> None:
        if on_gpu:
            torch.cuda.set_device(device)  # each thread has its own
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timeout,
            device_id=device if on_gpu else None,
            pg_options=high_priority_nccl(timeout) if on_gpu else None,
        )

    try:
        awaited(connect, lambda: "connections of all ranks", limit_s, say_on_first_ranks)
    except TimeoutError as error:
        raise CommunicationError(f"rank {rank}: {error}") from error


def _wait_for_all(store: Store, keys: Sequence[str], limit_s: float) -> None:
    """Waits until every rank has told its device under its key."""
    late, end = list(range(len(keys))), time.monotonic() + limit_s

    def find_late() -> None:
        late[:] = [rank for rank in late if not store.check([keys[rank]])]

    def hear() -> None:
        # torch's own wait would log each time that a part of it ends
        store.add(NUM_TOLD, 1)
        for looks in itertools.count(1):
            if store.add(NUM_TOLD, 0) >= len(keys):
                return late.clear()
            if looks % LOOKS == 0 or time.monotonic() > end:
                find_late()
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)

    try:
        told = "rank(s) {} to call autopar.compile".format
        # a second more: `hear` ends by itself first, and the error below names the late ranks
        awaited(hear, lambda: told(late), limit_s + 1, say_on_first_ranks)
    except (TimeoutError, RuntimeError) as error:
        raise CommunicationError(f"the ranks' store is lost: {first_line(error)}") from error
    if late:
        raise CommunicationError(
            f"rank(s) {late} did not call autopar.compile within {limit_s:g} s: "
            "look for the first error among all ranks' output, or give a larger timeout_s"
        )


def say_on_first_ranks(text: str) -> None:
    """Prints a line on the first two ranks of each host: one of them may be waited for."""
    if int(os.environ.get("LOCAL_RANK", "0")) < 2:
        print(f"autopar: rank {os.environ['RANK']} {text}", file=sys.stderr, flush=True)


def _of_this_attempt(store: Store) -> Store:
    """The part of torchrun's store in which a dead attempt has left no addresses.

    Agents of several nodes count attempts differently; `autopar run` gives each its own store.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or attempt == "0":
        return store
    return PrefixStore(f"attempt-{attempt}", store)


@dataclass(frozen=True)
class RankDevice:
    """Device of a rank's model.

    Attributes:
        device: name of the device, such as "cuda:1".
        backend: backend of its collectives, "" if there is none.
        host: name of the host.
        unit: identity of the GPU among those of all hosts; "" for a CPU.
    """

    device: str
    backend: str
    host: str
    unit: str

    @classmethod
    def of(cls, device: torch.device, backends: Mapping[str, str]) -> RankDevice:
        """The device of this process, under these backends by type of device."""
        unit = ""
        if device.type == "cuda":
            unit = f"{boot_id()} {torch.cuda.get_device_properties(device).uuid}"
        return cls(str(device), backends.get(device.type, ""), socket.gethostname(), unit)


def check_ranks(ranks: Sequence[RankDevice]) -> None:
    """Raises StrategyError on every rank alike if these devices of all ranks cannot communicate."""
    kinds = {each.device.partition(":")[0]: rank for rank, each in enumerate(ranks)}
    if len(kinds) > 1:
        where = " and ".join(f"{ranks[rank].device} on rank {rank}" for rank in kinds.values())
        raise StrategyError(f"the model is on {where}: move it to one kind of device on all ranks")
    kind = next(iter(kinds))
    lacking = [rank for rank, each in enumerate(ranks) if not each.backend]
    if lacking:
        raise StrategyError(
            f"the model is on {ranks[lacking[0]].device}, but the process group of rank(s) "
            f"{lacking} has no backend for {kind}: leave init_process_group out, or move the model"
        )
    users: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        if each.unit and each.backend == "nccl":
            users.setdefault(each.unit, []).append(rank)
    for sharing in users.values():
        if len(sharing) > 1:
            first = ranks[sharing[0]]
            raise StrategyError(
                f"ranks {sharing} all have their model on {first.device} of {first.host}, and NCCL "
                'needs a GPU for each rank. Move the model to torch.device("cuda", '
                'int(os.environ["LOCAL_RANK"])), and launch no more processes than GPUs.'
            )
