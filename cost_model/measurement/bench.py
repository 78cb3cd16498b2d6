"""`Bench`: times collectives on a live process group.

The collectives are the functional ones of a compiled step, and include the allocation of their
results, as in a step.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from autopar._torch import group_timeout
from autopar.core.common.groups import advice_for_hangs, backends_of, cpu_group, gather_values
from autopar.core.gloo_chunks import gloo_chunks
from autopar.cost_model.measurement.group_layouts import Groups
from autopar.errors import CommunicationError

T = TypeVar("T")

Subgroups = dict[tuple[int, ...], dist.ProcessGroup | None]
_LOCAL: weakref.WeakKeyDictionary[dist.ProcessGroup, Subgroups] = weakref.WeakKeyDictionary()
"""Subgroups of each group that is a part of the world."""


class Bench:
    """A process group and its subgroups, as a context manager; it times tensors of one device.

    A collective that fails inside (a rank died, or exceeded the group's timeout) raises a
    CommunicationError that names the current activity, `doing`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = backends_of(group)[device.type]
        self._objects = cpu_group(group)
        self.doing = "agreeing on what to measure"
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self._local = self.world_size < dist.get_world_size()
        self._subgroups: Subgroups = _LOCAL.setdefault(group, {}) if self._local else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise CommunicationError(
                f"rank {self.rank}: a collective failed while {self.doing}: another rank died, "
                f"raised an error or did not come in time. Look for the first error among all "
                f"ranks' output. ({str(error).strip().splitlines()[0]}){advice_for_hangs()}"
            ) from error

    def release(self) -> None:
        """Destroys the subgroups; all ranks call it.

        Those of a part of the world stay for its next bench: torch would give the same name to new
        ones, whose ranks then look for the old ones.
        """
        if self._local:
            return
        for subgroup in self._subgroups.values():
            if subgroup is not None:
                dist.destroy_process_group(subgroup)
        self._subgroups.clear()

    def agree(self, decide: Callable[[], T]) -> T:
        """The result of `decide` on rank 0, on every rank; its error, likewise."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(decide(), None)]
            except Exception as error:
                box = [(None, error)]
        dist.broadcast_object_list(box, group=self._objects, group_src=0)
        value, failure = box[0]
        if failure is not None:
            raise failure
        return value

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        return gather_values(value, self._objects)

    def time(
        self,
        collective: str,
        groups: Groups,
        nbytes: int,
        repeats: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> float | None:
        """Mean seconds of one collective over `groups` at once; all ranks call it.

        All start together. None on a rank outside of all groups. `nbytes` is the approximate
        message size in bytes; see `message_bytes`.
        """
        self.doing = f"timing {collective} of {nbytes} bytes over {len(groups[0])} ranks"
        subgroup = self.subgroup(groups)
        run = self._runner(collective, subgroup, nbytes, dtype) if subgroup is not None else None
        self.line_up()
        if run is None:
            return None
        start = time.perf_counter()
        for turn in range(repeats):
            run(turn)
        self.finish()
        return (time.perf_counter() - start) / repeats

    def subgroup(self, groups: Groups) -> dist.ProcessGroup | None:
        """The one of `groups` with this rank; all ranks call it, and the first call creates them.

        If the bench's group is not the whole world, only its ranks create subgroups. torch then
        requires that all of these have created equally many before.
        """
        own = next((ranks for ranks in groups if self.rank in ranks), None)
        if own is not None and len(own) == self.world_size:
            return self.group
        world = dist.get_process_group_ranks(self.group)
        for ranks in groups:
            if ranks in self._subgroups or (self._local and ranks != own):
                continue
            group = dist.new_group(
                [world[rank] for rank in ranks],
                backend=self.backend,
                timeout=group_timeout(self.group),
                use_local_synchronization=self._local,
            )
            self._subgroups[ranks] = group if isinstance(group, dist.ProcessGroup) else None
        return None if own is None else self._subgroups[own]

    def _runner(
        self, collective: str, group: dist.ProcessGroup, nbytes: int, dtype: torch.dtype
    ) -> Callable[[int], None]:
        """Runs the collective once; its argument is the number of the run.

        Each broadcast or send has another sender, which must have received the one before. Times
        therefore end with the arrival, not when the sender is free.
        """
        ranks, rank, name = group.size(), group.rank(), group.group_name
        wait = torch.ops._c10d_functional.wait_tensor
        if collective in ("send", "broadcast"):
            message = self._zeros_of(message_bytes(ranks, nbytes), dtype)
        if collective == "send":

            def pass_on(turn: int) -> None:
                if turn % ranks == rank:
                    dist.send(message, group=group, group_dst=(rank + 1) % ranks)
                elif (turn + 1) % ranks == rank:
                    dist.recv(message, group=group, group_src=(rank - 1) % ranks)

            return pass_on
        if collective == "broadcast":
            broadcast = torch.ops._c10d_functional.broadcast_
            return lambda turn: wait(broadcast(message, turn % ranks, name))
        chunked = collective == "all_to_all" and self.backend == "gloo"
        count = gloo_chunks(nbytes, ranks) if chunked else 1
        issue = self.issuer(collective, group, nbytes // count, dtype)

        def run(turn: int) -> None:
            for pending in [issue() for _ in range(count)]:
                wait(pending)

        return run

    def issuer(
        self,
        collective: str,
        group: dist.ProcessGroup,
        nbytes: int,
        dtype: torch.dtype = torch.float32,
    ) -> Callable[[], torch.Tensor]:
        """A function that issues the collective once and returns the tensor to wait for."""
        ranks, name = group.size(), group.group_name
        whole = self._zeros_of(message_bytes(ranks, nbytes), dtype)
        chunk = whole[: whole.numel() // ranks]
        even = [chunk.numel()] * ranks
        ops = torch.ops._c10d_functional
        return {
            "all_reduce": lambda: ops.all_reduce_(whole, "sum", name),
            "all_gather": lambda: ops.all_gather_into_tensor(chunk, ranks, name),
            "reduce_scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", ranks, name),
            "all_to_all": lambda: ops.all_to_all_single(whole, even, even, name),
        }[collective]

    def _zeros_of(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        numel = nbytes // dtype.itemsize
        if dtype not in self._zeros or self._zeros[dtype].numel() < numel:
            self._zeros[dtype] = torch.zeros(numel, dtype=dtype, device=self.device)
        return self._zeros[dtype][:numel]

    def line_up(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.finish()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def message_bytes(ranks: int, nbytes: int) -> int:
    """Message size of about `nbytes` bytes: the same number of whole items for each rank."""
    item = 8  # bytes of the largest dtype
    return math.ceil(nbytes / (item * ranks)) * item * ranks
