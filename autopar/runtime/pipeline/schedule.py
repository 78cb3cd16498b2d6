"""`Schedule`: runs the stages of a rank by torch.distributed.pipelining's runtime.

torch's runtime decides when stages run and when tensors travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from autopar.core.schedules import Orders, ranks_in
from autopar.cost_model.simulator.pipeline_transfers import with_transfers
from autopar.runtime.pipeline.stage import Stage, StageCall, Values, inputs_of_next
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.watch.collective_log import LOG

if TYPE_CHECKING:
    from autopar._torch_dynamo import PipelineRuntime


@dataclass(frozen=True)
class Schedule:
    """The stages of a rank and the order of all ranks' actions."""

    stages: Mapping[int, Stage]
    orders: Orders  # of all ranks
    micro_batches: int
    device: torch.device
    group: dist.ProcessGroup | None  # None if this rank has all stages

    def run(self, call: StageCall) -> None:
        """Runs the actions, between the start of each stage's gathers and its last waits."""
        for stage in self.stages.values():
            stage.start(call, forwards=self._has_forwards)
        if self.group is None:
            self._run_on_one_rank()
        else:
            with (
                explaining_comm_errors("a pipeline"),
                LOG.waiting("a transfer between pipeline stages"),
            ):
                self._runtime._step_microbatches()
        for stage in self.stages.values():
            stage.finish()

    @cached_property
    def _has_forwards(self) -> bool:
        return any(action.kind == "F" for order in self.orders for action in order)

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
            received[is_forward, peer, micro] = inputs_of_next(sent)
            if action.kind == "B":
                stage.weight_backward(micro)

    @cached_property
    def _runtime(self) -> PipelineRuntime:
        """Torch's runtime, with the actions of the schedule and transfers between them."""
        from autopar._torch_dynamo import PipelineRuntime, give_actions
        from autopar.runtime.pipeline.torch_stage import TorchStage

        places = ranks_in(self.orders)
        stages = [
            TorchStage(stage, len(places), self.device, self.group)  # type: ignore[arg-type]
            for stage in self.stages.values()
        ]
        runtime = PipelineRuntime(
            stages, self.micro_batches, scale_grads=False, backward_requires_autograd=False
        )
        # gloo sends nothing before the receiver asks, so CPUs post receives before they compute
        actions = with_transfers(self.orders, hoisted=self.device.type == "cpu")
        give_actions(runtime, [list(of_rank) for of_rank in actions], places)
        runtime._stages_forward_initialized = True  # shapes need no inference
        return runtime
