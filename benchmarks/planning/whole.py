"""Answers by arithmetic beside whole lowerings of the same decisions.

    python -m benchmarks.planning.whole --count 64 --json FILE

Models and plans are drawn from a grammar by `--seed`. Each is planned twice for a cluster that is
not here: by arithmetic from few blocks, and whole, with the same stages, ZeRO, recomputation and
sizes of buckets. `ratio` is the figure by arithmetic over that of the whole model. `accounts` are
the differences of the parts of the step, as fractions of the whole step. With `--tuned` both are
planned once more, with buckets and schedules left open. Rows in FILE are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import autopar
from autopar.planner.extended.reduced_models import only_few_blocks
from autopar.session.driver import Driver
from autopar.session.offline import OfflineDriver
from benchmarks.planning.models import Made, language, vit
from benchmarks.published import gpt
from benchmarks.report import about, save

LIMIT_S = 600.0
MIB = 2**20
AMPLE = "10TB"  # memory that every plan fits in, so that nothing is chosen to fit
STEP = ("compute_s", "exposed_s", "update_s", "idle_s")
FIGURES = ("step_s", "peak_bytes", "needed_bytes", "wire")
BYTES = ("peak_bytes", "needed_bytes", "reserved_bytes")


@dataclass(frozen=True)
class Case:
    """A model, its cluster and the fixed choices of its plan."""

    family: str
    width: int
    depth: int
    rows: int
    cluster: str
    gpus: int
    kind: str
    strategy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        choices = " ".join(f"{key}={value}" for key, value in self.strategy.items())
        size = f"{self.family} {self.depth}x{self.width}, {self.rows} rows"
        return f"{size}, {self.gpus} of {self.cluster}, {choices}"


def gpt_of(width: int, depth: int, rows: int) -> Made:
    sizes = gpt.Sizes(width, depth, width // 64, 50257, 1024, flash=True, dropout=False)
    return gpt.make(sizes, rows)


def llama_of(width: int, depth: int, rows: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4 // 128 * 128,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=8,
        use_cache=False,
    )
    return language(lambda: LlamaForCausalLM(config), rows, 2048)


def mixtral_of(width: int, depth: int, rows: int) -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=8,
        use_cache=False,
    )
    return language(lambda: MixtralForCausalLM(config), rows, 1024)


FAMILIES: Mapping[str, Callable[[int, int, int], Made]] = {
    "gpt": gpt_of,
    "llama": llama_of,
    "mixtral": mixtral_of,
    "vit": lambda width, depth, rows: vit(width, depth, width // 64, rows),
}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"zero": 0},
    "zero3": {"zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
}


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Cases of all kinds in turn."""
    rng = random.Random(seed)
    for number in range(count):
        kind = [*KINDS][number % len(KINDS)]
        family = "mixtral" if kind == "ep" else rng.choice([*FAMILIES])
        gpus = rng.choice((8, 16, 32))
        strategy = dict(KINDS[kind])
        strategy.setdefault("zero", rng.choice((0, 1, 3)))
        strategy["recompute"] = rng.choice(("none", "selective", "full"))
        for axis in ("tp", "cp", "ep"):
            if axis in strategy:
                strategy[axis] = rng.choice((2, 4, 8))
        micro_batches = rng.choice((1, 1, 4))
        if kind == "pp":
            strategy["pp"] = rng.choice((2, 4))
            strategy["schedule"] = rng.choice(("1f1b", "1f1b", "interleaved", "zero_bubble"))
            micro_batches = rng.choice((4, 8))
            if rng.random() < 0.3:
                strategy["tp"] = 2
        if micro_batches > 1:
            strategy["micro_batches"] = micro_batches
        strategy["gather_bytes"] = strategy["reduce_bytes"] = rng.choice((4, 16, 64)) * MIB
        strategy["prefetch"] = rng.choice((1, 1, 2))
        yield Case(
            family=family,
            width=rng.choice((1024, 2048, 4096)),
            depth=rng.choice((12, 16, 24)),
            rows=gpus * micro_batches * rng.choice((1, 2, 4)),
            cluster=rng.choice(("dgx-a100", "dgx-h100", "l40s-eth100")),
            gpus=gpus,
            kind=kind,
            strategy=strategy,
        )


def compared(case: Case, *, tuned: bool) -> dict[str, Any]:
    """Both plans of a case; in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Usual layouts beside a plan take most of the time, and tell nothing here.
    OfflineDriver.with_outcome = Driver.with_outcome  # type: ignore[method-assign]
    row: dict[str, Any] = {"name": case.name, **asdict(case)}
    fixed = autopar.Strategy(**case.strategy, hierarchical=False, loss_chunks=1)
    try:
        few, row["few_seconds"] = planned(case, fixed, by_arithmetic=True)
        if not any(note.startswith("predicted by arithmetic") for note in few.notes):
            return row | {"error": "it is lowered whole"}
        own = replace(fixed, split_points=cuts(few))
        whole, row["whole_seconds"] = planned(case, own, by_arithmetic=False)
        row |= differences(few, whole)
        if tuned:
            free = replace(fixed, gather_bytes=None, reduce_bytes=None, prefetch=None)
            few, _ = planned(case, replace(free, hierarchical=None), by_arithmetic=True)
            free = replace(free, split_points=cuts(few), hierarchical=None)
            whole, row["tuned_seconds"] = planned(case, free, by_arithmetic=False)
            row["tuned"] = differences(few, whole)["ratio"]["step_s"]
    except autopar.AutoparError as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def planned(
    case: Case, strategy: autopar.Strategy, *, by_arithmetic: bool
) -> tuple[autopar.Plan, float]:
    """A plan, and the seconds that it took."""
    model, inputs = FAMILIES[case.family](case.width, case.depth, case.rows)
    nodes = max(1, case.gpus // autopar.Cluster.named(case.cluster).ranks_per_node)

    def make(limit_s: float | None) -> autopar.Plan:
        return autopar.plan(
            model,
            case.gpus,
            example_inputs=inputs,
            cluster=autopar.Cluster.named(case.cluster, nodes),
            strategy=strategy,
            memory=AMPLE,
            backend="inductor",
            time_limit_s=limit_s,
        )

    begin_s = time.monotonic()
    if not by_arithmetic:
        return make(None), time.monotonic() - begin_s
    with only_few_blocks():
        return make(LIMIT_S), time.monotonic() - begin_s


def cuts(plan: autopar.Plan) -> tuple[str, ...] | None:
    """First blocks of the later stages; None without stages."""
    if plan.pipeline is None or plan.pipeline.stages == 1:
        return None
    first: dict[int, str] = {}
    for block in (name for name, _ in plan.zero_stages if name):
        at = (stages[0] for name, stages in plan.pipeline.uses if name.startswith(f"{block}."))
        first.setdefault(min(at), block)
    return tuple(first[stage] for stage in range(1, plan.pipeline.stages))


def differences(few: autopar.Plan, whole: autopar.Plan) -> dict[str, Any]:
    """Figures by arithmetic beside those of the whole model."""
    a, b = few.prediction, whole.prediction
    assert a is not None
    assert b is not None
    sent, all_sent = dict(few.sent_bytes), dict(whole.sent_bytes)
    wire, all_wire = sum(sent.values()), sum(all_sent.values())
    ratio = {name: _ratio(getattr(a, name), getattr(b, name)) for name in ("step_s", *BYTES)}
    ratio |= {"wire": _ratio(wire, all_wire)}
    accounts = {name: (getattr(a, name) - getattr(b, name)) / b.step_s for name in STEP}
    for kind in {*a.waits, *b.waits}:
        accounts[f"wait for {kind}"] = (a.waits.get(kind, 0.0) - b.waits.get(kind, 0.0)) / b.step_s
    memory = {
        name: (a.memory.get(name, 0) - b.memory.get(name, 0)) / b.peak_bytes
        for name in {*a.memory, *b.memory}
    }
    stages = (each.pipeline.uses if each.pipeline else () for each in (few, whole))
    same = {
        "placements": dict(few.placements) == dict(whole.placements),
        "stages": len({frozenset(each) for each in stages}) == 1,
    }
    return {
        "step_s": b.step_s,
        "peak_bytes": b.peak_bytes,
        "wire_bytes": all_wire,
        "ratio": ratio,
        "accounts": accounts,
        "memory": memory,
        "differ": [name for name, alike in same.items() if not alike],
    }


def _ratio(few: float, whole: float) -> float:
    return few / whole if whole else 1.0 if not few else float("inf")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deviations by kind of plan in per cent, then those of all.

    `low` is the most that a figure by arithmetic is below that of the whole model, `high` above it.
    """
    found = []
    for kind in (*KINDS, "all"):
        own = [row for row in rows if "ratio" in row and kind in (row["kind"], "all")]
        if not own:
            continue
        figures = {name: [row["ratio"][name] for row in own] for name in FIGURES}
        if tuned := [row["tuned"] for row in own if "tuned" in row]:
            figures["tuned"] = tuned
        found.append(
            {"kind": kind, "plans": len(own)} | {n: _spread(r) for n, r in figures.items()}
        )
    return found


def _spread(ratios: list[float]) -> dict[str, float]:
    off = [100 * (ratio - 1) for ratio in ratios]
    return {"median": median(map(abs, off)), "low": max(0, -min(off)), "high": max(0, *off)}


def line_of(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    off = {**row["accounts"], **{f"{k} bytes": v for k, v in row["memory"].items()}}
    worst = sorted(off.items(), key=lambda item: -abs(item[1]))[:4]
    told = ", ".join(f"{key} {value - 1:+.1%}" for key, value in row["ratio"].items())
    parts = ", ".join(f"{key} {value:+.1%}" for key, value in worst if abs(value) > 0.002)
    more = f"; tuned {row['tuned'] - 1:+.1%}" if "tuned" in row else ""
    differ = f"; other {', '.join(row['differ'])}" if row["differ"] else ""
    seconds = f"{row['few_seconds']:.0f} and {row['whole_seconds']:.0f} s"
    return f"{row['name']} ({seconds}): {told} ({parts}){more}{differ}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.planning.whole", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=48, help="number of plans")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--mib", type=int, help="size of all buckets; drawn by default")
    parser.add_argument("--tuned", action="store_true", help="leave buckets and schedules open too")
    parser.add_argument("--json", type=Path, help="results, continued if present")
    options = parser.parse_args(arguments)
    known = json.loads(options.json.read_text())["rows"] if _exists(options.json) else []
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in known}
    for case in drawn(options.seed, options.count):
        if options.mib:
            sizes = dict.fromkeys(("gather_bytes", "reduce_bytes"), options.mib * MIB)
            case = replace(case, strategy={**case.strategy, **sizes})
        if case.name in rows or case.kind not in options.kinds:
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows[case.name] = pool.apply(compared, (case,), {"tuned": options.tuned})
        print(line_of(rows[case.name]), flush=True)
        if options.json:
            document = {"seed": options.seed, "kinds": summary([*rows.values()])}
            save(options.json, {**about(), **document, "rows": [*rows.values()]})
    for line in summary([*rows.values()]):
        print(line)
    return 0


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    sys.exit(main())
