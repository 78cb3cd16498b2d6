"""`PipelineCall`: one call of a pipeline on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import distributed as dist

from autopar.capture.call import BatchShard
from autopar.ir.graph import tensors
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.ir.roles import (
    BatchFraction,
    BatchIndex,
    BatchTotal,
    Buffer,
    Input,
    InputRole,
    MicrobatchPartial,
    Output,
    Parameter,
    UnshardedParam,
    Update,
)
from autopar.runtime.context import ExecutionContext
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall
from autopar.runtime.pipeline.stage import StageStep
from autopar.runtime.pipeline.tied_params import reduce_tied_grads, send_tied_params
from autopar.runtime.process_groups import explaining_comm_errors

TensorsByIndex = dict[int, torch.Tensor]


@dataclass
class PipelineCall:
    """A call in progress.

    Attributes:
        compiled: the stages and schedules.
        context: state shared by all calls.
        micro_batches: the arguments of each micro-batch.
        no_sync: whether gradients stay unreduced.
        loss_tangent: gradient of the loss that interleaved backwards assume.
        tied_params: parameters received from other ranks, by name.
        updates: new values of buffers, by name.
        is_consumed: whether the gradients were returned to autograd for good.
        tied_grads_reduced: whether the owners have the gradients of tied parameters.
    """

    compiled: CompiledPipelineCall
    context: ExecutionContext
    micro_batches: Sequence[BatchShard]
    no_sync: bool = False
    loss_tangent: float = 1.0
    tied_params: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    is_consumed: bool = False
    tied_grads_reduced: bool = False

    def __post_init__(self) -> None:
        program, unreduced = self.compiled.program, self.context.unreduced_grads
        index = self.context.index
        self.parameters = {
            n: local_part(p).detach() for n, p in index.parameters.items() if not is_remote(p)
        }
        self.buffers = index.buffers()
        self.step = StageStep(
            self.argument,
            len(self.micro_batches),
            unreduced,
            self.context.compression_state,
            program.graphs.replicated_partials,
            differentiates=program.differentiates,
        )
        self.interleaves_backward = (
            program.graphs.can_interleave_backward and not self.no_sync and not unreduced
        )
        tensor_leaves = program.capture.tensor_leaves
        self.returned = [i for i, is_tensor in enumerate(tensor_leaves) if is_tensor]

    def argument(self, role: InputRole, micro: int) -> torch.Tensor:
        """An argument of a program for a micro-batch."""
        shard, device = self.micro_batches[micro], self.compiled.device
        match role:
            case Parameter(name):
                return self.tied_params[name] if name in self.tied_params else self.parameters[name]
            case Buffer(name):
                return self.buffers[name]
            case Input(index):
                return self._inputs[micro][index].detach()
            case BatchFraction():
                return torch.tensor(
                    shard.rows / shard.global_rows, dtype=torch.float64, device=device
                )
            case BatchIndex():
                return shard.slices.unit_indices(device)
            case BatchTotal(index):
                return self.step.totals[index]
            case UnshardedParam(name):
                return self.step.unsharded_params[name]
        raise AssertionError(f"a stage has the unexpected input {role}")

    @cached_property
    def _inputs(self) -> list[TensorsByIndex]:
        return [
            dict(zip(s.call.tensor_indices, s.tensors, strict=True)) for s in self.micro_batches
        ]

    # Forward.

    def run_forward(self) -> list[torch.Tensor]:
        """Runs the forwards, and the backwards too if the schedule interleaves them."""
        compiled, step = self.compiled, self.step
        with explaining_comm_errors("a pipeline"), torch.no_grad():
            self._run_prologue()
            self.tied_params |= send_tied_params(compiled, self.parameters)
            if not step.differentiates:
                compiled.forward_schedule.run(step)
            elif self.interleaves_backward:
                (loss,) = compiled.program.graphs.tangents
                tangent = torch.tensor(
                    self.loss_tangent, device=compiled.device, dtype=torch.float64
                )
                step.tangents = [{loss: tangent}] * len(self.micro_batches)
                compiled.interleaved_schedule.run(step)
            else:
                compiled.split_schedules[0].run(step)
            step.unsharded_params.clear()  # backwards have their own references
            return self._run_epilogue()

    def _run_prologue(self) -> None:
        """Computes the batch totals that depend on inputs alone."""
        prologue = self.compiled.program.prologue
        if prologue is None:
            return
        partials: TensorsByIndex = {}
        for micro in range(len(self.micro_batches)):
            results = prologue.run([self.argument(role, micro) for role in prologue.inputs])
            for role, value in zip(prologue.outputs, results, strict=True):
                assert isinstance(role, MicrobatchPartial)
                known = partials.get(role.index)
                partials[role.index] = value if known is None else known + value
        fakes = {
            r.index: prologue.fake_tensors[r]
            for r in prologue.outputs
            if isinstance(r, MicrobatchPartial)
        }
        self.step.totals |= self._sum_over_ranks({} if self.compiled.pp_rank else partials, fakes)

    def _run_epilogue(self) -> list[torch.Tensor]:
        """Computes the results, which every rank returns, and new values of buffers."""
        compiled, step = self.compiled, self.step
        if compiled.fake_partials:
            is_first = compiled.mesh_coordinate[DATA_AXIS] == 0
            partials = {
                index: value
                for index, value in step.partials.items()
                if is_first or index not in step.replicated_partials
            }
            step.totals |= self._sum_over_ranks(partials, compiled.fake_partials)
        found: TensorsByIndex = {}
        epilogue, last = compiled.program.epilogue, len(self.micro_batches) - 1
        results = epilogue.run([self.argument(role, last) for role in epilogue.inputs])
        for role, value in zip(epilogue.outputs, results, strict=True):
            match role:
                case Output(index):
                    found[index] = value
                case Update(Buffer(name)):
                    self.updates[name] = value
        for index, stage in compiled.program.graphs.output_stage.items():
            found[index] = self._broadcast_output(index, stage)
        return [found[index] for index in self.returned]

    def _sum_over_ranks(
        self, partials: TensorsByIndex, fakes: Mapping[int, torch.Tensor]
    ) -> TensorsByIndex:
        """Sums partials over the ranks with the same tensor-parallel coordinate.

        Args:
            partials: this rank's partials; absent ones count as zeros.
            fakes: fake tensors of all partials.
        """
        plan = self.compiled.plan
        zero = torch.zeros((), dtype=torch.float64, device=self.compiled.device)
        ordered = sorted(fakes.items())
        flat = torch.cat(
            [
                partials[index].reshape(-1).to(torch.float64)
                if index in partials
                else zero.new_zeros(fake.numel())
                for index, fake in ordered
            ]
        )
        table = zero.new_zeros(plan.model_parallel_size, flat.numel())
        row = table[self.compiled.rank % plan.model_parallel_size]
        row.copy_(flat)
        if plan.world_size > 1:
            dist.all_reduce(table)
        pieces = zip(ordered, row.split([fake.numel() for _, fake in ordered]), strict=True)
        return {i: piece.view(fake.shape).to(fake.dtype) for (i, fake), piece in pieces}

    def _broadcast_output(self, index: int, stage: int) -> torch.Tensor:
        """Broadcasts an output from the stage that computes it along the pipeline."""
        compiled = self.compiled
        owner, batch_dim = compiled.pipeline.rank_of(stage), self._batch_dim(index, stage)
        if compiled.pp_rank == owner:
            parts = self.step.outputs.pop(index)
            several = batch_dim is not None and len(parts) > 1
            value = torch.cat(parts, batch_dim or 0) if several else parts[-1]
            value = value.contiguous()
        else:
            node = compiled.program.graphs.stages[stage].result(Output(index))
            assert node is not None
            fake = tensors(node)[0]
            shape = list(fake.shape)
            if batch_dim is not None:
                shape[batch_dim] *= len(self.micro_batches)
            value = torch.empty(shape, dtype=fake.dtype, device=compiled.device)
        if compiled.group is not None:
            dist.broadcast(value, group=compiled.group, group_src=owner)
        return value

    def _batch_dim(self, index: int, stage: int) -> int | None:
        """The batch dim of an output of a stage, None if it has none."""
        node = self.compiled.program.graphs.stages[stage].result(Output(index))
        assert node is not None
        batch_dims = (node.meta.get("batch_dims") or ((),))[0]
        return batch_dims[0] if batch_dims else None

    # Backward.

    def run_backward(self, tangents: Mapping[int, torch.Tensor], retain_graph: bool) -> None:
        """Runs the backwards, or scales the gradients of interleaved ones by the actual tangent.

        Args:
            tangents: gradients of the outputs, by index.
            retain_graph: whether another backward may follow.

        Raises:
            RuntimeError: an earlier backward did not retain the graph.
        """
        step = self.step
        if self.is_consumed:
            raise RuntimeError(
                "backward a second time through a call whose gradients are given away: give "
                "retain_graph=True the first time"
            )
        self.is_consumed = not retain_graph
        with explaining_comm_errors("a pipeline's backward"), torch.no_grad():
            if self.interleaves_backward:
                self._scale_gradients(tangents)
            else:
                step.retain_graph = retain_graph
                step.input_gradients.clear()
                step.tangents = [
                    {i: self._micro_batch_tangent(i, value, m) for i, value in tangents.items()}
                    for m in range(len(self.micro_batches))
                ]
                self.compiled.split_schedules[1].run(step)
            if not self.no_sync and not self.tied_grads_reduced:
                reduce_tied_grads(self.compiled, self.parameters, step.gradients)
                self.tied_grads_reduced = self.interleaves_backward

    def _scale_gradients(self, tangents: Mapping[int, torch.Tensor]) -> None:
        (loss,) = self.compiled.program.graphs.tangents
        assumed, self.loss_tangent = self.loss_tangent, float(tangents.get(loss, 0.0))
        if assumed != self.loss_tangent:
            for value in (*self.step.gradients.values(), *_values(self.step.input_gradients)):
                value.mul_(self.loss_tangent / assumed)

    def take_gradient(self, name: str, retain_graph: bool) -> torch.Tensor | None:
        """Hands out the gradient of a parameter."""
        gradients = self.step.gradients
        if retain_graph and self.interleaves_backward:
            return gradients[name].clone() if name in gradients else None
        return gradients.pop(name, None)

    def _micro_batch_tangent(self, index: int, tangent: torch.Tensor, micro: int) -> torch.Tensor:
        """A micro-batch's part of an output's gradient, times the number of micro-batches.

        The reduction averages over micro-batches, as it does for losses.
        """
        stage = self.compiled.program.graphs.output_stage.get(index)
        count = len(self.micro_batches)
        if stage is None or count == 1:
            return tangent
        batch_dim = self._batch_dim(index, stage)
        return tangent if batch_dim is None else tangent.chunk(count, batch_dim)[micro] * count

    def input_gradient(self, index: int) -> torch.Tensor:
        """The gradient of an argument's rows on this rank, summed along the pipeline."""
        found = self.step.input_gradients.get(index, {})
        inputs = [table[index] for table in self._inputs]
        if self.micro_batches[0].call.has_batch_dim[index]:
            total = torch.cat([found.get(m, torch.zeros_like(x)) for m, x in enumerate(inputs)])
        else:
            total = sum(found.values(), torch.zeros_like(inputs[0]))
        if self.compiled.group is not None:
            dist.all_reduce(total, group=self.compiled.group)
        return total


def _values(tables: Mapping[int, TensorsByIndex]) -> Iterable[torch.Tensor]:
    return [value for table in tables.values() for value in table.values()]
