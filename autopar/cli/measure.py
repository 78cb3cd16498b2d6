"""`autopar measure`: times collectives of this machine, or of torchrun's ranks.

Copies between GPUs and host memory are timed as well, and files of a given folder.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.capture.model_info import default_device
from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import budget_s, processes, ranks, size
from autopar.cli.plain_console import PlainConsole, plain_table
from autopar.cli.script import default_processes, launch
from autopar.core.common.world import rank
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.measurement.host_copy_bench import measure_host
from autopar.cost_model.measurement.measure import DTYPES, SIZES, measure
from autopar.cost_model.measurement.sampling import ReportProgress
from autopar.cost_model.measurement.storage_bench import measure_storage
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.start import ensure_process_group
from autopar.session.launchers import adopt_launcher

STORAGE_S, HOST_S = 8.0, 3.0
"""Seconds to spend on storage, and on copies to and from host memory."""

TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "measure",
        "time the collectives of this machine, and keep the times for later plans",
        "autopar measure --nproc 4 --output here.json",
        "Under torchrun, times the collectives of its ranks on all nodes. Otherwise "
        "launches --nproc processes of this machine.",
    )
    add = parser.add_argument
    add("--nproc", type=processes, help="processes to launch on this machine")
    add("--output", metavar="FILE", help="also write the cluster as JSON")
    add("--budget", type=budget_s, default=40.0, help="approximate seconds to spend")
    add("--dtype", default="float32", choices=DTYPES)
    add("--sizes", type=sizes_of, default=SIZES, help="such as 64KiB,1MiB,16MiB")
    add("--mesh", type=mesh_of, help="only groups along the axes of this mesh, such as dp=2,tp=4")
    add("--offload-dir", metavar="DIR", help="also time the storage under this folder")
    add("--no-cache", action="store_true", help="neither read nor write the cache")
    add("--force", action="store_true", help="measure even if the cached times still hold")
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def sizes_of(text: str) -> tuple[int, ...]:
    """The sizes in a text such as "64KiB,1MiB", in bytes."""
    return tuple(size(part) for part in text.split(","))


def mesh_of(text: str) -> dict[str, int]:
    """The axes in a text such as "dp=2,tp=4"."""
    axes = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and number for name, _, number in axes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh such as dp=2,tp=4")
    if len({name for name, _, _ in axes}) != len(axes):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    try:
        return {name: ranks(number) for name, _, number in axes}
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh: {error}") from None


def run(options: argparse.Namespace) -> int:
    """`autopar measure`."""
    adopt_launcher()
    if "RANK" not in os.environ:
        return _launch(options)
    if options.nproc is not None:
        raise StrategyError("--nproc under torchrun: it has launched the processes already")
    ensure_process_group(default_device(), None, TIMEOUT_S)
    try:
        _measure(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _launch(options: argparse.Namespace) -> int:
    """Runs this command as ranks of this machine."""
    nproc = default_processes() if options.nproc is None else options.nproc
    if nproc == 1:
        _measure(options)
        return 0
    words = ["--budget", str(options.budget), "--dtype", options.dtype]
    words += ["--sizes", ",".join(map(str, options.sizes))]
    words += ["--output", options.output] if options.output else []
    words += ["--offload-dir", options.offload_dir] if options.offload_dir else []
    mesh = ",".join(f"{name}={size}" for name, size in (options.mesh or {}).items())
    words += ["--mesh", mesh] if mesh else []
    for name in ("no_cache", "force", "json"):
        words += [f"--{name.replace('_', '-')}"] * getattr(options, name)
    return launch("-m", nproc, ["autopar", "measure", *words])


def _measure(options: argparse.Namespace) -> None:
    console = PlainConsole(stderr=options.json)
    with _progress(console) as tell:
        cluster = measure(
            sizes=options.sizes,
            mesh=options.mesh,
            dtype=options.dtype,
            budget_s=options.budget,
            cache=not options.no_cache,
            fresh=options.force,
            progress=tell,
        )
    if options.offload_dir:
        timed = run_on_all_ranks(lambda: measure_storage(options.offload_dir, STORAGE_S))
        cluster = replace(cluster, storage=timed)
    device = default_device()
    if device.type == "cuda":
        timed = run_on_all_ranks(lambda: measure_host(device, HOST_S))
        cluster = replace(cluster, host=timed)
    if rank() != 0:
        return
    if options.output:
        cluster.save(options.output)
    if options.json:
        print_json(cluster.to_dict())
    else:
        console.print(table(cluster))


@contextmanager
def _progress(console: PlainConsole) -> Iterator[ReportProgress | None]:
    """A progress bar on rank 0; None on other ranks."""
    if rank() != 0:
        yield None
        return
    columns = TextColumn("measuring"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda done: progress.update(task, completed=done)


def table(cluster: Cluster) -> Table:
    """Each curve in a row: milliseconds by size, GB/s at the largest size, error bar."""
    sizes = {n for entry in cluster.curves.values() for n in entry.curve.bytes}
    transfers = _curves_of_transfers(cluster)
    shown = _spread_out(sizes or {n for curve in transfers.values() for n in curve.bytes})
    right = ("group", "at once", *map(in_units, shown), "GB/s", "±")
    drawn = plain_table(f"{cluster.name}, {cluster.provenance}", ["collective"], right)
    drawn.padding = (0, 1, 0, 0)
    drawn.caption = "groups: nodes x ranks on each, at once; times in ms"
    if not cluster.curves:
        drawn.caption = "one process: no collectives"
    for name, curve in transfers.items():
        rate = f"{curve.bytes[-1] / curve.seconds[-1] / 1e9:.3g}"
        times = (f"{curve(n) * 1e3:.3g}" for n in shown)
        drawn.add_row(name, "", "", *times, rate, f"{curve.error(curve.bytes[-1]):.0%}")
    for key, entry in sorted(cluster.curves.items()):
        curve = entry.curve
        drawn.add_row(
            key.collective,
            f"{key.shape.nodes}x{key.shape.ranks_per_node}",
            str(key.shape.groups),
            *(f"{curve(n) * 1e3:.3g}" if n <= curve.bytes[-1] else "" for n in shown),
            f"{curve.bytes[-1] / curve.seconds[-1] / 1e9:.3g}",
            f"{sorted(curve.error(n) for n in curve.bytes)[len(curve.bytes) // 2]:.0%}",
        )
    return drawn


def _curves_of_transfers(cluster: Cluster) -> dict[str, Curve]:
    """Measured curves of files and of host memory by the names of their rows."""
    named = (
        (("storage write", "storage read"), cluster.storage),
        (("to host", "from host"), cluster.host),
    )
    return {
        name: curve
        for names, times in named
        if times is not None
        for name, curve in zip(names, (times.write, times.read), strict=True)
    }


def _spread_out(sizes: set[int]) -> list[int]:
    """Up to four sizes from the smallest to the largest."""
    ascending, steps = sorted(sizes), min(4, len(sizes))
    return [ascending[i * (len(sizes) - 1) // max(1, steps - 1)] for i in range(steps)]


def in_units(nbytes: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, whole in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= whole:
            return f"{nbytes / whole:.3g} {unit}"
    return f"{nbytes} B"
