"""Redistributions of all ranks, run in lockstep, against shards of the oracle."""

from itertools import product

import pytest
import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.core.ir.graph import tensor_bytes
from autopar.core.ir.placement import Partial, Placement, Replicate, Shard
from autopar.passes.core.collective_ops import start_all_to_all
from autopar.passes.rules.emit_redistribute import RedistributeEmitter
from autopar.passes.rules.proof.infer_batch_dims import infer_batch_dims
from autopar.passes.rules.proof.oracle import is_close, shard_tensor, unshard
from autopar.passes.rules.proof.spmd_interpreter import run_spmd
from autopar.passes.rules.redistribute import RedistributeStep, redistribute_steps

aten = torch.ops.aten
PLACEMENTS: tuple[Placement, ...] = (
    Replicate(),
    Partial(),
    Partial("max"),
    *(Shard(dim, pieces) for dim in range(3) for pieces in (1, 2)),
)
PAIRS = [(a, b) for a, b in product(PLACEMENTS, PLACEMENTS) if redistribute_steps(a, b)]
IN_ONE_PIECE = [pair for pair in PAIRS if all(getattr(p, "interleave", 1) == 1 for p in pair)]


def program(
    part: torch.Tensor, whole: torch.Size, before: Placement, after: Placement, n: int, rank: int
) -> fx.Graph:
    """The program of one rank that redistributes a tensor."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    with FakeTensorMode() as mode:
        node.meta = {"val": mode.from_tensor(part), "phase": "forward"}
        for step in redistribute_steps(before, after) or ():
            node = RedistributeEmitter(graph, node, n, rank, "tp").emit(step, node, whole)
    graph.output([node])
    return graph


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda p: str(p))
def test_redistribution_keeps_the_value(before: Placement, after: Placement, n: int) -> None:
    check(before, after, n, torch.randn(2 * n, 4 * n, 2 * n, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), IN_ONE_PIECE, ids=lambda p: str(p))
def test_uneven_chunks_are_padded(before: Placement, after: Placement, n: int) -> None:
    check(before, after, n, torch.randn(3 * n - 1, 4 * n + 1, 5 * n - 1, dtype=torch.float64))


def check(before: Placement, after: Placement, n: int, whole: torch.Tensor) -> None:
    """Checks a redistribution between two placements on n ranks."""
    whole = whole.transpose(0, 1)
    parts = shard_tensor(whole, before, n)
    graphs = [program(part, whole.shape, before, after, n, rank) for rank, part in enumerate(parts)]
    if all(step.kind != "keep_first" for step in redistribute_steps(before, after) or ()):
        assert len({tuple(node.target for node in graph.nodes) for graph in graphs}) == 1
    results = [result for (result,) in run_spmd(graphs, [[part] for part in parts])]
    made = unshard(results, after)
    assert made is not None
    assert is_close(made, whole)
    assert [result.shape for result in results] == [
        part.shape for part in shard_tensor(whole, after, n)
    ]
    for graph, result in zip(graphs, results, strict=True):
        (returned,) = graph.output_node().args[0]  # type: ignore[misc]
        assert returned.meta["val"].stride() == result.stride()
        for start in graph.find_nodes(op="call_function", target=start_all_to_all):
            (step,) = redistribute_steps(before, after) or ()
            priced = step.message_bytes(whole.shape, whole.element_size(), n)
            assert priced == tensor_bytes(start.args[0][0].meta["val"])


@pytest.mark.parametrize("kind", ["all_gather", "slice"])
def test_batch_dims_are_inferred_where_one_row_needs_no_copy(kind: str) -> None:
    lies = (Shard(1), Replicate())
    step = (
        RedistributeStep("all_gather", *lies)
        if kind == "all_gather"
        else RedistributeStep("slice", *reversed(lies))
    )

    def emit(graph: fx.Graph, given: list[fx.Node]) -> fx.Node:
        return RedistributeEmitter(graph, given[0], 2, 0, "tp").emit(step, given[0], (1, 8, 3))

    graph = fx.Graph()
    row = graph.placeholder("row")
    with FakeTensorMode():
        row.meta = {"val": torch.empty(1, 4, 3), "batch_dims": ((0,),), "phase": "forward"}
        result = emit(graph, [row])
        written = [node for node in graph.nodes if node is not row]
        infer_batch_dims(written, [row], emit)
    assert result.meta["batch_dims"] == ((0,),)
    assert aten.clone.default not in {node.target for node in written}
