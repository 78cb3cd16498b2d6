"""`GraphedFunction`: a generated function that the GPU replays as a CUDA graph.

A replay launches all kernels and collectives of a forward or backward at once, on the memory of
the run that was recorded. Parameters, buffers and saved tensors are read where they lie; other
arguments are copied there. Results that leave the program are copied out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload, storage_key
from autopar.core.ir.graph import TrainingGraph, render_node, tensors
from autopar.core.ir.messages import transfer_of
from autopar.core.ir.roles import Buffer, Parameter, Saved, State
from autopar.core.operators.random_streams import ON_STREAM
from autopar.core.operators.routing import arriving_rows, row_counts
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.errors import StrategyError
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.codegen.program import CompiledGraph, Program
from autopar.runtime.codegen.recorder import BoxedFunction

WARM_RUNS = 2
"""Successive runs on the same memory before the next is recorded."""

REMEDY = "Leave cuda_graphs out, or"
_IN_PLACE = Parameter, Buffer, Saved, State
_WAITING = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.cudagraph_unsafe,
)


def check_machine(device: torch.device, comm_backend: str, ranks: int) -> None:
    """Raises StrategyError where no CUDA graph can hold the model's kernels and collectives."""
    if device.type != "cuda":
        raise StrategyError(
            f"cuda_graphs=True, but the model is on {device}: {REMEDY} move the model to a GPU"
        )
    if ranks > 1 and comm_backend != "nccl":
        raise StrategyError(
            f"cuda_graphs=True, but {comm_backend} carries the GPUs' tensors, and its collectives "
            f"run on the host: {REMEDY} initialize torch.distributed with NCCL"
        )


def check_strategy(strategy: Strategy | Plan) -> None:
    """Raises StrategyError if a strategy or plan has pipeline stages, or may have."""
    is_searched = isinstance(strategy, Strategy) and strategy.pp is None and "pp" in strategy.search
    if is_searched or strategy.pp_size > 1:
        raise StrategyError(
            "cuda_graphs=True, but the host runs the schedule of a pipeline: "
            f'{REMEDY} give a strategy without stages, such as "auto"'
        )


def check_graph(graph: TrainingGraph) -> None:
    """Raises StrategyError if a program waits for the GPU, or does its work on the host."""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            reason = _of_host(node)
        else:
            reason = _waits(node) or _of_host(node)
        if reason:
            raise StrategyError(
                f"cuda_graphs=True, but {reason}: {REMEDY} change {render_node(node)}"
            )


def _waits(node: fx.Node) -> str:
    target = node.target
    if transfer_of(node) is not None:
        return "the host begins the transfers of what is offloaded"
    if target in (row_counts, arriving_rows):
        return "the host reads how many tokens go to each rank (route_experts=False gathers all)"
    if isinstance(target, OpOverload) and any(tag in target.tags for tag in _WAITING):
        return "the host waits for the GPU to know a value or a shape"
    if target in ON_STREAM.values():
        return "attention with dropout on several tp ranks sets the seed on the host"
    if "wait_tensor" in str(target) and node.args[0].op == "placeholder":  # type: ignore[union-attr]
        return "a collective starts in the forward and ends in the backward"
    return ""


def _of_host(node: fx.Node) -> str:
    on_host = any(tensor.device.type == "cpu" for tensor in tensors(node))
    return "a tensor of the program is on the CPU" if on_host else ""


def record(run: BoxedFunction, arguments: list[Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Records a run as a CUDA graph; returns what replays it, and the results in its memory."""
    graph = torch.cuda.CUDAGraph()
    # other threads, such as NCCL's watchdog, may use CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        results = run(arguments)
    return graph.replay, results


@dataclass(frozen=True)
class Recording:
    """A recorded run.

    Attributes:
        addresses: addresses and strides of the arguments that are read where they lie.
        copied: the other arguments' memory, by position.
        results: results of the last replay.
        leaving: positions of the results that are copied out.
    """

    addresses: tuple[Any, ...]
    copied: dict[int, torch.Tensor]
    replay: Callable[[], None]
    results: list[Any]
    leaving: tuple[int, ...]

    def run(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        for place, memory in self.copied.items():
            memory.copy_(arguments[place])
        self.replay()
        found = list(self.results)
        for place in self.leaving:
            found[place] = found[place].clone()
        return found


@dataclass
class GraphedFunction:
    """A generated function, recorded once its tensors stay where they are.

    It runs as it is while a backward of an earlier run is to come, whose saved tensors a replay
    would overwrite, and while parameters move in memory.

    Attributes:
        pool: memory that the recordings of a module share.
        replays: number of runs that were replayed.
    """

    graph: TrainingGraph
    plain: BoxedFunction
    pool: Any
    replays: int = 0
    _recording: Recording | None = None
    _last: tuple[Any, ...] = ()  # addresses of the last run
    _warm: int = 0  # runs with them
    _borrower: Callable[[], object] = field(default=lambda: None)
    _replayed: bool = False

    def __post_init__(self) -> None:
        kept = (isinstance(role, _IN_PLACE) for role in self.graph.inputs)
        self._kept = tuple(place for place, is_kept in enumerate(kept) if is_kept)

    def __call__(self, arguments: list[Any]) -> list[Any]:
        finish_exchange()  # replays run no Python
        addresses = tuple((arguments[i].data_ptr(), arguments[i].stride()) for i in self._kept)
        self._warm = self._warm + 1 if addresses == self._last else 0
        self._last, self._replayed = addresses, False
        if self._borrower() is not None:
            return self.plain(arguments)
        known = self._recording
        if known is None or known.addresses != addresses:
            if self._warm < WARM_RUNS:
                return self.plain(arguments)
            known = self._recording = self._record(arguments, addresses)
        results = known.run(arguments)
        arguments.clear()
        self.replays, self._replayed = self.replays + 1, True
        return results

    def _record(self, arguments: list[Any], addresses: tuple[Any, ...]) -> Recording:
        self._recording = None  # frees the memory of the one before
        copied = {i: _copy_of(x) for i, x in enumerate(arguments) if i not in self._kept}
        given = [copied.get(i, x) for i, x in enumerate(arguments)]
        in_place = {storage_key(arguments[i]) for i in self._kept}
        replay, results = record(self.plain, given, self.pool)
        leaving = tuple(
            place
            for place, role in enumerate(self.graph.outputs)
            if isinstance(value := results[place], torch.Tensor)
            and not isinstance(role, Saved)
            and storage_key(value) not in in_place
        )
        return Recording(addresses, copied, replay, results, leaving)

    def lend(self, call: object) -> None:
        """Keeps the tensors that the last run saved, until `call` is gone or gives them back."""
        if self._replayed:
            self._borrower = weakref.ref(call)

    def take_back(self, call: object) -> None:
        """Ends a loan to `call`, whose backward has run."""
        if self._borrower() is call:
            self._borrower = lambda: None


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides that compiled code depends on; expanded dims become dense."""
    if 0 in tensor.stride():  # copy_ refuses targets whose elements share memory
        return tensor.clone()
    shape, stride = tensor.shape, tensor.stride()
    return tensor.new_empty_strided(shape, stride).copy_(tensor)


def with_cuda_graphs(program: Program, pool: Any) -> Program:
    """The program with forward and backward that become CUDA graphs.

    Raises:
        StrategyError: it waits for the GPU, or does its work on the host.
    """

    def graphed(half: CompiledGraph) -> CompiledGraph:
        check_graph(half.graph)
        return replace(half, run=GraphedFunction(half.graph, half.run, pool))

    backward = None if program.backward is None else graphed(program.backward)
    return replace(program, forward=graphed(program.forward), backward=backward)
