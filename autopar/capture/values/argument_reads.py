"""`ReadArguments`, `AnswerReads`: values that Python reads from arguments, such as of a mask.

    if attention_mask.all():
        ...

A trace knows no values. So forward runs once on fake tensors beside the values of the whole batch,
which says what it reads and how that follows from the arguments (`Readings`). The trace then gets
the answers. A later call takes the program if its arguments give the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from autopar.capture.call import Answer
from autopar.capture.values.constant_values import READS, ConstantValues
from autopar.capture.values.replay import Replay

Place = tuple[str, int] | None
"""File and line of a read."""

_CONVERSIONS: dict[Any, Callable[[Any], Any]]
_CONVERSIONS = {Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__float__: float}
_CONVERSIONS |= {Tensor.__index__: int}


def answers_of(place: Place, value: Any) -> list[Answer]:
    """The answers of one read: the numbers of a list, row by row, or the number."""
    flat = np.array(value, dtype=object).reshape(-1).tolist()
    return [Answer(place, number) for number in flat]


@dataclass
class AnswerReads:
    """The answers of a call, which its trace takes in order."""

    answers: Sequence[Answer]
    position: int = 0

    def read(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_place: Callable[[], Place],
    ) -> tuple[Any] | None:
        """The next answer, in a tuple; None if this line does not read the next one."""
        if self.position == len(self.answers) or func not in READS:
            return None
        count = args[0].numel() if func is Tensor.tolist else 1
        following = self.answers[self.position : self.position + count]
        place = find_place()
        if len(following) < count or any(answer.place != place for answer in following):
            return None
        self.position += count
        values = [answer.value for answer in following]
        if func is Tensor.tolist:
            return (np.array(values, dtype=object).reshape(args[0].shape).tolist(),)
        convert = _CONVERSIONS.get(func)
        return (values[0] if convert is None else convert(values[0]),)


@dataclass(frozen=True)
class Readings:
    """Values that forward read from arguments in one run.

    Attributes:
        replay: how that follows from the tensor arguments.
        answers: the values, number by number.
    """

    replay: Replay
    answers: tuple[Answer, ...]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether other tensor arguments of the same sizes give the same answers."""
        return self.replay.holds({}, tensors)


@dataclass
class ReadArguments:
    """Reads values of arguments in a run beside them, and notes the reads.

    Attributes:
        constants: the values, by traced tensor.
        answers: the values read so far, number by number.
    """

    constants: ConstantValues
    answers: list[Answer] = field(default_factory=list)

    def read(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_place: Callable[[], Place],
    ) -> tuple[Any] | None:
        """The value that a function reads from arguments alone, in a tuple; else None."""
        value = self.constants.read_argument(func, args, kwargs)
        if value is not None:
            self.answers += answers_of(find_place(), value[0])
        return value

    def readings(self) -> Readings:
        """All reads so far."""
        replay = Replay.of(self.constants.steps, self.constants.arguments)
        return Readings(replay, tuple(self.answers))
