"""Examples run for a few steps; files for clusters have the structure that they need."""

import subprocess
from pathlib import Path

import pytest
import yaml

from autopar.commands.script import launch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def test_a_ddp_script_and_its_conversion_print_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """README has their difference and their output."""
    printed = []
    for name in ("before", "after"):
        assert launch(str(EXAMPLES / "from_ddp" / f"{name}.py"), 2, []) == 0
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
