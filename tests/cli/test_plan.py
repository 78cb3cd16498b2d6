"""`autopar plan`: what its options mean, and what it shows while it searches."""

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

import autopar
from autopar.cli.main import main, parser
from autopar.cli.plan import strategy_of
from autopar.cli.progress import progress_bar
from autopar.core.ir.placement import Replicate, Shard
from autopar.core.plan.strategy import Strategy
from autopar.errors import StrategyError
from autopar.planner.evaluate.candidate import default_config
from autopar.planner.search.search_progress import SearchProgress

MAKE = """
import torch
from tests.planner.blocks import GPTBlock, Stack
def make():
    with torch.device("meta"):
        return Stack(lambda: GPTBlock(256, 4), 2), (torch.empty(8, 64, 256),)
"""


def asked(*options: str) -> Strategy:
    return strategy_of(parser().parse_args(["plan", "make.py", *options]))


def test_options_are_a_strategy() -> None:
    assert asked() == Strategy.of("fastest")
    assert asked("--strategy", "zero3") == Strategy(zero=3)
    assert asked("--tp", "2") == Strategy(tp=2)
    assert asked("--strategy", "zero3", "--search", "pp,tp") == Strategy(
        zero=3, search=("pp", "tp")
    )
    pinned = asked("--tp", "2", "--pin", "*.up.weight=S(0)", "--pin", "head.weight=R")
    assert pinned.placements == {"*.up.weight": Shard(0), "head.weight": Replicate()}
    assert asked("--zero", "blocks.0=3", "--zero", "=1").zero == {"blocks.0": 3, "": 1}
    staged = asked("--pp", "3", "--split-points", "blocks.1,head")
    assert staged.split_points == ("blocks.1", "head")
    for wrong in (("--zero", "blocks.0=4"), ("--zero", "3"), ("--pin", "head.weight=left")):
        with pytest.raises(StrategyError, match="give a name and a value"):
            asked(*wrong)


def test_a_search_ends_in_time_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "make.py", tmp_path / "plan.json"
    script.write_text(MAKE)
    more = ["--cluster", "dgx-h100", "--world-size", "2", "--out", str(out), "--explain"]
    assert main(["plan", str(script), *more, "--search", "tp", "--time-limit", "0"]) == 0
    text = capsys.readouterr().out
    assert "not looked at: tp=2;" in text
    assert "What would change the choice" in text
    plan = autopar.Plan.load(out)
    assert plan.model_parallel_size == 1


def shown(seconds: float, terminal: bool, text: str = "") -> str:
    """Output of a search that goes on until `text` is shown."""
    console = Console(file=(file := io.StringIO()), force_terminal=terminal, width=100)
    with progress_bar(console, after_s=seconds, every_s=0.01) as progress:
        progress(SearchProgress("tp=2", 1, 4, 0.012))
        end_s = time.monotonic() + 30.0
        while text not in file.getvalue() and time.monotonic() < end_s:
            time.sleep(0.01)
    return file.getvalue()


def test_a_bar_on_a_terminal_where_it_takes_long_and_lines_elsewhere() -> None:
    assert "planning tp=2, best 12.0 ms" in shown(0.0, terminal=True)
    assert "tp=2" not in shown(60.0, terminal=True)
    line = "0 s: planning tp=2, best 12.0 ms (2 of 4)\n"
    assert line in shown(0.0, terminal=False, text=2 * line)
    assert not shown(60.0, terminal=False)


@pytest.mark.slow
def test_without_a_cluster_the_command_says_what_it_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "make.py").write_text(MAKE)
    assert main(["plan", str(script), "--world-size", "2", "--strategy", "ddp"]) == 0
    told = capsys.readouterr().err
    assert "PRICES OF PROCESSES ON THIS CPU" in told
    assert "dgx-h100" in told


def test_ranks_beyond_a_node_are_those_of_more_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "make.py").write_text(MAKE.replace("(8, 64, 256)", "(16, 64, 256)"))
    options = ["--cluster", "dgx-h100", "--world-size", "16", "--strategy", "ddp"]
    assert main(["plan", str(script), *options]) == 0
    assert "on 16 ranks" in capsys.readouterr().out
    assert autopar.Cluster.named("dgx-h100").spanning(12).world_size == 16


@pytest.mark.slow
def test_the_answer_is_short_and_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script imports what lies beside it, and is given as a file or as a module."""
    (tmp_path / "parts_of_it.py").write_text(MAKE)
    script = tmp_path / "chosen_here.py"
    script.write_text("import parts_of_it\n\ndef small():\n    return parts_of_it.make()\n")
    given = [f"{script}:small", "--cluster", "dgx-h100", "--world-size", "2", "--tp", "1"]
    assert main(["plan", *given, "--memory", "20G"]) == 0
    text = capsys.readouterr().out
    heads = [line.split()[0] for line in text.splitlines() if line[2:3].strip()]
    assert [head for head in heads if head != "note"] == [
        "Stack", "trains", "step", "memory", "bound", "next", "verdict",
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    assert "global batch of 8 rows, params fp32" in text
    assert "free under 20.0 GiB" in text
    assert "data parallel" in text
    assert main(["plan", "chosen_here:small", *given[1:], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mesh"] == {"dp": 2, "tp": 1} or document["mesh"] == {"dp": 2}
    assert document["prediction"]["rows"] == 8
    low, high = document["prediction"]["step_interval_s"]
    assert low < document["prediction"]["step_s"] < high
    assert main(["plan", "nowhere.at_all", *given[1:]]) == 2
    assert "neither a file nor a module 'nowhere.at_all'" in capsys.readouterr().err


def test_names_say_what_a_plan_is() -> None:
    config = default_config(Strategy(), ("", "blocks.0"), 0)
    assert config.named({"dp": 1}).startswith("single device, buckets")
    assert config.named({"dp": 4}).startswith("data parallel, buckets")
    assert config.named({"dp": 1, "tp": 2}).startswith("tp2, buckets")
    assert config.named({"dp": 2, "tp": 2}).startswith("tp2, data parallel, buckets")
    mixed = default_config(Strategy(zero={"blocks.0": 3}), ("", "blocks.0"), 0)
    assert mixed.named({"dp": 2}).startswith("data parallel x1 + zero3 x1, buckets")
