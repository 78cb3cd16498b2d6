"""Errors of ranks that outlive another."""

import sys

import pytest
import torch

from autopar.errors import CommunicationError
from autopar.runtime.lost_peers import is_lost_peer, wait_for_launcher


def test_errors_of_communication() -> None:
    assert is_lost_peer(RuntimeError("[gloo/tcp/pair.cc:537] Connection reset by peer"))
    assert is_lost_peer(RuntimeError("Application timeout caused pair closure"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(torch.OutOfMemoryError("NCCL buffers"))
    assert not is_lost_peer(ValueError("peer"))


def test_one_line_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(error))
    monkeypatch.delenv("AUTOPAR_LAUNCHED", raising=False)
    before = sys.excepthook
    wait_for_launcher()
    assert sys.excepthook is before, "nobody will end this process"

    monkeypatch.setenv("AUTOPAR_LAUNCHED", "0")
    wait_for_launcher()
    wait_for_launcher()  # of a second model
    other = ValueError("bad data")
    for error in (CommunicationError("rank 0: a collective failed\nmore"), other):
        sys.excepthook(type(error), error, None)
    assert reported == [other]
    assert capsys.readouterr().err == "autopar: rank 0: a collective failed\n"
