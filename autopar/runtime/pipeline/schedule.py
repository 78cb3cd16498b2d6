"""Runs the stages of a rank in the order of a schedule, by torch.distributed.pipelining.

torch's runtime says when a stage runs a micro-batch and when tensors travel. What it is given is
our own kind of stage, whose forward and backward are generated functions, without autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autopar._torch import (
    PipelineAction,
    PipelineRuntime,
    PipelineStageBase,
    PipelineWork,
    add_transfers,
)
from autopar.cost_model.simulator.schedules import Orders
from autopar.ir.roles import StageInput, StageOutput
from autopar.runtime.codegen.program import CompiledGraph
from autopar.runtime.pipeline.stage import Stage, StageStep, Values
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass(frozen=True)
class Schedule:
    """The stages of a rank, and what all ranks do in which order.

    Attributes:
        stages: those of this rank, by number.
        orders: of actions, for each rank of the pipeline.
        micro_batches: how many there are.
        device: of tensors.
        group: the process group of the pipeline; None if this rank has all stages.
    """

    stages: Mapping[int, Stage]
    orders: Orders
    micro_batches: int
    device: torch.device
    group: dist.ProcessGroup | None

    def run(self, step: StageStep) -> None:
        """Runs all of it for one call."""
        for stage in self.stages.values():
            stage.begin(step)
        if self.group is None:
            return self._run_alone()
        with explaining_comm_errors("a pipeline"):
            self._runtime._step_microbatches()
        return None

    def _run_alone(self) -> None:
        """This rank has all stages: nothing travels."""
        came: dict[tuple[bool, int, int], Values] = {}
        for action in self.orders[0]:
            stage, micro = self.stages[action.stage], action.micro
            if action.kind == "W":
                stage.weight_backward(micro)
                continue
            forward = action.kind == "F"
            given = came.pop((forward, stage.index, micro), {})
            sent = stage.forward(micro, given) if forward else stage.backward(micro, given)
            came[forward, stage.index + (1 if forward else -1), micro] = as_received(sent)
            if action.kind == "B":
                stage.weight_backward(micro)

    @cached_property
    def _runtime(self) -> PipelineRuntime:
        """torch's runtime, with transfers written between the actions."""
        ranks = len(self.orders)
        count = 1 + max(action.stage for order in self.orders for action in order)
        stages = [
            _TorchStage(stage, count, self.device, self.group)  # type: ignore[arg-type]
            for stage in self.stages.values()
        ]
        runtime = PipelineRuntime(
            stages, self.micro_batches, scale_grads=False, backward_requires_autograd=False
        )
        actions = {
            rank: [PipelineAction(a.stage, PipelineWork(a.kind), a.micro) for a in order]
            for rank, order in enumerate(self.orders)
        }
        written = add_transfers(actions, lambda s: s % ranks, count)
        if self.device.type == "cpu":
            written = {rank: hoist_receives(own) for rank, own in written.items()}
        runtime.pipeline_order_with_comms = written
        runtime._stages_forward_initialized = True  # shapes are known: nothing is inferred
        return runtime


def hoist_receives(actions: Iterable[PipelineAction]) -> list[PipelineAction]:
    """Each receive before the work that it follows, so that what comes travels meanwhile.

    gloo sends nothing before it is asked for; a GPU's queue asks early of itself. What one rank
    sends another is received in the same order as before.
    """
    found: list[PipelineAction] = []
    for action in actions:
        place = len(found)
        if action.computation_type in _RECEIVES:
            works = (i for i in reversed(range(place)) if found[i].computation_type not in _TRAVELS)
            place = next(works, place)
        found.insert(place, action)
    return found


_RECEIVES = (PipelineWork.RECV_F, PipelineWork.RECV_B)
_TRAVELS = (*_RECEIVES, PipelineWork.SEND_F, PipelineWork.SEND_B)


class _TorchStage(PipelineStageBase):
    """A stage as torch's runtime takes it."""

    def __init__(
        self, stage: Stage, count: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(nn.Module(), stage.index, count, device, group)
        self.stage = stage
        self.forwards: dict[int, Values] = {}  # came from below, then goes above
        self.backwards: dict[int, Values] = {}  # came from above, then goes below

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        micro = fwd_chunk_id
        self.forwards[micro] = self.stage.forward(micro, self.forwards.pop(micro, {}))

    def backward_one_chunk(
        self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any
    ) -> None:
        micro = bwd_chunk_id
        self.backwards[micro] = self.stage.backward(micro, self.backwards.pop(micro, {}))
        if full_backward:
            self.stage.weight_backward(micro)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self.stage.weight_backward(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the last backward has reduced."""

    def get_fwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        return self._receive(self.forwards, micro, self.stage.program.forward.fake_tensors, -1)

    def get_fwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        return self._send(self.forwards.pop(micro), self.stage.program.forward.fake_tensors, +1)

    def get_bwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        return self._receive(self.backwards, micro, self._of_backward, +1)

    def get_bwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        return self._send(self.backwards.pop(micro), self._of_backward, -1)

    @cached_property
    def _of_backward(self) -> Mapping[Any, torch.Tensor]:
        last = self.stage.program.last_backward
        return {} if last is None else CompiledGraph(last.graph, last.parts[0].run).fake_tensors

    def _receive(
        self, table: dict[int, Values], micro: int, likes: Mapping[Any, torch.Tensor], offset: int
    ) -> list[dist.P2POp]:
        table[micro], ops = {}, []
        for role in _in_order(likes, StageInput):
            wire, table[micro][role] = _buffer(likes[role], self.device)
            ops.append(self._transfer(dist.irecv, wire, offset))
        return ops

    def _send(
        self, sent: Values, likes: Mapping[Any, torch.Tensor], offset: int
    ) -> list[dist.P2POp]:
        return [
            self._transfer(dist.isend, _wire(sent[role], likes[role]), offset)
            for role in _in_order(sent, StageOutput)
        ]

    def _transfer(self, what: Any, tensor: torch.Tensor, offset: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[self.stage_index + offset]
        return dist.P2POp(what, tensor, group=self.group, group_peer=peer)

    # What the base class asks for, and a traced stage knows already.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> tuple[()]:
        return ()


def as_received(sent: Values) -> Values:
    """What was sent, as it is received."""
    return {StageInput(role.value, role.phase): value for role, value in sent.items()}


def _in_order(roles: Iterable[Any], kind: type) -> list[Any]:
    return sorted((role for role in roles if isinstance(role, kind)), key=lambda r: r.value)


def _dims(strides: Sequence[int]) -> list[int]:
    """The dims of a tensor as they follow one another in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _wire(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor as it travels: its elements as they lie in memory."""
    return tensor.detach().permute(_dims(like.stride())).contiguous()


def _buffer(like: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a tensor arrives, and the same as the tensor that was sent."""
    dims = _dims(like.stride())
    wire = torch.empty([like.shape[dim] for dim in dims], dtype=like.dtype, device=device)
    return wire, wire.permute(sorted(range(len(dims)), key=dims.__getitem__))
