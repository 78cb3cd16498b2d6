"""The arithmetic of communication's tables; the racing is what every run of it tests."""

import pytest

from benchmarks.communication.field import ALONE, UNBUCKETED
from benchmarks.communication.report import Setting, least_step, parts, rows
from benchmarks.contenders import Contender

SETTING = Setting("gpt", 2, 2, "1gbit", gradient_bytes=10**7)


def contender(name: str, *peers: str, reference: str = "") -> Contender:
    return Contender(name, lambda case: None, peers, reference=reference)  # type: ignore[arg-type,return-value]


def outcome(**others: tuple[list[float], int]) -> dict[str, object]:
    """Of the model alone, which takes 0.1 s and sends 1000 bytes of barriers, and of others."""
    ran = {ALONE: ([0.1, 0.1, 0.1], 1000), **others}
    made = [
        {"contender": name, "error": None, "seconds": seconds, "sent": [sent] * 3, "losses": [2.0]}
        for name, (seconds, sent) in ran.items()
    ]
    return {"reference": [1.0], "contenders": made}


def test_a_step_is_taken_apart() -> None:
    field = [contender(ALONE), contender(UNBUCKETED), contender("bucketed", "ddp", UNBUCKETED)]
    given = outcome(unbucketed=([0.5, 0.6, 0.7], 15_001_000), bucketed=([0.22] * 3, 15_001_000))
    alone, unbucketed, bucketed = rows(SETTING, field, given)
    assert alone.exposed_s is None
    assert unbucketed.speed_up == 1.0
    assert bucketed.speed_up == pytest.approx(0.6 / 0.22)
    assert bucketed.exposed_s == pytest.approx(0.12)
    assert bucketed.sent_bytes == 15_000_000
    assert bucketed.bits_per_s == pytest.approx(8 * 1.5 * 10**7 / 0.12)
    assert bucketed.bound_s == pytest.approx(0.12)  # 15 MB over 1 Gbit/s, longer than computing
    assert bucketed.bound_ratio == pytest.approx(0.22 / 0.12)
    assert (bucketed.peer, bucketed.ratio) == (UNBUCKETED, pytest.approx(0.22 / 0.6))


def test_no_bucket_is_sent_before_it_is_there() -> None:
    """Of 3 s of computing, 1 s forwards; then 2 s of link, or 8 s that follow the first bucket."""
    assert least_step(3.0, 2.0, [1.0]) == pytest.approx(5.0)
    assert least_step(3.0, 2.0, [0.5, 0.5]) == pytest.approx(4.0)
    assert least_step(3.0, 8.0, [0.25, 0.75]) == pytest.approx(1.5 + 8.0)


def test_whoever_should_train_the_plain_model_is_held_to_its_losses() -> None:
    field = [contender("lossy"), contender("exact", reference="the plain model")]
    lossy, exact = rows(SETTING, field, outcome(lossy=([0.1] * 3, 0), exact=([0.1] * 3, 0)))
    assert lossy.error is None
    assert "losses differ" in str(exact.error)


def test_each_rate_has_its_part_of_the_rounds() -> None:
    given = outcome(unbucketed=([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 7))
    found = [part["contenders"][1]["seconds"] for part in parts(given, 3)]
    assert found == [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
