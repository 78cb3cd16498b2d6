"""autopar verify of a training script: the loop as the user wrote it."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.cli.script import has_make
from autopar.cli.verify import RUNS
from autopar.core.environment import PLAIN, VERIFY
from autopar.errors import FallbackWarning, StrategyError
from autopar.train.verification.script_record import record_script
from autopar.train.verification.script_runs import compare_runs, folder_of

LOOP = """
import os
import torch, autopar
from torch import nn
from torch.nn import functional as F
from autopar.cost_model.cluster.cluster import Cluster

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8))
fixed = dict(recompute="none", gather_bytes=1 << 14, reduce_bytes=1 << 14, prefetch=1)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
body = autopar.compile(body, cluster=Cluster.default(ranks, "cpu"), time_limit_s=None, {options})
head = nn.Linear(8, 4)
optimizers = [torch.optim.AdamW(body.parameters(), 0.01), torch.optim.SGD(head.parameters(), 0.1)]
data = torch.Generator().manual_seed(1)
for step in range(9):
    for micro in range(2):
        x, y = torch.randn({rows}, 6, generator=data), torch.randn({rows}, 4, generator=data)
        loss = F.mse_loss(head(body(x)), y)
        (loss + 1e-2 * {penalty}).backward()
    {fault}
    body.clip_grad_norm_(1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


WEIGHTS = "sum(p.square().sum() for p in body.parameters())"


def script(
    folder: Path,
    strategy: str = "zero=0",
    *,
    options: str = "",
    penalty: str = WEIGHTS,
    fault: str = "pass",
) -> str:
    options = f"strategy=autopar.Strategy({strategy}, **fixed), {options}"
    path = folder / "train.py"
    path.write_text(LOOP.format(options=options, rows=6, penalty=penalty, fault=fault))
    return str(path)


def verdict(path: str, capsys: Any, *more: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", path, "--nproc", "2", "--steps", "2", "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_both_runs_of_a_loop_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path)
    compiled, plain = (folder_of(tmp_path / run, 0) for run in RUNS)
    for folder in (compiled, plain):
        folder.parent.mkdir()
    record_script(path, [], 2, compiled)
    monkeypatch.setenv(PLAIN, "1")
    with pytest.warns(FallbackWarning, match="AUTOPAR_PLAIN=1 asks for it"):
        record_script(path, [], 2, plain)
    result = compare_runs(*(tmp_path / run for run in RUNS))
    assert result.passed
    assert result.steps == 4  # two of each optimizer
    assert "bernoulli" in result.draws
    assert "is not" not in str(result)


RESUMING = """
import torch, autopar
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
example = (torch.randn(4, 4),)
model = autopar.compile(model, example_inputs=example, strategy="ddp")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = autopar.Checkpointer({folder!r}, model, optimizer, every=1)
for step, (x,) in checkpointer.steps(data, total={total}):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_resumes_starts_anew_in_both_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, runs = tmp_path / "train.py", tmp_path / "runs"
    path.write_text(RESUMING.format(folder=str(runs), total=3))
    monkeypatch.setenv(VERIFY, str(tmp_path))
    for name in RUNS:
        folder = folder_of(tmp_path / name, 0)
        folder.parent.mkdir()
        assert record_script(str(path), [], 2, folder).steps == 2
    assert not [*runs.glob("step-*")]
    assert compare_runs(*(tmp_path / run for run in RUNS)).passed


def test_runs_of_different_lengths_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    for name, total in zip(RUNS, (2, 1), strict=True):
        path.write_text(RESUMING.format(folder=str(tmp_path / f"saved-{name}"), total=total))
        folder = folder_of(tmp_path / name, 0)
        folder.parent.mkdir()
        record_script(str(path), [], 2, folder)
    with pytest.raises(StrategyError, match="2 steps with its compiled models, and 1 with"):
        compare_runs(*(tmp_path / run for run in RUNS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "penalty"),
    [("zero=3", WEIGHTS), ("zero=0, pp=2", "head.weight.square().sum()")],
)
def test_a_loop_passes(strategy: str, penalty: str, tmp_path: Path, capsys: Any) -> None:
    status, result = verdict(script(tmp_path, strategy, penalty=penalty), capsys)
    assert (status, result["passed"], result["ranks"]) == (0, True, 2)


@pytest.mark.slow
def test_own_rows_are_compared_with_distributed_data_parallel(tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, "zero=2", options="batch='local', rows=0")
    status, result = verdict(path, capsys)
    assert (status, result["passed"]) == (0, True)
    assert any("DistributedDataParallel" in note for note in result["notes"])


@pytest.mark.slow
def test_a_fault_of_the_loop_is_named(tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, fault="body[0].weight.grad.mul_(body.data_parallel_size)")
    status, result = verdict(path, capsys)
    assert status == 1
    assert result["first"].startswith("gradient of ")
    assert "step 1" in result["first"]


def test_options_of_make_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", script(tmp_path), "--pp", "2"]) == 2
    assert "--pp has no effect: its own call of autopar.compile" in capsys.readouterr().err


STEP = "torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (STEP, "none of them of a model from autopar.compile"),
        ("", "made no optimizer step"),
    ],
)
def test_a_script_without_a_step_of_a_compiled_model(
    line: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{line}\n")
    assert main(["verify", str(path), "--nproc", "1"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def make(): ...", True),
        ("from models import gpt as make", True),
        ("from models import *", True),
        ("from helpers import *", False),
        ("if True:\n    print('def make(): ...')", False),
    ],
)
def test_which_scripts_have_make(source: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(source))
    (tmp_path / "helpers.py").write_text("from script import *\ndef train(): ...\n")
    assert has_make(str(path)) is expected


def test_plain_is_one_or_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLAIN, "yes")
    with pytest.raises(StrategyError, match="AUTOPAR_PLAIN='yes': give 1"):
        record_script(script(tmp_path), [], 1, tmp_path / "record")
