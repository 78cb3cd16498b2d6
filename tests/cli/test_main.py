"""The command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli.completion import SHELLS
from autopar.cli.main import main
from autopar.cli.script import load

MAKE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x).square().mean()
def make():
    torch.manual_seed(0)
    return Model(), (torch.ones(8, 4),)
"""

SCRIPT = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}", flush=True)
sys.exit(int(os.environ["RANK"] == "1" and "fail" in sys.argv))
"""


@pytest.fixture
def make(tmp_path: Path) -> Path:
    path = tmp_path / "make.py"
    path.write_text(MAKE)
    return path


def test_plan_show_diff(make: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    html = tmp_path / "a.html"
    plan = ["plan", str(make), "--world-size", "2"]
    assert main([*plan, "--strategy", "zero3", "--out", first, "--html", str(html)]) == 0
    assert main([*plan, "--strategy", "ddp", "--out", second]) == 0
    assert "<svg" in html.read_text()
    assert autopar.Plan.load(first).zero_stages == (("", 3),)
    capsys.readouterr()
    assert main(["show", first, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "sharded" in text
    assert text.count("predicted step") == 1
    assert main(["diff", first, second]) == 1
    assert "zero_stages: (outside of blocks) 3 -> 0" in capsys.readouterr().out
    assert main(["diff", first, first]) == 0
    capsys.readouterr()
    assert main(["diff", first, second, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]["zero_stages"].startswith("(outside of blocks)")
    assert main(["show", first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_stages"] == {"": 3}


def test_the_graph_of_a_rank_has_provenance_and_source(
    make: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    main(["plan", str(make), "--world-size", "2", "--strategy", "zero3", "--out", path])
    capsys.readouterr()
    assert main(["show", path, "--graph", str(make), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert "# captured from Model" in text
    assert "# shard_parameters(axis='dp', rank=1" in text
    assert "return self.layer(x).square().mean()" in text
    assert "all_to_all_single" in text
    assert "backward:" in text
    assert "# schedule_overlap(" in text
    without = ["--disable", "schedule_overlap,fuse_cross_entropy"]
    assert main(["show", path, "--graph", str(make), *without]) == 0
    assert "# schedule_overlap(" not in capsys.readouterr().out
    assert main(["show", path, "--graph", str(make), "--disable", "overlap"]) == 2
    assert "no such pass; choose from " in capsys.readouterr().err


@pytest.mark.slow
def test_the_placements_of_a_plan(
    make: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    pins = {"layer.weight": autopar.Shard(0)}
    strategy = autopar.Strategy(tp=2, placements=pins)
    model, inputs = load(str(make))
    autopar.plan(model, 2, example_inputs=inputs, strategy=strategy).save(path)
    assert main(["show", path, "--placements", str(make), "--cluster", "dgx-h100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("along tp, 2 ranks; dgx-h100")
    (weight,) = [line for line in text.splitlines() if "layer.weight" in line]
    assert weight.split() == ["parameter", "layer.weight", "[4,", "4]", "S(0)"]
    assert max(map(len, text.splitlines())) <= 80
    assert "all_" in text[text.index("layer.weight") :]
    axes = ["--tp", "2", "--cp", "2", "--ep", "2"]
    assert main(["plan", str(make), "--world-size", "8", *axes, "--out", path]) == 0
    capsys.readouterr()
    assert main(["show", path, "--placements", str(make)]) == 0
    text = capsys.readouterr().out
    assert [word for word in text.split() if word in ("tp,", "cp,", "ep,")] == ["tp,", "cp,", "ep,"]
    assert main(["plan", str(make), "--world-size", "2", "--strategy", "ddp", "--out", path]) == 0
    capsys.readouterr()
    assert main(["show", path, "--placements", str(make)]) == 0
    assert "the model is not partitioned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "is not a plan"),
        (lambda text: json.dumps({**json.loads(text), "schema_version": 0}), "schema 0"),
        (lambda text: json.dumps({**json.loads(text), "stranger": 1}), "stranger"),
    ],
)
def test_bad_plans_are_refused(
    make: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, message: str
) -> None:
    path = tmp_path / "plan.json"
    main(["plan", str(make), "--world-size", "2", "--strategy", "ddp", "--out", str(path)])
    path.write_text(change(path.read_text()))
    assert main(["show", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_arguments_of_the_script_stand_behind_two_dashes(
    make: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(make), "--nproc", "1", "--lr", "0.1"]) == 2
    assert "arguments of the script stand behind --: -- --lr 0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no make()"),
        (
            "def make():\n    return 1, 2.0, 'a'\n",
            "returns (int, float, str): return (model, inputs)",
        ),
    ],
)
def test_scripts_without_a_proper_make_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (path := tmp_path / "script.py").write_text(text)
    assert main(["plan", str(path), "--world-size", "2"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_fits(make: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(make), "--world-size", "2", "--strategy", "zero3", "--memory"]
    assert main([*plan, "100"]) == 2
    assert "memory='100'" in capsys.readouterr().err
    assert main([*plan, "0.1KiB"]) == 3
    assert "nothing fits under 102 B per rank" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "seen"), [(["--", "--steps", "3"], "['--steps', '3']"), (["--"], "[]")]
)
def test_run_launches_ranks(tmp_path: Path, rest: list[str], seen: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "autopar", "run", str(script), "--nproc", "2", *rest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 2 {seen}" in done.stdout for rank in (0, 1))


@pytest.mark.slow
def test_run_fails_if_a_rank_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "autopar", "run", str(script), "--nproc", "2", "--", "fail"]
    assert subprocess.run(command, capture_output=True).returncode != 0


LLAMA = str(Path(__file__).parent.parent / "examples" / "plan_llama.py")


@pytest.mark.slow
def test_a_plan_for_machines_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    fixed = ["--strategy", "zero1", "--tp", "8", "--backend", "inductor", "--out", out, "-v"]
    model = ["--", "--size", "1b", "--rows", "16", "--length", "256"]
    assert main(["plan", LLAMA, "--cluster", "dgx-h100", "--nodes", "2", *fixed, *model]) == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text
    assert "error bars: step" in text
    assert "model FLOPs utilisation" in text
    plan = autopar.Plan.load(out)
    assert plan.world_size == 16
    assert dict(plan.mesh) == {"dp": 2, "tp": 8}
    prediction = plan.prediction
    assert prediction is not None
    assert prediction.work is not None
    assert prediction.work.tokens == 16 * 256
    parameters = sum(size for _, size in plan.parameter_bytes) / 4
    products = 6 * (parameters - 32000 * 2048) * prediction.work.tokens
    assert products < prediction.work.flops < 1.2 * products  # and attention


def test_nodes_are_those_of_a_cluster(make: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(make), "--nodes", "2"]) == 2
    assert main(["plan", str(make)]) == 2
    said = capsys.readouterr().err
    assert "--cluster" in said
    assert "--world-size" in said


def test_help_has_an_example_of_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"autopar {autopar.__version__}, torch ")
    assert main(["--help"]) == 0
    names = re.findall(r"^    ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"plan", "scale", "show", "diff", "run", "verify"} < set(names)
    for name in names:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"example:\n  autopar {name} " in text
        assert "--json" in text or name in ("run", "completion")
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_of_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--micro-batches" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
