"""The hash of a graph, by which a plan knows the graph that its strategies are for."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Input, Output
from autopar.core.plan.partition import graph_hash, operators_hash
from autopar.passes.core.collective_ops import collective, start_all_reduce
from autopar.passes.core.node_builder import call

aten = torch.ops.aten


def graph_of(target: Any, *args: Any, **kwargs: Any) -> TrainingGraph:
    """A graph of one operator on a tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 4, 4)
        x.meta["batch_dims"] = ((0,),)
        result = call(graph, x, target, x, *args, **kwargs)
    graph.output([result])
    return TrainingGraph(graph, (Input(0),), (Output(0),), {})


@pytest.mark.parametrize(
    ("target", "one", "other"),
    [
        (aten._softmax.default, (1, False), (2, False)),
        (aten.sum.dim_IntList, ([1], False), ([1], True)),
        (aten.permute.default, ([0, 1, 2],), ([0, 2, 1],)),
        (aten.mul.Scalar, (2.0,), (2.5,)),
        (aten.gelu.default, {"approximate": "none"}, {"approximate": "tanh"}),
        (aten._to_copy.default, {"dtype": torch.float64}, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_the_hash_covers_constants(target: Any, one: Any, other: Any) -> None:
    def made(constants: Any) -> TrainingGraph:
        named = isinstance(constants, dict)
        return graph_of(target, **constants) if named else graph_of(target, *constants)

    assert graph_hash(made(one)) != graph_hash(made(other))
    assert graph_hash(made(one)) == graph_hash(made(one))
    assert operators_hash(made(one)) == operators_hash(made(other))


HASH = """
from autopar.core.plan.partition import graph_hash
from tests.core.plan.test_partition import collective_graph
print(graph_hash(collective_graph()))
"""


def collective_graph() -> TrainingGraph:
    """A graph with functions of autopar and Python, such as those before a second axis."""
    graph = graph_of(aten.exp.default)
    result = graph.results[0]
    assert result is not None
    graph.graph.inserting_before(graph.output_node)
    (reduced,) = collective(graph.graph, result, start_all_reduce, [result], "tp")
    graph.output_node.args = ([reduced],)
    return graph


@pytest.mark.slow
def test_the_hash_is_the_same_in_all_processes() -> None:
    command = [sys.executable, "-c", HASH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == graph_hash(collective_graph())
