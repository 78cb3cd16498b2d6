"""`PassPipeline`: passes in order, printed as a numbered list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from autopar.errors import StrategyError
from autopar.passes.core.pass_base import Pass, describe, pass_name


@dataclass(frozen=True)
class PassPipeline(Sequence[Pass]):
    """Passes in the order of application."""

    passes: tuple[Pass, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Pass: ...

    @overload
    def __getitem__(self, index: slice) -> PassPipeline: ...

    def __getitem__(self, index: int | slice) -> Pass | PassPipeline:
        found = self.passes[index]
        return PassPipeline(found) if isinstance(found, tuple) else found

    def __len__(self) -> int:
        return len(self.passes)

    def __add__(self, other: Iterable[Pass]) -> PassPipeline:
        return PassPipeline((*self.passes, *other))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each pass."""
        return tuple(pass_name(item) for item in self.passes)

    def without(self, disable: Iterable[str]) -> PassPipeline:
        """The pipeline without the passes of some names.

        Raises:
            StrategyError: the graph would be wrong without such a pass.
        """
        disable = frozenset(disable)
        for item in self.passes:
            if item.ensures and pass_name(item) in disable:
                raise StrategyError(
                    f"{pass_name(item)} cannot be disabled: it ensures "
                    f"{', '.join(sorted(fact.name for fact in item.ensures))}"
                )
        return PassPipeline(tuple(p for p in self.passes if pass_name(p) not in disable))

    def __str__(self) -> str:
        return "\n".join(f"{i}. {describe(item)}" for i, item in enumerate(self.passes, 1))
