"""`Schedule`: runs the stages of a rank by torch.distributed.pipelining's runtime.

torch's runtime decides when stages run and when tensors travel. Its stages here run generated
functions without autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autopar._torch import PipelineRuntime, PipelineStageBase
from autopar.cost_model.simulator.pipeline_transfers import with_transfers
from autopar.cost_model.simulator.schedules import Orders
from autopar.ir.roles import StageInput, StageOutput
from autopar.passes.core.node_builder import dims_by_stride
from autopar.runtime.codegen.program import CompiledGraph
from autopar.runtime.pipeline.stage import Stage, StageCall, Values
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.watch.collective_log import LOG


@dataclass(frozen=True)
class Schedule:
    """The stages of a rank and the order of all ranks' actions."""

    stages: Mapping[int, Stage]
    orders: Orders  # of all ranks
    micro_batches: int
    device: torch.device
    group: dist.ProcessGroup | None  # None if this rank has all stages

    def run(self, call: StageCall) -> None:
        for stage in self.stages.values():
            stage.call = call
            stage.pending.clear()  # other calls may have run since
        if self.group is None:
            return self._run_on_one_rank()
        with (
            explaining_comm_errors("a pipeline"),
            LOG.waiting("a transfer between pipeline stages"),
        ):
            self._runtime._step_microbatches()
        return None

    def _run_on_one_rank(self) -> None:
        """Runs all stages here, without transfers."""
        received: dict[tuple[bool, int, int], Values] = {}
        for action in self.orders[0]:
            stage, micro = self.stages[action.stage], action.micro
            if action.kind == "W":
                stage.weight_backward(micro)
                continue
            is_forward = action.kind == "F"
            values = received.pop((is_forward, stage.index, micro), {})
            run = stage.forward if is_forward else stage.backward
            sent = run(micro, values)
            peer = stage.index + (1 if is_forward else -1)
            received[is_forward, peer, micro] = {
                StageInput(role.value, role.phase): value for role, value in sent.items()
            }
            if action.kind == "B":
                stage.weight_backward(micro)

    @cached_property
    def _runtime(self) -> PipelineRuntime:
        """Torch's runtime, with the actions of the schedule and transfers between them."""
        count = 1 + max(action.stage for order in self.orders for action in order)
        stages = [
            _TorchStage(stage, count, self.device, self.group)  # type: ignore[arg-type]
            for stage in self.stages.values()
        ]
        runtime = PipelineRuntime(
            stages, self.micro_batches, scale_grads=False, backward_requires_autograd=False
        )
        actions = with_transfers(self.orders, hoisted=self.device.type == "cpu")
        runtime.pipeline_order_with_comms = {r: list(own) for r, own in enumerate(actions)}
        runtime._stages_forward_initialized = True  # shapes need no inference
        return runtime


class _TorchStage(PipelineStageBase):
    """A stage with the interface of torch's runtime."""

    def __init__(
        self, stage: Stage, count: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(nn.Module(), stage.index, count, device, group)
        self.stage = stage
        self.activations: dict[int, Values] = {}  # received, then to send, by micro-batch
        self.gradients: dict[int, Values] = {}  # received, then to send, by micro-batch

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        received = self.activations.pop(fwd_chunk_id, {})
        with LOG.busy(f"a transfer after the forward of {self._work(fwd_chunk_id)}"):
            self.activations[fwd_chunk_id] = self.stage.forward(fwd_chunk_id, received)

    def backward_one_chunk(
        self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any
    ) -> None:
        received = self.gradients.pop(bwd_chunk_id, {})
        with LOG.busy(f"a transfer after the backward of {self._work(bwd_chunk_id)}"):
            self.gradients[bwd_chunk_id] = self.stage.backward(bwd_chunk_id, received)
            if full_backward:
                self.stage.weight_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        with LOG.busy(f"a transfer after the weights' backward of {self._work(bwd_chunk_id)}"):
            self.stage.weight_backward(bwd_chunk_id)

    def _work(self, micro: int) -> str:
        return f"micro-batch {micro} on stage {self.stage_index}"

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Does nothing: the last backward reduces."""

    def get_fwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        return self._receive(self.activations, micro, self.stage.program.forward.fake_tensors, -1)

    def get_fwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        values = self.activations.pop(micro)
        return self._send(values, self.stage.program.forward.fake_tensors, +1)

    def get_bwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        return self._receive(self.gradients, micro, self._backward_fakes, +1)

    def get_bwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        return self._send(self.gradients.pop(micro), self._backward_fakes, -1)

    @cached_property
    def _backward_fakes(self) -> Mapping[Any, torch.Tensor]:
        backward = self.stage.program.last_backward
        if backward is None:
            return {}
        return CompiledGraph(backward.graph, backward.parts[0].run).fake_tensors

    def _receive(
        self, table: dict[int, Values], micro: int, fakes: Mapping[Any, torch.Tensor], offset: int
    ) -> list[dist.P2POp]:
        table[micro], ops = {}, []
        for role in _sorted_roles(fakes, StageInput):
            fake, dims = fakes[role], dims_by_stride(fakes[role])
            value = torch.empty_permuted(fake.shape, dims, dtype=fake.dtype, device=self.device)
            table[micro][role] = value
            ops.append(self._transfer(dist.irecv, value.permute(dims), offset))
        return ops

    def _send(
        self, values: Values, fakes: Mapping[Any, torch.Tensor], offset: int
    ) -> list[dist.P2POp]:
        ops = []
        for role in _sorted_roles(values, StageOutput):
            value = values[role].detach().permute(dims_by_stride(fakes[role]))
            ops.append(self._transfer(dist.isend, value.contiguous(), offset))
        return ops

    def _transfer(self, op: Any, tensor: torch.Tensor, offset: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[self.stage_index + offset]
        return dist.P2POp(op, tensor, group=self.group, group_peer=peer)

    # The base class infers shapes here; captured stages have them.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> tuple[()]:
        return ()


def _sorted_roles(roles: Iterable[Any], kind: type) -> list[Any]:
    return sorted((role for role in roles if isinstance(role, kind)), key=lambda r: r.value)
