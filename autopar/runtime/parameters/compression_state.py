"""`CompressionState`: tensors that compression keeps between steps, here and in state dicts.

In a state dict every tensor is a DTensor with a leading dim for each mesh axis, sharded so that
each rank has one entry. Training resumes exactly from such a checkpoint. On another number of
data-parallel ranks, each takes an equal share of the summed residuals.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES, coordinate_on
from autopar.core.ir.placement import Shard, chunk_of
from autopar.core.ir.roles import State
from autopar.core.plan.compression import Compression
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.errors import LossyWarning
from autopar.passes.compression.reduce_algorithms import kept_of

STATE_DICT_KEY = "_extra_state"
"""Key in the state dict of a module, after torch's convention."""

MESH_KEY = "mesh"


@dataclass
class CompressionState:
    """Tensors that compression keeps, written by programs, and their largest shapes on any rank."""

    tensors: dict[State, Tensor] = field(default_factory=dict)
    padded_shapes: dict[State, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of_plan(
        plan: Plan, parameters: Mapping[str, ParameterInfo], rank: int, device: torch.device
    ) -> CompressionState:
        """The state of a plan before the first step."""
        made, pipeline = CompressionState(), plan.pipeline
        coordinate = Layout(plan).coordinate(rank)
        local = pipeline.held(coordinate.get("pp", 0)) if pipeline else parameters
        for names, text in zip(plan.buckets.reduce, plan.compressions.reduce, strict=True):
            if not text or plan.dp_size == 1:
                continue
            infos = [parameters[name] for name in names if name in local]
            if not infos:
                continue
            shapes, largest = (
                {i.name: _local_shape(plan, i, place) for i in infos}
                for place in (coordinate, dict.fromkeys(dict(plan.mesh), 0))
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
        """The tensor of a role, created if there is none of this shape and dtype."""
        found = self.tensors.get(role)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            found = self.tensors[role] = initial_state(role, like).to(like.device)
        return found

    def copy(self) -> CompressionState:
        tensors = {role: tensor.clone() for role, tensor in self.tensors.items()}
        return CompressionState(tensors, dict(self.padded_shapes))

    def state_dict(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Entries of a state dict; empty without compression."""
        if not self.tensors:
            return {}
        placements = [TorchShard(axis) for axis in range(mesh.ndim)]
        found: dict[str, Any] = {MESH_KEY: _text(mesh)}
        for role in sorted(self.tensors, key=_key):
            part = self.tensors[role]
            # `DTensor.from_local` takes the shards of all ranks to be as large as this one.
            part = _padded(part, self.padded_shapes.get(role, tuple(part.shape)))
            part = part.view([1] * mesh.ndim + list(part.shape)).clone()
            found[_key(role)] = DTensor.from_local(part, mesh, placements, run_check=False)
        return found

    def load(self, values: Mapping[str, Any], mesh: DeviceMesh) -> None:
        """Loads a `state_dict` of this or another mesh; warns of tensors that it resets."""
        sizes = _sizes(str(values.get(MESH_KEY, _text(mesh))))
        lost = []
        for role, own in self.tensors.items():
            value = values.get(_key(role))
            part = None if value is None else _local_entry(role, value, sizes, mesh)
            shape = self.padded_shapes.get(role, tuple(own.shape))
            if part is None or tuple(part.shape) != shape:
                lost.append(_key(role))
                part = _padded(initial_state(role, own).to(own.device), shape)
            own.copy_(part[tuple(map(slice, own.shape))])
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            warn_once(
                LossyWarning,
                f"the state of compression starts anew for {len(lost)} of {len(self.tensors)} "
                f"states: the state dict lacks them or is of another compression ({some})",
            )


def initial_state(role: State, like: Tensor) -> Tensor:
    """A tensor before the first step: random factors, equal on all ranks, or zeros."""
    if role.kind != "factor":
        return torch.zeros(like.shape, dtype=like.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(role.name.encode()))
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def _local_shape(plan: Plan, info: ParameterInfo, place: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a rank's gradient before compression."""
    layout, axes = Layout(plan), Layout(plan).axes
    shape = layout.model_parallel_shape(info, place)
    placement = layout.of(info.name)[layout.shard_order[-1]]
    if isinstance(placement, Shard):
        shape[0], shape[placement.dim] = shape[placement.dim], shape[0]  # as it travels
        if layout.shard_axis != DATA_AXIS:  # uncompressed reduction over neighbours first
            index = coordinate_on(layout.shard_axis, place[DATA_AXIS], axes)
            shape[0] = chunk_of(shape[0], axes[layout.shard_axis], index)[1]
    return tuple(shape)


def _key(role: State) -> str:
    return f"{role.kind}.{role.name}"


def _text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (p.partition("=") for p in text.split(","))}


def _padded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    missing = [w - h for h, w in zip(part.shape, shape, strict=True)]
    return F.pad(part, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else part


def _local_entry(
    role: State, value: Any, sizes: Mapping[str, int], mesh: DeviceMesh
) -> Tensor | None:
    """This rank's entry of a saved tensor, None if the model was partitioned otherwise."""
    if isinstance(value, DTensor):
        if value.device_mesh == mesh:
            return value.to_local().flatten(0, mesh.ndim - 1)[0]
        value = value.full_tensor()
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    assert place is not None
    new_sizes = dict(zip(names, mesh.shape, strict=True))
    coordinate = dict(zip(names, place, strict=True))
    model_axes = [{x for x in t.items() if not _is_data(x[0])} for t in (sizes, new_sizes)]
    if model_axes[0] != model_axes[1]:
        return None
    num_data_axes = sum(map(_is_data, sizes))
    entries = value[tuple(slice(None) if _is_data(name) else coordinate[name] for name in sizes)]
    entries = entries.flatten(0, num_data_axes - 1) if num_data_axes else entries.unsqueeze(0)
    ranks, index = 1, 0
    for name, size in new_sizes.items():
        if _is_data(name):
            ranks, index = ranks * size, index * size + coordinate[name]
    if len(entries) == ranks:
        return entries[index]
    return entries.sum(0) / ranks if role.kind == "residual" else entries[0]


def _is_data(axis: str) -> bool:
    return axis in (DATA_AXIS, *DATA_STORAGE_AXES)
