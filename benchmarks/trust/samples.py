"""`SAMPLES`: a good file, or folder of files, of each kind that autopar reads, and its reader."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.cluster_cache import read_cluster, write_cluster
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing
from autopar.cost_model.memory.workspace import Workspace
from autopar.cost_model.nccl.nccl_tests import read_tables
from autopar.passes.core.reproducer import Reproducer
from autopar.passes.core.reproducer import load as load_reproducer
from autopar.passes.core.reproducer import save as save_reproducer
from autopar.passes.core.runner import apply_pass
from autopar.passes.pipeline import build_pass_pipeline
from autopar.runtime.parameters.safetensors_files import INDEX, SafetensorsFiles
from autopar.session.profiler.report import Profile, find
from autopar.train.checkpoints.checkpointer import Checkpointer
from autopar.train.checkpoints.plain_data import load_plain
from tests.cost_model.nccl.test_nccl_tests import NEW, in_json
from tests.harness.nonsense.examples import example_plan, example_profile
from tests.passes.golden import two_layers

FACTS = {"machine": "this one"}
KEY = "aten.sin.default(float32 cpu [8]/(1,))"


@dataclass(frozen=True)
class Sample:
    """A kind of file.

    Attributes:
        make: writes good files into an empty folder.
        read: reads the folder as autopar does; raises Lost if something whole was not read.
        targets: pattern of the files that may be broken.
    """

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    targets: str = "*"


class LostError(Exception):
    """Something whole is gone, or was read as something else."""


def _make_profile(folder: Path) -> None:
    example_profile().save(folder / "rank0.json")


def _read_profile(folder: Path) -> None:
    find([Profile.load(folder / "rank0.json")])


def _table(name: str) -> Sample:
    text = in_json() if name.endswith("json") else NEW if name.endswith("log") else CSV
    return Sample(
        lambda folder: (folder / name).write_text(text),
        lambda folder: [table.curve() for table in read_tables(folder / name)],
    )


CSV = """# collective: all_reduce
# ranks: 8
# nodes: 1
size_bytes,count,dtype,oop_time_us,oop_algbw,oop_busbw,ip_time_us,ip_algbw,ip_busbw
1048576,262144,float,50.00,20.97,36.70,52.00,20.16,35.29
8388608,2097152,float,200.00,41.94,73.40,200.00,41.94,73.40
"""


@contextlib.contextmanager
def _cache(folder: Path) -> Any:
    os.environ["AUTOPAR_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["AUTOPAR_CACHE"]


def _make_operators(folder: Path) -> None:
    with _cache(folder):
        times = OperatorTimes.load("cpu")
        timed = {KEY: Timing(1e-6, 8.0, 64, "2026-11-28")}
        OperatorTimes(times.setting, True, timed, {KEY: 1e-6}).save()


def _read_operators(folder: Path) -> None:
    with _cache(folder):
        dict(OperatorTimes.load("cpu").times)


def _make_scratch(folder: Path) -> None:
    with _cache(folder):
        empty = Workspace.load("cpu")
        Workspace("cpu", empty.setting, True, {KEY: 64}).save()


def _read_scratch(folder: Path) -> None:
    with _cache(folder):
        dict(Workspace.load("cpu").nbytes)


def _make_clusters(folder: Path) -> None:
    with _cache(folder):
        write_cluster(FACTS, Cluster.default(2, "cpu"), 1.0)


def _read_clusters(folder: Path) -> None:
    with _cache(folder):
        read_cluster(FACTS)


def _make_reproducer(folder: Path) -> None:
    world = two_layers()
    passes = build_pass_pipeline(world.plan(3), 0, "gloo")[:4]
    save_reproducer(Reproducer(world.graph(0), passes)).rename(folder / "pass.json")


def _read_reproducer(folder: Path) -> None:
    found = load_reproducer(folder / "pass.json")
    graph = found.graph
    with contextlib.suppress(Exception):  # the command that reads it prints what passes raise
        for each in found.pipeline:
            graph = apply_pass(each, graph)


def _make_weights(folder: Path) -> None:
    files = {f"{number}.weight": f"model-{number}.safetensors" for number in range(2)}
    for name, file in files.items():
        save_file({name: torch.ones(4, 4)}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _read_weights(folder: Path) -> None:
    found = SafetensorsFiles.find(folder)
    found.read_into({name: torch.empty(shape) for name, shape in found.shapes.items()})


def _checkpointer(folder: Path) -> tuple[Checkpointer, nn.Linear]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpointer(folder, model, optimizer), model


def _make_checkpoints(folder: Path) -> None:
    """After steps 1 and 2; weights are the number of the step."""
    checkpointer, model = _checkpointer(folder)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        checkpointer.save(step, wait=True)


def _read_checkpoints(folder: Path) -> None:
    checkpointer, model = _checkpointer(folder)
    if (step := checkpointer.resume()) not in (1, 2) or not bool((model.weight == step).all()):
        raise LostError(f"resumed {step} with {model.weight}")


def _read_forged(folder: Path) -> None:
    """Reads a checkpoint whose checksums fit what was changed, so that values may be any."""
    checkpointer, _ = _checkpointer(folder)
    if (step := checkpointer.resume()) not in (1, 2):
        raise LostError(f"resumed {step}")


SAMPLES: dict[str, Sample] = {
    "plan": Sample(
        lambda folder: example_plan().save(folder / "plan.json"),
        lambda folder: Plan.load(folder / "plan.json"),
    ),
    "cluster": Sample(
        lambda folder: Cluster.default(2, "cpu").save(folder / "cluster.json"),
        lambda folder: Cluster.load(folder / "cluster.json"),
    ),
    "profile": Sample(_make_profile, _read_profile),
    "nccl-tests as text": _table("run.log"),
    "nccl-tests as JSON": _table("run.json"),
    "nccl-tests as CSV": _table("run.csv"),
    "cached operators": Sample(_make_operators, _read_operators, "operators/*"),
    "cached scratch": Sample(_make_scratch, _read_scratch, "scratch/*"),
    "cached clusters": Sample(_make_clusters, _read_clusters, "clusters/*"),
    "reproducer": Sample(_make_reproducer, _read_reproducer),
    "safetensors": Sample(_make_weights, _read_weights),
    "weights of torch.save": Sample(
        lambda folder: torch.save(nn.Linear(4, 4).state_dict(), folder / "model.bin"),
        lambda folder: load_plain(folder / "model.bin"),
    ),
    "checkpoint": Sample(_make_checkpoints, _read_checkpoints, "step-2/*"),
    "forged checkpoint": Sample(_make_checkpoints, _read_forged, "step-2/*"),
}
