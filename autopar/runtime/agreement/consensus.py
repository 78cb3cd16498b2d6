"""Decisions that all ranks make together: an error on one rank is raised on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autopar.core.common.world import rank, world_size
from autopar.errors import AutoparError, DisagreementError
from autopar.runtime.agreement.channel import Channel, channel
from autopar.runtime.agreement.record import Entry

T = TypeVar("T")


def is_multi_rank() -> bool:
    """Whether several ranks are running."""
    return world_size() > 1


def gather_objects(value: Any, event: str = "exchanges values with the others") -> list[Any]:
    """Gathers a value from every rank, by rank."""
    exchanged = _open_channel().exchange(event, payload=pickle.dumps(value))
    return [pickle.loads(payload) for payload in exchanged.payloads]


def assert_same_across_ranks(values: Mapping[str, object], advice: str, group: object = "") -> None:
    """Raises DisagreementError on every rank if a value differs between ranks of equal groups."""
    if not is_multi_rank():
        return
    entries = [
        Entry(f"hold another {name}", str(value), group, advice) for name, value in values.items()
    ]
    _open_channel().exchange(f"compares its {', '.join(values)}", entries)


def broadcast_from_rank0(decide: Callable[[], T]) -> T:
    """Rank 0's decision, on every rank; its error is raised on every rank too."""
    return broadcast_object(0, decide)


def broadcast_object(source: int, decide: Callable[[], T]) -> T:
    """The decision of rank `source`, on every rank; its error is raised on every rank too."""
    if not is_multi_rank():
        return decide()
    payload = b""
    if rank() == source:
        answer: Any
        try:
            answer = (True, decide())
        except AutoparError as error:
            answer = (False, error)
        except Exception as error:
            # The other ranks wait for this payload, so any error has to travel in it.
            answer = (False, AutoparError(f"rank {source} failed to plan: {error!r}"))
        payload = pickle.dumps(answer)
    exchanged = _open_channel().exchange(f"hears what rank {source} decides", payload=payload)
    succeeded, value = pickle.loads(exchanged.payloads[source])
    if not succeeded:
        raise value
    return value


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Runs the same work on every rank; if it fails on some, the others raise DisagreementError."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    if is_multi_rank():
        shown = str(failure) if isinstance(failure, AutoparError) else repr(failure)
        failures = gather_objects(None if failure is None else shown)
        failed = [(index, text) for index, text in enumerate(failures) if text is not None]
        is_partial = 0 < len(failed) < len(failures)
        if is_partial and (failure is None or isinstance(failure, AutoparError)):
            first, text = failed[0]
            raise DisagreementError(
                f"rank {first} failed where others did not: {text}"
            ) from failure
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def _open_channel() -> Channel:
    found = channel()
    assert found is not None, "a single rank has no channel"
    return found
