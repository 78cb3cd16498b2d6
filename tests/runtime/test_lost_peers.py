"""Errors of ranks that outlive another."""

import subprocess
import sys

import pytest
import torch

from autopar.runtime.lost_peers import is_lost_peer

SCRIPT = """
import sys
from autopar.runtime import lost_peers
lost_peers.WAIT_S = 0
lost_peers.wait_for_launcher()
lost_peers.wait_for_launcher()  # once is enough
raise RuntimeError(sys.argv[1])
"""


def test_errors_of_communication() -> None:
    assert is_lost_peer(RuntimeError("[gloo/tcp/pair.cc:537] Connection reset by peer"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(torch.OutOfMemoryError("NCCL buffers"))
    assert not is_lost_peer(ValueError("peer"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "launched", "traceback"),
    [("Connection closed", "1", False), ("Connection closed", "", True), ("bad shape", "1", True)],
)
def test_one_line_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, text: str, launched: str, traceback: bool
) -> None:
    monkeypatch.delenv("AUTOPAR_LAUNCHED", raising=False)
    if launched:
        monkeypatch.setenv("AUTOPAR_LAUNCHED", launched)
    command = [sys.executable, "-c", SCRIPT, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) is traceback
    assert text in done.stderr.splitlines()[-1]
