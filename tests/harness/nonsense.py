"""Nonsense: arguments and documents that must be refused, each by an error that names the place.

`CASES` is the table of arguments, `document_cases` that of documents with one field changed.
"""

import contextlib
import copy
import io
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.simulator.exposure import Exposure
from autopar.cost_model.simulator.streams import Event
from autopar.ir.mesh_levels import Levels
from autopar.plan.buckets import Buckets
from autopar.plan.compression import Compression, Compressions
from autopar.plan.overlap import Overlap
from autopar.plan.partition import Partition
from autopar.plan.pipeline import Pipeline
from autopar.plan.prediction import Prediction, RunnerUp, StagePrediction
from autopar.plan.report_data import ReportData, Traffic
from autopar.plan.throughput import Work
from autopar.profiler.report import Again, Message, Profile, Side
from autopar.report.plan import Plan

NAN, INF = math.nan, math.inf


class Case(NamedTuple):
    """A call that must be refused.

    Attributes:
        kind: what is given nonsense.
        names: the error must contain one of these words.
        said: the nonsense, in words.
        call: does it.
    """

    kind: str
    names: tuple[str, ...]
    said: str
    call: Callable[[], object]


class Outcome(NamedTuple):
    """What came of a case: "refused", "unnamed", "raw" or "accepted", and in how many seconds."""

    what: str
    seconds: float
    message: str


def outcome(case: Case) -> Outcome:
    """Runs a case."""
    begin = time.perf_counter()
    try:
        case.call()
    except (autopar.AutoparError, TypeError, ValueError) as error:
        words = set(re.findall(r"[\w.-]+|\$", str(error).replace("$.", "$ ").replace(".", " . ")))
        words |= set(re.findall(r"[\w.-]+", str(error)))
        what = "refused" if words & set(case.names) else "unnamed"
        return Outcome(what, time.perf_counter() - begin, str(error))
    except Exception as error:
        return Outcome("raw", time.perf_counter() - begin, repr(error))
    return Outcome("accepted", time.perf_counter() - begin, "")


class Model(nn.Module):
    """One layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


INPUTS = (torch.ones(4, 4),)
FOREIGN: list[Any] = ["x", [], {}, b"x", object(), print]
NUMBERS: list[Any] = [True, -1, 1.5, NAN, INF, -INF, 2**80]
COUNT = [*NUMBERS, 0, 2**40, *FOREIGN]
SECONDS = [True, -1, NAN, INF, -INF, 1e300, 2**80, *FOREIGN]
FLAG = [None, 0, 1, 2, 1.5, NAN, *FOREIGN]
NAME = [None, 3, True, NAN, "", *FOREIGN]
OBJECT = [3, True, NAN, *FOREIGN]

COMPILE: Mapping[str, Sequence[Any]] = {
    "model": [None, nn.Linear, *OBJECT],
    "world_size": COUNT,
    "example_inputs": [3, True, NAN, (), {3: INPUTS[0]}, {1, 2}, *FOREIGN],
    "loss_fn": [3, True, NAN, nn.MSELoss, "x", [], {}, object()],
    "optimizer": [None, 3, True, int, nn.Linear, torch.optim.SGD(Model().parameters()), "x", []],
    "strategy": [None, 3, True, NAN, "", "zero4", ("ddp",), *FOREIGN],
    "memory": [
        *NUMBERS,
        0,
        "",
        "G",
        "100",
        "-1GiB",
        "nanGiB",
        "infGiB",
        "1e3GiB",
        "2 QB",
        *FOREIGN,
    ],
    "cluster": OBJECT,
    "plan": [autopar.Strategy(), *OBJECT],
    "batch": [*NAME, "Global"],
    "precision": ["int8", "fp32", torch.int8, torch.float32, *NAME[1:]],
    "lossy": [None, 3, NAN, "int8", ["x"], [3], [""], ["powersgd(rank=-1)"], "x", {}, object()],
    "backend": [*NAME, "eagr"],
    "fallback": FLAG,
    "timeout_s": [None, 0, *SECONDS],
    "time_limit_s": SECONDS,
    "trials": [*NUMBERS, 2**40, *FOREIGN],
}
PLAN = {
    **{name: values for name, values in COMPILE.items() if name not in ("plan", "fallback")},
    "world_size": [None, *COUNT],
    "example_inputs": [None, *COMPILE["example_inputs"]],
    "progress": [None, 3, True, "x", [], {}],
}
del PLAN["timeout_s"], PLAN["trials"]


def _optimizes(value: Any) -> bool:
    """Whether `verify` takes a value as an optimizer, which `compile` does not."""
    return value is None or isinstance(value, torch.optim.Optimizer)


VERIFY = {
    **{name: COMPILE[name] for name in ("model", "plan", "strategy", "memory")},
    "optimizer": [value for value in COMPILE["optimizer"] if not _optimizes(value)],
    "example_inputs": PLAN["example_inputs"],
    "loss": [3, True, NAN, "x", [], {}],
    "double": FLAG,
}
MEASURE: Mapping[str, Sequence[Any]] = {
    "group": OBJECT,
    "collectives": [None, 3, (), "all_reduce", ("x",), (3,), [None], *FOREIGN],
    "sizes": [None, 3, (), (0,), (-1,), (1.5,), (NAN,), (True,), (2**80,), ("x",), *FOREIGN],
    "mesh": [3, {}, {"dp": 0}, {"dp": -1}, {"dp": 1.5}, {3: 1}, {"": 1}, {"dp": 2**80}, "x", []],
    "dtype": [*NAME, "float8"],
    "budget_s": [None, 0, *SECONDS],
    "cache": FLAG,
    "fresh": FLAG,
    "tell": [3, True, "x", [], {}],
}
METHOD = [3, True, NAN, "", "int9", "powersgd(rank=0)", "topk(density=nan)", "sign(rank=x)", [], {}]
STRATEGY: Mapping[str, Sequence[Any]] = {
    "zero": [*COUNT[:-8], 4, {"": True}, {"": 4}, {"": 1.5}, {3: 1}, {"": None}, "x", [1], print],
    "recompute": [*NAME[1:], "some"],
    **dict.fromkeys(("gather_bytes", "reduce_bytes"), (*NUMBERS, 0, "4MiB", *FOREIGN)),
    **dict.fromkeys(("prefetch", "activation_bytes"), (*NUMBERS, *FOREIGN)),
    "batch_semantics": NAME,
    **dict.fromkeys(
        ("tp", "cp", "ep", "pp", "dp_shard", "micro_batches", "stages_per_rank"), COUNT
    ),
    "schedule": [*NAME[1:], "2f2b"],
    "split_points": [3, True, "x", (3,), ("",), ("a", "a"), {}, print],
    "hierarchical": [-1, 0, 1, 1.5, NAN, INF, 2**80, "x", [], {}, print],
    "compress": METHOD,
    "compress_gathers": [*METHOD, "topk"],
    "compress_activations": [*METHOD, "int8"],
    "lossy": [None, 3, True, "int8", ("x",), (3,), ("",), {"x": 1}, print],
    "search": [None, 3, True, "tp", ("x",), (3,), ("",), {"tp": 2}, print],
    "placements": [None, 3, "x", [], {"a": 3}, {3: autopar.Shard(0)}, {"a": {"tp": 3}}, print],
    "keep_sharded": FLAG,
    "sequence_parallel": FLAG,
}
STRATEGY["placements"] += [{"a": autopar.Shard(x)} for x in ("x", 1.5, None, True)]  # type: ignore
COMPRESSION: Mapping[str, Sequence[Any]] = {
    "method": [*NAME, "int9"],
    "rank": COUNT,
    "block": [*COUNT, 4, 12],
    "density": [True, 0, -1, 2, NAN, INF, "x", [], None],
    "threshold": [True, -1, NAN, INF, "x", [], None],
    "feedback": FLAG[1:],
}
CLUSTER: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("name", "device", "backend"), (None, 3, True, "", [], {})),
    **dict.fromkeys(("world_size", "ranks_per_node"), (None, *COUNT)),
    **dict.fromkeys(("device_memory_bytes", "host_memory_bytes"), (*NUMBERS, 0, *FOREIGN)),
    "curves": [None, 3, "x", []],
    "versions": [None, 3, "x", []],
    "provenance": [None, 3, "x", "somebody said so", []],
    "slowdown": [None, 3, "x", {}],
    "uniform": FLAG,
    "topology": [3, "x", {}],
    "figures": [3, "x", {}],
    "link": [3, "x", {}],
}
PATH = [None, 3, True, NAN, "", b"x", [], {}, "missing.json", ".", "nul\0"]
"""Nothing of these can be read."""

OPTIONS: Mapping[str, Sequence[str]] = {
    "plan SCRIPT --world-size": ["x", "-1", "0", "1.5", "nan", "inf", str(2**40), ""],
    "plan SCRIPT --cluster dgx-h100 --nodes": ["x", "-1", "0", "1.5", str(2**40)],
    "plan SCRIPT --world-size 2 --memory": ["x", "-1", "0", "nan", "1e3G", "100", ""],
    "plan SCRIPT --world-size 2 --time-limit": ["x", "-1", "nan", "inf", "1e300"],
    "plan SCRIPT --world-size 2 --tp": ["x", "-1", "0", "1.5", str(2**40)],
    "plan SCRIPT --world-size 2 --micro-batches": ["x", "-1", "0", "1.5", str(2**40)],
    "plan SCRIPT --world-size 2 --strategy": ["x", "", "zero4"],
    "plan SCRIPT --world-size 2 --schedule": ["x", ""],
    "plan SCRIPT --world-size 2 --search": ["x", "tp,x"],
    "plan SCRIPT --world-size 2 --zero": ["x", "=", "a=4", "a=-1", "a=x"],
    "plan SCRIPT --world-size 2 --pin": ["x", "a=S", "a=S(x)", "a=P(sum)"],
    "plan SCRIPT --world-size 2 --compress": ["x", "powersgd(rank=0)"],
    "plan SCRIPT --world-size 2 --precision": ["x", "int8"],
    "plan SCRIPT --world-size 2 --backend": ["x", ""],
    "plan SCRIPT --world-size 2 --cluster": ["missing.json", "."],
    "scale SCRIPT --cluster dgx-h100 --gpus": ["x", "", "-8", "0", "8,x", "1.5", str(2**40)],
    "scale SCRIPT --cluster dgx-h100 --gpus 8 --time-limit": ["x", "-1", "nan", "inf"],
    "scale SCRIPT --cluster dgx-h100 --gpus 8 --strategies": ["x", "tp0", "ddp+x", ""],
    "show missing.json --rank": ["x", "-1", "1.5"],
    "run SCRIPT --nproc": ["x", "-1", "0", "1.5", str(2**40)],
    "profile SCRIPT --nproc": ["x", "-1", "0"],
    "profile SCRIPT --steps": ["x", "-1", "0", "1.5", str(2**40)],
    "measure --nproc": ["x", "-1", "0", str(2**40)],
    "measure --nproc 1 --budget": ["x", "-1", "0", "nan", "inf", "1e300"],
    "measure --nproc 1 --sizes": ["x", "", "0", "-1", "1.5", "nan", "²"],
    "measure --nproc 1 --mesh": ["x", "", "dp=0", "dp=-1", "dp=x", "dp=²", "=2"],
    "measure --nproc 1 --dtype": ["x", ""],
    "collectives --ranks 8 --bytes": ["x", "", "0", "-1", "nan", "1e999", "infGB"],
    "collectives --bytes 1MB --ranks": ["x", "-1", "0", "1.5", str(2**40)],
    "collectives --bytes 1MB --ranks 8 --nodes": ["x", "-1", "0", str(2**40)],
    "collectives --bytes 1MB --ranks 8 --groups": ["x", "-1", "0"],
    "collectives --bytes 1MB --ranks 8 --cluster": ["x", "."],
    "import-nccl-tests missing.log -o out.json --ranks": ["x", "-1", "0"],
    "import-nccl-tests missing.log -o out.json --least-bytes": ["x", "-1", "1.5Q"],
}
"""The last option of each line is given these."""


def given_to(
    kind: str, call: Callable[..., Any], table: Mapping[str, Sequence[Any]]
) -> Iterator[Case]:
    """A case for each bad value of each argument of a function."""
    for name, values in table.items():
        for value in values:
            said = f"{name}={type(value).__name__} {value!r:.40}"
            yield Case(kind, (name,), said, lambda name=name, value=value: call(**{name: value}))


def argument_cases(script: str) -> Iterator[Case]:
    """All of arguments.

    Args:
        script: path of a file with make().
    """
    model, cluster = Model(), Cluster.default(2)
    plan = example_plan()
    yield from given_to(
        "compile", lambda **own: autopar.compile(**{"model": model, **own}), COMPILE
    )
    base = {"model": model, "world_size": 2, "example_inputs": INPUTS, "strategy": "ddp"}
    yield from given_to("plan", lambda **own: autopar.plan(**{**base, **own}), PLAN)
    given = {"model": model, "example_inputs": INPUTS}
    yield from given_to("verify", lambda **own: autopar.verify(**{**given, **own}), VERIFY)
    yield from given_to("measure", autopar.measure, MEASURE)
    yield from given_to("Strategy", autopar.Strategy, STRATEGY)
    small = {"method": "powersgd"}
    yield from given_to("Compression", lambda **own: Compression(**{**small, **own}), COMPRESSION)
    yield from given_to("Cluster", lambda **own: replace(cluster, **own), CLUSTER)
    default: Mapping[str, Sequence[Any]] = {
        "world_size": [None, *COUNT],
        "device": [None, 3, "", []],
    }
    two = {"world_size": 2}
    yield from given_to("Cluster", lambda **own: Cluster.default(**{**two, **own}), default)
    named: Mapping[str, Sequence[Any]] = {"name": [*NAME, "dgx-h1000"], "nodes": COUNT}
    yield from given_to(
        "Cluster", lambda **own: Cluster.named(**{"name": "dgx-h100", **own}), named
    )
    of_nodes = Cluster.named("dgx-h100").of_nodes
    yield from given_to("Cluster", of_nodes, {"nodes": [None, *COUNT]})
    for call in (Cluster.load, Plan.load, Profile.load):
        for path in PATH:
            names = ("path", "missing.json", "nul", "cannot")
            said = f"{call.__qualname__}({path!r})"
            yield Case("file", names, said, lambda call=call, path=path: call(path))
    yield from given_to("plan", plan.diff, {"other": [None, *OBJECT]})
    yield from given_to("plan", plan.mesh_coordinate, {"rank": [None, *NUMBERS, 8, *FOREIGN]})
    yield from command_cases(script)


def command_cases(script: str) -> Iterator[Case]:
    """All of the command line; an exit status of 2 and a message count as an error."""
    for line, values in OPTIONS.items():
        words = [script if word == "SCRIPT" else word for word in line.split()]
        option = words[-1].lstrip("-")
        names = (f"--{option}", option, option.replace("-", "_"), *ALSO.get(option, ()))
        for value in values:
            given = [*words[:-1], f"{words[-1]}={value}"]
            yield Case("command line", names, " ".join(given), lambda given=given: command(given))


ALSO = {"pin": ("placements",), "cluster": ("cannot",)}
"""Words that name an option as well."""


def command(words: Sequence[str]) -> None:
    """Runs a command, and raises what it says where it fails."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(list(words))
        except SystemExit as stop:
            status = stop.code
    if status == 2:
        raise ValueError(said.getvalue())


# -- documents ---------------------------------------------------------------------------------


def example_plan() -> Plan:
    """A plan that says something in every field."""
    parameters = (("head.weight", 4096), ("blocks.0.weight", 1024))
    traffic = Traffic(
        "all_reduce",
        "tp",
        "2 ranks",
        "float32",
        "measured",
        ((8, 1e-4),),
        ((8, 1e-4, 0.1),),
        ((8, 1, 1e-4),),
    )
    picture = ReportData(
        8, (("blocks.0", "forward", 0.0, 0.1),), (0.0, 0.1), (("parameters", (5, 6)),), (traffic,)
    )
    exposure = Exposure("a", "blocks.0", "all_reduce", "tp", 8, 0.1, 0.01, 0.01, 0.01)
    stage = StagePrediction(8, 0.1, 0.2, 8, 8, 8, 1)
    prediction = Prediction(
        step_s=0.3,
        update_s=0.1,
        compute_s=0.1,
        communication_s=0.1,
        exposed_s=0.05,
        peak_bytes=100,
        node_bytes=3,
        memory={"parameters": 100},
        reserved_bytes=128,
        context_bytes=1,
        provenance={"measured": 3},
        waits={"all_reduce": 0.1},
        causes={"the link": 0.1},
        exposures=(exposure,),
        events=(("a", "compute", 0.0, 0.1, "compute"),),
        memory_curve=((0.0, 100),),
        stages=(stage, stage),
        idle=(0.1, 0.2),
        report_data=picture,
        work=Work(8, 64, 1e6, 1e12, "float32"),
        at_rates=((0.5, 0.4),),
    )
    return Plan(
        name="zero3 x tp",
        model="Model",
        fingerprint="abc",
        world_size=8,
        mesh=(("pp", 2), ("dp_shard", 2), ("tp", 2)),
        zero_stages=(("", 3), ("blocks.0", 3)),
        batch="global",
        buckets=Buckets((("head.weight",),), (("head.weight",),), (("blocks.0.weight",),)),
        compressions=Compressions(("bf16",), ("",), ("int8",), "bf16"),
        levels=(Levels("dp_shard", 2, (("all_reduce", 1024),)),),
        overlaps=(Overlap((1.5,), (1.5,), (0.5,), 0),),
        recompute=(("", "none"), ("blocks.0", "full")),
        activation_bytes=1024,
        precision="bfloat16",
        memory_cap=2**30,
        placements=(("head.weight", "S(0)"), ("blocks.0.weight", "R")),
        partitions=(
            Partition(
                "tp", 2, (("head.weight", "S(1)"),), "abc", 4, (("R, S(0) -> P(sum)", ("mm",)),)
            ),
        ),
        pipeline=Pipeline(2, "1f1b", 4, 1, (("head.weight", (1,)), ("blocks.0.weight", (0,))), 4),
        parameter_bytes=parameters,
        prediction=prediction,
        sent_bytes=(("tp", 64),),
        runners_up=(RunnerUp("ddp", 0.4, 200, "slower", 200, ((0.5, 0.5),)),),
        cluster="here (measured)",
        notes=("a note",),
        torch="2.13.0",
    )


def example_profile() -> Profile:
    """A profile that says something in every field."""
    side = Side(
        0.3,
        {"mm": 0.1},
        {"all_reduce": 0.1},
        0.1,
        (Event("a", "tp", 0.0, 0.1, "wait"),),
        ((0.0, 8),),
    )
    message = Message("a", "all_reduce", 8, 0.1, 0.01, "measured")
    again = Again(1.1, {"all_reduce": 1.2}, 0.3, "ddp", 0.2, False, "file")
    return Profile(
        0,
        (0.3,),
        side,
        side,
        (message,),
        {"b": "a"},
        {"operators": 0.2},
        {"measured": 3},
        "here",
        again,
    )


Path_ = tuple[str | int, ...]

NONSENSE: Mapping[type, Sequence[Any]] = {
    bool: [0, 1, 3, 1.5, "x", None, [], {}, NAN],
    int: [True, 1.5, -1, NAN, INF, 10**30, 10**4000, "x", None, [], {}, [[1]]],
    float: [True, NAN, INF, -INF, 10**30, "x", None, [], {}, [[1.0]]],
    str: [3, True, 1.5, None, [], {}, NAN, "\ud800"],
    list: [3, True, "x", None, {}, NAN, {"a": []}],
    dict: [3, True, "x", [], NAN, [{}]],
}
"""What a field of each type of JSON must not hold."""

OPTIONAL = {
    "activation_bytes", "precision", "memory_cap", "pipeline", "prediction", "work", "topology",
    "figures", "link", "device_memory_bytes", "host_memory_bytes", "again",
}  # fmt: skip
FREE = {"graph"}  # networkx's own, of any content


def places(document: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every place in a document; of a list of lists or objects only the first of them."""
    if path:
        yield path, document
    if path and path[-1] in FREE:
        return
    items = document.items() if isinstance(document, dict) else ()
    if isinstance(document, list):
        nested = document[:1] and isinstance(document[0], (dict, list))
        items = enumerate(document[: 1 if nested else 6])
    for key, value in items:
        yield from places(value, (*path, key))


def changed(document: Any, path: Path_, value: Any) -> Any:
    """A copy of a document with another value at a place."""
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def fields_of(path: Path_) -> tuple[str, ...]:
    """The names that an error about a place may use: the last two of it."""
    return tuple(key for key in path if isinstance(key, str))[-2:]


def document_cases(kind: str, read: Callable[[Any], Any], document: Any) -> Iterator[Case]:
    """Every place of a document with every nonsense of its type, unknown fields, missing ones."""
    for path, held in places(document):
        if held is None or path == ("schema_version",):
            continue
        for value in NONSENSE[type(held)]:
            if value is None and path[-1] in OPTIONAL:
                continue
            bad = changed(document, path, value)
            said = f"{path} = {type(value).__name__}"
            yield Case(kind, fields_of(path), said, lambda bad=bad: read(bad))
    for name in document.keys() - {"again"}:
        short = {key: value for key, value in document.items() if key != name}
        yield Case(kind, (name,), f"no {name}", lambda short=short: read(short))
    yield Case(kind, ("stranger",), "a stranger", lambda: read({**document, "stranger": 1}))


def drawn_cases(
    kind: str, read: Callable[[Any], Any], document: Any, seed: int, count: int
) -> Iterator[Case]:
    """Documents with a value of one place at another, of another type, drawn by a seed."""
    draw = random.Random(seed)
    spots = [(path, held) for path, held in places(document) if held is not None]
    while count:
        path, held = draw.choice(spots)
        value = draw.choice([*NONSENSE[type(held)], [[[]]], {"a": {"b": {}}}, deep(200)])
        if value is None or path == ("schema_version",) or (held == [] and value == []):
            continue
        if path[-1] in FREE and isinstance(value, dict):
            continue
        bad = changed(document, path, value)
        count -= 1
        said = f"{path} = {type(value).__name__}"
        yield Case(kind, fields_of(path), said, lambda bad=bad: read(bad))


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


CONTRADICTIONS: Mapping[str, Sequence[tuple[Path_, Any]]] = {
    "mesh": [
        (("world_size",), 9),
        (("world_size",), 2**40),
        (("mesh",), []),
        (("mesh", 0, 0), "x"),
        (("mesh", 1, 0), "pp"),
        (("mesh", 2, 1), 4),
        (("mesh", 1, 0), "cp"),
    ],
    "zero_stages": [
        (("zero_stages",), []),
        (("zero_stages", 0, 1), 4),
        (("zero_stages", 1, 0), ""),
    ],
    "batch": [(("batch",), "x"), (("batch",), "")],
    "batch_semantics": [(("batch_semantics",), "x")],
    "recompute": [(("recompute", 0, 1), "some"), (("recompute", 0, 0), "blocks.9")],
    "precision": [(("precision",), "int8"), (("precision",), "x"), (("precision",), "nn")],
    "placements": [
        (("placements",), []),
        (("placements", 0, 0), "x"),
        (("placements", 0, 1), "x"),
        (("placements", 0, 1), "S(-1)"),
        (("placements", 0, 1), "P(sum)"),
    ],
    "partitions": [
        (("partitions",), []),
        (("partitions", 0, "axis"), "x"),
        (("partitions", 0, "ranks"), 3),
        (("partitions", 0, "parameters", 0, 0), "x"),
        (("partitions", 0, "parameters", 0, 1), "Q"),
        (("partitions", 0, "strategies", 0, 0), "x"),
    ],
    "levels": [(("levels", 0, "intra_node"), 3), (("levels", 0, "axis"), "x")],
    "buckets": [(("buckets", "gather", 0), []), (("buckets", "reduce", 0, 0), "x")],
    "compressions": [
        (("compressions", "gather"), ["bf16", "bf16"]),
        (("compressions", "reduce", 0), "int9"),
        (("compressions", "activations"), "powersgd(rank=0)"),
    ],
    "overlaps": [(("overlaps", 0, "gather", 0), -1.0)],
    "pipeline": [
        (("pipeline", "ranks"), 4),
        (("pipeline", "schedule"), "x"),
        (("pipeline", "uses", 0, 1), []),
        (("pipeline", "uses", 0, 1), [2]),
        (("pipeline", "uses", 0, 0), "x"),
    ],
    "prediction": [
        (("prediction", "stages"), [asdict(StagePrediction(8, 0.1, 0.2, 8, 8, 8, 1))]),
        (("prediction", "events", 0, 3), 0.0),
        (("prediction", "report_data", "memory", 0, 1), [1]),
        (("prediction", "step_s"), -1.0),
    ],
    "schema_version": [(("schema_version",), v) for v in (0, -1, 99, "5", None, [], NAN, 5.5)],
}
"""Changes of the example plan after which its fields contradict each other."""


def contradiction_cases() -> Iterator[Case]:
    """All of them; the event is moved to after its end first."""
    document = example_plan().to_dict()
    document["prediction"]["events"][0][2] = 0.05
    for field, changes in CONTRADICTIONS.items():
        for path, value in changes:
            bad = changed(document, path, value)
            names = (field, *fields_of(path), *(("placements",) if field == "mesh" else ()))
            said = f"{path} = {value!r:.30}"
            yield Case("plan document", names, said, lambda bad=bad: Plan.from_dict(bad))


TEXTS: Mapping[str, bytes] = {
    "empty": b"",
    "cut": b'{"name": ',
    "deep-list": b"[" * 100_000,
    "deep-closed": b"[" * 100_000 + b"]" * 100_000,
    "deep-object": b'{"name":' * 100_000,
    "digits": b"1" * 100_000,
    "nan": b"NaN",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "list": b"[]",
    "object": b"{}",
    "binary": bytes(range(256)),
    "utf-16": '{"name": "x"}'.encode("utf-16"),
}


def file_cases(folder: Path) -> Iterator[Case]:
    """Files that are no JSON, or not of any use; errors name the file."""
    for name, content in TEXTS.items():
        path = folder / f"{name}.json"
        path.write_bytes(content)
        for call in (Cluster.load, Plan.load, Profile.load):
            said = f"{call.__qualname__} of {name}"
            yield Case("file", (path.name,), said, lambda call=call, path=path: call(path))


def profile_reader(folder: Path) -> Callable[[Any], Any]:
    """Reads a profile from a document, by a file."""
    path = folder / "rank0.json"

    def read(document: Any) -> Profile:
        path.write_text(json.dumps(document))
        return Profile.load(path)

    return read


def all_cases(folder: Path, seed: int) -> Iterator[Case]:
    """Every case.

    Args:
        folder: for files.
        seed: of the documents that are drawn.
    """
    script = folder / "make.py"
    script.write_text(
        "from tests.harness.nonsense import INPUTS, Model\n\n"
        "def make():\n    return Model(), INPUTS\n"
    )
    yield from argument_cases(str(script))
    plan = example_plan().to_dict()
    cluster = json.loads(json.dumps(Cluster.named("dgx-h100").to_dict()))
    profile = json.loads(json.dumps(asdict(example_profile())))
    yield from contradiction_cases()
    for kind, read, document in (
        ("plan document", Plan.from_dict, plan),
        ("cluster document", Cluster.from_dict, cluster),
        ("profile document", profile_reader(folder), profile),
    ):
        yield from document_cases(kind, read, document)
        yield from drawn_cases(kind, read, document, seed, 100)
    yield from file_cases(folder)


LIKELY: Mapping[type, Sequence[Any]] = {
    bool: [True, False],
    int: [0, 1, 2, 3, 2**20, 2**62],
    float: [0.0, 1e-300, 1.0, 1e300],
    str: ["", "x", "reduce", "pp", "S(0)", "R"],
    list: [[]],
    dict: [{}],
}
"""Values that a place of each type may hold, whether or not they fit to the rest."""


def likely_documents(document: Any) -> Iterator[tuple[str, Any]]:
    """What was changed, and a copy of the document with one value of its type, or none."""
    for path, held in places(document):
        values = [*LIKELY.get(type(held), ()), None]
        if isinstance(held, list):
            values += [held + held, held * 3, held[::-1]]
        for value in values:
            if held is not None and value != held:
                yield f"{path} = {value!r:.40}", changed(document, path, value)
