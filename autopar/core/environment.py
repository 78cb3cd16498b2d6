"""Variables of the environment that autopar or torch reads as it starts."""

from __future__ import annotations

import logging
import os

from autopar.errors import StrategyError

OLDEST_TORCH = 2, 11
NEWEST_TORCH = 2, 15
"""Releases of torch, as (major, minor), that the tests of autopar have met."""

PLAIN = "AUTOPAR_PLAIN"
"""Variable: "1" to train the plain model, under DistributedDataParallel on several ranks."""

VERIFY = "AUTOPAR_VERIFY"
"""Variable: folder of `autopar verify`, set in the processes that it starts."""


def is_verified() -> bool:
    """Whether `autopar verify` runs this process, whose steps nobody wants to keep."""
    return VERIFY in os.environ


def asks_for_plain() -> bool:
    """Whether the user wants the plain model in place of the compiled one.

    Raises:
        StrategyError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(PLAIN, "0")
    if value not in ("0", "1"):
        raise StrategyError(f"{PLAIN}={value!r}: give 1 to train the plain model, or unset it")
    return value == "1"


def check_log_level() -> None:
    """Checks LOGLEVEL, by which torch fails to load.

    Raises:
        StrategyError: it is no level of logging.
    """
    level = os.environ.get("LOGLEVEL")
    if level is not None and level not in logging.getLevelNamesMapping():
        raise StrategyError(f"LOGLEVEL={level!r}: give DEBUG, INFO, WARNING or ERROR, or unset it")


def untested_torch(version: str) -> str | None:
    """A warning where torch is older or newer than the releases that autopar's tests have met."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if OLDEST_TORCH <= (major, minor) <= NEWEST_TORCH:
        return None
    tested = " to ".join(".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
    return (
        f"autopar is tested with torch {tested}, this is {version}: give verify=True once for each "
        "model, which compares training steps with the plain model's"
    )


def check_launch() -> None:
    """Checks the variables by which a launcher tells a rank its place.

    Raises:
        StrategyError: one is missing, or out of range.
    """
    ranks = _whole("WORLD_SIZE", 1, 2**20)
    _whole("RANK", 0, ranks - 1)
    _whole("MASTER_PORT", 1, 2**16 - 1)
    if not os.environ.get("MASTER_ADDR"):
        raise StrategyError(_UNSET.format("MASTER_ADDR"))


_UNSET = "{} is not set, but RANK is: start all ranks with autopar run or torchrun"


def _whole(name: str, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        raise StrategyError(_UNSET.format(name))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise StrategyError(f"{name}={text!r}: give a whole number from {least} to {most}")
    return int(text)
