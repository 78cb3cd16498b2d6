"""`TorchStage`: a stage as torch's runtime of pipelines sees it.

It runs generated functions, without autograd. Only a rank that runs a pipeline over ranks loads
this module, since the base class loads Dynamo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from autopar._torch_dynamo import PipelineStageBase
from autopar.core.ir.roles import StageInput, StageOutput
from autopar.passes.core.node_builder import dims_by_stride
from autopar.runtime.pipeline.stage import Stage, Values, inputs_of_next
from autopar.runtime.watch.collective_log import LOG


class TorchStage(PipelineStageBase):
    """A stage with the interface of torch's runtime."""

    def __init__(
        self, stage: Stage, count: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(nn.Module(), stage.index, count, device, group)
        self.stage = stage
        self.activations: dict[int, Values] = {}  # received, then to send, by micro-batch
        self.gradients: dict[int, Values] = {}  # received, then to send, by micro-batch

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Values:
        received = self.activations.pop(fwd_chunk_id, {})
        with LOG.busy(f"a transfer after the forward of {self._work(fwd_chunk_id)}"):
            sent = self.activations[fwd_chunk_id] = self.stage.forward(fwd_chunk_id, received)
        return sent

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
        return self._receive(self.activations, micro, self._forward_fakes(micro), -1)

    def get_fwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        values = self.activations.pop(micro)
        return self._send(values, self._forward_fakes(micro), +1)

    def get_bwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        return self._receive(self.gradients, micro, self._backward_fakes(micro), +1)

    def get_bwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        return self._send(self.gradients.pop(micro), self._backward_fakes(micro), -1)

    # Neighbours on one rank, as in a V, hand over what they send.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.activations[mb_index] = inputs_of_next(prev_stage_outputs)
        prev_stage_outputs.clear()  # it holds no reference to what is freed here

    def get_local_bwd_output(self, mb_index: int) -> Values:
        return self.gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.gradients[mb_index] = inputs_of_next(next_stage_bwd_outputs)

    def _forward_fakes(self, micro: int) -> Mapping[Any, torch.Tensor]:
        return self.stage.programs[micro].forward.fake_tensors

    def _backward_fakes(self, micro: int) -> Mapping[Any, torch.Tensor]:
        backward = self.stage.programs[micro].last_backward
        return {} if backward is None else backward.fake_tensors

    def _receive(
        self, table: dict[int, Values], micro: int, fakes: Mapping[Any, torch.Tensor], offset: int
    ) -> list[dist.P2POp]:
        table[micro], ops = {}, []
        for role in _sorted_roles(fakes, StageInput):
            fake, dims = fakes[role], dims_by_stride(fakes[role])
            # messages are dense, and the strides of a slice would cost memory for its gaps
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
    # both ends must post the transfers of a link in the same order
    return sorted((role for role in roles if isinstance(role, kind)), key=lambda r: r.value)
