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

T = TypeVar("T")

_ITEM = 4  # float32


class Bench:
    """A process group and its parts, inside a `with`.

    Attributes:
        group: all ranks that take part.
        rank: of this process among them.
        world_size: their number.
        backend: "gloo", "nccl", ...
        device: where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = _backend(group)
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._zeros = torch.zeros(0, device=self.device)
        self._parts: dict[int, dist.ProcessGroup] = {self.world_size: group}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            if part is not self.group:
                dist.destroy_process_group(part)

    def agree(self, decide: Callable[[], T]) -> T:
        """What `decide` says on rank 0, on every rank."""
        box = [decide() if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0, device=self.device)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def part(self, ranks: int) -> dist.ProcessGroup:
        """This process's group of `ranks` consecutive ranks; all ranks ask for it together."""
        if ranks not in self._parts:
            members = dist.get_process_group_ranks(self.group)
            first = self.rank - self.rank % ranks
            made = dist.new_group(members[first : first + ranks], use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self._parts[ranks] = made
        return self._parts[ranks]

    def message_bytes(self, ranks: int, nbytes: int) -> int:
        """The message size that is sent for about `nbytes`: a multiple of ranks and items."""
        return math.ceil(nbytes / (_ITEM * ranks)) * _ITEM * ranks

    def time(self, collective: str, ranks: int, nbytes: int, repeats: int = 1) -> float:
        """Seconds of one collective among `ranks`, all groups of that size at once."""
        issue = self.issuer(collective, ranks, nbytes)
        self.line_up()
        start = time.perf_counter()
        for _ in range(repeats):
            torch.ops._c10d_functional.wait_tensor(issue())
        self.finish()
        return (time.perf_counter() - start) / repeats

    def issuer(self, collective: str, ranks: int, nbytes: int) -> Callable[[], torch.Tensor]:
        """A function that issues the collective once and returns what to wait for."""
        numel = self.message_bytes(ranks, nbytes) // _ITEM
        name = self.part(ranks).group_name
        ops = torch.ops._c10d_functional
        if self._zeros.numel() < numel:
            self._zeros = torch.zeros(numel, device=self.device)
        whole, chunk = self._zeros[:numel], self._zeros[: numel // ranks]
        even = [numel // ranks] * ranks
        return {
            "all_reduce": lambda: ops.all_reduce_(whole, "sum", name),
            "all_gather": lambda: ops.all_gather_into_tensor(chunk, ranks, name),
            "reduce_scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", ranks, name),
            "all_to_all": lambda: ops.all_to_all_single(whole, even, even, name),
            "broadcast": lambda: ops.broadcast_(whole, 0, name),
        }[collective]

    def line_up(self) -> None:
        """Wait for all ranks."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _backend(group: dist.ProcessGroup) -> str:
    """The backend that serves the device in use: of a mixed group, NCCL if there is a GPU."""
    name = str(dist.get_backend(group))
    if name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        return name
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
