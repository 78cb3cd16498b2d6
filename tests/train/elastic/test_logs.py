"""What the launcher reads of the files that ranks write."""

import tracemalloc
from pathlib import Path

from autopar.train.elastic.logs import LINES, TRACEBACK, RankLogs


def logs_of(path: Path) -> RankLogs:
    logs = RankLogs(path.parent)
    logs.errors = {0: path}
    return logs


def test_the_last_error_of_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.err"
    with path.open("wb") as log:
        log.write(f"{TRACEBACK}\n  the first\n".encode())
        log.seek(2**30)  # a hole, which takes no room
        log.write(f"\n{TRACEBACK}\n  the last\nValueError: bad data\n".encode())
    tracemalloc.start()
    try:
        assert logs_of(path).error_of(0) == f"{TRACEBACK}\n  the last\nValueError: bad data"
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_log_without_an_error_shows_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.err"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    assert logs_of(path).error_of(0).splitlines() == [f"line {n}" for n in range(100 - LINES, 100)]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    full = tmp_path / "rank-0.err"
    full.symlink_to("/dev/full")
    assert logs_of(full).trouble_of(0) == f"{full}: No space left on device"
    (tmp_path / "rank-1.err").touch()
    assert logs_of(tmp_path / "rank-1.err").trouble_of(0) == ""
