"""`CompressionState`: tensors that compression keeps between steps, here and in state dicts.

In a state dict every state is a DTensor with a leading dim for each axis of the mesh, along which
every rank has its own entry: so a checkpoint holds what each rank has kept, and training goes on
from it as if it had not stopped. Where the ranks of the data are others than before, each takes an
equal part of what all together had not sent: their sum is all that counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.common.notices import warn_once
from autopar.errors import LossyWarning
from autopar.ir.graph import ParameterInfo
from autopar.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES, coordinate_on
from autopar.ir.placement import Shard as Divided
from autopar.ir.placement import chunk_rows
from autopar.ir.roles import State
from autopar.passes.compression.reduce_algorithms import kept_of
from autopar.plan.compression import Compression
from autopar.report.plan import Plan

STATE_DICT_KEY = "_extra_state"
"""Of these in the state dict of a module, by torch's own convention."""

MESH = "mesh"


@dataclass
class CompressionState:
    """Tensors by their role; programs write them in place.

    Attributes:
        known: of each role, this rank's own.
        full: the shape of the largest among the ranks, if the model is divided unevenly.
    """

    tensors: dict[State, Tensor] = field(default_factory=dict)
    padded_shapes: dict[State, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of_plan(
        plan: Plan, parameters: Mapping[str, ParameterInfo], rank: int, device: torch.device
    ) -> CompressionState:
        """What a plan will keep, before the first step."""
        made, pipeline = CompressionState(), plan.pipeline
        held = pipeline.held(plan.mesh_coordinate(rank).get("pp", 0)) if pipeline else parameters
        for names, text in zip(plan.buckets.reduce, plan.compressions.reduce, strict=True):
            if not text or plan.dp_size == 1:
                continue
            infos = [parameters[name] for name in names if name in held]
            if not infos:
                continue
            shapes, largest = (
                {i.name: _local_shape(plan, i, place) for i in infos}
                for place in (plan.mesh_coordinate(rank), dict.fromkeys(dict(plan.mesh), 0))
            )
            dtype = torch.promote_types(infos[0].dtype, torch.float32)
            compression = Compression.of(text)
            made.padded_shapes |= {
                s: like.shape for s, like in kept_of(compression, largest, dtype)
            }
            for state, like in kept_of(compression, shapes, dtype):
                made.tensors[state] = initial_state(state, like).to(device)
        return made

    def get(self, role: State, like: Tensor) -> Tensor:
        """What is kept for a role; another kind of call may ask for more than was known of."""
        found = self.tensors.get(role)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            found = self.tensors[role] = initial_state(role, like).to(like.device)
        return found

    def copy(self) -> CompressionState:
        """The same, in tensors of its own."""
        known = {role: tensor.clone() for role, tensor in self.tensors.items()}
        return CompressionState(known, dict(self.padded_shapes))

    def state_dict(self, mesh: DeviceMesh) -> dict[str, Any]:
        """What a state dict holds of it; empty if nothing is kept."""
        if not self.tensors:
            return {}
        places = [Shard(axis) for axis in range(mesh.ndim)]
        found: dict[str, Any] = {MESH: _text(mesh)}
        for role in sorted(self.tensors, key=_key):
            part = self.tensors[role]
            part = _padded(part, self.padded_shapes.get(role, tuple(part.shape)))
            part = part.view([1] * mesh.ndim + list(part.shape)).clone()
            found[_key(role)] = DTensor.from_local(part, mesh, places, run_check=False)
        return found

    def load(self, values: Mapping[str, Any], mesh: DeviceMesh) -> None:
        """Takes what `saved` gave, here or elsewhere; says what starts anew."""
        sizes = _sizes(str(values.get(MESH, _text(mesh))))
        lost = []
        for role, own in self.tensors.items():
            value = values.get(_key(role))
            part = None if value is None else _own_part(role, value, sizes, mesh)
            wanted = self.padded_shapes.get(role, tuple(own.shape))
            if part is None or tuple(part.shape) != wanted:
                lost.append(_key(role))
                part = _padded(initial_state(role, own).to(own.device), wanted)
            own.copy_(part[tuple(slice(0, size) for size in own.shape)])
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            warn_once(
                LossyWarning,
                f"the state of compression starts anew for {len(lost)} of {len(self.tensors)} "
                f"states: the state dict lacks them or is of another compression ({some})",
            )


def initial_state(role: State, like: Tensor) -> Tensor:
    """What is kept before the first step: factors are the same on all ranks."""
    if role.kind != "factor":
        return torch.zeros(like.shape, dtype=like.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(role.name.encode()))
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def _local_shape(plan: Plan, info: ParameterInfo, place: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a gradient on a rank before it is compressed."""
    shape, sizes = list(info.shape), dict(plan.mesh)
    for partition in plan.partitions:
        layout = partition.layouts.get(info.name)
        if isinstance(layout, Divided):
            rows = chunk_rows(shape[layout.dim] // layout.interleave, sizes[partition.axis])
            shape[layout.dim] = rows[place[partition.axis]] * layout.interleave
    sharded = isinstance(plan.layout(info.name)[plan.shard_order[-1]], Divided)
    if sharded and plan.shard_axis != DATA_AXIS:  # summed over neighbours as it is
        own = coordinate_on(plan.shard_axis, place[DATA_AXIS], plan.axes)
        shape[0] = chunk_rows(shape[0], plan.axes[plan.shard_axis])[own]
    return tuple(shape)


def _key(role: State) -> str:
    return f"{role.kind}.{role.name}"


def _text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (p.partition("=") for p in text.split(","))}


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A part filled up with zeros to a shape."""
    missing = [w - h for h, w in zip(part.shape, shape, strict=True)]
    return F.pad(part, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else part


def _own_part(role: State, value: Any, sizes: Mapping[str, int], mesh: DeviceMesh) -> Tensor | None:
    """This rank's entry of a saved state, None if it was saved of a model divided otherwise."""
    if isinstance(value, DTensor):
        if value.device_mesh == mesh:
            return value.to_local().flatten(0, mesh.ndim - 1)[0]
        value = value.full_tensor()
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    assert place is not None
    now = dict(zip(names, mesh.shape, strict=True))
    at = dict(zip(names, place, strict=True))
    if _undata(now) != _undata(sizes):
        return None
    of_data = sum(map(_is_data, sizes))
    entries = value[tuple(slice(None) if _is_data(name) else at[name] for name in sizes)]
    entries = entries.flatten(0, of_data - 1) if of_data else entries.unsqueeze(0)
    ranks, own = 1, 0
    for name, size in now.items():
        if _is_data(name):
            ranks, own = ranks * size, own * size + at[name]
    if len(entries) == ranks:
        return entries[own]
    return entries.sum(0) / ranks if role.kind == "residual" else entries[0]


def _is_data(axis: str) -> bool:
    return axis in (DATA_AXIS, *DATA_STORAGE_AXES)


def _undata(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if not _is_data(name)}
