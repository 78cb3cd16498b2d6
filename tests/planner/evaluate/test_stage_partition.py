import random
from itertools import combinations, pairwise

import pytest

from autopar.core.schedules import stage_ranks
from autopar.planner.evaluate.stage_partition import SLACK, Segment, partition_stages


def loads(segments, ranks, cuts, transfer, paces=None, places=None):
    """Seconds of each rank."""
    paces = paces or (1.0,) * ranks
    places = places or [stage % ranks for stage in range(len(cuts) + 1)]
    ends = (0, *cuts, len(segments))
    taken = [0.0] * ranks
    for rank, (first, after) in zip(places, pairwise(ends), strict=True):
        taken[rank] += paces[rank] * sum(s.seconds for s in segments[first:after])
    for (one, two), cut in zip(pairwise(places), cuts, strict=True):
        if one != two:
            taken[one] += transfer(segments[cut].sent_bytes)
            taken[two] += transfer(segments[cut].returned_bytes)
    return taken


def bytes_held(segments, ranks, cuts, in_flight):
    held = [0] * ranks
    for stage, (first, after) in enumerate(pairwise((0, *cuts, len(segments)))):
        run = segments[first:after]
        held[stage % ranks] += sum(s.held_bytes + in_flight[stage] * s.saved_bytes for s in run)
    return held


def best(segments, ranks, in_flight, transfer, cap, paces=None, places=None):
    """Seconds of the slowest rank under the best cuts of all; None if there are none."""
    every = combinations(range(1, len(segments)), len(in_flight) - 1)
    allowed = (c for c in every if max(bytes_held(segments, ranks, c, in_flight)) <= cap)
    each = (max(loads(segments, ranks, c, transfer, paces, places)) for c in allowed)
    return min(each, default=None)


def transfer(nbytes):
    return nbytes / 100


def drawn(rng, count, head):
    """A model whose last segment is so many times as heavy as another."""
    kinds = [head if i == count - 1 else 1.0 for i in range(count)]
    return [Segment(k * rng.random(), *(rng.randrange(12) for _ in range(4))) for k in kinds]


@pytest.mark.parametrize(("ranks", "count"), [(2, 12), (3, 12), (4, 11)])
@pytest.mark.parametrize("head", [1.0, 6.0])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_no_cuts_are_better(ranks, count, head, equal):
    rng = random.Random(ranks)
    for _ in range(12):
        segments = drawn(rng, count, head)
        in_flight = [rng.randrange(1, 4) for _ in range(ranks)]
        cap = rng.choice([10**9, 16 * count // ranks])
        paces = () if equal else [rng.choice([0.5, 1.0, 3.0]) for _ in range(ranks)]
        found = partition_stages(segments, ranks, in_flight, transfer, cap, paces)
        least = best(segments, ranks, in_flight, transfer, cap, paces)
        assert (found is None) == (least is None)
        if found is not None:
            assert max(loads(segments, ranks, found, transfer, paces)) <= least * (1 + SLACK)
            assert max(bytes_held(segments, ranks, found, in_flight)) <= cap


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(2, 2, 24), (2, 3, 14), (3, 2, 14)])
@pytest.mark.parametrize("head", [1.0, 6.0])
@pytest.mark.parametrize(("slow", "most"), [(1.0, 1.16), (2.0, 1.22)], ids=["equal", "unequal"])
def test_several_stages_on_a_rank_are_near_the_best(ranks, chunks, count, head, slow, most):
    """The search is local: with a slow rank more of its optima are worse."""
    rng, worse = random.Random(1), []
    in_flight = [1] * (ranks * chunks)
    for _ in range(6):
        segments = drawn(rng, count, head)
        paces = [1.0] * (ranks - 1) + [slow]
        found = partition_stages(segments, ranks, in_flight, transfer, paces=paces)
        least = best(segments, ranks, in_flight, transfer, 10**9, paces)
        worse.append(max(loads(segments, ranks, found, transfer, paces)) / least)
    assert max(worse) < most * (1 + SLACK)
    assert sum(worse) / len(worse) < 1.07 * (1 + SLACK)


@pytest.mark.parametrize(("ranks", "count"), [(2, 24), (3, 14), (4, 12)])
@pytest.mark.parametrize("head", [1.0, 6.0])
def test_stages_in_a_v_are_near_the_best(ranks, count, head):
    """The first rank has the head beside the first stage, and the tip of the V sends nothing."""
    rng, worse = random.Random(1), []
    places = stage_ranks("zbv", ranks, 2)
    for _ in range(6):
        segments = drawn(rng, count, head)
        found = partition_stages(segments, ranks, [1] * 2 * ranks, transfer, rank_of=places)
        least = best(segments, ranks, [1] * 2 * ranks, transfer, 10**9, places=places)
        worse.append(max(loads(segments, ranks, found, transfer, places=places)) / least)
    assert max(worse) < 1.16 * (1 + SLACK)
    assert sum(worse) / len(worse) < 1.07 * (1 + SLACK)


def test_several_stages_on_a_rank_stay_under_the_cap():
    segments = [Segment(1.0, held_bytes=10 if i < 4 else 1) for i in range(12)]
    free = partition_stages(segments, 2, [1] * 4, transfer)
    assert max(bytes_held(segments, 2, free, [1] * 4)) == 33
    under = partition_stages(segments, 2, [1] * 4, transfer, 25)
    assert max(bytes_held(segments, 2, under, [1] * 4)) <= 25
    assert partition_stages(segments, 2, [1] * 4, transfer, 20) is None


def test_a_heavy_head_stands_alone():
    segments = [Segment(1.0)] * 12 + [Segment(4.0)]
    assert partition_stages(segments, 4, [1] * 4, transfer) == (4, 8, 12)


def test_of_cuts_as_good_the_one_that_sends_less():
    sent = [0, 50, 50, 7, 50, 50, 7, 50, 50]
    segments = [Segment(1.0, sent_bytes=nbytes) for nbytes in sent]
    assert partition_stages(segments, 3, [1] * 3, lambda nbytes: 0.0) == (3, 6)
    uneven = [Segment(1.0 if i else 0.99, sent_bytes=n) for i, n in enumerate([0, 50, 50, 7, 50])]
    assert partition_stages(uneven, 2, [1] * 2, lambda nbytes: nbytes * 1.0) == (3,)
