import pytest
from expecttest import assert_expected_inline

from autopar.cost_model.memory.liveness import Overhead, memory_spans
from autopar.cost_model.storage import is_stored
from autopar.ir.graph import GraphProperty
from autopar.operators import parameters
from autopar.passes.memory.offload_parameters import OffloadParameters
from tests.passes.golden import changes, order, two_layers
from tests.passes.memory.test_offload_activations import gpt, lowered, moves


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "LEAST_BYTES", 1)


def test_a_parameter_is_fetched_in_each_half() -> None:
    graph = two_layers(1).graph(0)
    assert_expected_inline(changes(graph, lowered(graph, OffloadParameters())), """""")


def test_reads_begin_ahead_of_their_readers() -> None:
    after = lowered(two_layers(1).graph(0), OffloadParameters())
    assert_expected_inline(order(after, moves), """""")


def test_stored_parameters_take_no_memory_but_their_copies() -> None:
    before, after = gpt(), lowered(gpt(), OffloadParameters())
    assert GraphProperty.PARAMETERS_OFFLOADED in after.properties
    kept = [
        sum(s.nbytes for s in memory_spans(g, Overhead()) if s.category == "parameters")
        for g in (before, after)
    ]
    assert kept[0] > 0
    assert kept[1] == 0
    for node in after.placeholders:
        assert not is_stored(node) or {user.target for user in node.users} == {parameters.fetch}
