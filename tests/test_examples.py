"""Examples run for a few steps; files for clusters have the structure that they need."""

import contextlib
import io
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from autopar.cli.script import launch
from tests.harness.worlds import run

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "causal_lm": "--steps 20 --width 32 --strategy ddp",
    "trainer": "--steps 20 --out {out}",
    "lightning_fit": "--epochs 2 --out {out}",
    "vit": "--epochs 2 --images 128 --workers 0",
    "mixture": "--steps 20 --experts 4",
    "large_batch": "--steps 40 --rows 64",
}
"""Arguments with which each example takes a few seconds."""


def run_script(rank, world_size, *, script, arguments):
    """Output of a rank."""
    written = io.StringIO()
    paths = [str(script.parent), *sys.path]
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", paths),
        contextlib.redirect_stdout(written),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return written.getvalue()


def printed(name, ranks, arguments):
    """Output of rank 0."""
    env = {"TORCHELASTIC_RUN_ID": "example"}  # Lightning looks for it
    given = {"script": EXAMPLES / f"{name}.py", "arguments": arguments.split()}
    return run(run_script, ranks, init=ranks == 1, env=env, **given)[0]


def losses(text):
    return [float(loss) for loss in re.findall(r"loss'?:? '?([0-9.]+)", text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_trains(name, tmp_path):
    if name == "lightning_fit":
        pytest.importorskip("autopar.integrations.lightning")
    found = losses(printed(name, 2, SCRIPTS[name].format(out=tmp_path)))
    assert all(map(math.isfinite, found))
    assert found[-1] < found[0]


@pytest.mark.slow
def test_simclr_prints_the_same_on_two_ranks_as_on_one():
    one, two = (losses(printed("simclr", ranks, "--steps 20 --rows 16")) for ranks in (1, 2))
    assert two == one
    assert one[-1] < one[0]


@pytest.mark.slow
def test_a_recipe_resumes(tmp_path):
    size = f"--size tiny --rows 8 --length 32 --strategy zero3 --out {tmp_path}"
    texts = [printed("pretrain_7b", 2, f"--steps {steps} {size}") for steps in (10, 20)]
    assert [re.findall(r"step (\d+)", text) for text in texts] == [["10"], ["20"]]
    assert all(map(math.isfinite, losses("".join(texts))))


def test_the_recipe_is_that_of_a_7b_model_in_float32(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["pretrain_7b.py"])
    model, (tokens, _) = runpy.run_path(str(EXAMPLES / "pretrain_7b.py"))["make"]()
    assert 6.6e9 < sum(p.numel() for p in model.parameters()) < 6.9e9
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokens.shape == (256, 4096)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its code cells in order, with smaller sizes in place of the cell tagged "parameters"."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "will_it_fit.ipynb").read_text())
    small = "WIDTH, LAYERS, VOCABULARY = 128, 1, 256\nROWS, LENGTH = 8, 64\n"
    space: dict[str, object] = {"CLUSTER": "dgx-h100", "GPUS": 8}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            given = "parameters" in cell["metadata"].get("tags", ())
            exec(small if given else "".join(cell["source"]), space)
    text = capsys.readouterr().out
    assert all(re.search(rf"^{name} .* GiB stay free$", text, re.M) for name in ("ddp", "zero3"))
    assert "parameters" in text
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    assert (tmp_path / "trace.json").exists()


def test_every_example_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in path.read_text().split('"""')[1], path


@pytest.mark.slow
def test_a_ddp_script_and_its_conversion_print_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """README has their difference and their output."""
    printed = []
    for name in ("before", "after"):
        status = launch(str(EXAMPLES / "from_ddp" / f"{name}.py"), 2, [])
        # on a busy machine torch's DDP now and then aborts in its exit, after its output
        assert status == 0 or name == "before"
        lines = capfd.readouterr().out.splitlines()
        printed.append([line for line in lines if line.startswith("epoch")])
    before, after = printed
    assert len(before) == 4
    assert after == before
    readme = (ROOT / "README.md").read_text()
    sources = [(EXAMPLES / "from_ddp" / f"{n}.py").read_text() for n in ("before", "after")]
    old, new = ([line for line in text.splitlines()[2:] if line] for text in sources)
    gone = [f"-{line}" for line in old if line not in new]
    come = [f"+{line}" for line in new if line not in old]
    shown = readme.split("```diff\n")[1].split("```")[0].splitlines()
    assert sorted(shown) == sorted([*gone, *come])


def test_files_for_clusters() -> None:
    folder = EXAMPLES / "cluster"
    subprocess.run(["bash", "-n", str(folder / "train.sbatch")], check=True)
    service, job = yaml.safe_load_all((folder / "job.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert f"--nnodes={job['spec']['parallelism']}" in container["args"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert [node["hostname"] for node in services.values()] == list(services)
    for node in services.values():
        assert (folder / node["build"]["context"] / node["build"]["dockerfile"]).exists()
    scripts = [
        *container["args"],
        *(part for node in services.values() for part in node["command"]),
    ]
    assert all((ROOT / part).exists() for part in scripts if part.endswith(".py"))
