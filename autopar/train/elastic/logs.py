"""`RankLogs`: a folder of what each rank wrote, and the error in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

TRACEBACK = "Traceback (most recent call last):"
LINES = 40  # of an error that are shown
TAIL_BYTES = 2**18  # of a log that are searched for it


class RankLogs(LogsSpecs):
    """Files `attempt-K/rank-R.out` and `.err` of every attempt; earlier ones stay.

    Without a folder ranks write to this terminal. With one, only rank 0's output is shown here.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(None if folder is None else str(folder))
        self.folder, self._attempt = folder, -1
        self.errors: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self.folder or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files of the next attempt, by local rank."""
        if self.folder is None:
            everywhere = dict.fromkeys(envs, "")
            return LogsDest(everywhere, dict(everywhere), error_files=dict(everywhere))
        ranks = {local: int(each["RANK"]) for local, each in envs.items()}
        attempt = self._next_attempt(self.folder, ranks)
        outs, errs = (
            {local: str(attempt / f"rank-{rank}.{kind}") for local, rank in ranks.items()}
            for kind in ("out", "err")
        )
        self.errors = {local: Path(name) for local, name in errs.items()}
        first = [local for local, rank in ranks.items() if rank == 0]
        return LogsDest(
            outs,
            errs,
            {local: outs[local] for local in first},
            {local: errs[local] for local in first},
            dict.fromkeys(envs, ""),
        )

    def _next_attempt(self, folder: Path, ranks: Mapping[int, int]) -> Path:
        """A folder in which none of these ranks has written yet."""
        while True:
            self._attempt += 1
            attempt = folder / f"attempt-{self._attempt}"
            attempt.mkdir(parents=True, exist_ok=True)
            if not any((attempt / f"rank-{rank}.err").exists() for rank in ranks.values()):
                return attempt

    def error_of(self, local_rank: int) -> str:
        """The last traceback that a rank wrote, or else its last lines; empty without a folder."""
        path = self.errors.get(local_rank)
        lines = last_lines(path) if path else []
        starts = [number for number, line in enumerate(lines) if TRACEBACK in line]
        shown = lines[starts[-1] :] if starts else lines
        return "\n".join(shown[-LINES:])

    def trouble_of(self, local_rank: int) -> str:
        """The reason why a rank can write no more to its log, such as a full disk; or empty."""
        path = self.errors.get(local_rank)
        if path is None:
            return ""
        try:
            # Opening a file succeeds on a full disk. Only a write tells.
            with path.open("ab") as log:
                log.write(b"\n")
        except OSError as error:
            return f"{path}: {error.strerror}"
        return ""


def last_lines(path: Path) -> list[str]:
    """The lines in the last `TAIL_BYTES` of a file; the first may be cut."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return log.read(TAIL_BYTES).decode(errors="replace").splitlines()
