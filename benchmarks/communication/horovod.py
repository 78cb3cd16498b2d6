"""Horovod over gloo, beside other contenders in the same processes.

Its thread talks to the other ranks every millisecond, even when there is nothing to reduce, so it
runs during its own turns only. `horovodrun` is not needed: rank 0 serves the addresses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import adamw, my_rows
from benchmarks.models import Case

_NAMES = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "MASTER_ADDR",
    "HOROVOD_GLOO_IFACE": "GLOO_SOCKET_IFNAME",
}


class Horovod:
    """A training step under `horovod.torch`, gradients sent in half precision."""

    def __init__(self, case: Case) -> None:
        self.model = case.build()
        os.environ.update({name: os.environ[torch] for name, torch in _NAMES.items()})
        os.environ.update({"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"})
        os.environ["HOROVOD_HOSTNAME"] = os.uname().nodename
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "300"
        with _running() as hvd:
            self.optimizer = hvd.DistributedOptimizer(
                adamw(self.model, case),
                named_parameters=self.model.named_parameters(),
                compression=hvd.Compression.fp16,
            )

    @contextlib.contextmanager
    def turn(self, x: Tensor, y: Tensor) -> Iterator[None]:
        """Let it run inside, after a step that tells it again what will be reduced."""
        with _running():
            self(x, y)
            yield

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train one step on this rank's rows."""
        loss: Tensor = self.model(my_rows(x), my_rows(y))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@contextlib.contextmanager
def _running() -> Iterator[Any]:
    """Horovod's module, initialised inside, by a server that knows no old addresses."""
    import horovod.torch as hvd
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer() if dist.get_rank() == 0 else None
    port = [server.start() if server else 0]
    if server:
        server.init([])
    dist.broadcast_object_list(port)
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port[0])
    hvd.init()
    try:
        yield hvd
    finally:
        hvd.shutdown()
        dist.barrier()
        if server:
            server.stop()
