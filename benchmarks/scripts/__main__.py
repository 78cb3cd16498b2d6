"""Scripts of people's libraries under plans on two processes, beside the library on one.

    python -m benchmarks.scripts --plans ddp,zero3

Weights and data are float64. A run is exact if the weights that it ends with differ by at most
1e-6 of their size: some losses of transformers and trl are computed in float32.
The exit status is 1 if a run differs or ends in an error that is not autopar's.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.integrations.record import difference
from benchmarks.report import about, save, wide_console
from benchmarks.scripts.train import SCRIPTS, train
from tests.harness import worlds

EXACT = 1e-6


@dataclass(frozen=True)
class Row:
    """A script under a plan.

    Attributes:
        kind: the library, and what of it the script uses.
        difference: largest relative difference of a weight from the library's run on one process.
        change: largest relative change of a weight by that run, 0 if nothing was trained.
        error: the error that ended the run, if any.
        warnings: beginnings of autopar's warnings.
    """

    script: str
    kind: str
    plan: str
    difference: float
    change: float
    error: str
    warnings: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        if self.error:
            return "told" if self.error.startswith("autopar.") else "failed"
        return "exact" if self.difference <= EXACT else "differs"


class FirstWeights:
    """Parameters as the first optimizer of a plain run finds them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def keep(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.pairs:
            groups = optimizer.param_groups
            self.pairs = [(p, p.detach().clone()) for group in groups for p in group["params"]]

    def change(self) -> float:
        """Largest relative change since."""
        return max((difference((now.detach(), first)) for now, first in self.pairs), default=0.0)


def compare(number: int, names: list[str]) -> list[Row]:
    """Runs a script plain, and on two processes under each plan."""
    script = SCRIPTS[number]
    kind = (script.__doc__ or "").strip()
    with tempfile.TemporaryDirectory() as folder:
        first = FirstWeights()
        handle = register_optimizer_step_pre_hook(first.keep)
        plain = train(0, 1, number, "", f"{folder}/plain")
        handle.remove()
        change, rows = first.change(), []
        for name in names:
            begun, error, told, worst = time.monotonic(), "", (), math.inf
            try:
                given: dict[str, Any] = {"number": number, "plan": name}
                found = worlds.run(train, 2, timeout=900, folder=f"{folder}/{name}", **given)
            except worlds.RankError as raised:
                lines = [text.strip().splitlines()[-1] for text in raised.errors.values()]
                error = min(lines, key=lambda line: "gloo" in line)  # not that of a lost peer
            else:
                told, error = found[0].warnings, found[0].error
                if not error:
                    assert found[0].weights.keys() == plain.weights.keys(), script
                    worst = max(
                        difference((outcome.weights[weight], value))
                        for outcome in found
                        for weight, value in plain.weights.items()
                    )
            seconds = round(time.monotonic() - begun, 1)
            rows.append(Row(script.__name__, kind, name, worst, change, error, told, seconds))
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table("script", "plan", "difference", "change", "s", "", box=box.SIMPLE)
    for row in rows:
        figures = [f"{value:.0e}" for value in (row.difference, row.change)]
        said = escape(f"{row.verdict} {row.error[:90]} {' '.join(row.warnings)}".strip())
        table.add_row(row.script, row.plan, *figures, str(row.seconds), said)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [script.__name__ for script in SCRIPTS]
    parser.add_argument("--scripts", default=",".join(names))
    parser.add_argument("--plans", default="ddp,zero3")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.scripts.split(","):
        new = compare(names.index(name), given.plans.split(","))
        wide_console().print(table_of(new))
        rows += new
        if given.json:
            save(given.json, {**about(), "rows": [asdict(row) for row in rows]})
    verdicts = [row.verdict for row in rows]
    wide_console().print({verdict: verdicts.count(verdict) for verdict in sorted({*verdicts})})
    return 0 if {*verdicts} <= {"exact", "told"} else 1


if __name__ == "__main__":
    sys.exit(main())
