"""`PipelineCall`: one call of a pipeline on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
from torch import distributed as dist

from autopar.capture.call import BatchShard
from autopar.core.ir import roles
from autopar.core.ir.graph import tensors
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.runtime.batch_checks import is_on_host
from autopar.runtime.context import (
    ExecutionContext,
    batch_fraction,
    cached_scalar,
    inputs_of,
)
from autopar.runtime.parameters.distribute import is_remote, local_part
from autopar.runtime.pipeline.compiled_call import CompiledPipelineCall
from autopar.runtime.pipeline.output_parts import OutputParts
from autopar.runtime.process_groups import explaining_comm_errors

TensorsByIndex = dict[int, torch.Tensor]
Scalar = float | torch.Tensor
"""A number, left on its accelerator as a float64, since reading it would wait."""


@dataclass
class PipelineCall:
    """A call in progress.

    Attributes:
        modes: those of the context at the forward.
        loss_tangent: gradient of the loss that interleaved backwards assume.
        is_consumed: whether the gradients were returned to autograd for good.
        tied_grads_reduced: whether the owners have the gradients of tied parameters.
        retain_graph: whether another backward may follow.
        tangents: gradients by output index, for each micro-batch.
        saved: saved tensors, by stage and micro-batch.
        partials: sums over the micro-batches so far, by index.
        outputs: outputs by index, in the order of micro-batches.
        input_gradients: gradients of inputs, by index and micro-batch.
    """

    compiled: CompiledPipelineCall
    context: ExecutionContext
    micro_batches: Sequence[BatchShard]
    no_sync: bool = False
    modes: tuple[Any, ...] = ()
    loss_tangent: Scalar = 1.0
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    is_consumed: bool = False
    tied_grads_reduced: bool = False
    retain_graph: bool = False
    tangents: list[TensorsByIndex] = field(default_factory=list)
    totals: TensorsByIndex = field(default_factory=dict)
    unsharded_params: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    partials: TensorsByIndex = field(default_factory=dict)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    input_gradients: dict[int, TensorsByIndex] = field(default_factory=dict)

    def __post_init__(self) -> None:
        compiled, index = self.compiled, self.context.index
        self.parameters = {
            n: local_part(p).detach() for n, p in index.parameters.items() if not is_remote(p)
        }
        self.buffers = index.buffers()
        # Interleaved gradients are scaled once the true gradient of the loss arrives. Those that
        # no_sync holds are sums over several calls, which no one factor corrects.
        self.interleaves_backward = (
            compiled.graphs.can_interleave_backward
            and not self.no_sync
            and not self.context.held_gradients.names
        )
        tensor_leaves = compiled.capture.tensor_leaves
        self.returned = [i for i, is_tensor in enumerate(tensor_leaves) if is_tensor]

    def argument(self, role: roles.InputRole, micro: int) -> torch.Tensor:
        shard, device = self.micro_batches[micro], self.compiled.device
        match role:
            case roles.Parameter(name):
                return self.parameters[name]
            case roles.Buffer(name):
                return self.buffers[name]
            case roles.Input(index):
                return self._inputs[micro][index].detach()
            case roles.BatchFraction():
                return batch_fraction(shard, device)
            case roles.BatchIndex():
                return shard.slices.unit_indices(device)
            case roles.BatchTotal(index):
                return self.totals[index]
            case roles.UnshardedParam(name):
                return self.unsharded_params[name]
        raise AssertionError(f"a stage has the unexpected input {role}")

    @property
    def differentiates(self) -> bool:
        return self.compiled.differentiates

    def add_partial(self, index: int, value: torch.Tensor) -> None:
        """Adds a micro-batch's part of a batch total, or keeps the last of replicated ones."""
        adds = index in self.partials and index not in self.compiled.graphs.replicated_partials
        self.partials[index] = self.partials[index] + value if adds else value

    @cached_property
    def _inputs(self) -> list[TensorsByIndex]:
        return [inputs_of(shard) for shard in self.micro_batches]

    # Forward.

    def run_forward(self) -> list[torch.Tensor]:
        """Runs the forwards, and the backwards too if the schedule interleaves them."""
        compiled = self.compiled
        with explaining_comm_errors("a pipeline"), torch.no_grad():
            self._run_prologue()
            self.parameters |= compiled.send_tied_params(self.parameters)
            if compiled.differentiates and self.interleaves_backward:
                (loss,) = compiled.graphs.tangents
                # Backwards begin before the loop gives the loss a gradient. The last call's is
                # assumed, and run_backward corrects it.
                tangent = self.loss_tangent
                if isinstance(tangent, float):
                    tangent = cached_scalar(tangent, compiled.device)
                self.tangents = [{loss: tangent}] * len(self.micro_batches)
                compiled.interleaved_schedule.run(self)
            else:
                compiled.split_schedules[0].run(self)
            self.unsharded_params.clear()  # backwards have their own references
            return self._run_epilogue()

    def _run_prologue(self) -> None:
        """Computes the batch totals that depend on inputs alone."""
        prologues = self.compiled.prologues
        if not prologues:
            return
        partials: TensorsByIndex = {}
        for micro, prologue in enumerate(prologues):
            results = prologue.run([self.argument(role, micro) for role in prologue.graph.inputs])
            for role, value in zip(prologue.graph.outputs, results, strict=True):
                assert isinstance(role, roles.MicrobatchPartial)
                known = partials.get(role.index)
                partials[role.index] = value if known is None else known + value
        fakes = {
            r.index: prologues[-1].fake_tensors[r]
            for r in prologues[-1].graph.outputs
            if isinstance(r, roles.MicrobatchPartial)
        }
        # all stages have the same rows: the first stage counts them for all
        self.totals |= self._sum_over_ranks({} if self.compiled.pp_rank else partials, fakes)

    def _run_epilogue(self) -> list[torch.Tensor]:
        """Computes the results, which every rank returns, and new values of buffers."""
        compiled = self.compiled
        if compiled.fake_partials:
            is_first = compiled.mesh_coordinate[DATA_AXIS] == 0
            partials = {
                index: value
                for index, value in self.partials.items()
                # data-parallel ranks all have these in full, and a sum would count each
                if is_first or index not in compiled.graphs.replicated_partials
            }
            self.totals |= self._sum_over_ranks(partials, compiled.fake_partials)
        found: TensorsByIndex = {}
        epilogue, last = compiled.epilogue, len(self.micro_batches) - 1
        results = epilogue.run([self.argument(role, last) for role in epilogue.graph.inputs])
        for role, value in zip(epilogue.graph.outputs, results, strict=True):
            match role:
                case roles.Output(index):
                    found[index] = value
                case roles.Update(roles.Buffer(name)):
                    self.updates[name] = value
        for index, stage in compiled.graphs.output_stage.items():
            found[index] = self._output(index, stage)
        return [found[index] for index in self.returned]

    def _sum_over_ranks(
        self, partials: TensorsByIndex, fakes: Mapping[int, torch.Tensor]
    ) -> TensorsByIndex:
        """Sums partials over the ranks with the same tensor-parallel coordinate."""
        options, ordered = self.compiled.options, sorted(fakes.items())
        ranks, sizes = options.plan.model_parallel_size, [fake.numel() for _, fake in ordered]
        device = self.compiled.device
        # Process groups run along single axes, or are the world. So each tensor-parallel coordinate
        # gets a row of a table that the world sums.
        table = torch.zeros(ranks, sum(sizes), dtype=torch.float64, device=device)
        pieces = table[options.rank % ranks].split(sizes)
        for (index, _), piece in zip(ordered, pieces, strict=True):
            if index in partials:
                piece.copy_(partials[index].reshape(-1))
        if options.plan.world_size > 1:
            dist.all_reduce(table, group=self.context.world)
        pairs = zip(ordered, pieces, strict=True)
        # copies, or float64 totals would be views of one table
        return {i: x.view(fake.shape).to(fake.dtype, copy=True) for (i, fake), x in pairs}

    def _output(self, index: int, stage: int) -> torch.Tensor:
        """An output of a stage: sent along the pipeline now, or where the loop reads it."""
        compiled, batch_dim = self.compiled, self._batch_dim(index, stage)
        node = compiled.graphs.stages[stage].result(roles.Output(index))
        assert node is not None
        fake = tensors(node)[0]
        shape = list(fake.shape)
        if batch_dim is not None:
            shape[batch_dim] = shape[batch_dim] // compiled.rows[-1] * sum(compiled.rows)
        made = OutputParts(
            tuple(self.outputs.pop(index, ())),
            batch_dim,
            tuple(shape),
            fake.dtype,
            compiled.device,
            compiled.pipeline.rank_of(stage),
            compiled.group,
            partial(self.context.announce, f"reads output {index}, which its stage alone has,"),
        )
        return made.later() if index in compiled.untrained else made.broadcast()

    def _batch_dim(self, index: int, stage: int) -> int | None:
        """The batch dim of an output of a stage, None if it has none."""
        node = self.compiled.graphs.stages[stage].result(roles.Output(index))
        assert node is not None
        batch_dims = (node.meta.get("batch_dims") or ((),))[0]
        return batch_dims[0] if batch_dims else None

    # Backward.

    def run_backward(self, tangents: Mapping[int, torch.Tensor], retain_graph: bool) -> None:
        """Runs the backwards, or scales the gradients of interleaved ones by the actual tangent.

        Raises:
            RuntimeError: an earlier backward did not retain the graph.
        """
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
                self.retain_graph = retain_graph
                self.input_gradients.clear()
                self.tangents = [
                    {i: self._micro_batch_tangent(i, value, m) for i, value in tangents.items()}
                    for m in range(len(self.micro_batches))
                ]
                self.compiled.split_schedules[1].run(self)
            if not self.no_sync and not self.tied_grads_reduced:
                self.compiled.reduce_tied_grads(self.parameters, self.gradients)
                # a second backward only scales these gradients: their sum must not be taken twice
                self.tied_grads_reduced = self.interleaves_backward

    def _scale_gradients(self, tangents: Mapping[int, torch.Tensor]) -> None:
        (loss,) = self.compiled.graphs.tangents
        given = tangents.get(loss)
        actual: Scalar = 0.0
        if given is not None:
            actual = float(given) if is_on_host(given) else given.double()
        assumed, self.loss_tangent = self.loss_tangent, actual
        if isinstance(actual, float) and isinstance(assumed, float) and actual == assumed:
            return
        inputs = (x for table in self.input_gradients.values() for x in table.values())
        for value in (*self.gradients.values(), *inputs):
            value.mul_(actual / assumed)

    @property
    def next_loss_tangent(self) -> Scalar:
        """The loss's gradient to assume in the next call: this call's, unless it is unusable."""
        tangent = self.loss_tangent
        if isinstance(tangent, float):
            return tangent if isfinite(tangent) and tangent else 1.0
        return torch.where(tangent.isfinite() & (tangent != 0), tangent, 1.0)

    def take_gradient(self, name: str, retain_graph: bool) -> torch.Tensor | None:
        """The gradient of a parameter; without values where another stage has it."""
        gradients, parameter = self.gradients, self.context.index.parameters[name]
        if is_remote(parameter):
            is_trained = name in self.compiled.outputs_by_gradient
            return torch.empty_like(local_part(parameter.detach())) if is_trained else None
        if retain_graph and self.interleaves_backward:
            # a second backward scales these in place, and would change the loop's .grad
            return gradients[name].clone() if name in gradients else None
        return gradients.pop(name, None)

    def _micro_batch_tangent(self, index: int, tangent: torch.Tensor, micro: int) -> torch.Tensor:
        """A micro-batch's part of an output's gradient, over its share of the rank's rows.

        The reduction averages over rows, as it does for losses.
        """
        stage, rows = self.compiled.graphs.output_stage.get(index), self.compiled.rows
        if stage is None or len(rows) == 1:
            return tangent
        batch_dim = self._batch_dim(index, stage)
        if batch_dim is None:
            return tangent
        unit = tangent.shape[batch_dim] // sum(rows)
        part = tangent.narrow(batch_dim, sum(rows[:micro]) * unit, rows[micro] * unit)
        return part * (sum(rows) / rows[micro])

    def input_gradient(self, index: int) -> torch.Tensor:
        """The gradient of an argument's rows on this rank, summed along the pipeline."""
        found = self.input_gradients.get(index, {})
        inputs = [table[index] for table in self._inputs]
        dim = self.micro_batches[0].call.row_dims[index]
        if dim is not None:
            parts = [found.get(m, torch.zeros_like(x)) for m, x in enumerate(inputs)]
            total = torch.cat(parts, dim)
        else:
            total = sum(found.values(), torch.zeros_like(inputs[0]))
        if self.compiled.group is not None:
            dist.all_reduce(total, group=self.compiled.group)
        return total
