"""`ensure_process_group`: the ranks of a model, by its device."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from autopar._torch import PrefixStore, Store, high_priority_nccl
from autopar.common.groups import backends_of
from autopar.cost_model.host import boot_id
from autopar.environment import check_launch
from autopar.errors import CommunicationError, StrategyError
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.lost_peers import wait_for_launcher

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
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = _of_this_attempt(store)
    on_gpu = device.type == "cuda"
    own = RankDevice.of(device, {"cpu": "gloo", **({"cuda": "nccl"} if on_gpu else {})})
    store.set(f"autopar/device/{rank}", json.dumps(asdict(own)))
    keys = [f"autopar/device/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys)
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CommunicationError(
            f"rank(s) {absent} did not call autopar.compile within {timeout.total_seconds():g} s: "
            "look for the first error among all ranks' output, or give a larger timeout_s"
        ) from error
    check_ranks([RankDevice(**json.loads(text)) for text in store.multi_get(keys)])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=device if on_gpu else None,
        pg_options=high_priority_nccl(timeout) if on_gpu else None,
    )


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
