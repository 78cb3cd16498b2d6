"""The tables of placements: repeated blocks once, every conversion with its bytes and time."""

import io

from rich.console import Console
from torch import nn

from autopar.ir.placement import Shard
from autopar.planner.placement.solve import costs_along, partition
from autopar.planner.placement.table import placement_tables
from tests.planner.blocks import GPTBlock, Stack, captured
from tests.planner.test_known_best import machine


class Odd(nn.Module):
    """A block, and an operator behind it that cannot be split: it sorts what is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(lambda: GPTBlock(1024, 8), 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        for block in self.stack.blocks:
            x = block(x)
        return x.flatten().sort().values[::2].sum()


def test_tables() -> None:
    graph = captured(Odd(), (2, 1024, 1024))
    prices = costs_along(8, machine())
    pins = {"*.up.weight": Shard(0), "*.down.weight": Shard(1), "*.out.weight": Shard(1)}
    op_strategies = partition(
        graph, 8, machine(), pins={**pins, "*.qkv.*": Shard(0, 3)}
    ).op_strategies
    console = Console(width=200, file=io.StringIO())
    for item in placement_tables(graph, op_strategies, prices):
        console.print(item)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "stack.blocks.1 and 1 like it" in text
    assert cells(text, "stack.blocks.*.qkv.weight")[2:4] == ["[3072, 1024]", "S(0, x3)"]
    sums = [line for line in text.splitlines() if "x2 │ all_reduce 8.0 MiB" in line]
    assert len(sums) == 4
    assert all("us imported" in line for line in sums)
    assert ", sort x1" in text[text.index("run whole on every rank, cheapest whole") :]


def cells(text: str, name: str) -> list[str]:
    """The row that holds a name."""
    row = next(line for line in text.splitlines() if name in line)
    return [cell.strip() for cell in row.strip("│").split("│")]
