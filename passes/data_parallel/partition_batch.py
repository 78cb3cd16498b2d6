"""`PartitionBatch`: the program of one slice of the batch, from the graph of the whole batch.

Averaged gradients train models that couple rows to other numbers than one device does, for example
under contrastive losses or batch norm. A partition by proven rules is exact by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from autopar.core.common.notices import BorderNote, NumericsNote
from autopar.core.ir.batch_slicing import BATCH, BatchSlices
from autopar.core.ir.graph import TrainingGraph, Value, dense_strides, elements, source_line
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate, Shard, Varying
from autopar.core.ir.roles import (
    BatchFraction,
    BatchIndex,
    Gradient,
    Input,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)
from autopar.errors import BatchError
from autopar.formatting import human_bytes
from autopar.passes.core.collective_ops import (
    STARTS,
    is_name,
    start_all_to_all,
    start_reduce_scatter,
    value_of,
)
from autopar.passes.core.node_builder import call, fake_like, is_random
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.untrained_outputs import is_returned_by
from autopar.passes.data_parallel.propagate import BatchPlacements
from autopar.passes.data_parallel.redistribute import BatchRedistributor, moves
from autopar.passes.data_parallel.strategy_choice import batch_dims_after
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import lower
from autopar.passes.tensor_parallel.memory_formats import with_strides_of
from autopar.passes.tensor_parallel.partition_axis import Partitioner

WHOLE, PARTIAL, VARYING = Replicate(), Partial(), Varying()


@dataclass(frozen=True)
class PartitionBatch(Pass):
    """Turns a graph of the whole batch into the graph of one slice.

    Before: the graph of the whole batch. After: inputs with a batch dim, and values computed row by
    row, have only this slice's rows. Operators that couple rows have collectives over the batch
    axis around them. Gradients of parameters are Partial, and outputs without a batch dim are
    replicated. Every node has `meta["placement"]` and `meta["batch_dims"]`. Tier: exact, except for
    random numbers.

    Attributes:
        row_dims: the batch dim of each flattened argument, None for those without.
        whole_outputs: indices of outputs that the model keeps, so that each rank needs all rows.
        proves_rows: whether rows were not stated, so that no operator may depend on the choice.
        gathers_rows: whether the loop reads all outputs, so that each rank needs all rows.
        output_dims: the batch dim of each output, None for those without; None to find out.
    """

    slices: BatchSlices
    row_dims: tuple[int | None, ...]
    whole_outputs: tuple[int, ...] = ()
    gathers_rows: bool = False
    proves_rows: bool = False
    output_dims: tuple[int | None, ...] | None = None

    def __call__(self, graph: TrainingGraph) -> PassResult:
        placements = BatchPlacements(
            graph,
            self.slices,
            self.row_dims,
            self.whole_outputs,
            self.gathers_rows,
            self.output_dims,
        )
        if self.proves_rows and (coupled := placements.couplings()):
            line = source_line(coupled[0])
            raise BatchError(
                f"{coupled[0].target}{f' ({line})' if line else ''} couples what batch='local' "
                "takes for rows: dim 0 of the first tensor, and of every other argument with its "
                "size. Other rows would train otherwise, so say which dims are rows: "
                "autopar.compile(rows=0) if dim 0 of every tensor is, else by argument, such as "
                "rows={'x': 1, 'y': 0}, and leave out arguments without rows. "
                "Strategy(batch_semantics='local') computes what DistributedDataParallel does."
            )
        return PassResult(_BatchPartitioner(graph, self.slices, placements).run())


class _BatchPartitioner(Partitioner):
    """Writes the graph of one slice in one walk over the graph of the whole batch."""

    def __init__(
        self, source: TrainingGraph, slices: BatchSlices, placements: BatchPlacements
    ) -> None:
        super().__init__(source, BATCH, slices.axis_size, slices.index, placements.op_strategies)
        self.slices, self.placements = slices, placements
        self.slice_inputs: dict[InputRole, fx.Node] = {}

    # Inputs.

    def placeholder(self, node: fx.Node, role: InputRole) -> None:
        placement = self.placements.inputs[node.name]
        copy = self.copy(node, placement)
        if isinstance(placement, Shard):
            whole = node.meta["val"]
            shape = local_shape(whole.shape, placement, self.ranks, self.rank)
            strides = dense_strides(shape, whole.stride())
            copy.meta["val"] = whole.new_empty_strided(shape, strides)

    def batch_index(self) -> fx.Node:
        shape = (self.slices.local_units,)
        return self.slice_input(BatchIndex(), "batch_index", shape, torch.int64)

    def batch_fraction(self) -> fx.Node:
        return self.slice_input(BatchFraction(), "row_weight", (), torch.float64)

    def slice_input(
        self, role: InputRole, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        if role not in self.slice_inputs:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                node = self.graph.placeholder(name)
            fake = fake_like(self.source, shape, dtype)
            node.meta = {"val": fake, "phase": "forward", "block": "", "source": None}
            node.meta |= {"placement": VARYING, "batch_dims": ((),)}
            self.slice_inputs[role] = node
        return self.slice_inputs[role]

    def begin_backward(self) -> None:
        """Scales tangents with a batch dim by `BatchFraction`, as for a mean over all slices."""
        first = self.source.backward_start
        for role, node in zip(self.source.inputs, self.source.placeholders, strict=True):
            tangent, placement = self.local[Value(node)]
            if isinstance(role, Tangent) and isinstance(placement, Shard):
                last = self.last
                # A loss in the loop is a mean over the rows of this slice alone.
                scaled = self.redistributor(first).share(tangent)
                self.annotate_after(last)
                self.annotate(scaled, placement)
                self.local[Value(node)] = (scaled, placement)

    # Operators.

    def operator(self, node: fx.Node) -> None:
        """Writes an operator; random numbers without a batch dim come from slice 0."""
        super().operator(node)
        if is_name(node) or not is_random(node):
            return
        op_strategy = self.op_strategies.get(node.name)
        if op_strategy is not None and any(isinstance(p, Shard) for p in op_strategy.results):
            return
        for index, fake in enumerate(elements(node)):
            if fake is None:
                continue
            value = Value(node, index)
            drawn, _ = self.local[value]
            if node in self.local_tuples:
                drawn = call(self.graph, node, getitem, drawn, index)
            last, redistributor = self.last, self.redistributor(node)
            (agreed,) = redistributor.reduce([redistributor.keep_first(drawn)])
            self.annotate_after(last)
            self.local[value] = (agreed, WHOLE)

    def reduce_gradient(self, node: fx.Node) -> None:
        """Gradients stay Partial: `SynchronizeGradients` reduces them once a step."""

    def lower(
        self, node: fx.Node, operator: Operator, op_strategy: OpStrategy, shards: list[fx.Node]
    ) -> None:
        last = self.last
        results = lower(self.lowering_context(node, operator, op_strategy, shards))
        self.annotate_after(last, varying=True)
        for index, result in enumerate(results):
            if result is not None:
                placement = op_strategy.results[index]
                result = with_strides_of(self.graph, elements(node)[index], result, node)
                self.annotate_after(last, varying=True)
                self.annotate(result, placement)
                self.local[Value(node, index)] = (result, placement)

    # Redistribution.

    def redistributor(self, like: fx.Node) -> BatchRedistributor:
        """Writes redistributions with the phase, block, stage and source of a node."""
        inputs = (self.batch_index, self.batch_fraction)
        return BatchRedistributor(self.graph, like, self.slices, *inputs)

    def operand(self, value: Value, wanted: Placement, reader: fx.Node) -> fx.Node:
        """A value in the wanted placement, redistributed at most once.

        Raises:
            ValueError: no redistribution leads to the wanted placement.
        """
        node, placement = self.local[value]
        path = moves(placement, wanted, self.slices)
        if path is None:
            raise ValueError(f"{reader} wants {value.node} as {wanted}, which is {placement}")
        for move in path:
            key = (value, move.after)
            if key not in self.redistributed:
                last = self.last
                moved = self.redistributor(reader).write(move, node, tuple(value.tensor.shape))
                if move.after == wanted:
                    self.annotate_after(last)
                    moved = with_strides_of(self.graph, value.tensor, moved, reader)
                self.annotate_after(last)
                self.annotate(moved, move.after)
                self.redistributed[key] = moved
            node = self.redistributed[key]
        return node

    # Outputs.

    def results(self, phase: str) -> dict[OutputRole, fx.Node | None]:
        """The results of a phase; one collective reduces the Partial ones."""
        last = self.last
        sums: dict[Value, fx.Node] = {}
        for role, node in zip(self.source.outputs, self.source.results, strict=True):
            if node is not None and is_returned_by(phase, role, node):
                value = value_of(node)
                is_sum = self.local[value][1] == PARTIAL and self.result_placement(role) == WHOLE
                if is_sum and (value, WHOLE) not in self.redistributed:
                    sums[value] = node
        if len(sums) > 1:
            write = self.redistributor(next(iter(sums.values())))
            totals = write.reduce([self.local[value][0] for value in sums])
            self.annotate_after(last)
            for value, total in zip(sums, totals, strict=True):
                self.annotate(total, WHOLE)
                self.redistributed[value, WHOLE] = total
        for new in self.nodes_after(last):
            new.meta["phase"] = phase
        return super().results(phase)

    def keep_shard(self, role: Output, placement: Shard) -> None:
        """The border gathers rows (`autopar/runtime/border/border.py`)."""

    def result_placement(self, role: OutputRole) -> Placement:
        match role:
            case Output(index):
                return self.placements.outputs[index]
            case Gradient(Parameter()):
                return PARTIAL
            case Gradient(Input() as of) | Update(Input() as of):
                node = self.source.placeholder(of)
                assert node is not None
                placement = self.placements.inputs[node.name]
                is_summed = isinstance(role, Gradient) and self.slices.over_time
                return PARTIAL if placement == WHOLE and is_summed else placement
        return WHOLE

    # Metadata of new nodes.

    def annotate(self, node: fx.Node, *placements: Placement) -> None:
        first = placements[0] if placements else WHOLE
        node.meta["placement"] = VARYING if isinstance(first, Shard) else first
        if isinstance(first, Shard) and first.interleave > 1:
            node.meta["batch_interleave"] = first.interleave
        node.meta["batch_dims"] = tuple(
            (p.dim,) if isinstance(p, Shard) else () for p in placements
        )

    def annotate_after(self, last: fx.Node, varying: bool = False) -> None:
        """Annotates the nodes after `last`: received values are replicated, others follow operands.

        With `varying`, nodes with whole operands may differ between slices.
        """
        for node in self.nodes_after(last):
            if "placement" in node.meta:
                continue
            node.meta["batch_dims"] = ((),) * len(elements(node))
            kinds = {n.meta["placement"] for n in node.all_input_nodes} - {WHOLE}
            is_received = node.target in STARTS or (not kinds and is_name(node))
            if node.target in (start_reduce_scatter, start_all_to_all):
                node.meta["placement"] = VARYING
            elif is_received or not (kinds or varying):
                node.meta["placement"] = WHOLE
            else:
                node.meta["placement"] = kinds.pop() if len(kinds) == 1 else VARYING
                if not is_name(node):
                    node.meta["batch_dims"] = batch_dims_after(node)

    # The graph of the slice.

    def result(self) -> TrainingGraph:
        return replace(
            self.source,
            graph=self.graph,
            inputs=(*self.source.inputs, *self.slice_inputs),
            partitioned=(*self.source.partitioned, BATCH),
            notes=(*self.source.notes, *self.notes()),
        )

    def notes(self) -> Iterator[str]:
        """A note for each operator that gathers all rows, and one for local random numbers."""
        nodes = {node.name: node for node in self.source.calls()}
        gathered: dict[str, int] = {}
        for name, nbytes in self.placements.gathered_bytes.items():
            node = nodes[name]
            if node.meta["phase"] == "forward":
                reader = f"{node.target} needs all rows of the batch ({source_line(node)})"
                gathered[reader] = gathered.get(reader, 0) + nbytes
        for reader, nbytes in gathered.items():
            yield f"{reader}: {nbytes} bytes are gathered, exact"
        if self.placements.returned_bytes:
            size = human_bytes(self.placements.returned_bytes)
            yield BorderNote(
                f"every rank gathers {size} of rows that the model returns, at every call, and "
                "computes a loss of them for the whole batch. Return the loss from forward, or "
                "give autopar.compile loss_fn=. For this rank's rows alone give outputs='own'."
            )
        for name in sorted(self.placements.local_random)[:1]:
            line = source_line(nodes[name])
            yield NumericsNote(f"each rank draws random numbers for its own rows, first at {line}")
