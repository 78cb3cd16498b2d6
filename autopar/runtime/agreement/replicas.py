"""Replicas: parts of parameters and buffers that several ranks hold, and that must stay equal."""

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

from autopar.errors import DisagreementError
from autopar.runtime.agreement.channel import stable_hash
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.optimizer_steps import hyperparameters
from autopar.runtime.parameters.distribute import is_remote, local_part

MAX_ELEMENTS = 64
"""Elements of a replica that a call compares."""

REPLICAS_PER_CALL = 4
"""Replicas that a call compares."""

NUMBERS_PER_SAMPLE = 4
"""Numbers that a sample travels as."""

ACCELERATOR_INTERVAL = 64
"""Calls between comparisons where reading an element waits for an accelerator."""

MAX_NAMED = 5
"""Replicas that an error names."""


@dataclass(frozen=True)
class Replica:
    """This rank's copy of something that other ranks hold too.

    Attributes:
        name: as a person calls it.
        place: which part of it, where it is sharded along other axes.
        part: the values.
    """

    name: str
    place: tuple[tuple[int, int], ...]
    part: torch.Tensor

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Replica:
        """The replica of a tensor; of a DTensor, of this rank's part."""
        if not isinstance(tensor, DTensor):
            return Replica(name, (), tensor.detach())
        at, mesh = tensor.device_mesh.get_coordinate() or (), tensor.device_mesh
        place = tuple(
            (mesh.size(axis), at[axis])
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        )
        return Replica(name, place, local_part(tensor).detach())

    @property
    def key(self) -> str:
        """A text that is equal where parts must be."""
        return f"{self.name} {self.place}"


@dataclass(frozen=True)
class Sample:
    """A few elements of a replica, added up.

    Attributes:
        name: of the replica.
        key: a number that is equal where parts must be.
        total: of the elements.
        size: of their absolute values.
        tolerance: relative difference that rounding may bring about over many steps.
    """

    name: str
    key: int
    total: float
    size: float
    tolerance: float

    @property
    def numbers(self) -> tuple[int, ...]:
        """As it travels."""
        return (self.key, _bits(self.total), _bits(self.size), _bits(self.tolerance))


def check_samples(shown: Sequence[Sequence[int]], own: Sequence[Sample]) -> None:
    """Raises on every rank alike if ranks sampled other values of the same replica.

    Args:
        shown: the numbers of all samples of every rank.
        own: of this rank.

    Raises:
        DisagreementError: copies of one parameter or buffer have parted.
    """
    first: dict[int, tuple[int, Sequence[int]]] = {}
    for rank, numbers in enumerate(shown):
        for place in range(0, len(numbers), NUMBERS_PER_SAMPLE):
            sample = numbers[place : place + NUMBERS_PER_SAMPLE]
            base, known = first.setdefault(sample[0], (rank, sample))
            if sample[0] and not _near(known, sample):
                names = [repr(s.name) for s in own if s.key == sample[0]]
                raise DisagreementError(
                    f"rank {rank} holds other values of {', '.join(names) or 'another stage'} "
                    f"than rank {base}: their copies have parted. The ranks stepped differently, "
                    "or one changed its copy. model.check_replicas(optimizer) compares everything."
                )


def _near(a: Sequence[int], b: Sequence[int]) -> bool:
    if tuple(a) == tuple(b):
        return True
    (total, size, tolerance), (other, _, _) = map(_float, a[1:]), map(_float, b[1:])
    return abs(total - other) <= tolerance * size


@dataclass(frozen=True)
class Replicas:
    """What a rank holds of a model.

    Attributes:
        parameters: by name.
        buffers: by name.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def samples(self, number: int) -> list[Sample]:
        """A few elements of each of the next replicas in turn; none if it is not their turn.

        Args:
            number: of the call, from 0.
        """
        held = [(n, p) for n, p in self.parameters.items() if not is_remote(p)]
        held += list(self.buffers.items())
        if not held:
            return []
        turn, rest = divmod(number, ACCELERATOR_INTERVAL if held[0][1].device.type != "cpu" else 1)
        places = (
            {(turn * REPLICAS_PER_CALL + i) % len(held) for i in range(REPLICAS_PER_CALL)}
            if not rest
            else ()
        )
        return [_sampled(*held[place]) for place in sorted(places) if _has_values(held[place][1])]

    def all(self, optimizer: Optimizer | None) -> Iterator[Replica]:
        """Every replica, with the state of an optimizer."""
        names = {id(p): name for name, p in self.parameters.items()}
        for name, tensor in [*self.parameters.items(), *self.buffers.items()]:
            if not is_remote(tensor):
                yield Replica.of(name, tensor)
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and id(parameter) in names:
                    yield Replica.of(f"{key} of {names[id(parameter)]}", value)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.layout is torch.strided


def _sampled(name: str, tensor: torch.Tensor) -> Sample:
    replica = Replica.of(name, tensor)
    flat = replica.part.reshape(-1)
    few = flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))]
    few = torch.view_as_real(few) if few.is_complex() else few
    eps = torch.finfo(few.dtype).eps if few.is_floating_point() else 0.0
    few = few.double()
    tolerance = min(1000 * eps, eps**0.5)
    return Sample(
        name, stable_hash(replica.key), float(few.sum()), float(few.abs().sum()), tolerance
    )


def compare_replicas(
    replicas: Replicas, optimizer: Optimizer | None, stage: int, tolerance: float
) -> None:
    """Compares every replica in full; all ranks call it at once.

    Args:
        replicas: of this rank.
        optimizer: with its state and hyperparameters, if given.
        stage: where this rank stands along a pipeline: others step other parameters.
        tolerance: absolute difference that passes.

    Raises:
        DisagreementError: on every rank, if some have parted.
    """
    event = "compares replicas"
    own = {replica.key: replica for replica in replicas.all(optimizer)}
    groups = f"{stage} {hyperparameters(optimizer)}" if optimizer is not None else ""
    told: list[Any] = gather_objects(
        ({key: _checksum(replica.part) for key, replica in own.items()}, groups), event
    )
    first: dict[str, tuple[int, int]] = {}
    parted: dict[str, list[int]] = {}
    for rank, (checksums, _) in enumerate(told):
        for key, value in checksums.items():
            if first.setdefault(key, (rank, value))[1] != value:
                parted.setdefault(key, []).append(rank)
    lines = []
    looked_at = list(parted.items()) if tolerance else list(parted.items())[:MAX_NAMED]
    for key, ranks in looked_at:
        values = gather_objects(own[key].part.cpu() if key in own else None, event)
        base = first[key][0]
        most = max(_distance(values[rank], values[base]) for rank in ranks)
        if not most <= tolerance:
            name = key.rpartition(" (")[0]
            lines.append(f"{name}: rank(s) {ranks} are off rank {base} by up to {most:.2e}")
    lines += _of_groups([groups for _, groups in told])
    if lines:
        hidden = len(parted) - len(looked_at) + max(0, len(lines) - 2 * MAX_NAMED)
        shown = "\n".join(lines[: 2 * MAX_NAMED]) + (f"\n(and {hidden} more)" if hidden else "")
        raise DisagreementError(
            f"copies that the ranks hold of the same tensors have parted:\n{shown}\nThe ranks "
            "stepped differently, or one changed its copy. Load the last checkpoint."
        )


def _distance(part: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference of two parts; infinite if their shapes differ."""
    if part.shape != other.shape:
        return math.inf
    return float((part.double() - other.double()).abs().max())


def _of_groups(groups: Sequence[str]) -> list[str]:
    """Lines about ranks of one stage whose hyperparameters differ."""
    first: dict[str, tuple[int, str]] = {}
    lines = []
    for rank, text in enumerate(groups):
        stage, _, values = text.partition(" ")
        base, known = first.setdefault(stage, (rank, values))
        if values != known:
            lines.append(f"the optimizer's groups: {values} on rank {rank}, {known} on rank {base}")
    return lines


def _checksum(part: torch.Tensor) -> int:
    data = part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.data, zlib.crc32(str(tuple(part.shape)).encode()))


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
