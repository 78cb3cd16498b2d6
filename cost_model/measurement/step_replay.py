"""`replay_step`: runs a lowered step on all ranks with stand-ins for collectives, and times it.

An operator that runs by itself appears up to three times faster than in a step. The whole generated
program of a rank therefore runs on random values, with a clock between its operators. Caches, fresh
memory, the other ranks and Python's overhead are then as in a step. A collective does its work on
the calling thread (allocates, copies) and sends one number: issuing it costs as much as in a step,
and its wait lasts as long as the ranks are out of step.

Where ranks outnumber the cores, the wall time of an operator depends on how many ranks wait. Its
seconds are then CPU time at an equal part of the cores, and waits take the rest of the step.

The seconds of an operator are a mean over ranks, rounds and equal nodes, scaled to add up to the
median round. Means add up, medians do not.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch import BoxedCodeGen
from autopar.core.common.groups import cpu_group, gather_values
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.messages import collective_of, is_wait, issuer
from autopar.core.ir.roles import Parameter
from autopar.core.ir.signature import time_key
from autopar.core.random_inputs import index_bound, random_like
from autopar.cost_model.host import boot_id, free_memory_bytes
from autopar.cost_model.memory.peak import simulate_memory

log = logging.getLogger(__name__)

c10d = torch.ops._c10d_functional
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_MEMORY_SHARE = 0.6  # largest share of free memory for the tensors of all ranks here
_UPDATED = 4  # an update reads or writes parameters, gradients and, for AdamW, two states
_SWEPT = 64 * 2**20  # most bytes of an update that matter to a cache


@dataclass(frozen=True)
class ReplayGroup:
    """The ranks that replay together.

    Attributes:
        line_up: waits for all of them.
        gather: returns the value of each, on each.
        sharing: number of ranks on this machine, all nodes of an emulated cluster included.
        group: name of their process group; None if nothing can be sent.
    """

    line_up: Callable[[], None]
    gather: Callable[[Any], list[Any]]
    sharing: int = 1
    group: str | None = None

    @classmethod
    def live(cls) -> ReplayGroup:
        """All ranks of the default process group, all of which call this."""
        group = cpu_group()
        gather = partial(gather_values, group=group)

        def line_up() -> None:
            dist.all_reduce(torch.zeros(1), group=group)

        machines = gather(boot_id())
        return cls(line_up, gather, machines.count(boot_id()), group.group_name)


SINGLE_RANK = ReplayGroup(lambda: None, lambda value: [value])


def replay_step(
    graphs: Sequence[TrainingGraph],
    ranks: ReplayGroup = SINGLE_RANK,
    *,
    budget_s: float = 2.0,
    ranks_per_core: float = 1.0,
) -> dict[str, float]:
    """Seconds of each operator of lowered graphs on a CPU, by `time_key`; every rank calls it.

    The graphs of a rank take turns for `budget_s` seconds, three rounds of each at least. The
    result is the same on every rank. It lacks graphs that cannot be run, and is empty if one needs
    too much memory. `ranks_per_core` is 1 where each rank has a core.
    """
    with _prepared(graphs, ranks, ranks_per_core) as programs:
        return _times(programs, ranks, budget_s) if programs else {}


def _times(
    programs: Sequence[TimedProgram], ranks: ReplayGroup, budget_s: float
) -> dict[str, float]:
    first = max(ranks.gather(sum(sum(program.run(ranks)) for program in programs)))
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, round(budget_s / first)))
    runs = [[program.run(ranks) for program in programs] for _ in range(rounds)]
    times: dict[str, list[float]] = {}
    for index, program in enumerate(programs):
        scale, tables = _scaled(program.keys, [run[index] for run in runs], ranks)
        for table in tables:
            for key, seconds in table.items():
                times.setdefault(key, []).extend(scale * s for s in seconds)
    return {key: statistics.mean(seconds) for key, seconds in times.items()}


def _scaled(
    keys: Sequence[str | None], runs: Sequence[Sequence[float]], ranks: ReplayGroup
) -> tuple[float, list[dict[str, list[float]]]]:
    """The factor for means, and the mean seconds of each node on every rank, by key."""
    means = [statistics.mean(column) for column in zip(*runs, strict=True)]
    table: dict[str, list[float]] = {}
    for key, mean in zip(keys, means, strict=True):
        if key is not None:
            table.setdefault(key, []).append(mean)
    totals = [
        sum(seconds for key, seconds in zip(keys, run, strict=True) if key is not None)
        for run in runs
    ]
    by_rank = ranks.gather((totals, table))
    rounds = [sum(row) for row in zip(*[totals for totals, _ in by_rank], strict=True)]
    scale = statistics.median(rounds) / statistics.mean(rounds)
    return scale, [table for _, table in by_rank]


@contextlib.contextmanager
def _prepared(
    graphs: Sequence[TrainingGraph], ranks: ReplayGroup, ranks_per_core: float
) -> Iterator[Sequence[TimedProgram]]:
    """The programs of graphs that ran once on every rank; released at the end."""
    need = max((simulate_memory(graph).peak for graph in graphs), default=0)
    free = free_memory_bytes()
    suffices = all(ranks.gather(not free or need * ranks.sharing < _MEMORY_SHARE * free))
    with contextlib.ExitStack() as made:
        programs = dict[int, TimedProgram]()
        for index, graph in enumerate(graphs) if suffices else ():
            try:
                program = TimedProgram(graph, ranks_per_core)
                made.callback(program.release)
                # Without messages: a program that fails on one rank would leave others waiting.
                program.run(SINGLE_RANK)
            except Exception as error:  # its operators are then timed alone
                log.debug("a step cannot be replayed: %r", error)
            else:
                programs[index] = program
        ran = set(programs).intersection(*ranks.gather(set(programs)))
        yield [programs[index] for index in sorted(ran)]


class TimedProgram:
    """A lowered graph as a program with a clock in it.

    `keys` has the `time_key` of each interval between two ticks; None for those that do not count.
    """

    def __init__(self, graph: TrainingGraph, ranks_per_core: float = 1.0) -> None:
        self.keys: list[str | None] = []
        self._waits: list[bool] = []  # whether each interval is a wait
        self._ticks: list[tuple[float, float]] = []  # wall and CPU time
        self._ranks_per_core = ranks_per_core
        self._group: str | None = None
        self._pending: dict[str, torch.Tensor] = {}
        module = fx.GraphModule(dict(graph.constants), graph.copy().graph)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        known = [(node, time_key(node), issuer(node) if is_wait(node) else None) for node in calls]
        for node, key, source in known:  # keys must be read before any target is replaced
            self._instrument(module.graph, node, key, source)
        module.graph.set_codegen(BoxedCodeGen())
        module.recompile()
        self._program = module.forward
        with torch.random.fork_rng([]):
            self._arguments = arguments_of(graph)
        pairs = zip(graph.inputs, self._arguments, strict=True)
        held = sum(value.nbytes for role, value in pairs if isinstance(role, Parameter))
        self._swept = min(_UPDATED * held, _SWEPT)

    def run(self, ranks: ReplayGroup) -> list[float]:
        """Seconds of each interval of one run, from a common start, after a sweep of the caches."""
        self._ticks.clear()
        self._group = ranks.group
        with torch.random.fork_rng([]), torch.no_grad():
            torch.zeros(self._swept, dtype=torch.uint8).add_(1)
            ranks.line_up()
            self._tick()
            self._program(list(self._arguments))
        spans = [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(self._ticks)]
        if self._ranks_per_core <= 1.0:
            return [wall_s for wall_s, _ in spans]
        return self._on_shared_cores(spans)

    def _on_shared_cores(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """CPU time at an equal part of the cores; waits share the remaining wall time."""
        pairs = list(zip(spans, self._waits, strict=True))
        waited_s = sum(wall_s for (wall_s, _), waits in pairs if waits)
        computed_s = sum(cpu_s for (_, cpu_s), waits in pairs if not waits) * self._ranks_per_core
        rest_s = max(0.0, sum(wall_s for wall_s, _ in spans) - computed_s)
        part = rest_s / waited_s if waited_s else 0.0
        return [
            wall_s * part if waits else cpu_s * self._ranks_per_core
            for (wall_s, cpu_s), waits in pairs
        ]

    def release(self) -> None:
        """Frees the tensors, which a reference cycle would keep."""
        self._arguments.clear()

    def _tick(self) -> None:
        self._ticks.append((time.perf_counter(), time.thread_time()))

    def _instrument(self, graph: fx.Graph, node: fx.Node, key: str, source: fx.Node | None) -> None:
        """Inserts a tick after a node, and replaces a collective or wait by its stand-in."""
        self.keys.append(key)
        self._waits.append(is_wait(node))
        sends = collective_of(node) is not None
        if sends:
            node.target = self._sender(node.name, _stand_in(node))
        elif is_wait(node):
            node.target = self._waiter(source.name if source is not None else "")
        with graph.inserting_after(node):
            last = graph.call_function(self._tick)
        if sends:
            # The write of a message counts for no operator: in a step another thread does it.
            self.keys.append(None)
            self._waits.append(False)
            with graph.inserting_after(last):
                last = graph.call_function(_arrive, (node,))
            with graph.inserting_after(last):
                graph.call_function(self._tick)

    def _sender(self, name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for a collective: sends one number and does its work on tensors."""

        def send(*arguments: Any) -> Any:
            if self._group is not None:
                self._pending[name] = c10d.all_reduce_(torch.zeros(1), "sum", self._group)
            return stand_in(*arguments)

        return send

    def _waiter(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Stands for a wait: until the number has arrived."""

        def wait(value: torch.Tensor) -> torch.Tensor:
            pending = self._pending.pop(name, None)
            if pending is not None:
                c10d.wait_tensor(pending)
            return value

        return wait


def _stand_in(node: fx.Node) -> Callable[..., Any]:
    """The work of issuing a collective on the calling thread."""
    name = node.target.name().partition("::")[2].partition(".")[0]  # type: ignore[union-attr]
    many = isinstance(node.meta["val"], (list, tuple))
    like = [(t.shape, t.dtype, t.device) for t in tensors(node)]

    def in_place(value: Any, *options: Any) -> Any:
        return value

    def copied(value: Any, *options: Any) -> Any:
        return [t.clone() for t in value] if many else value.clone()

    def fresh(*options: Any) -> Any:
        values = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like]
        return values if many else values[0]

    if name.endswith("_"):
        return in_place
    return copied if name.startswith("all_reduce") else fresh


def _arrive(received: Any) -> None:
    """Writes a received message, as another thread does in a step."""
    for tensor in received if isinstance(received, (list, tuple)) else [received]:
        tensor.fill_(0.01)


def arguments_of(graph: TrainingGraph) -> list[torch.Tensor]:
    """Random values for the inputs of a graph; integers are valid indices."""
    values = []
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        value = random_like(node.meta["val"], 0, _bound(node))
        if isinstance(role, Parameter) and value.dtype.is_floating_point:
            value = (value - 0.5) * 0.1  # no overflow, no denormal numbers
        values.append(value)
    return values


def _bound(placeholder: fx.Node) -> int:
    """Exclusive upper bound of an input's integers, from the tables that they index."""
    bounds: list[int] = []
    seen, queue = {placeholder}, [placeholder]
    while queue:
        for user in queue.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            seen.add(user)
            bound = index_bound(user)
            if bound > 1:
                bounds.append(bound)
            elif not any(t.dtype.is_floating_point for t in tensors(user)):
                queue.append(user)
    return min(bounds, default=1)
