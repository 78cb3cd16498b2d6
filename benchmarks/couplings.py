"""Errors of torch's DDP and of autopar on models that couple the rows of a batch.

    python -m benchmarks.couplings

Each model trains for three steps on two ranks in float64 under AdamW, at 12 rows, and is compared
with one process. Under DDP each rank gets its half of the rows. The output is the table of worst
relative errors in docs/couplings.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.harness.coupled import COUPLED
from tests.harness.reference import (
    Reference,
    batches,
    reference,
    train_steps,
    worst_error,
    worst_loss,
)
from tests.harness.training import ADAMW, fixed, rows_of, whole_state
from tests.harness.worlds import RankError, run

ROWS, RANKS, STEPS = 12, 2, 3


def train_with_ddp(rank: int, world_size: int, name: str) -> Reference:
    """Train under DDP; the loss is the mean over ranks, as scripts log it."""
    case = COUPLED[name]
    model = DistributedDataParallel(case.make().double())
    shares = (local_rows(batch, rank, world_size) for batch in batches(case, range(STEPS), ROWS))
    local_losses = train_steps(model, ADAMW(model.parameters()), case, shares)
    losses = torch.tensor(local_losses, dtype=torch.float64)
    torch.distributed.all_reduce(losses)
    return Reference((losses / world_size).tolist(), whole_state(model.module))


def train_with_autopar(rank: int, world_size: int, name: str) -> Reference:
    """Train the compiled model under plain data parallelism."""
    case = COUPLED[name]
    model = autopar.compile(case.make().double(), strategy=fixed(0), fallback=False)
    losses = train_steps(model, ADAMW(model.parameters()), case, batches(case, range(STEPS), ROWS))
    return Reference(losses, whole_state(model))


def local_rows(batch: Any, rank: int, ranks: int) -> Any:
    """Return the rows of a rank; a permutation becomes one of these rows alone."""
    args, kwargs = rows_of(batch, rank, ranks)
    both = zip(batch[0], args, strict=True)
    return tuple(x.argsort() if is_permutation(whole) else x for whole, x in both), kwargs


def is_permutation(x: Tensor) -> bool:
    """Whether a tensor numbers the rows."""
    return x.dtype == torch.long and x.sort().values.equal(torch.arange(len(x)))


def row(name: str) -> str:
    """Return one line of the table: errors of DDP on a model, then of autopar."""
    cells = []
    for train in (train_with_ddp, train_with_autopar):
        try:
            cells += errors(run(train, RANKS, name=name)[0], name)
        except RankError:
            cells += ["raises", "", ""]
    return f"| {name} | {' | '.join(cells)} |"


def errors(got: Reference, name: str) -> list[str]:
    """Return the worst relative errors of a loss, a parameter and a buffer."""
    want = reference(COUPLED[name], STEPS, torch.float64, ADAMW, ROWS)
    model = COUPLED[name].make()
    found = [f"{worst_loss(got, want):.0e}"]
    for tensors in (model.named_parameters(), model.named_buffers()):
        names = [name for name, _ in tensors]
        states = ({name: state[name] for name in names} for state in (got.state, want.state))
        found.append(f"{worst_error(*states)[0]:.0e}" if names else "")
    return found


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.couplings").parse_args()
    heads = ["model"]
    for engine in ("DDP", "autopar"):
        heads += [f"{engine}: {what}" for what in ("loss", "parameters", "buffers")]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name in COUPLED:
        print(row(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
