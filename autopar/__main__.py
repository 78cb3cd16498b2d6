"""`python -m autopar`, and the command `autopar`."""

import signal
import sys

from autopar.environment import check_log_level
from autopar.errors import StrategyError


def main() -> int:
    """Runs a command and returns its exit status."""
    try:
        check_log_level()
        from autopar.cli import main as run  # loads torch, which takes seconds

        return run()
    except StrategyError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
