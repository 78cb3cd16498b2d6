"""`replay_step`: runs a lowered step on all ranks with stand-ins for collectives, and times it.

An operator that is run by itself looks up to three times faster than in a step, and one that is
run among others on a host that ranks share may take any time. So the whole generated program of a
rank runs, on random values, with a clock between its operators: what the cache holds, which memory
is fresh, what the other ranks compute meanwhile and what Python does in between are as in a step.
A collective does what it does on the calling thread (allocates, copies), and sends one number: so
issuing it costs what it will, and a wait lasts as long as the ranks are out of step.

The seconds of an operator are a mean over ranks, rounds and all nodes alike, scaled so that they
add up to a middling round: means add up where medians do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch import BoxedCodeGen
from autopar.cost_model.collectives import collective_of, is_wait, issuer
from autopar.cost_model.host import boot_id, free_memory_bytes
from autopar.cost_model.kernels.random_inputs import index_bound, random_like
from autopar.cost_model.kernels.signature import time_key
from autopar.cost_model.memory.peak import simulate_memory
from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.roles import Parameter

c10d = torch.ops._c10d_functional
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_MEMORY_SHARE = 0.6  # of what is free, that the tensors of all ranks here may take


@dataclass(frozen=True)
class ReplayGroup:
    """Those who rehearse together.

    Attributes:
        line_up: waits for all of them.
        gather: the value of each, on each.
        sharing: how many share this machine, be they on other nodes of an emulated cluster.
        group: the name of their process group; None if nothing can be sent.
    """

    line_up: Callable[[], None]
    gather: Callable[[Any], list[Any]]
    sharing: int = 1
    group: str | None = None

    @classmethod
    def live(cls) -> ReplayGroup:
        """All ranks of the default process group, all of which call this."""

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values

        def line_up() -> None:
            dist.all_reduce(torch.zeros(1))

        machines = gather(boot_id())
        world = dist.group.WORLD
        assert world is not None
        return cls(line_up, gather, machines.count(boot_id()), world.group_name)


SINGLE_RANK = ReplayGroup(lambda: None, lambda value: [value])


def replay_step(
    graphs: Sequence[TrainingGraph], ranks: ReplayGroup = SINGLE_RANK, *, budget_s: float = 2.0
) -> dict[str, float]:
    """Seconds of each operator of lowered graphs on a CPU, by `time_key`; every rank calls it.

    Args:
        graphs: of this rank; they take turns.
        ranks: those who do the same now.
        budget_s: seconds to spend, but three rounds of each graph at least.

    Returns:
        The same on every rank. Nothing if a graph cannot be run, or needs too much memory.
    """
    stages = _prepared(graphs, ranks)
    if not stages:
        return {}
    first = max(ranks.gather(sum(sum(stage.run(ranks)) for stage in stages)))
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, round(budget_s / first)))
    runs = [[stage.run(ranks) for stage in stages] for _ in range(rounds)]
    found: dict[str, list[float]] = {}
    for index, stage in enumerate(stages):
        mine = [run[index] for run in runs]
        scale, tables = _scaled(stage.keys, mine, ranks)
        for table in tables:
            for key, times in table.items():
                found.setdefault(key, []).extend(scale * time for time in times)
    for stage in stages:
        stage.release()
    return {key: statistics.mean(times) for key, times in found.items()}


def _scaled(
    keys: Sequence[str | None], runs: Sequence[Sequence[float]], ranks: ReplayGroup
) -> tuple[float, list[dict[str, list[float]]]]:
    """What to multiply means by, and the mean seconds of each node of every rank, by key."""
    means = [statistics.mean(column) for column in zip(*runs, strict=True)]
    table: dict[str, list[float]] = {}
    for name, mean in zip(keys, means, strict=True):
        if name is not None:
            table.setdefault(name, []).append(mean)
    totals = [_total(keys, run) for run in runs]
    everyone = ranks.gather((totals, table))
    rounds = [sum(row) for row in zip(*[totals for totals, _ in everyone], strict=True)]
    scale = statistics.median(rounds) / statistics.mean(rounds)
    return scale, [table for _, table in everyone]


def _total(keys: Sequence[str | None], run: Sequence[float]) -> float:
    return sum(taken for name, taken in zip(keys, run, strict=True) if name is not None)


def _prepared(graphs: Sequence[TrainingGraph], ranks: ReplayGroup) -> list[Stage]:
    """The graphs ready to run, having run once; none if that fails on any rank."""
    need = max((simulate_memory(graph).peak for graph in graphs), default=0)
    free = free_memory_bytes()
    stages: list[Stage] = []
    if all(ranks.gather(not free or need * ranks.sharing < _MEMORY_SHARE * free)):
        try:
            stages = [Stage(graph) for graph in graphs]
            for stage in stages:
                stage.run(SINGLE_RANK)
        except Exception:  # whatever an operator dislikes about random values: it is timed alone
            stages = []
    return stages if all(ranks.gather(bool(stages))) else []


class Stage:
    """One lowered graph as a program with a clock in it.

    Attributes:
        keys: what each interval between two ticks of the clock belongs to; None if to nothing.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.keys: list[str | None] = []
        self._ticks: list[float] = []
        self._group: str | None = None
        self._sent: dict[str, torch.Tensor] = {}
        with torch.random.fork_rng([]):
            self._arguments = arguments_of(graph)
        module = fx.GraphModule(dict(graph.constants), graph.copy().graph)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        known = [(node, time_key(node), issuer(node) if is_wait(node) else None) for node in calls]
        for node, key, source in known:  # nodes that have been replaced can no longer be asked
            self._watch(module.graph, node, key, source)
        module.graph.set_codegen(BoxedCodeGen())
        module.recompile()
        self._program = module.forward

    def run(self, ranks: ReplayGroup) -> list[float]:
        """Seconds of each interval of one run, from a common start."""
        self._ticks.clear()
        self._group = ranks.group
        with torch.random.fork_rng([]), torch.no_grad():
            ranks.line_up()
            self._tick()
            self._program(list(self._arguments))
        return [after - before for before, after in pairwise(self._ticks)]

    def release(self) -> None:
        """Lets go of its tensors, which it and its program, holding each other, would keep."""
        self._arguments.clear()

    def _tick(self) -> None:
        self._ticks.append(time.perf_counter())

    def _watch(self, graph: fx.Graph, node: fx.Node, key: str, source: fx.Node | None) -> None:
        """Puts a tick behind a node, and a stand-in in the place of a collective."""
        self.keys.append(key)
        sends = collective_of(node) is not None
        if sends:
            node.target = self._sender(node.name, _stand_in(node))
        elif is_wait(node):
            node.target = self._waiter(source.name if source is not None else "")
        with graph.inserting_after(node):
            last = graph.call_function(self._tick)
        if sends:
            self.keys.append(None)
            with graph.inserting_after(last):
                last = graph.call_function(_arrive, (node,))
            with graph.inserting_after(last):
                graph.call_function(self._tick)

    def _sender(self, name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a collective: its work on tensors, and a number that is sent."""

        def send(*arguments: Any) -> Any:
            if self._group is not None:
                self._sent[name] = c10d.all_reduce_(torch.zeros(1), "sum", self._group)
            return stand_in(*arguments)

        return send

    def _waiter(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What stands for a wait: until the number has come."""

        def wait(pending: torch.Tensor) -> torch.Tensor:
            sent = self._sent.pop(name, None)
            if sent is not None:
                c10d.wait_tensor(sent)
            return pending

        return wait


def _stand_in(node: fx.Node) -> Callable[..., Any]:
    """What issuing a collective does to tensors on the calling thread."""
    name = node.target.name().partition("::")[2].partition(".")[0]  # type: ignore[union-attr]
    many = isinstance(node.meta["val"], (list, tuple))
    like = [(t.shape, t.dtype, t.device) for t in tensors(node)]

    def given_back(given: Any, *options: Any) -> Any:
        return given

    def copied(given: Any, *options: Any) -> Any:
        return [t.clone() for t in given] if many else given.clone()

    def fresh(*options: Any) -> Any:
        made = [torch.empty(shape, dtype=d, device=place) for shape, d, place in like]
        return made if many else made[0]

    if name.endswith("_"):
        return given_back
    return copied if name.startswith("all_reduce") else fresh


def _arrive(received: Any) -> None:
    """Writes what was received, as another thread does in a step."""
    for tensor in received if isinstance(received, (list, tuple)) else [received]:
        tensor.fill_(0.01)


def arguments_of(graph: TrainingGraph) -> list[torch.Tensor]:
    """Random values for the inputs of a graph; integers stay inside of the tables they index."""
    values = []
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        value = random_like(node.meta["val"], 0, _bound(node))
        if isinstance(role, Parameter) and value.dtype.is_floating_point:
            value = (value - 0.5) * 0.1  # as a model starts: no overflow, no denormal numbers
        values.append(value)
    return values


def _bound(placeholder: fx.Node) -> int:
    """What the integers of an input must stay below, by the tables that they reach."""
    found: list[int] = []
    seen, queue = {placeholder}, [placeholder]
    while queue:
        for user in queue.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            seen.add(user)
            bound = index_bound(user)
            if bound > 1:
                found.append(bound)
            elif not any(t.dtype.is_floating_point for t in tensors(user)):
                queue.append(user)
    return min(found, default=1)
