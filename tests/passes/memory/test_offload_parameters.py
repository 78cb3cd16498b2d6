import pytest
from expecttest import assert_expected_inline

from autopar.core.ir.graph import GraphProperty
from autopar.core.ir.messages import is_stored
from autopar.core.operators import parameters
from autopar.cost_model.memory.liveness import Overhead, memory_spans
from autopar.passes.memory.offload_parameters import OffloadParameters
from tests.passes.golden import changes, order, two_layers
from tests.passes.memory.test_offload_activations import gpt, lowered, moves


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "LEAST_BYTES", 1)


def test_a_parameter_is_fetched_in_each_half() -> None:
    graph = two_layers(1).graph(0)
    assert_expected_inline(
        changes(graph, lowered(graph, OffloadParameters("/nvme"))),
        """\
+ fetch_default: [3,4] = fetch(blocks.0.weight, /nvme)
+ fetch_default_1: [2,3] = fetch(blocks.1.weight, /nvme)
+ fetched_default: [3,4] = fetched(fetch_default)
~ t: [4,3] = t(fetched_default)
+ fetched_default_1: [2,3] = fetched(fetch_default_1)
~ t_1: [3,2] = t(fetched_default_1)
+ fetch_default_2: [2,3] = fetch(blocks.1.weight, /nvme)
+ fetched_default_2: [2,3] = fetched(fetch_default_2)
+ t_9: [3,2] = t(fetched_default_2)
~ t_4: [2,3] = t(t_9)""",
    )


def test_reads_begin_ahead_of_their_readers() -> None:
    after = lowered(two_layers(1).graph(0), OffloadParameters("/nvme"))
    assert_expected_inline(
        order(after, moves),
        """\
f fetch_default
f fetch_default_1
f fetched_default
f fetched_default_1
b fetch_default_2
b fetched_default_2""",
    )


def test_stored_parameters_take_no_memory_but_their_copies() -> None:
    before, after = gpt(), lowered(gpt(), OffloadParameters("/nvme"))
    assert GraphProperty.PARAMETERS_OFFLOADED in after.properties
    kept = [
        sum(s.nbytes for s in memory_spans(g, Overhead()) if s.category == "parameters")
        for g in (before, after)
    ]
    assert kept[0] > 0
    assert kept[1] == 0
    for node in after.placeholders:
        assert not is_stored(node) or {user.target for user in node.users} == {parameters.fetch}
