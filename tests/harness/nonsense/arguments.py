"""Arguments that must be refused, of every public function and command."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cli.main import main
from autopar.core.plan.compression import Compression
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.session.profiler.report import Profile
from tests.harness.nonsense.case import INF, NAN, Case
from tests.harness.nonsense.examples import example_plan


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
    "precision": ["int8", "fp64", torch.int8, torch.float32, *NAME[1:]],
    "reduce_precision": ["fp16", "fp32", torch.bfloat16, *NAME[1:]],
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
    "reduce_precision": ["fp16", torch.bfloat16, *NAME[1:]],
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
    "plan SCRIPT --world-size 2 --reduce-precision": ["x", "fp16"],
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
    yield from given_to("plan", Layout(plan).coordinate, {"rank": [None, *NUMBERS, 8, *FOREIGN]})
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
