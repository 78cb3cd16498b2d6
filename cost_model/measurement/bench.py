"""`Bench`: what timing collectives on a live process group needs.

The collectives are the functional ones that a compiled step issues, timed with the allocation of
their result, as there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from autopar._torch import group_timeout
from autopar.cost_model.algorithms.gloo_chunks import gloo_chunks
from autopar.cost_model.measurement.group_layouts import Groups
from autopar.errors import CommunicationError

T = TypeVar("T")


class Bench:
    """A process group and its parts, inside a `with`.

    A collective that fails inside (a rank has died, or has not come within the group's timeout)
    leaves as a CommunicationError that says what was being done.

    Attributes:
        group: all ranks that take part.
        rank: of this process among them.
        world_size: their number.
        backend: "gloo", "nccl", ...
        device: where the tensors are.
        doing: what goes on now, for errors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = _backend(group)
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.doing = "agreeing on what to measure"
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self._parts: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            tuple(range(self.world_size)): group
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            if part is not None and part is not self.group:
                dist.destroy_process_group(part)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise CommunicationError(
                f"rank {self.rank}: a collective failed while {self.doing}: another rank died, "
                f"raised an error or did not come in time. Look for the first error among all "
                f"ranks' output. ({str(error).strip().splitlines()[0]})"
            ) from error

    def agree(self, decide: Callable[[], T]) -> T:
        """What `decide` says on rank 0, on every rank; its error, likewise."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(decide(), None)]
            except Exception as error:
                box = [(None, error)]
        dist.broadcast_object_list(box, group=self.group, group_src=0, device=self.device)
        value, failure = box[0]
        if failure is not None:
            raise failure
        return value

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def time(
        self,
        collective: str,
        groups: Groups,
        nbytes: int,
        repeats: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> float | None:
        """Seconds of one collective among `groups` at once, from a common start; every rank calls.

        Args:
            collective: one of COLLECTIVES.
            groups: ranks of each group that takes part.
            nbytes: about the message size; see `message_bytes`.
            repeats: how often in a row.
            dtype: of what is sent.

        Returns:
            The mean over the repeats, None on a rank that is in no group.
        """
        self.doing = f"timing {collective} of {nbytes} bytes over {len(groups[0])} ranks"
        part = self.part(groups)
        run = self._runner(collective, part, nbytes, dtype) if part is not None else None
        self.line_up()
        if run is None:
            return None
        start = time.perf_counter()
        for turn in range(repeats):
            run(turn)
        self.finish()
        return (time.perf_counter() - start) / repeats

    def part(self, groups: Groups) -> dist.ProcessGroup | None:
        """The one of these groups that this rank is in; every rank calls it, the first makes them.

        The parts of a group that is not the whole world are made by their ranks alone; torch
        requires then that these have made equally many groups before.
        """
        for ranks in groups:
            if ranks not in self._parts:
                self._parts[ranks] = self._make(ranks)
        return next((self._parts[ranks] for ranks in groups if self.rank in ranks), None)

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        names = dist.get_process_group_ranks(self.group)
        alone = self.world_size < dist.get_world_size()
        if alone and self.rank not in ranks:
            return None
        made = dist.new_group(
            [names[rank] for rank in ranks],
            timeout=group_timeout(self.group),
            use_local_synchronization=alone,
        )
        return made if isinstance(made, dist.ProcessGroup) else None

    def _runner(
        self, collective: str, group: dist.ProcessGroup, nbytes: int, dtype: torch.dtype
    ) -> Callable[[int], None]:
        """Runs the collective once, as the so-manieth in a row.

        Of broadcasts and messages the next is sent by another rank, which must have received the
        one before: so their times are those until arrival, not until the sender is free.
        """
        ranks, rank, name = group.size(), group.rank(), group.group_name
        if collective == "send":
            message = self._zeros_of(message_bytes(ranks, nbytes), dtype)

            def pass_on(turn: int) -> None:
                if turn % ranks == rank:
                    dist.send(message, group=group, group_dst=(rank + 1) % ranks)
                elif (turn + 1) % ranks == rank:
                    dist.recv(message, group=group, group_src=(rank - 1) % ranks)

            return pass_on
        if collective == "broadcast":
            message = self._zeros_of(message_bytes(ranks, nbytes), dtype)
            broadcast = torch.ops._c10d_functional.broadcast_
            return lambda turn: _wait(broadcast(message, turn % ranks, name))
        exchanged = collective == "all_to_all" and self.backend == "gloo"
        count = gloo_chunks(nbytes, ranks) if exchanged else 1
        issue = self.issuer(collective, group, nbytes // count, dtype)

        def run(turn: int) -> None:
            for pending in [issue() for _ in range(count)]:
                _wait(pending)

        return run

    def issuer(
        self,
        collective: str,
        group: dist.ProcessGroup,
        nbytes: int,
        dtype: torch.dtype = torch.float32,
    ) -> Callable[[], torch.Tensor]:
        """A function that issues the collective once and returns what to wait for."""
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
        """Wait for all ranks."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def message_bytes(ranks: int, nbytes: int) -> int:
    """The message size that is sent for about `nbytes`: as many whole items for each rank."""
    item = 8  # bytes of the largest dtype that is sent
    return math.ceil(nbytes / (item * ranks)) * item * ranks


def _wait(pending: torch.Tensor) -> None:
    torch.ops._c10d_functional.wait_tensor(pending)


def _backend(group: dist.ProcessGroup) -> str:
    """The backend that serves the device in use: of a mixed group, NCCL if there is a GPU."""
    name = str(dist.get_backend(group))
    if name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        return name
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
