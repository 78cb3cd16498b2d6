"""`autopar import-nccl-tests`: a cluster from outputs of nccl-tests."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import ranks, size
from autopar.cli.plain_console import PlainConsole, plain_table
from autopar.cost_model.cluster.import_nccl_tests import import_nccl_tests
from autopar.formatting import human_bytes


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "import-nccl-tests",
        "make a cluster from outputs of nccl-tests",
        "autopar import-nccl-tests all_reduce.log all_gather.log -o cluster.json",
        "Reads text (with any launcher's prefixes), JSON of -J, or CSV: one file for "
        "each run of one test program, of groups of one size. Times are imported, bandwidths only "
        "checked. Options give the facts that the files lack.",
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE")
    add("-o", "--output", required=True, metavar="FILE", help="JSON file to write")
    add("--name", help="name of the cluster")
    add("--device", help="name of the GPUs, if the files lack it")
    add("--ranks", type=ranks, help="number of ranks, if the files lack it")
    add("--ranks-per-node", type=ranks, help="ranks of a node, if the files list no hosts")
    add("--collective", help="such as all_reduce, if the files lack it")
    add("--least-bytes", type=size, help="smallest size to import, such as 8M")
    add(
        "--uniform",
        action="store_true",
        help="groups of one shape take equally long wherever they are (behind switches): allow "
        "times of other shapes to be derived",
    )
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """`autopar import-nccl-tests`."""
    cluster = import_nccl_tests(
        options.files,
        name=options.name,
        device=options.device,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        collective=options.collective,
        least_bytes=options.least_bytes,
        uniform=options.uniform,
    )
    cluster.save(options.output)
    if options.json:
        print_json(cluster.to_dict())
        return
    right = ("sizes", "from", "to", "takes", "GB/s at most")
    drawn = plain_table(cluster.name, ("collective", "groups"), right)
    for key, entry in sorted(cluster.curves.items()):
        curve = entry.curve
        speeds = [size / time / 1e9 for size, time in zip(curve.bytes, curve.seconds, strict=True)]
        drawn.add_row(
            key.collective,
            str(key.shape),
            str(len(curve.bytes)),
            human_bytes(curve.bytes[0]),
            human_bytes(curve.bytes[-1]),
            f"{curve.seconds[0] * 1e6:.0f} us up",
            f"{max(speeds):.1f}",
        )
    console = PlainConsole()
    console.print(drawn)
    for key, entry in sorted(cluster.curves.items()):
        console.print(f"{key}: {entry.provenance}", markup=False)
