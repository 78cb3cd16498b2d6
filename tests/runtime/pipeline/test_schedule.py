"""In which order a rank of a pipeline works, asks for what it is sent, and sends."""

from autopar._torch import PipelineAction, add_transfers
from autopar.cost_model.simulator.schedules import orders
from autopar.runtime.pipeline.schedule import PipelineWork, hoist_receives


def written(schedule: str, ranks: int, micros: int, chunks: int = 1) -> dict[int, list[str]]:
    made = orders(schedule, ranks, micros, chunks)
    actions = {
        rank: [PipelineAction(a.stage, PipelineWork(a.kind), a.micro) for a in order]
        for rank, order in enumerate(made)
    }
    found = add_transfers(actions, lambda stage: stage % ranks, ranks * chunks)
    return {rank: [str(a) for a in hoist_receives(own)] for rank, own in found.items()}


def test_what_comes_next_is_asked_for_before_what_is_there_is_worked_on() -> None:
    _, last = written("gpipe", 2, 3).values()
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
