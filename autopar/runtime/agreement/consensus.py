"""Ranks that decide together: one plans, all compare, and an error of one is an error of all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import distributed as dist

from autopar.errors import AutoparError, DisagreementError
from autopar.runtime.agreement.channel import Channel, Entry, channel

T = TypeVar("T")


def is_multi_rank() -> bool:
    """Whether several ranks are running."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_objects(value: Any, event: str = "exchanges values with the others") -> list[Any]:
    """Gathers a value from every rank, by rank.

    Args:
        value: anything that can be pickled.
        event: what this rank does, in words, the same on every rank.
    """
    met = _live().exchange(event, payload=pickle.dumps(value))
    return [pickle.loads(payload) for payload in met.payloads]


def assert_same_across_ranks(values: Mapping[str, object], advice: str) -> None:
    """Raises DisagreementError on every rank if a value is not the same on all.

    Args:
        values: by what a person calls them; compared as text.
        advice: what to do about it.
    """
    if not is_multi_rank():
        return
    entries = [Entry(f"hold another {name}", str(v), advice=advice) for name, v in values.items()]
    _live().exchange(f"compares its {', '.join(values)}", entries)


def broadcast_from_rank0(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank; if it fails, every rank raises its error."""
    if not is_multi_rank():
        return decide()
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            answer = (True, decide())
        except AutoparError as error:
            answer = (False, error)
        except Exception as error:
            answer = (False, AutoparError(f"rank 0 failed to plan: {error!r}"))
    packed = pickle.dumps(answer) if dist.get_rank() == 0 else b""
    good, value = pickle.loads(
        _live().exchange("hears what rank 0 decides", payload=packed).payloads[0]
    )
    if not good:
        raise value
    return value


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Does the same work on every rank; if it fails on one, all raise an error.

    Raises:
        DisagreementError: on the other ranks, if the work fails on some only.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    if is_multi_rank():
        failures = gather_objects(None if failure is None else _said(failure))
        bad = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        if 0 < len(bad) < len(failures) and (failure is None or isinstance(failure, AutoparError)):
            rank, text = bad[0]
            raise DisagreementError(f"rank {rank} failed where others did not: {text}") from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def _said(failure: Exception) -> str:
    return str(failure) if isinstance(failure, AutoparError) else repr(failure)


def _live() -> Channel:
    opened = channel()
    assert opened is not None, "one rank has nobody to agree with"
    return opened
