"""Variables of the environment that are wrong."""

import subprocess
import sys

import pytest

import autopar
from autopar.__main__ import main
from autopar.core.environment import check_launch, untested_torch
from autopar.errors import StrategyError


def test_a_wrong_level_of_logging_is_named_before_torch_fails_to_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGLEVEL", "bad")
    assert main() == 2
    assert capsys.readouterr().err.startswith("autopar: LOGLEVEL='bad': give DEBUG")
    monkeypatch.delitem(vars(autopar), "compile", raising=False)  # as before its first use
    with pytest.raises(StrategyError, match="LOGLEVEL='bad'"):
        _ = autopar.compile


def test_releases_of_torch_that_no_test_has_met() -> None:
    assert untested_torch("2.13.0+cpu") is None
    assert untested_torch("2.11.1") is None
    for version in ("2.10.0", "2.99.0a0+git1", "3.0.0"):
        assert f"this is {version}" in (untested_torch(version) or "")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MASTER_PORT", "99999", "MASTER_PORT='99999': give a whole number from 1 to 65535"),
        ("MASTER_PORT", "http", "MASTER_PORT='http'"),
        ("MASTER_PORT", None, "MASTER_PORT is not set, but RANK is"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
        ("WORLD_SIZE", "0", "WORLD_SIZE='0'"),
        ("RANK", "2", "RANK='2': give a whole number from 0 to 1"),
        ("RANK", "-1", "RANK='-1'"),
    ],
)
def test_wrong_places_of_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, told: str
) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for key, text in {**right, name: value}.items():
        if text is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, text)
    with pytest.raises(StrategyError, match=told):
        check_launch()


def test_ctrl_c_while_torch_loads_ends_the_command() -> None:
    """Some imports go on after a KeyboardInterrupt."""
    code = (
        "import os, signal, sys\n"
        "class Swallows:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except KeyboardInterrupt: pass\n"
        "sys.meta_path.insert(0, Swallows())\n"
        "from autopar.__main__ import main; sys.exit(main())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130
