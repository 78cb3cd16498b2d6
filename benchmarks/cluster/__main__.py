"""`python -m benchmarks.cluster --nodes 2 --ranks-per-node 2 --rate 1gbit -- COMMAND ...`

Runs the command as every rank of an emulated cluster, with torchrun's environment variables. The
exit status is 1 if a rank failed, and 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.network import Network, Unavailable, bits_per_second
from benchmarks.cluster.ranks import RanksFailed, launch

SKIPPED = 77


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", usage="%(prog)s [options] -- COMMAND ..."
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument(
        "--rate", type=_rate, help="of each link, such as 1gbit; unshaped by default"
    )
    parser.add_argument("--timeout", type=float, help="limit of the command, in seconds")
    options, command = parser.parse_args(words[:split]), words[split + 1 :]
    if not command:
        parser.error("give the command after --")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network is removed
    try:
        with Network(options.nodes, options.rate) as network:
            return _run(network, command, options.ranks_per_node, options.timeout)
    except Unavailable as reason:
        print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
        return SKIPPED
    except KeyboardInterrupt:
        return 130


def _rate(text: str) -> str:
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _run(network: Network, command: Sequence[str], ranks: int, timeout_s: float | None) -> int:
    start, status = time.monotonic(), 0
    try:
        launch(network, command, ranks, timeout_s=timeout_s)
    except RanksFailed as error:
        print(error, file=sys.stderr)
        status = 1
    seconds = time.monotonic() - start
    title = f"links of {network.rate or 'no set rate'}, {seconds:.1f} s"
    table = Table("node", title=title, title_justify="left")
    for heading in ("sent, bytes", "received, bytes"):
        table.add_column(heading, justify="right")
    for node, count in enumerate(network.traffic()):
        table.add_row(f"node{node}", f"{count.sent:,}", f"{count.received:,}")
    Console(stderr=True).print(table)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
