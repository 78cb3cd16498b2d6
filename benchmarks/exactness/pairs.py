"""Random pairs of plans: a model trains under one, and goes on under the other from its state.

    python -m benchmarks.exactness.pairs --draws 60 --seed 1

A plan is drawn from axes, ZeRO, recomputation, chunks, schedules, rings of attention and ways of
tokens to experts. Losses and the last state are compared with the plain model's, to 1e-9 relative
in float64. A draw is *exact*, *told* (an error of autopar, or its warning of a difference),
*silent* (it differs) or *raw* (another error, or a hang).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autopar
from autopar.core.ir.placement import Shard
from autopar.core.plan.pipeline import SCHEDULES
from benchmarks.report import about, save, wide_console
from tests.harness.architectures import ARCHITECTURES
from tests.harness.architectures import EXPERTS as MIXTURES
from tests.harness.models import MODELS, Case
from tests.harness.reference import Reference, batches, to_dtype, worst_error, worst_loss
from tests.harness.training import EXACT, SGD, fixed, whole_state
from tests.harness.worlds import RankError, run

CASES: Mapping[str, Case] = {
    **{name: MODELS[name] for name in ("gpt", "odd", "encoder", "encdec", "moe")},
    "llama": ARCHITECTURES["llama"].case,
    **{name: MIXTURES[name].case for name in ("mixtral", "qwen3_moe", "deepseek_v3")},
}
EXPERTS = ("moe", *MIXTURES)
WHOLE_EXPERTS = {"placements": {"*.experts.*": {"ep": Shard(0)}}, "keep_sharded": True}
"""Experts of transformers' mixtures on one rank of ep each, to which tokens can be sent."""

DIFFERENCES = (autopar.LossyWarning, autopar.NumericsWarning)
"""Warnings that training differs from one device's."""

STEPS_EACH = 2
TIMEOUT_S = 240.0

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Draw:
    """A model, and the fixed fields of the strategies that it trains under in turn."""

    seed: int
    model: str
    ranks: int
    rows: int
    clip: float  # largest norm of the gradient; 0 for any
    first: Options
    second: Options

    @staticmethod
    def of(seed: int, models: tuple[str, ...]) -> Draw:
        """The draw of a seed."""
        choices = random.Random(seed)
        model, ranks = choices.choice(models), choices.choice((2, 2, 3, 4))
        first, second = (strategy_of(choices, model, ranks) for _ in range(2))
        rows, clip = choices.choice((5, 7, 8, 12)), choices.choice((0.0, 0.5))
        return Draw(seed, model, ranks, rows, clip, first, second)


@dataclass(frozen=True)
class Result:
    """Outcome of a draw, on the rank with the largest error."""

    draw: Draw
    outcome: str
    error: float | None = None  # largest relative difference of a loss or tensor
    message: str = ""  # of the error or warning


class RankResult(NamedTuple):
    """Training of one rank, and autopar's warnings of differences."""

    training: Reference
    told: list[str]


def strategy_of(choices: random.Random, model: str, ranks: int) -> Options:
    """Fixed fields of a random strategy for some ranks."""
    axes = ["tp", "cp", "pp", *(["ep"] * 2 if model in EXPERTS else [])]
    choices.shuffle(axes)
    options: dict[str, Any] = {"zero": choices.randrange(4)}
    left = ranks
    for axis in dict.fromkeys(axes):
        if left > 1 and choices.random() < 0.5:
            options[axis] = choices.choice([n for n in range(2, left + 1) if left % n == 0])
            left //= options[axis]
    if choices.random() < 0.3:
        options["recompute"] = choices.choice(("selective", "full", "everything"))
    if choices.random() < 0.3:
        options["loss_chunks"] = choices.choice((2, 3))
    if "cp" in options:
        options["ring_attention"] = choices.random() < 0.6
    if "ep" in options and model in MIXTURES and choices.random() < 0.7:
        options |= {**WHOLE_EXPERTS, "route_experts": choices.random() < 0.8}
    if "pp" in options:
        options["micro_batches"] = choices.randint(1, 4)
        options["schedule"] = choices.choice(SCHEDULES)
        if options["schedule"] == "interleaved":
            options["stages_per_rank"] = 2
    return options


def train_pair(rank: int, world_size: int, draw: Draw) -> RankResult:
    """Trains under the first plan, then from its whole state under the second."""
    case, losses = CASES[draw.model], list[float]()
    states: list[dict[str, Any]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turn, options in enumerate((draw.first, draw.second)):
            strategy = fixed(**options)
            model = autopar.compile(
                case.make().double(), strategy=strategy, fallback=False, rows=case.rows
            )
            begin = turn * STEPS_EACH
            optimizer = SGD(model.parameters())
            if states:
                arguments, named = to_dtype(case.batch(draw.rows, begin), torch.float64)
                model(*arguments, **named)  # plans; states then go where parameters lie
                model.load_full_state_dict(states[0])
                model.load_full_optimizer_state_dict(optimizer, states[1])
            seeds = range(begin, begin + STEPS_EACH)
            losses += train_steps(model, optimizer, case, draw, seeds, model.clip_grad_norm_)
            states = [model.full_state_dict(), model.full_optimizer_state_dict(optimizer)]
    told = [str(each.message) for each in caught if issubclass(each.category, DIFFERENCES)]
    return RankResult(Reference(losses, whole_state(model)), told)


def train_plain(draw: Draw) -> Reference:
    """Trains the plain model on one process."""
    model = CASES[draw.model].make().double()
    optimizer = SGD(model.parameters())
    seeds = range(2 * STEPS_EACH)

    def clip(limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    losses = train_steps(model, optimizer, CASES[draw.model], draw, seeds, clip)
    return Reference(losses, model.state_dict())


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    draw: Draw,
    seeds: Iterable[int],
    clip: Callable[[float], Any],
) -> list[float]:
    """Losses of some steps."""
    losses = []
    for arguments, named in batches(case, seeds, draw.rows, torch.float64):
        loss = case.loss(model(*arguments, **named))
        loss.backward()
        if draw.clip:
            clip(draw.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measure(draw: Draw) -> Result:
    """Trains a draw on processes that later draws reuse."""
    try:
        answers: list[RankResult] = run(train_pair, draw.ranks, timeout=TIMEOUT_S, draw=draw)
    except RankError as error:
        trace = error.errors[min(error.errors)].strip()
        lines = [line for line in trace.splitlines() if "Error" in line.partition(":")[0]]
        last = lines[-1] if lines else trace[-300:]
        is_told = last.partition(":")[0].startswith("autopar.")
        return Result(draw, "told" if is_told else "raw", message=last[:400])
    except TimeoutError as error:
        return Result(draw, "raw", message=f"hang: {error}"[:400])
    plain = train_plain(draw)
    worst = max(error_of(answer.training, plain) for answer in answers)
    told = next((text for answer in answers for text in answer.told), "")
    if worst <= EXACT[torch.float64]:
        return Result(draw, "exact", worst, told[:400])
    return Result(draw, "told" if told else "silent", worst, told[:400])


def error_of(training: Reference, plain: Reference) -> float:
    """Largest relative difference of a loss or a tensor of the state."""
    return max(worst_loss(training, plain), worst_error(training.state, plain.state)[0])


def main() -> int:
    """Runs all draws, and fails if one is silent or raw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness.pairs")
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the first draw")
    parser.add_argument("--models", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments, console = parser.parse_args(), wide_console()
    models, begin = tuple(arguments.models.split(",")), time.monotonic()
    if unknown := set(models) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    torch.set_num_threads(1)
    results, counts = list[Result](), dict[str, int]()
    for seed in range(arguments.seed, arguments.seed + arguments.draws):
        result = measure(Draw.of(seed, models))
        results.append(result)
        if result.outcome != "exact":
            console.print(
                f"{result.outcome} {result.error}: {result.draw} {result.message}", markup=False
            )
        counts = dict(Counter(result.outcome for result in results))
        if arguments.json:
            rows = [asdict(result) for result in results]
            save(arguments.json, {**about(), "counts": counts, "rows": rows})
    console.print(f"{counts} in {time.monotonic() - begin:.0f} s")
    return int(bool(counts.keys() & {"silent", "raw"}))


if __name__ == "__main__":
    sys.exit(main())
