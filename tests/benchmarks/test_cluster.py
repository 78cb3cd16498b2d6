"""The emulated cluster; skips where nodes cannot be made."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import Network, RanksFailed, Unavailable, launch
from benchmarks.cluster.__main__ import SKIPPED, main
from benchmarks.cluster.network import bits_per_second, sweep

SHOW = "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $(uname -n)"


@pytest.fixture(scope="module", autouse=True)
def nodes_can_be_made() -> None:
    try:
        with Network(nodes=1):
            pass
    except Unavailable as reason:
        pytest.skip(str(reason))


def namespaces() -> list[str]:
    """Namespaces of this process's networks."""
    mine = f"autopar-{os.getpid()}-"
    folder = Path("/run/netns")
    return [p.name for p in folder.glob("*") if p.name.startswith(mine)] if folder.exists() else []


def test_ranks_have_torchruns_environment_and_a_host_name(tmp_path: Path) -> None:
    with Network(nodes=2, rate="1gbit") as network:
        launch(network, ["sh", "-c", SHOW], 2, logs=tmp_path)
    shown = [(tmp_path / f"rank{rank}.log").read_text().split() for rank in range(4)]
    assert shown == [
        [str(rank), str(rank % 2), str(rank // 2), "4", "2", "10.77.0.1", f"node{rank // 2}-1gbit"]
        for rank in range(4)
    ]
    assert not namespaces()


SEND = """
import os, socket, time
if os.environ["RANK"] == "1":
    listener = socket.create_server(("10.77.0.2", 5000))
    peer = listener.accept()[0]
    start, left = time.monotonic(), 1_250_000
    while left:
        left -= len(peer.recv(65536))
    print(time.monotonic() - start)
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(("10.77.0.2", 5000))
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(bytes(1_250_000))
"""


def test_links_have_a_rate_and_count_bytes(tmp_path: Path) -> None:
    with Network(nodes=2, rate="10mbit") as network:
        launch(network, [sys.executable, "-c", SEND], 1, logs=tmp_path, timeout_s=30)
        traffic = network.traffic()
    assert 1_250_000 < traffic[0].sent < 1_400_000
    assert traffic[1].received == pytest.approx(traffic[0].sent, rel=0.01)
    seconds = float((tmp_path / "rank1.log").read_text())
    assert seconds > 0.8  # a second's worth of bits, but for the burst


def test_a_failed_rank_ends_the_others(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo from $RANK; [ $RANK = 0 ] || exec sleep 60; exit 3"]
    with (
        pytest.raises(RanksFailed, match=r"rank 0 ended with status 3:\nfrom 0"),
        Network(nodes=2) as network,
    ):
        launch(network, command, 1, logs=tmp_path, grace_s=0.1)
    assert not namespaces()


def test_a_run_has_a_timeout(tmp_path: Path) -> None:
    with Network(nodes=1) as network, pytest.raises(RanksFailed, match="rank 0 was still busy"):
        launch(network, ["sleep", "60"], 1, logs=tmp_path, timeout_s=0.2)


def test_namespaces_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from benchmarks.cluster import Network, launch
with Network(nodes=1) as network:
    Path({str(tmp_path)!r}, "name").write_text(network.namespace(0))
    launch(network, ["sh", "-c", "echo $$ > {tmp_path}/pid; exec sleep 60"], 1)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    written = tmp_path / "pid"
    for _ in range(200):
        if written.exists() and written.read_text().strip():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    name = (tmp_path / "name").read_text()
    assert Path("/run/netns", name).exists()
    sweep()
    assert not Path("/run/netns", name).exists()
    time.sleep(0.2)
    status = Path("/proc", written.read_text().strip(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_the_command_line_prints_bytes_and_returns_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--nodes", "2", "--rate", "1gbit", "--", "true"]) == 0
    assert "received, bytes" in capsys.readouterr().err
    assert main(["--nodes", "1", "--", "false"]) == 1
    with pytest.raises(SystemExit):
        main(["--rate", "fast", "--", "true"])


def test_missing_tools_are_a_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--", "true"]) == SKIPPED
    assert "skipped, nodes cannot be emulated here: ip, tc" in capsys.readouterr().err


def test_rates() -> None:
    assert bits_per_second("2.5gbit") == 2.5e9
    assert bits_per_second("100Mbit") == 1e8
    with pytest.raises(ValueError, match="'1gb' is not one"):
        bits_per_second("1gb")
