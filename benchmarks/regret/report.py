"""Tables of races and of all cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.regret.score import entries


def table(race: Mapping[str, Any]) -> Table:
    """Return who took how long in a race, the fastest first, and what was predicted of it."""
    title = f"{race['model']}, {race['cluster']} at {race['rate'] or 'one node'}"
    title += f", {race['took_s']:.0f} s"
    drawn = _table(title, "step, ms", "predicted", "", "peak, MiB", "predicted", "")
    found = entries(race).values()
    for entry in sorted(found, key=lambda entry: entry.step_s or float("inf")):
        held, foreseen = entry.held_bytes, entry.predicted_bytes
        drawn.add_row(
            entry.name if entry.same is None else f"{entry.name} = {entry.same}",
            _text(entry.step_s, 1e3, ".0f"),
            _text(entry.predicted_s, 1e3, ".0f"),
            _text(entry.error_of_step, 1, "+.0%"),
            _text(held, 2**-20, ".1f"),
            _text(foreseen, 2**-20, ".1f"),
            _text(foreseen / held - 1 if foreseen and held else None, 1, "+.1%"),
            style="red" if entry.error else "",
        )
    return drawn


def overview(document: Mapping[str, Any]) -> Table:
    """Return every case as a line, and what they say together as a caption."""
    columns = ("regret", "by prediction", "gain", "error", "order", "exceeding")
    drawn = _table("regret", *columns)
    drawn.add_column("chosen", no_wrap=True)
    drawn.add_column("best", no_wrap=True)
    for case in document["cases"]:
        cap = "" if case["cap"] is None else f", cap {case['cap']:g}"
        where = " at ".join(filter(None, (case["cluster"], case["rate"])))
        drawn.add_row(
            f"{case['model']}, {where}{cap}",
            _text(case["regret"], 1, ".3f"),
            _text(case["regret_by_prediction"], 1, ".3f"),
            _text(case["gain"], 1, ".2f"),
            _text(case["median_error"], 1, ".0%"),
            _text(case["order"], 1, ".2f"),
            str(len(case["exceeding"]) or ""),
            case["chosen"] or "nothing",
            case["best"] or "nothing",
        )
    own, foreseen = document["prediction"], document["by_prediction"]
    drawn.caption = (
        f"regret: median {_text(document['median'], 1, '.3f')}, "
        f"worst {_text(document['worst'], 1, '.3f')}; gain {_text(document['gain'], 1, '.2f')}; "
        f"by prediction: median {_text(foreseen['median'], 1, '.3f')}, "
        f"worst {_text(foreseen['worst'], 1, '.3f')}; "
        f"error of steps {_text(own['median_error'], 1, '.1%')}, "
        f"least order {_text(own['least_order'], 1, '.2f')}, exceeding {own['exceeding']}"
    )
    return drawn


def _table(title: str, *headings: str) -> Table:
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for heading in headings:
        drawn.add_column(heading, justify="right", no_wrap=True)
    return drawn


def _text(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(unit * value, form)
