"""`PassPipeline`: passes in order, as a numbered list that can be read back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from autopar.errors import PassError, StrategyError
from autopar.passes.core.literals import constructors_in, field_types, read, write
from autopar.passes.core.pass_base import Pass, describe, known_passes, pass_name


class PassPipeline(tuple[Pass, ...]):
    """Passes in the order of application."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return PassPipeline(found) if isinstance(index, slice) else found

    def __add__(self, other: Iterable[Pass]) -> PassPipeline:  # type: ignore[override]
        return PassPipeline((*self, *other))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each pass."""
        return tuple(map(pass_name, self))

    @classmethod
    def parse(cls, text: str) -> PassPipeline:
        """The pipeline that prints as `text`: a pass a line, its number optional.

        Options are literals and constructor calls of the types of the fields, such as
        `Shard(0)`. The modules of the passes must be imported.

        Raises:
            PassError: a line is not a known pass with valid options.
        """
        lines = (re.sub(r"^\s*(\d+\.)?\s*", "", line) for line in text.splitlines())
        return cls(_parse_pass(line) for line in lines if line)

    def split(self, *kinds: type[Pass]) -> tuple[PassPipeline, PassPipeline]:
        """The passes before the first of some classes, and that one with those behind it."""
        first = next((i for i, p in enumerate(self) if isinstance(p, kinds)), len(self))
        return self[:first], self[first:]

    def without(self, disable: Iterable[str]) -> PassPipeline:
        """The pipeline without the passes of some names.

        Raises:
            StrategyError: a name is unknown, or the graph would be wrong without such a pass.
        """
        disable = frozenset(disable)
        if not disable:
            return self
        known = known_passes()
        if unknown := sorted(disable.difference(known)):
            optional = sorted(name for name, kind in known.items() if not kind.ensures)
            raise StrategyError(
                f"cannot disable {', '.join(unknown)}: no such pass; choose from "
                f"{', '.join(optional)}"
            )
        for name in sorted(disable):
            if properties := sorted(fact.name for fact in known[name].ensures):
                raise StrategyError(
                    f"{name} cannot be disabled: it ensures {', '.join(properties)}"
                )
        return PassPipeline(p for p in self if pass_name(p) not in disable)

    def __str__(self) -> str:
        return "\n".join(f"{i}. {describe(item, write)}" for i, item in enumerate(self, 1))


def _parse_pass(line: str) -> Pass:
    try:
        call = ast.parse(line, mode="eval").body
    except SyntaxError as failure:
        raise PassError(f"cannot read the pass {line[:200]!r}: {failure}") from failure
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise PassError(f"cannot read the pass {line[:200]!r}: write name(option=value, ...)")
    kind = known_passes().get(call.func.id)
    if kind is None:
        raise PassError(f"no pass is called {call.func.id}: import the module that defines it")
    return read(line, {**constructors_in(field_types(kind)), call.func.id: kind})
