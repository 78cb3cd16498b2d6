"""Cost of planning by the size of the world and by depth, and its answers on busy cores.

    python -m benchmarks.planning.scaling
    python -m benchmarks.planning.scaling --load 4

Each row is a question of llama 70B in a process of its own: on 8 to 131,072 H100s with two rows of
8,192 tokens for each but at most 16,384, since every rank holds the tokens of the whole batch, and
in 10 to 1,000 layers on 512. 8 GPUs do not hold its states: that nothing fits is the answer there.
Seconds are of the process (`cpu`) and of the clock (`wall`): `cluster` of `Cluster.named`, `model`
of the module on the meta device, `plan_seconds` of the plan under the limit. `first` and `chosen`
are those until the search reported its first plan that fits, and its last improvement, None if
there was none. Reports come between meshes, so they may be late.

`--load N` asks the question on 512 GPUs five times with N busy processes beside it; `ratio` is the
largest predicted step over the least, None while a run has no plan. Rows that the file has are
kept, so a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.planning import large
from benchmarks.planning.questions import ALL, Question, cluster_of, figures, planned
from benchmarks.report import about, save

RESULT = Path("benchmarks/results/planning/scaling.json")
GPUS = (8, 64, 512, 4096, 32768, 131072)
LAYERS = (10, 80, 320, 1000)
ROWS_PER_GPU, MOST_ROWS = 2, 16384
LOADED = 512  # GPUs of the question under load, and of those by depth
REPEATS = 5


def question(gpus: int, layers: int) -> Question:
    """Llama of the width of 70B, with as much work for each GPU in all but the largest worlds."""
    rows = min(MOST_ROWS, ROWS_PER_GPU * gpus)
    return Question(partial(large.llama, "70b", rows, layers=layers), "dgx-h100", gpus, {})


QUESTIONS: Mapping[str, Question] = {
    **{f"{gpus} GPUs": question(gpus, 80) for gpus in GPUS},
    **{f"{layers} layers": question(LOADED, layers) for layers in LAYERS},
}


class Spent:
    """Seconds of the process and of the clock since it was made."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.monotonic()

    def __call__(self) -> dict[str, float]:
        return {"cpu": time.process_time() - self.cpu, "wall": time.monotonic() - self.wall}


def ask(name: str, asked: Question, limit_s: float) -> dict[str, Any]:
    """The row of a question; in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size, unit, *_ = name.split()
    row: dict[str, Any] = {"name": name, "size": size, "unit": unit}
    row |= {"gpus": asked.gpus, "limit_s": limit_s}
    spent = Spent()
    cluster_of(asked)
    row["cluster"], spent = spent(), Spent()
    made = asked.make()
    row["model"], spent = spent(), Spent()
    improvements: dict[float, dict[str, float]] = {}

    def note(search: Any) -> None:
        if search.best_s:
            improvements.setdefault(search.best_s, spent())

    try:
        strategy = autopar.Strategy(search=ALL)
        plan = planned(asked, strategy, limit_s, made=made, progress=note)
        row |= figures(plan, asked.gpus)
        row["document_bytes"] = len(json.dumps(plan.to_dict()))
    except autopar.AutoparError as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    moments = [*improvements.values()]
    return row | {
        "plan_seconds": spent(),
        "first": moments[0] if moments else None,
        "chosen": moments[-1] if moments else None,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def alone(name: str, asked: Question, limit_s: float) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(ask, (name, asked, limit_s))


def _compute() -> None:
    for _ in count():
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps so many processes computing meanwhile."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_compute, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def ratio(rows: list[dict[str, Any]]) -> float | None:
    """The largest of the predicted steps over the least; None if one is missing."""
    steps = [row.get("step_s") for row in rows]
    return max(steps) / min(steps) if steps and all(steps) else None  # type: ignore[type-var]


def line_of(row: Mapping[str, Any]) -> str:
    spent = "cluster {:.2f}, model {:.1f}, plan {:.1f}".format(
        *(row[part]["cpu"] for part in ("cluster", "model", "plan_seconds"))
    )
    if row["first"]:
        spent += f" (first {row['first']['cpu']:.1f}, chosen {row['chosen']['cpu']:.1f})"
    spent += f" CPU s, {row['peak_bytes'] / 2**20:.0f} MiB"
    found = row.get("error") or f"{row['plan']}: {row['step_s']:.4g} s"
    return f"{row['name']}: {found}; {spent}"


def main(arguments: list[str] | None = None, questions: Mapping[str, Question] = QUESTIONS) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.planning.scaling", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*questions], default=[*questions])
    parser.add_argument("--load", type=int, default=0, help="busy processes; asks one question")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a plan")
    parser.add_argument("--json", type=Path, default=RESULT, help="the rows, kept and added to")
    options = parser.parse_args(arguments)
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}
    rows, loaded = kept.get("rows", []), kept.get("loaded", [])
    names, group = options.only, rows
    if options.load:
        asked = questions.get(f"{LOADED} GPUs", next(iter(questions.values())))
        names = [f"{options.load} busy, {n + 1} of {REPEATS}" for n in range(REPEATS)]
        questions, group = dict.fromkeys(names, asked), loaded
    with busy(options.load):
        for name in names:
            if any(row["name"] == name and row["limit_s"] == options.limit for row in group):
                continue
            group.append(alone(name, questions[name], options.limit))
            print(line_of(group[-1]), flush=True)
            document = {**about(), "rows": rows, "loaded": loaded, "ratio": ratio(loaded)}
            save(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
