"""`python -m autopar`, and the command `autopar`."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from autopar.core.environment import check_log_level
from autopar.errors import StrategyError


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _imported() -> Callable[[], int]:
    """The command line, which loads torch for seconds. Ctrl-C ends the process meanwhile.

    Some imports take a KeyboardInterrupt for a missing module and go on.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a job in the background ignores Ctrl-C
        signal.signal(signal.SIGINT, _end)
    from autopar.cli.main import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return run


def main() -> int:
    """Runs a command and returns its exit status."""
    try:
        check_log_level()
        run = _imported()
        return run()
    except StrategyError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
