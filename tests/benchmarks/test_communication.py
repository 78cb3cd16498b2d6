"""The arithmetic of the tables of `benchmarks.communication`."""

import pytest

from benchmarks.communication.contenders import ALONE
from benchmarks.communication.report import Setting, rows
from benchmarks.contenders import PLAIN, Contender

SETTING = Setting("gpt", 2, 2, "1gbit")


def contender(name: str, *peers: str, reference: str = "") -> Contender:
    return Contender(name, lambda case: None, peers, reference=reference)  # type: ignore[arg-type,return-value]


def outcome(**others: tuple[list[float], int]) -> dict[str, object]:
    """Outcome with the model alone, which takes 0.1 s and sends 1000 bytes of barriers."""
    ran = {ALONE: ([0.1, 0.1, 0.1], 1000), **others}
    made = [
        {"contender": name, "error": None, "seconds": seconds, "sent": [sent] * 3, "losses": [2.0]}
        for name, (seconds, sent) in ran.items()
    ]
    return {"reference": [1.0], "contenders": made}


def test_a_step_consists_of_computation_and_exposed_communication() -> None:
    field = [contender(ALONE), contender("ddp"), contender("bucketed", "absent", "ddp")]
    measured = outcome(ddp=([0.5, 0.6, 0.7], 15_001_000), bucketed=([0.22] * 3, 15_001_000))
    alone, _, bucketed = rows(SETTING, field, measured)
    assert alone.exposed_s is None
    assert bucketed.exposed_s == pytest.approx(0.12)
    assert bucketed.sent_bytes == 15_000_000
    assert bucketed.bound_ratio == pytest.approx(0.22 / 0.12)  # 15 MB over 1 Gbit/s
    assert (bucketed.peer, bucketed.ratio) == ("ddp", pytest.approx(0.22 / 0.6))


def test_only_lossless_contenders_must_have_the_plain_losses() -> None:
    field = [contender("lossy"), contender("exact", reference=PLAIN)]
    lossy, exact = rows(SETTING, field, outcome(lossy=([0.1] * 3, 0), exact=([0.1] * 3, 0)))
    assert lossy.error is None
    assert "losses differ" in str(exact.error)
