"""All ranks of a world in one process, in lockstep, without torch.distributed.

`run_ranks` interprets every rank's graph node by node. A collective stops a rank until all ranks
have come to the same one; what it yields is poison (NaN) until it is waited for, and what it was
given must not change before, so a read too early, an overwritten buffer or a wait that is missing
is found, as well as ranks whose collectives differ. Abstract collectives and torch's functional
ones both run, so any graph between two passes does.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.mesh_levels import DATA_AXIS, mesh_of
from autopar.core.ir.placement import Replicate, chunk_rows
from autopar.core.ir.roles import InputRole, OutputRole
from autopar.passes.core import collective_ops as abstract
from autopar.passes.core.node_builder import is_view
from autopar.passes.core.routed_values import sends_routed_rows

Values = Mapping[InputRole, Tensor]
Results = dict[OutputRole, Tensor | None]
c10d = torch.ops._c10d_functional
POISON = -10_101_010


@dataclass
class Request:
    """A rank stands before a collective or a wait."""

    node: fx.Node
    args: tuple[Any, ...]


@dataclass
class Flight:
    """A collective of one rank that is under way."""

    pending: list[Tensor]
    operands: list[Tensor]
    given: list[Tensor]
    results: list[Tensor]
    done: bool = False


@dataclass
class Rank:
    """One rank: its graph, and the value of every node that it has run."""

    graph: TrainingGraph
    inputs: Values
    values: dict[fx.Node, Any] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Rows that were routed before the graph cannot be told from others.
        self.routes = any(map(sends_routed_rows, self.graph.graph.nodes))

    def run(self) -> Generator[Request, Any, Results]:
        """Runs every node; collectives are yielded, and their results sent in."""
        roles = dict(zip(self.graph.placeholders, self.graph.inputs, strict=True))
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.inputs[roles[node]]
            elif node.op == "get_attr":
                self.values[node] = self.graph.constants[node.target]
            elif node.op == "call_function":
                args = fx.map_arg(node.args, self.values.__getitem__)
                if node.target in COLLECTIVES or node.target in WAITS:
                    self.values[node] = yield Request(node, args)
                else:
                    kwargs = fx.map_arg(node.kwargs, self.values.__getitem__)
                    self.values[node] = node.target(*args, **kwargs)
            self.check_shape(node)
        assert all(flight.done for flight in self.flights), "a collective is never waited for"
        found = (None if n is None else self.values[n] for n in self.graph.results)
        return dict(zip(self.graph.outputs, found, strict=True))

    def check_shape(self, node: fx.Node) -> None:
        """What a node yields has the shape and dtype that passes were told."""
        if node.op != "output":
            real = [t for t in as_list(self.values[node]) if isinstance(t, Tensor)]
            first = 1 if self.routes else 0  # how many rows are routed, no pass is told
            have, want = ([(t.shape[first:], t.dtype) for t in ts] for ts in (real, tensors(node)))
            if any("scaled_dot_product" in n.name for n in (node, *node.all_input_nodes)):
                return  # torch 2.11 is wrong about the dtype of its second result
            assert have == want, f"{node.name} has {have}, but its meta says {want}"

    def start(self, operands: list[Tensor], results: list[Tensor], in_place: bool) -> list[Tensor]:
        """Begins a collective and returns what will hold its results."""
        given = [t.clone() for t in operands]
        pending = operands if in_place else [torch.empty_like(t) for t in results]
        for tensor in pending:
            tensor.fill_(torch.nan if tensor.is_floating_point() else poison(tensor.dtype))
        self.flights.append(Flight(pending, [] if in_place else operands, given, results))
        return pending

    def wait(self, pending: list[Tensor]) -> None:
        """Ends a collective: its results appear."""
        flight = [f for f in self.flights if f.pending[0] is pending[0]][-1]
        assert not flight.done, "a collective is waited for twice"
        flight.done = True
        for now, before in zip(flight.operands, flight.given, strict=False):
            same = torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)
            assert same, "a buffer changed while a collective read it"
        for tensor, result in zip(flight.pending, flight.results, strict=True):
            tensor.copy_(result)


def poison(dtype: torch.dtype) -> int:
    """A whole number that nobody would send."""
    return POISON if dtype.itemsize > 2 else 171


def run_ranks(graphs: Sequence[TrainingGraph], inputs: Sequence[Values]) -> list[Results]:
    """Runs all ranks' graphs on their inputs and returns what each returns."""
    ranks = [Rank(g, values) for g, values in zip(graphs, inputs, strict=True)]
    with torch.no_grad():
        results = _lockstep(ranks)
    check_replicas(ranks)
    return results


def _lockstep(ranks: list[Rank]) -> list[Results]:
    programs = [rank.run() for rank in ranks]
    answers: list[Any] = [None] * len(ranks)
    while True:
        requests, results = [], []
        for program, answer in zip(programs, answers, strict=True):
            try:
                requests.append(program.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if not requests:
            return results
        assert not results, f"some ranks have ended, others stand before {requests[0].node}"
        answers = _serve(ranks, requests)


def _serve(ranks: list[Rank], requests: list[Request]) -> list[Any]:
    targets = {request.node.target for request in requests}
    assert len(targets) == 1, f"ranks stand before different collectives: {targets}"
    (target,) = targets
    args = [request.args for request in requests]
    if target in WAITS:
        for rank, (pending, *_) in zip(ranks, args, strict=True):
            rank.wait(as_list(pending))
        return [pending for pending, *_ in args]
    answers: list[Any] = [None] * len(ranks)
    for group in groups(ranks[0].graph, requests[0].node, len(ranks)):
        own = _begin(target, [ranks[r] for r in group], [args[r] for r in group])
        for rank, pending in zip(group, own, strict=True):
            answers[rank] = pending if target in abstract.STARTS else pending[0]
    return answers


def _begin(target: Any, ranks: list[Rank], args: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    """Starts a collective of a group of ranks."""
    operands = [as_list(first) for first, *_ in args]
    moved = [
        COLLECTIVES[target](parts, [options for _, *options in args])
        for parts in zip(*operands, strict=True)
    ]
    if target in (abstract.start_reduce_scatter, abstract.start_all_gather):
        sizes = [options[0] for _, *options in args]
        for index, results in enumerate(moved):
            for rank, result in enumerate(results):
                assert result.shape[0] == sizes[rank][index], "rows asked for and rows had differ"
    at_once = target is c10d.all_reduce.default  # it reduces a copy
    in_place = target is c10d.all_reduce_.default
    return [
        rank.start([] if at_once else mine, [results[i] for results in moved], in_place)
        for i, (rank, mine) in enumerate(zip(ranks, operands, strict=True))
    ]


def groups(graph: TrainingGraph, node: fx.Node, ranks: int) -> list[list[int]]:
    """The ranks that take part in a collective together: those of its axis or level."""
    names = [arg for arg in node.args if isinstance(arg, str) and arg in graph.axes]
    return peers(graph.axes, names[-1], ranks) if names else [list(range(ranks))]


def peers(axes: Mapping[str, int], name: str, ranks: int) -> list[list[int]]:
    """The groups of the ranks of one pipeline stage along an axis or level."""
    mesh = {axis: size for axis, size in mesh_of(name, axes).items() if axis != "pp"}
    if len(mesh) == 1:
        return [list(range(ranks))]
    table = torch.arange(ranks).view(*mesh.values())
    return table.movedim([*mesh].index(name), -1).reshape(-1, mesh[name]).tolist()


def check_replicas(ranks: Sequence[Rank]) -> None:
    """What a graph types Replicate is the same on every rank, where ranks run the same nodes."""
    programs = [[(n.name, n.target) for n in rank.graph.graph.nodes] for rank in ranks]
    if any(program != programs[0] for program in programs):
        return  # ranks whose chunks are smaller pad them
    axes = ranks[0].graph.axes
    for group in peers(axes, DATA_AXIS, len(ranks)) if DATA_AXIS in axes else []:
        _check_same([ranks[r] for r in group])


EMPTY = (torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default)


def _has_no_values(node: fx.Node) -> bool:
    """Whether a node is memory that nothing was written to, or a part of it."""
    if node.target in EMPTY:
        return True
    source = next(iter(node.all_input_nodes), None)
    selects = is_view(node) or node.target is torch.ops.aten.index_select.default
    return selects and source is not None and _has_no_values(source)


def _check_same(ranks: Sequence[Rank]) -> None:
    for nodes in zip(*(rank.graph.graph.nodes for rank in ranks), strict=True):
        if not isinstance(nodes[0].meta.get("placement"), Replicate) or is_pending(nodes[0]):
            continue
        if _has_no_values(nodes[0]):
            continue
        first, *others = (as_list(r.values[n]) for r, n in zip(ranks, nodes, strict=True))
        for other in others:
            same = all(map(close, first, other))
            assert same, f"{nodes[0].name} is typed Replicate and differs between ranks"


def close(a: Any, b: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, equal_nan=True)


def is_pending(node: fx.Node) -> bool:
    """Whether a node is a collective under way."""
    return node.target in COLLECTIVES


# Each takes the ranks' tensors and options, and gives the ranks' results.

Parts = tuple[Tensor, ...]


def _same(parts: Parts) -> None:
    shapes = {(t.shape, t.dtype) for t in parts}
    assert len(shapes) == 1, f"ranks send different shapes: {shapes}"
    assert all(t.is_contiguous() for t in parts), "a collective was given strided memory"


def _sum(parts: Parts) -> Tensor:
    return torch.stack(parts).sum(0)


def _all_reduce(parts: Parts, options: Any) -> list[Tensor]:
    _same(parts)
    (how,) = {o[0] for o in options}
    return [_sum(parts) if how == "sum" else torch.stack(parts).amax(0)] * len(parts)


def _all_gather(parts: Parts, options: Any) -> list[Tensor]:
    _same(parts)
    assert all(o[0] == len(parts) for o in options)
    return [torch.cat(parts)] * len(parts)


def _reduce_scatter(parts: Parts, options: Any) -> list[Tensor]:
    _same(parts)
    assert all(o[:2] == ["sum", len(parts)] for o in options)
    return list(_sum(parts).chunk(len(parts)))


def _all_to_all(parts: Parts, options: Any) -> list[Tensor]:
    assert all(t.is_contiguous() for t in parts), "a collective was given strided memory"
    pieces = [part.split(sent) for part, (_, sent, _) in zip(parts, options, strict=True)]
    columns = list(zip(*pieces, strict=True))
    for column, (received, *_) in zip(columns, options, strict=True):
        assert [len(piece) for piece in column] == list(received), "ranks expect other sizes"
    return [torch.cat(column) for column in columns]


def _start_all_reduce(parts: Parts, options: Any) -> list[Tensor]:
    how = options[0][1] if len(options[0]) > 1 else "sum"
    return [_sum(parts) if how == "sum" else torch.stack(parts).amax(0)] * len(parts)


def _start_all_gather(parts: Parts, options: Any) -> list[Tensor]:
    return [torch.cat(parts)] * len(parts)


def _start_all_to_all(parts: Parts, options: Any) -> list[Tensor]:
    if len(options[0]) > 1:
        return _all_to_all(parts, [(*counts, axis) for axis, *counts in options])
    rows = [part.chunk(len(parts)) for part in parts]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _start_permute(parts: Parts, options: Any) -> list[Tensor]:
    assert len({tuple(targets) for targets, *_ in options}) == 1, "ranks send elsewhere"
    targets = list(options[0][0])
    assert sorted(targets) == list(range(len(parts))), "two ranks send to one"
    return [parts[targets.index(rank)] for rank in range(len(parts))]


def _start_reduce_scatter(parts: Parts, options: Any) -> list[Tensor]:
    total = _sum(parts)
    return list(total.split(chunk_rows(total.shape[0], len(parts))))


COLLECTIVES: Mapping[Any, Any] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    abstract.start_all_reduce: _start_all_reduce,
    abstract.start_all_gather: _start_all_gather,
    abstract.start_reduce_scatter: _start_reduce_scatter,
    abstract.start_all_to_all: _start_all_to_all,
    abstract.start_permute: _start_permute,
}
WAITS = (c10d.wait_tensor.default, abstract.wait)


def as_list(value: Any) -> list[Any]:
    """A value or values, as a list."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def chunks(tensor: Tensor, parts: int, dim: int = 0) -> Iterator[Tensor]:
    """A tensor's shards of a dim, some perhaps empty."""
    return iter(tensor.split(chunk_rows(tensor.shape[dim], parts), dim))
