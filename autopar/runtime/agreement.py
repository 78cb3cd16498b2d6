"""Ranks that decide together: one plans, all compare, and an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from autopar.errors import AutoparError, DisagreementError

T = TypeVar("T")


def is_live() -> bool:
    """Whether several ranks are running."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def same_everywhere(value: str, what: str, advice: str) -> None:
    """Raises DisagreementError on every rank if `value` is not the same on all."""
    if not is_live():
        return
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    odd = [rank for rank, other in enumerate(values) if other != values[0]]
    if odd:
        raise DisagreementError(f"rank(s) {odd} hold another {what} than rank 0. {advice}")


def decided_by_first(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; if it fails, every rank raises its error."""
    if not is_live():
        return decide()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [(True, decide())]
        except AutoparError as error:
            answer = [(False, error)]
        except Exception as error:
            answer = [(False, AutoparError(f"rank 0 failed to plan: {error!r}"))]
    dist.broadcast_object_list(answer, src=0)
    good, value = answer[0]
    if not good:
        raise value
    return value


def together(work: Callable[[], T]) -> T:
    """Does the same work on every rank; if one fails with an AutoparError, all raise one."""
    result, failure = None, None
    try:
        result = work()
    except AutoparError as error:
        failure = error
    if is_live():
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, None if failure is None else str(failure))
        bad = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        if bad and failure is None:
            raise DisagreementError(f"rank {bad[0][0]} failed where this one did not: {bad[0][1]}")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
