"""`Outer`: how groups of ranks that step apart average their parameters."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autopar.core.common.checks import (
    argument_error,
    choice,
    count,
    demand,
    flag,
    number,
    short_repr,
)
from autopar.core.common.documents import Ranks, Seconds
from autopar.errors import StrategyError
from autopar.formatting import duration


@dataclass(frozen=True)
class Outer:
    """Averaging of groups that step apart, for `Strategy(sync_every=..., outer=...)`.

    In a round, groups average the change of their parameters since the last one, and an outer SGD
    steps the last common parameters by it. The defaults are local SGD.

    Attributes:
        lr: learning rate of the outer SGD; 1 without momentum takes the average itself.
        momentum: Nesterov momentum of the outer SGD.
        over: "all" groups, or each with its two neighbours on a "ring": D-PSGD, or with momentum
            SlowMo (Wang et al. 2019).
        weights: weights of groups: "equal", or by their "rows" since the last round.
        participants: number of groups, drawn anew in each round, whose change counts. The
            others take over the result. None for all.
        late: whether averages are sent beside compute, and taken up `delay` steps later.
        delay: optimizer steps until a late average is taken up, at most `sync_every`; None for a
            sixth of a round.
        warm_up: first steps, in which all groups average their gradients at each step.
        compress: "bf16" or "int8" for the messages of rounds; None for none.
        blocks: parts of the model, each with its own round, spread over `sync_every` steps.
        seed: seed of the draws of participants.
    """

    lr: float = 1.0
    momentum: float = 0.0
    over: Literal["all", "ring"] = "all"
    weights: Literal["equal", "rows"] = "equal"
    participants: int | None = None
    late: bool = False
    delay: int | None = None
    warm_up: int = 0
    compress: Literal["bf16", "int8"] | None = None
    blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        number("lr", self.lr, "give a positive number")
        momentum = number("momentum", self.momentum, "give a number in [0, 1)", zero=True)
        demand(momentum < 1, "momentum", momentum, "give a number in [0, 1)")
        choice("over", self.over, ("all", "ring"))
        choice("weights", self.weights, ("equal", "rows"))
        if self.participants is not None:
            count("participants", self.participants)
        flag("late", self.late)
        if self.delay is not None:
            count("delay", self.delay)
            demand(self.late, "delay", self.delay, "give late=True too")
        count("warm_up", self.warm_up, 0)
        if self.compress is not None:
            choice("compress", self.compress, ("bf16", "int8"))
        count("blocks", self.blocks)
        count("seed", self.seed, 0)
        plain = self.weights, self.participants, self.late, self.compress
        if self.over == "ring" and plain != ("equal", None, False, None):
            raise StrategyError(
                "over='ring' averages parameters of neighbours alone: leave weights, participants, "
                "late and compress out"
            )
        if self.late and self.compress == "int8":
            raise StrategyError(
                "late=True sends one message beside compute, int8 needs two: give compress='bf16'"
            )

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Outer({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @staticmethod
    def of(given: str | Outer) -> Outer:
        """The averaging with a name of `NAMED`; an `Outer` is returned unchanged."""
        if isinstance(given, Outer):
            return given
        return NAMED[choice("outer", given, NAMED, ", or give an autopar.Outer")]


NAMED: Mapping[str, Outer] = {
    "local_sgd": Outer(),
    "diloco": Outer(lr=0.7, momentum=0.9),
    "ring": Outer(over="ring"),
    "fedavg": Outer(weights="rows"),
    "late": Outer(lr=0.7, momentum=0.7, late=True),
}
"""Averagings by name. (Stich 2019; Douillard et al. 2023; Lian et al. 2017; McMahan et al. 2017;
Shen et al. 2019, with the momentum of Douillard et al. 2025)"""


@dataclass(frozen=True)
class LocalSteps:
    """Steps that groups take apart, and their averaging.

    Attributes:
        sync_every: optimizer steps of a round.
    """

    sync_every: int
    outer: Outer

    def __post_init__(self) -> None:
        count("sync_every", self.sync_every)
        if self.outer.blocks > self.sync_every:
            raise StrategyError(
                f"blocks={self.outer.blocks} have a round each in sync_every={self.sync_every} "
                "steps: give at most as many blocks as steps"
            )
        if self.delay > self.sync_every:
            raise StrategyError(
                f"delay={self.delay}: one average at a time is under way, so give at most "
                f"sync_every={self.sync_every}"
            )

    @property
    def delay(self) -> int:
        """Steps from the end of a round until its average is taken up, 0 if not late."""
        if not self.outer.late:
            return 0
        return self.outer.delay or max(1, self.sync_every // 6)

    @staticmethod
    def named(text: str) -> bool:
        """Whether a text names local steps, as "diloco(steps=50)" does."""
        return text.partition("(")[0].strip() in NAMED

    @staticmethod
    def of(text: str, name: str = "lossy") -> LocalSteps:
        """Parses text such as "diloco(steps=50)" or "local_sgd(steps=8, warm_up=100)".

        Raises:
            StrategyError: The text, of the argument `name`, does not name local steps.
        """
        try:
            call: Any = ast.parse(text.strip(), mode="eval").body
            options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            steps = options.pop("steps")
            return LocalSteps(steps, replace(NAMED[call.func.id], **options))
        except StrategyError as error:
            raise StrategyError(f"{name}={short_repr(text)}: {error}") from None
        except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
            wanted = f"write {', '.join(NAMED)} with their steps, as in 'diloco(steps=50)'"
            raise argument_error(name, text, wanted) from error


@dataclass(frozen=True)
class PlannedSteps:
    """Local steps of a plan, whose mesh is that of one group.

    Attributes:
        local: steps that groups take apart, and their averaging.
        groups: number of groups.
        round_s: predicted seconds of an average, which a round waits for; None if not predicted.
    """

    local: LocalSteps
    groups: Ranks
    round_s: Seconds | None = None

    def __str__(self) -> str:
        local, outer = self.local, self.local.outer
        text = f"{self.groups} groups step apart and average every {local.sync_every} steps"
        waits = ""
        if self.round_s is not None:
            each = self.round_s / local.sync_every
            waits = f": {duration(self.round_s)} a round, {duration(each)} a step"
        return f"{text} ({outer}), which is lossy{waits}"
