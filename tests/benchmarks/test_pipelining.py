"""Stages cut by hand train what the plain model trains."""

import torch
import torch.distributed as dist

from benchmarks.contenders import build_pipelining, build_plain
from benchmarks.models import CASES
from tests.harness.worlds import run

STEPS = 2


def by_hand(rank, world_size, *, schedule):
    torch.manual_seed(0)
    case = CASES["gpt"]
    step = build_pipelining(case, schedule=schedule)
    losses = torch.stack([step(*case.batch(index)).detach() for index in range(STEPS)])
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


def test_tied_weights_and_several_stages_on_a_rank():
    torch.manual_seed(0)
    case = CASES["gpt"]
    step = build_plain(case)
    plain = torch.tensor([step(*case.batch(index)).item() for index in range(STEPS)])
    for losses in run(by_hand, world_size=2, schedule="interleaved"):
        torch.testing.assert_close(torch.tensor(losses), plain, rtol=1e-5, atol=0)
