"""`slowest_of`: how much slower the slowest of many GPUs is than a middling one."""

from __future__ import annotations

from statistics import NormalDist

SPREAD = 0.08 / 5.4
"""Standard deviation of the time that GPUs of one kind take at their power limit. Between the ends
of their distribution, 2.7 standard deviations to either side, times of five computing centres
differ by 8 % (Sinha et al., SC'22, arXiv 2208.11035)."""


def slowest_of(gpus: int) -> float:
    """Time of the slowest GPU, on which a step waits, over that of the median one.

    The expected maximum of normal times (Blom 1958).
    """
    return 1.0 + SPREAD * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))
