"""Loops of other libraries under plans, beside the library's own run on one process, in float64.

    python -m benchmarks.integrations --parts lightning,fabric --ranks 2,3 --steps 20

Every run accumulates two batches of ragged labels a step, clips, evaluates, and is resumed in its
middle under another plan. The exit status is 1 if a figure differs by more than its tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from autopar.core.plan.strategy import Strategy
from benchmarks.integrations.plans import run_plain, run_plans
from benchmarks.report import about, save, wide_console
from tests.harness import worlds
from tests.harness.training import fixed

PARTS = {
    "trainer": "transformers.Trainer",
    "sft": "trl.SFTTrainer",
    "accelerate": "accelerate",
    "lightning": "lightning.Trainer",
    "fabric": "lightning.Fabric",
}
"""Modules of this package, and the loops in them."""

FIGURES = ("losses", "norms", "weights", "evaluation", "resumed")
EXACT, ROUNDED = 1e-9, 1e-6

ROUNDING = {
    "trainer": ("losses",),
    "sft": FIGURES,
}
"""Figures that a library rounds to float32: logged losses, and the loss of trl."""


@dataclass(frozen=True)
class Row:
    """A loop under a plan; relative differences from the library's run on one process.

    Attributes:
        resumed_under: plan of the run that is resumed.
        error: the error that ended the run, if any.
    """

    loop: str
    ranks: int
    plan: str
    resumed_under: str
    differences: dict[str, float]
    error: str = ""

    @property
    def is_exact(self) -> bool:
        return not self.error and all(map(self.passes, FIGURES))

    def passes(self, figure: str) -> bool:
        rounds = figure in ROUNDING.get(self.loop, ())
        return self.differences[figure] <= (ROUNDED if rounds else EXACT)


def plans_for(ranks: int) -> dict[str, Strategy]:
    """Plans of a number of ranks; heads are two, so three ranks do not divide them."""
    more = {"tp2": fixed(0, tp=2), "pp2": fixed(0, pp=2, micro_batches=1)} if ranks == 2 else {}
    return {"ddp": fixed(0), "zero3": fixed(3), **more}


def compare(part: str, ranks: int, steps: int, names: list[str]) -> list[Row]:
    """Runs a loop on one process and under each plan."""
    plans = {name: plan for name, plan in plans_for(ranks).items() if name in names or not names}
    following = dict(zip(plans, [*list(plans)[1:], next(iter(plans))], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        plain = run_plain(part, f"{folder}/plain", steps)
        given = {"part": part, "folder": folder, "steps": steps, "plans": plans}
        try:
            found = worlds.run(run_plans, ranks, timeout=3600, **given)
        except worlds.RankError as error:
            print(error, file=sys.stderr)
            lines = [text.strip().splitlines()[-1] for text in error.errors.values()]
            first = min(lines, key=lambda line: "gloo" in line)  # not that of a lost connection
            return [Row(part, ranks, name, following[name], {}, first) for name in plans]
    rows = []
    for name in plans:
        each = [records[name].distance(plain) for records in found]
        worst = {figure: max(one[figure] for one in each) for figure in FIGURES}
        rows.append(Row(part, ranks, name, following[name], worst))
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table("loop", "ranks", "plan", "resumed under", *FIGURES, "", box=box.SIMPLE)
    for row in rows:
        figures = [f"{row.differences[f]:.0e}" if row.differences else "-" for f in FIGURES]
        verdict = "exact" if row.is_exact else escape(row.error[:60]) or "differs"
        table.add_row(
            PARTS[row.loop], str(row.ranks), row.plan, row.resumed_under, *figures, verdict
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--plans", default="", help="names of plans; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, begun = [], time.monotonic()
    names = [name for name in given.plans.split(",") if name]
    for part in given.parts.split(","):
        for ranks in map(int, given.ranks.split(",")):
            rows += compare(part, ranks, given.steps, names)
            wide_console().print(table_of(rows))
            if given.json:
                document = {"steps": given.steps, "rows": [asdict(row) for row in rows]}
                save(given.json, {**about(), "seconds": time.monotonic() - begun, **document})
    return 0 if all(row.is_exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
