"""`Deadline`: until when a search goes on, and one of its parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadline:
    """So many seconds from now.

    Attributes:
        limit_s: None for any number.
        began_s: now, on the monotonic clock.
    """

    limit_s: float | None
    began_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> bool:
        """Whether they have not passed yet."""
        return self.limit_s is None or time.monotonic() < self.began_s + self.limit_s

    def part(self, share: float) -> Deadline:
        """A part of these seconds from now, which ends no later."""
        if self.limit_s is None:
            return self
        now = time.monotonic()
        left = self.began_s + self.limit_s - now
        return Deadline(max(0.0, min(left, share * self.limit_s)), now)
