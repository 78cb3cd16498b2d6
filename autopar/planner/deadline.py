"""`Deadline`: the end of a search or of one of its parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadline:
    """A time limit from now on; a call returns whether time is left.

    Attributes:
        limit_s: limit in seconds, None for no limit.
        start_s: start on the monotonic clock, in seconds.
    """

    limit_s: float | None
    start_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> bool:
        return self.limit_s is None or time.monotonic() < self.start_s + self.limit_s

    def part(self, fraction: float) -> Deadline:
        """A deadline for a fraction of the limit from now, which ends no later than this one."""
        if self.limit_s is None:
            return self
        now = time.monotonic()
        left_s = self.start_s + self.limit_s - now
        return Deadline(max(0.0, min(left_s, fraction * self.limit_s)), now)
