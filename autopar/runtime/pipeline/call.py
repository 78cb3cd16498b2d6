"""One call of a pipeline on one rank: what is given, the schedule, and what every rank returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import distributed as dist

from autopar.capture.batch_shards import BatchShard
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
from autopar.runtime.parameters.compression_state import CompressionState
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall
from autopar.runtime.pipeline.stage import StageStep
from autopar.runtime.process_groups import explaining_comm_errors

Tensors = dict[int, torch.Tensor]


@dataclass
class PipelineCall:
    """A call under way.

    Attributes:
        pipe: what runs.
        shares: what each micro-batch is given.
        parameters: this rank's parts of parameters, by name.
        buffers: by name.
        held: local gradients kept from earlier calls, by parameter.
        states: what compression keeps from step to step.
        hold: keep gradients local.
        tangent: what the gradient of the loss is taken to be until it is known.
        lent: parameters that other ranks hold.
        updates: new values of buffers.
        over: whether its gradients are given away.
        given_back: whether those of lent parameters are where these are held.
    """

    compiled: CompiledPipelineCall
    micro_batches: Sequence[BatchShard]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    unreduced_grads: dict[str, torch.Tensor]
    compression_state: CompressionState
    no_sync: bool = False
    loss_tangent: float = 1.0
    tied_params: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    is_consumed: bool = False
    tied_grads_reduced: bool = False

    def __post_init__(self) -> None:
        program = self.compiled.program
        self.step = StageStep(
            self.argument,
            len(self.micro_batches),
            self.unreduced_grads,
            self.compression_state,
            program.split.replicated_partials,
            differentiates=program.differentiates,
        )
        self.at_once = (
            self.compiled.fused_backward and not self.no_sync and not self.unreduced_grads
        )
        tensor_leaves = program.capture.tensor_leaves
        self.returned = [i for i, is_tensor in enumerate(tensor_leaves) if is_tensor]

    def argument(self, role: InputRole, micro: int) -> torch.Tensor:
        """An argument of a program for a micro-batch."""
        share = self.micro_batches[micro]
        match role:
            case Parameter(name):
                return self.tied_params[name] if name in self.tied_params else self.parameters[name]
            case Buffer(name):
                return self.buffers[name]
            case Input(index):
                return self._inputs[micro][index].detach()
            case BatchFraction():
                weight = share.rows / share.global_rows
                return torch.tensor(weight, dtype=torch.float64, device=self.compiled.device)
            case BatchIndex():
                return share.slices.unit_indices(self.compiled.device)
            case BatchTotal(index):
                return self.step.totals[index]
            case UnshardedParam(name):
                return self.step.unsharded_params[name]
        raise AssertionError(f"a stage asks for {role}")

    @cached_property
    def _inputs(self) -> list[Tensors]:
        return [
            dict(zip(s.call.tensor_indices, s.tensors, strict=True)) for s in self.micro_batches
        ]

    # Forward.

    def run(self) -> list[torch.Tensor]:
        """Runs the forwards, and the backwards too where they run among them."""
        pipe = self.compiled
        with explaining_comm_errors("a pipeline"), torch.no_grad():
            self._open()
            self._lend()
            if not self.step.differentiates:
                pipe.forward_schedule.run(self.step)
            elif self.at_once:
                (loss,) = pipe.tangents
                tangent = torch.tensor(self.loss_tangent, device=pipe.device, dtype=torch.float64)
                self.step.tangents = [{loss: tangent}] * len(self.micro_batches)
                pipe.fused_schedule.run(self.step)
            else:
                pipe.split_schedules[0].run(self.step)
            self.step.unsharded_params.clear()  # backwards have saved what they read of them
            return self._close()

    def _open(self) -> None:
        """Adds up what is known from the inputs."""
        prologue = self.compiled.program.prologue
        if prologue is None:
            return
        parts: Tensors = {}
        for micro in range(len(self.micro_batches)):
            results = prologue.run([self.argument(role, micro) for role in prologue.inputs])
            for role, value in zip(prologue.outputs, results, strict=True):
                assert isinstance(role, MicrobatchPartial)
                known = parts.get(role.index)
                parts[role.index] = value if known is None else known + value
        likes = {
            r.index: prologue.fake_tensors[r]
            for r in prologue.outputs
            if isinstance(r, MicrobatchPartial)
        }
        self.step.totals |= self._sum({} if self.compiled.pp_rank else parts, likes)

    def _lend(self) -> None:
        """Sends parameters to the ranks that use them beside the one that holds them."""
        pipe, transfers = self.compiled, []
        for name, owner, users in pipe.tied_params:
            if pipe.pp_rank == owner:
                value = self.parameters[name].contiguous()
                transfers += [dist.isend(value, group=pipe.group, group_dst=u) for u in users]
            elif pipe.pp_rank in users:
                like = pipe.fake_param(name)
                self.tied_params[name] = torch.empty(
                    like.shape, dtype=like.dtype, device=pipe.device
                )
                transfers.append(
                    dist.irecv(self.tied_params[name], group=pipe.group, group_src=owner)
                )
        for transfer in transfers:
            assert transfer is not None
            transfer.wait()

    def _close(self) -> list[torch.Tensor]:
        """What every rank returns."""
        program = self.compiled.program
        likes = self.compiled.fake_partials
        if likes:
            first = self.compiled.mesh_coordinate[DATA_AXIS] == 0
            made = self.step.partials.items()
            parts = {
                i: value for i, value in made if first or i not in self.step.replicated_partials
            }
            self.step.totals |= self._sum(parts, likes)
        found: dict[int, torch.Tensor] = {}
        epilogue, last = program.epilogue, len(self.micro_batches) - 1
        results = epilogue.run([self.argument(role, last) for role in epilogue.inputs])
        for role, value in zip(epilogue.outputs, results, strict=True):
            match role:
                case Output(index):
                    found[index] = value
                case Update(Buffer(name)):
                    self.updates[name] = value
        for index, stage in program.split.output_stage.items():
            found[index] = self._broadcast(index, stage)
        return [found[index] for index in self.returned]

    def _sum(self, parts: Tensors, likes: Mapping[int, torch.Tensor]) -> Tensors:
        """Sums over ranks that are in the same place of the model's own axes.

        What a rank has no part of it adds nothing to.
        """
        plan, device = self.compiled.plan, self.compiled.device
        flat = torch.cat(
            [
                parts[index].reshape(-1).to(torch.float64)
                if index in parts
                else torch.zeros(like.numel(), dtype=torch.float64, device=device)
                for index, like in sorted(likes.items())
            ]
        )
        places = torch.zeros(
            plan.model_parallel_size, flat.numel(), dtype=torch.float64, device=device
        )
        own = places[self.compiled.rank % plan.model_parallel_size]
        own.copy_(flat)
        if plan.world_size > 1:
            dist.all_reduce(places)
        sizes = [like.numel() for _, like in sorted(likes.items())]
        pieces = zip(sorted(likes.items()), own.split(sizes), strict=True)
        return {i: piece.view(like.shape).to(like.dtype) for (i, like), piece in pieces}

    def _broadcast(self, index: int, stage: int) -> torch.Tensor:
        """An output that one stage has, on all ranks of the pipeline."""
        pipe = self.compiled
        assert pipe.plan.pipeline is not None
        owner = pipe.plan.pipeline.rank_of(stage)
        node = pipe.program.split.stages[stage].result(Output(index))
        assert node is not None
        rows = (node.meta.get("batch_dims") or ((),))[0]
        if pipe.pp_rank == owner:
            made = self.step.outputs.pop(index)
            value = torch.cat(made, rows[0]) if rows and len(made) > 1 else made[-1]
            value = value.contiguous()
        else:
            like = tensors(node)[0]
            shape = list(like.shape)
            if rows:
                shape[rows[0]] *= len(self.micro_batches)
            value = torch.empty(shape, dtype=like.dtype, device=pipe.device)
        if pipe.group is not None:
            dist.broadcast(value, group=pipe.group, group_src=owner)
        return value

    # Backward.

    def backward(self, given: Mapping[int, torch.Tensor], again: bool) -> None:
        """Runs the backwards, or scales what they gave by the gradient that is now known.

        Args:
            given: gradients by the outputs that they enter by.
            again: whether the caller may ask for another backward.

        Raises:
            RuntimeError: nothing was kept for another backward.
        """
        pipe, step = self.compiled, self.step
        if self.is_consumed:
            raise RuntimeError(
                "backward a second time through a call whose gradients are given away: give "
                "retain_graph=True the first time"
            )
        self.is_consumed = not again
        with explaining_comm_errors("a pipeline's backward"), torch.no_grad():
            if self.at_once:
                (loss,) = pipe.tangents
                known, self.loss_tangent = (
                    self.loss_tangent,
                    float(given[loss]) if loss in given else 0.0,
                )
                if known != self.loss_tangent:
                    for value in (*step.gradients.values(), *_all(step.input_gradients)):
                        value.mul_(self.loss_tangent / known)
            else:
                step.retain_graph = again
                step.input_gradients.clear()
                step.tangents = [
                    {i: self._of_micro(i, value, micro) for i, value in given.items()}
                    for micro in range(len(self.micro_batches))
                ]
                pipe.split_schedules[1].run(step)
            if not self.no_sync and not self.tied_grads_reduced:
                self._give_back()
                self.tied_grads_reduced = self.at_once

    def take_gradient(self, name: str, again: bool) -> torch.Tensor | None:
        """The gradient of a parameter."""
        gradients = self.step.gradients
        if again and self.at_once:
            return gradients[name].clone() if name in gradients else None
        return gradients.pop(name, None)

    def _of_micro(self, index: int, tangent: torch.Tensor, micro: int) -> torch.Tensor:
        """The part of an output's gradient that belongs to a micro-batch.

        Times their number: gradients that enter by rows are averaged over all slices of a batch, as
        losses that ranks make of their rows are.
        """
        stage = self.compiled.program.split.output_stage.get(index)
        count = len(self.micro_batches)
        if stage is None or count == 1:
            return tangent
        node = self.compiled.program.split.stages[stage].result(Output(index))
        rows = (node.meta.get("batch_dims") or ((),))[0] if node is not None else ()
        return tangent.chunk(count, rows[0])[micro] * count if rows else tangent

    def _give_back(self) -> None:
        """Sends gradients to the ranks that hold their parameters."""
        pipe, waiting, transfers = self.compiled, [], []
        for name, owner, users in pipe.tied_params:
            if pipe.pp_rank == owner:
                for user in users:
                    if pipe.trains(name, user):
                        came = torch.empty_like(
                            self.parameters[name], memory_format=torch.contiguous_format
                        )
                        transfers.append(dist.irecv(came, group=pipe.group, group_src=user))
                        waiting.append((name, came))
            elif pipe.pp_rank in users and pipe.trains(name, pipe.pp_rank):
                sent = self.step.gradients.pop(name)
                transfers.append(dist.isend(sent.contiguous(), group=pipe.group, group_dst=owner))
        for transfer in transfers:
            assert transfer is not None
            transfer.wait()
        for name, came in waiting:
            known = self.step.gradients.get(name)
            self.step.gradients[name] = came if known is None else known + came

    def input_gradient(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """The gradient of an argument, on every rank."""
        own = self.step.input_gradients.get(index, {})
        split = self.micro_batches[0].call.has_batch_dim[index] and len(self.micro_batches) > 1
        if not split:
            total = sum(own.values(), torch.zeros_like(like))
        else:
            pieces = like.chunk(len(self.micro_batches))
            total = torch.cat([own.get(m, torch.zeros_like(p)) for m, p in enumerate(pieces)])
        if self.compiled.group is not None:
            dist.all_reduce(total, group=self.compiled.group)
        return total


def _all(tables: Mapping[int, Tensors]) -> Iterable[torch.Tensor]:
    return [value for table in tables.values() for value in table.values()]
