"""Messages as the cost model sees them."""

import pytest

from autopar.core.ir.roles import Input, Output
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer, permutation
from autopar.cost_model.group_shape import GroupShape
from tests.cost_model.sketch import Sketch, c10d

BYTES = 480


def permuted(ranks: int, ranks_per_node: int) -> Transfer:
    """A ring's message of BYTES bytes, lowered."""
    g = Sketch(dp=2, cp=ranks)
    sent = g.take(Input(0), BYTES // 4)
    splits = ([0] * (ranks - 1) + [BYTES // 4], [0, BYTES // 4, *[0] * (ranks - 2)])
    issued = g.call(c10d.all_to_all_single.default, sent, *splits, "cp")
    g.give({Output(0): g.call(c10d.wait_tensor.default, issued)})
    return Transfer.of(issued, {"dp": 2, "cp": ranks}, ranks_per_node)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_permutation_is_one_message_of_each_rank(ranks: int) -> None:
    cluster = Cluster.default(2 * ranks, "cuda")
    assert cluster.link is not None
    found = permuted(ranks, 2 * ranks)
    assert found.nbytes == BYTES * ranks // (ranks - 1)
    link = cluster.link
    expected = link.launch_s + (ranks - 1) * link.step_s + BYTES / link.bytes_per_s
    assert cluster.price(found).seconds == pytest.approx(expected)


def test_between_nodes_one_pair_of_each_group_counts() -> None:
    found = permuted(4, 2)
    assert (found.nbytes, found.shape) == (2 * BYTES, GroupShape(2, 1, groups=2))
    assert permutation(BYTES, GroupShape(4, 2, groups=2)) == ("all_to_all", *found_of(found))


def found_of(transfer: Transfer) -> tuple[int, GroupShape]:
    return transfer.nbytes, transfer.shape
