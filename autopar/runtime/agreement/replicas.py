"""Checks that copies of parameters and buffers on several ranks stay equal."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._torch import local_tensor
from autopar.errors import DisagreementError
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.optimizer_steps import hyperparameters
from autopar.runtime.agreement.record import odd_ranks, stable_hash
from autopar.runtime.batch_checks import LateNumbers, is_on_host

MAX_ELEMENTS = 64
"""Elements of a replica that a call compares."""

REPLICAS_PER_CALL = 4
"""Replicas that a call compares."""

NUMBERS_PER_SAMPLE = 4
"""Numbers that a sample is encoded in."""

ACCELERATOR_INTERVAL = 64
"""Calls between comparisons on accelerators, where each takes some twenty small kernels."""

MAX_NAMED = 5
"""Replicas that an error names."""


@dataclass(frozen=True)
class Sample:
    """Sums over a few elements of a replica.

    Attributes:
        numbers: hash of the replica's key. Bits of three float64: the sum, the sum of absolute
            values, and the relative difference that rounding may cause over many steps.
    """

    name: str
    numbers: tuple[int, ...]


class PendingSamples:
    """Samples of some replicas, perhaps still to be computed by an accelerator."""

    def __init__(self, chosen: Sequence[tuple[str, torch.Tensor]]) -> None:
        parts = [(name, *_keyed_part(name, tensor)) for name, tensor in chosen]
        self._names = [(name, stable_hash(key)) for name, key, _ in parts]
        few = [_few_elements(part) for _, _, part in parts]
        eps = [torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0 for x in few]
        # 1000 * eps of bfloat16 is beyond 1, and would hide almost any difference.
        self._tolerances = [min(1000 * e, e**0.5) for e in eps]
        self.is_late = not all(map(is_on_host, few))
        self._sums: LateNumbers | list[float]
        if self.is_late:
            sums = [s for x in few for y in [x.double()] for s in (y.sum(), y.abs().sum())]
            self._sums = LateNumbers(torch.stack(sums))
        else:
            lists = [x.tolist() for x in few]  # quicker than operators on so few elements
            self._sums = [s for x in lists for s in (float(sum(x)), float(sum(map(abs, x))))]

    def read(self) -> list[Sample]:
        sums = iter(self._sums if isinstance(self._sums, list) else self._sums.read())
        return [
            Sample(name, (key, *struct.unpack("<3q", struct.pack("<3d", *pair, tolerance))))
            for (name, key), tolerance, pair in zip(
                self._names, self._tolerances, zip(sums, sums, strict=True), strict=True
            )
        ]


def _few_elements(part: torch.Tensor) -> torch.Tensor:
    flat = part.reshape(-1)
    few = flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))]
    return torch.view_as_real(few).reshape(-1) if few.is_complex() else few


def _keyed_part(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """This rank's copy of a tensor or shard, under a key that is equal for equal replicas."""
    shard: tuple[tuple[int, int], ...] = ()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate() or ()
        shard = tuple(
            (mesh.size(axis), coordinate[axis])
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        )
    return f"{name} {shard}", local_tensor(tensor).detach()


def check_samples(numbers: Sequence[Sequence[int]], own: Sequence[Sample]) -> None:
    """Raises DisagreementError on every rank alike if samples of the same replica differ."""
    first: dict[int, tuple[int, Sequence[int]]] = {}
    for rank, row in enumerate(numbers):
        for begin in range(0, len(row), NUMBERS_PER_SAMPLE):
            sample = row[begin : begin + NUMBERS_PER_SAMPLE]
            base, known = first.setdefault(sample[0], (rank, sample))
            # The key is 0 where a rank sent fewer samples than a record has room for.
            if sample[0] and not _are_close(known, sample):
                names = [repr(s.name) for s in own if s.numbers[0] == sample[0]]
                raise DisagreementError(
                    f"rank {rank} holds other values of {', '.join(names) or 'another stage'} "
                    f"than rank {base}: their copies have parted. The ranks stepped differently, "
                    "or one changed its copy. model.check_replicas(optimizer) compares everything."
                )


def _are_close(a: Sequence[int], b: Sequence[int]) -> bool:
    if list(a) == list(b):
        return True
    total, magnitude, tolerance = struct.unpack("<3d", struct.pack("<3q", *a[1:]))
    (other,) = struct.unpack("<d", struct.pack("<q", b[1]))
    return bool(abs(total - other) <= tolerance * magnitude)


@dataclass(frozen=True)
class Replicas:
    """The parameters and buffers on this rank."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def samples(self, number: int) -> PendingSamples | None:
        """Samples of the next replicas in turn; none between intervals on accelerators."""
        names = [*self.parameters, *self.buffers]
        if not names:
            return None
        turn, skipped = divmod(
            number, 1 if is_on_host(self._of_name(names[0])) else ACCELERATOR_INTERVAL
        )
        if skipped:
            return None
        places = {(turn * REPLICAS_PER_CALL + i) % len(names) for i in range(REPLICAS_PER_CALL)}
        chosen = [(n, self._of_name(n)) for n in map(names.__getitem__, sorted(places))]
        dense = [(n, x) for n, x in chosen if x.numel() and not x.is_meta]
        dense = [(n, x) for n, x in dense if x.layout is torch.strided]
        return PendingSamples(dense)

    def _of_name(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def all(self, optimizer: Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The key and part of every replica, with the state of an optimizer."""
        names = {id(p): name for name, p in self.parameters.items()}
        for name, tensor in [*self.parameters.items(), *self.buffers.items()]:
            yield _keyed_part(name, tensor)
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and id(parameter) in names:
                    yield _keyed_part(f"{key} of {names[id(parameter)]}", value)


def compare_replicas(
    replicas: Replicas, optimizer: Optimizer | None, stage: int, tolerance: float
) -> None:
    """Compares every replica in full, as `DistributedModule.check_replicas`."""
    event = "compares replicas"
    own = dict(replicas.all(optimizer))
    groups = (stage, hyperparameters(optimizer)) if optimizer is not None else ("", "")
    gathered: list[Any] = gather_objects(
        ({key: checksum(part) for key, part in own.items()}, groups), event
    )
    first, differing = _differing([checksums for checksums, _ in gathered])
    compared = list(differing.items()) if tolerance else list(differing.items())[:MAX_NAMED]
    lines = []
    for key, ranks in compared:
        values = gather_objects(own[key].cpu() if key in own else None, event)
        base = first[key]
        distance = max(_distance(values[rank], values[base]) for rank in ranks)
        # Not `distance > tolerance`: a distance of NaN is a difference, too.
        if not distance <= tolerance:
            name = key.rpartition(" (")[0]
            lines.append(f"{name}: rank(s) {ranks} are off rank {base} by up to {distance:.2e}")
    settings = [(values, stage) for _, (stage, values) in gathered]
    lines += [
        f"the optimizer's groups: {settings[rank][0]} on rank {rank}, "
        f"{settings[base][0]} on rank {base}"
        for rank, base in odd_ranks(settings).items()
    ]
    if lines:
        hidden = len(differing) - len(compared) + max(0, len(lines) - 2 * MAX_NAMED)
        shown = "\n".join(lines[: 2 * MAX_NAMED]) + (f"\n(and {hidden} more)" if hidden else "")
        raise DisagreementError(
            f"copies that the ranks hold of the same tensors have parted:\n{shown}\nThe ranks "
            "stepped differently, or one changed its copy. Load the last checkpoint."
        )


def _differing(
    checksums: Sequence[Mapping[str, int]],
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The first rank of each key, and the ranks whose checksums differ from it."""
    first: dict[str, int] = {}
    differing: dict[str, list[int]] = {}
    for rank, table in enumerate(checksums):
        for key, value in table.items():
            if checksums[first.setdefault(key, rank)][key] != value:
                differing.setdefault(key, []).append(rank)
    return first, differing


def _distance(part: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two parts; infinite if their shapes differ."""
    if part.shape != other.shape:
        return math.inf
    return float((part.double() - other.double()).abs().max())


def checksum(part: torch.Tensor) -> int:
    """A number that almost surely differs for other values or another shape."""
    data = part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.data, zlib.crc32(str(tuple(part.shape)).encode()))
