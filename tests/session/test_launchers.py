"""Ranks that Slurm and MPI start find each other without torchrun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import StrategyError
from autopar.session.launchers import PORTS, adopt_launcher, first_node

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-007,012],login1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1242497025",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PLACE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, without any launcher's variables."""
    prefixes = "SLURM_", "OMPI_", "PMI", "MPI_"
    values = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    for name in (*PLACE, "MASTER_PORT"):
        values.pop(name, None)
    monkeypatch.setattr(os, "environ", values)
    return values


@pytest.mark.parametrize(
    ("launched", "place"),
    [
        (SLURM, ("3", "4", "1", "gpu003")),
        (OPEN_MPI, ("1", "2", "1", "127.0.0.1")),
        (MPICH, ("1", "2", "0", "127.0.0.1")),
        # mpirun inside of a Slurm job
        ({**SLURM, **OPEN_MPI}, ("1", "2", "1", "127.0.0.1")),
    ],
)
def test_a_launchers_place_becomes_torchs(
    launched: dict[str, str], place: tuple[str, ...], variables: dict[str, str]
) -> None:
    variables |= launched
    adopt_launcher()
    assert tuple(variables[name] for name in PLACE) == place
    assert int(variables["MASTER_PORT"]) in PORTS


@pytest.mark.parametrize(
    "launched",
    [
        {**SLURM, "RANK": "0"},  # torchrun inside of srun
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {},
    ],
)
def test_what_is_no_rank_of_a_launcher_stays_alone(
    launched: dict[str, str], variables: dict[str, str]
) -> None:
    variables |= launched
    adopt_launcher()
    assert "WORLD_SIZE" not in variables


def test_an_address_that_is_set_is_kept(variables: dict[str, str]) -> None:
    several_nodes = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    variables |= several_nodes
    with pytest.raises(StrategyError, match="MASTER_ADDR"):
        adopt_launcher()
    assert "RANK" not in variables
    variables |= {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    adopt_launcher()
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("head", "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-2]", "n1"), ("rack[2,4]-n[07-09],x", "rack2-n07")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


TRAIN = """
import autopar, sys, torch
model = autopar.compile(torch.nn.Linear(4, 4, dtype=torch.float64), strategy="zero3")
shape = model(torch.ones(4, 4).double()).shape
# one write: the output of ranks is interleaved
sys.stdout.write(f"ranks {torch.distributed.get_world_size()} {shape}\\n")
"""


@pytest.mark.processes
@pytest.mark.parametrize("command", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi_starts_ranks(command: str, tmp_path: Path) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    options = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in command else []
    result = subprocess.run(
        [command, *options, "-n", "2", sys.executable, str(script)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ranks 2 torch.Size([4, 4])") == 2
