"""`Scaling`: predicted throughput, efficiency, memory and cost over numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from autopar.core.plan.prediction import Prediction
from autopar.formatting import human_bytes
from autopar.report.error_bars import STEPS

MILLION = 1e6


@dataclass(frozen=True)
class ScalePoint:
    """A strategy on a number of GPUs.

    Attributes:
        gpus: number of GPUs.
        plan: name of the plan; "" if none runs.
        step_s: predicted step time in seconds; 0 if none runs.
        rate: tokens a second of all GPUs, or rows without tokens; 0 if none runs.
        used: model FLOPs utilisation; 0 if unknown.
        needed_bytes: predicted memory of one GPU, in bytes.
        why: reason why none runs.
    """

    gpus: int
    plan: str = ""
    step_s: float = 0.0
    rate: float = 0.0
    used: float = 0.0
    needed_bytes: int = 0
    why: str = ""

    @staticmethod
    def of(gpus: int, plan: str, p: Prediction) -> ScalePoint:
        """The point of a plan."""
        assert p.work is not None, "a given cluster is always priced"
        rate = (p.work.tokens or p.work.rows) / p.step_s
        used = p.work.utilisation(p.step_s, gpus)
        return ScalePoint(gpus, plan, p.step_s, rate, used, p.needed_bytes)

    @property
    def gpu_hours(self) -> float:
        """GPU hours for a million tokens, or rows."""
        return MILLION / self.rate * self.gpus / 3600


@dataclass(frozen=True)
class Scaling:
    """Strategies over numbers of GPUs, for one global batch.

    Attributes:
        model: class name of the model.
        cluster: name of the cluster.
        rows: points of each strategy, fewest GPUs first.
        unit: "tokens" or "rows".
        price: price of a GPU hour, in any currency; None if unknown.
        cap_bytes: memory of a GPU in bytes; None if unknown.
    """

    model: str
    cluster: str
    rows: dict[str, list[ScalePoint]]
    unit: str = "tokens"
    price: float | None = None
    cap_bytes: int | None = None

    @property
    def title(self) -> str:
        """Model and cluster."""
        return f"{self.model} on {self.cluster}, one global batch"

    @property
    def cost_name(self) -> str:
        """Heading of `cost`."""
        return f"{'GPU hours' if self.price is None else 'cost'} a million {self.unit}"

    def running(self) -> Iterator[tuple[str, ScalePoint]]:
        """Points that run, with their strategies."""
        return ((name, point) for name, row in self.rows.items() for point in row if point.rate)

    def efficiency(self, name: str, point: ScalePoint) -> float:
        """Throughput a GPU, relative to the strategy on the fewest GPUs that run it."""
        first = next(other for other in self.rows[name] if other.rate)
        return point.rate / point.gpus / (first.rate / first.gpus)

    def cost(self, point: ScalePoint) -> float:
        """Price of a million tokens; GPU hours without a price."""
        return point.gpu_hours * (1.0 if self.price is None else self.price)

    def is_best(self, point: ScalePoint) -> bool:
        """Whether no other strategy is faster on as many GPUs."""
        return all(o.rate <= point.rate for _, o in self.running() if o.gpus == point.gpus)

    def failures(self) -> Iterator[str]:
        """One line for each point that does not run."""
        for name, row in self.rows.items():
            yield from (f"{name} on {point.gpus}: {point.why}" for point in row if point.why)

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can store: seconds, bytes, rates a second."""
        return {
            "model": self.model,
            "cluster": self.cluster,
            "unit": self.unit,
            "price": self.price,
            "memory_cap": self.cap_bytes,
            "points": [
                self._point(name, point) for name, row in self.rows.items() for point in row
            ],
        }

    def table(self) -> Table:
        """One row for each point that runs; the fastest strategy of each number is bold."""
        grid = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        grid.add_column("strategy")
        cost = "GPU h/M" if self.price is None else "cost/M"
        for name in ("GPUs", f"{self.unit}/s", "efficiency", "MFU", "memory", cost):
            grid.add_column(name, justify="right", no_wrap=True)
        last = ""
        for name, point in self.running():
            if last not in ("", name):
                grid.add_section()
            used = f"{point.used:.0%}" if point.used else ""
            cells = (f"{point.rate:,.0f}", f"{self.efficiency(name, point):.0%}", used)
            memory, cost = human_bytes(point.needed_bytes), f"{self.cost(point):.3g}"
            style = "bold" if self.is_best(point) else None
            shown = "" if last == name else name
            grid.add_row(shown, str(point.gpus), *cells, memory, cost, style=style)
            last = name
        grid.caption, grid.caption_justify = self.caption, "left"
        return grid

    @property
    def caption(self) -> str:
        """Meaning of the columns, and how far off rates may be."""
        bar = STEPS["modelled"]
        slow, fast = bar.of_rate(1.0)
        return (
            "efficiency: throughput a GPU against the fewest GPUs; MFU: model FLOPs utilisation; "
            f"/M: a million {self.unit}. Rates may be {slow:.2f} to {fast:.2f} times these (nine "
            f"in ten of {bar.source})."
        )

    def _point(self, name: str, point: ScalePoint) -> dict[str, Any]:
        found = {
            "strategy": name,
            "gpus": point.gpus,
            "plan": point.plan or None,
            "step_s": point.step_s or None,
            "rate": point.rate or None,
            "utilisation": point.used or None,
            "needed_bytes": point.needed_bytes or None,
            "why": point.why or None,
        }
        if not point.rate:
            return found
        return found | {
            "efficiency": self.efficiency(name, point),
            "gpu_hours_per_million": point.gpu_hours,
            "cost_per_million": None if self.price is None else self.cost(point),
        }
