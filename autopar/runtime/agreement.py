"""Ranks that decide together: one plans, all compare, and an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import distributed as dist

from autopar.errors import AutoparError, DisagreementError
from autopar.runtime.groups import failing_together

T = TypeVar("T")


def is_live() -> bool:
    """Whether several ranks are running."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_everywhere(value: Any) -> list[Any]:
    """What every rank holds, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    with failing_together("an agreement"):
        dist.all_gather_object(values, value)
    return values


def same_everywhere(values: Mapping[str, object], advice: str) -> None:
    """Raises DisagreementError on every rank if a value is not the same on all.

    Args:
        values: by what a person calls them; compared as text.
        advice: what to do about it.
    """
    if not is_live():
        return
    first, *others = from_everywhere({name: str(value) for name, value in values.items()})
    for name in values:
        odd = [rank for rank, other in enumerate(others, 1) if other.get(name) != first.get(name)]
        if odd:
            raise DisagreementError(f"rank(s) {odd} hold another {name} than rank 0. {advice}")


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
    with failing_together("an agreement"):
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
        failures = from_everywhere(None if failure is None else str(failure))
        bad = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        if 0 < len(bad) < len(failures):
            rank, text = bad[0]
            raise DisagreementError(f"rank {rank} failed where others did not: {text}") from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
