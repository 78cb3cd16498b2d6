"""In which order a rank of a pipeline works, asks for what it is sent, and sends."""

import pytest

from autopar.core.schedules import orders
from autopar.cost_model.simulator.pipeline_transfers import inputs_ahead, with_transfers


def written(schedule: str, ranks: int, micros: int, chunks: int = 1) -> list[list[str]]:
    made = with_transfers(orders(schedule, ranks, micros, chunks), hoisted=True)
    return [[str(action) for action in own] for own in made]


def test_what_comes_next_is_asked_for_before_what_is_there_is_worked_on() -> None:
    _, last = written("gpipe", 2, 3)
    assert " ".join(last) == (
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    )


def test_what_one_rank_sends_another_is_received_in_that_order() -> None:
    found = written("interleaved", 2, 4, 2)
    for rank, other in ((0, 1), (1, 0)):
        sent = [a for a in found[rank] if "SEND" in a]
        came = [a for a in found[other] if "RECV" in a]
        assert len(sent) == len(came)
        for one, two in zip(sent, came, strict=True):
            step = 1 if "SEND_F" in one else -1
            assert int(one[0]) + step == int(two[0])
            assert one[1:].replace("SEND", "RECV") == two[1:]


@pytest.mark.parametrize("hoisted", [False, True])
def test_inputs_are_there_from_their_receive_to_their_use(hoisted: bool) -> None:
    """Stages between which nothing is sent have no inputs ahead, and the last work has none."""
    made = with_transfers(orders("interleaved", 4, 8, 2), hoisted=hoisted)
    for own in made:
        ahead = inputs_ahead(own)
        names = [str(action) for action in own]
        works = [n for n in names if "RECV" not in n and "SEND" not in n]
        for place, (work, inputs) in enumerate(zip(works, ahead, strict=True)):
            before, later = names[: names.index(work)], works[place + 1 :]
            asked = {n.replace("RECV_", "") for n in before if "RECV" in n}
            want = sorted((n[1], int(n[0])) for n in asked.intersection(later))
            assert sorted(inputs) == want
    assert any(len(inputs) > 1 for own in made for inputs in inputs_ahead(own))
