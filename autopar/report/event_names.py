"""`EventNames`: names of a step's events for people, and the collectives behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autopar.core.plan.report_data import CollectiveCall, TimelineEvent
from autopar.cost_model.simulator.streams import COMPUTE

_OVERLOAD = re.compile(r"(_default|_Tensor|_Scalar|_int|_dim)?(_\d+)?$")


class EventNames:
    """Names of events and collectives of one program.

    Attributes:
        calls: collectives by the names of their own node and of their wait.
    """

    def __init__(self, events: Iterable[TimelineEvent], calls: Iterable[CollectiveCall]) -> None:
        kinds = {name: kind for name, stream, _, _, kind in events if stream != COMPUTE}
        self.calls: dict[str, CollectiveCall] = {}
        self._names: dict[str, str] = {}
        for call in calls:
            kind = kinds.get(call.name, "collective").replace("_", "-")
            self._names[call.name] = f"{kind} {call.block}".strip()
            self.calls[call.name] = self.calls[call.wait] = call

    def of(self, event: TimelineEvent) -> str:
        """Such as "all-gather layers.3", "wait for all-gather layers.3" and "mm"."""
        name, stream = event[:2]
        call = self.calls.get(name)
        if call is None:
            return _OVERLOAD.sub("", name).strip("_") or name
        own = self._names[call.name]
        if name == call.wait:
            return f"wait for {own}"
        return f"issue {own}" if stream == COMPUTE else own
