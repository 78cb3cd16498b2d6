"""`scenarios`: every disagreement with the strategies that it runs under."""

from dataclasses import dataclass

from tests.harness.disagreements import (
    backward,
    before_training,
    calls,
    fallback,
    leaving,
    legitimate,
    optimizer,
)
from tests.harness.disagreements.loop import STRATEGIES, Loop

MODULES = (before_training, calls, backward, optimizer, leaving, fallback, legitimate)


@dataclass(frozen=True)
class Scenario:
    """One disagreement under one strategy."""

    name: str
    strategy: str

    @property
    def kind(self) -> type[Loop]:
        """The class that describes it."""
        return SCENARIOS[self.name]

    def loop(self, rank: int, size: int, folder: str) -> Loop:
        """The loop of a rank: the last rank's differs."""
        kind = self.kind
        odd, others = getattr(kind, "Odd", kind), getattr(kind, "Everyone", Loop)
        return (odd if rank == size - 1 else others)(rank, size, self.strategy, folder)


SCENARIOS = {
    kind.__name__: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Loop) and kind.__module__ == module.__name__
    if not vars(kind).get("abstract")
}


def scenarios(strategies: int) -> list[Scenario]:
    """Every disagreement under `strategies` of the strategies that it applies to, in turn."""
    found, turn = [], 0
    for name, kind in SCENARIOS.items():
        suited = [s for s in STRATEGIES if not kind.only or s in kind.only]
        for _ in range(min(strategies, len(suited))):
            found.append(Scenario(name, suited[turn % len(suited)]))
            turn += 1
    return list(dict.fromkeys(found))
