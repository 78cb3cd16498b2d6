"""The tables of placements: repeated blocks once, every conversion with its bytes and time."""

import io

from rich.console import Console
from torch import nn

from autopar.core.ir.placement import Shard
from autopar.planner.placement.solve import costs_along, partition
from autopar.planner.placement.table import PlacementTable, placement_tables
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
    found = list(placement_tables(graph, op_strategies, prices))
    tables = [item for item in found if isinstance(item, PlacementTable)]
    (block,) = [table for table in tables if table.title == "stack.blocks.1 and 1 like it"]
    rows = block.to_dict()["rows"]
    (weight,) = [row for row in rows if row["what"] == "stack.blocks.*.qkv.weight"]
    assert (weight["shape"], weight["placement"]) == ("[3072, 1024]", "S(0, x3)")
    twice = [row for t in tables for row in t.to_dict()["rows"] if row["converted"][-2:] == "x2"]
    sums = [row for row in twice if row["sends"] == "all_reduce 8.0 MiB"]
    assert len(sums) == 4
    assert all("us imported" in row["takes"] for row in sums)
    console = Console(width=80, file=io.StringIO())
    console.print(block.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "S(0, x3)" in text
    (cheapest,) = [text for text in found if "cheapest whole" in str(text)]
    assert ", sort x1" in str(cheapest)
