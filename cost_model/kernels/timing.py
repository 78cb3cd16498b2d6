"""`Stopwatch`: times operators on a CPU, called as in a compiled step."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar.core.ir.aliases import extent_bytes
from autopar.core.ir.graph import tensors
from autopar.core.random_inputs import integer_ranges, random_like
from autopar.cost_model.host import free_memory_bytes

aten = torch.ops.aten

_LEAST_RUNS, _MOST_RUNS = 3, 30
_LEAST_TIMING_S = 0.03  # seconds to time an operator of no duration, its random values included
_DISPATCHES = 1000
_CACHE_BYTES = 32 * 2**20
_MEMORY_SHARE = 0.25  # largest share of free memory for the tensors of one operator

_CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5),
}
"""Position of the queries, and number of products over queries, keys and width. torch's counter
covers attention on GPUs only."""


class Stopwatch:
    """Times operators, for `budget_s` seconds each, three runs at least.

    They alternate, as in a step: an operator that is run repeatedly finds its data in the
    cache and its memory mapped, and appears up to three times faster. The clock is thread time
    where others share the cores.
    """

    def __init__(
        self, budget_s: float = 0.02, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.budget_s, self.clock = budget_s, clock
        self._ballast = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)

    def times(self, nodes: Mapping[str, fx.Node]) -> dict[str, float]:
        """Median seconds of each operator on random tensors like its own, by the same keys.

        Allocation of the result and dispatch from Python are included. Operators that cannot be
        run are left out. The caller's random generators do not change.
        """
        found: dict[str, float] = {}
        with torch.random.fork_rng([]), torch.no_grad():
            for batch in _batches(nodes):
                found |= self._batch(batch)
        return found

    def times_within(
        self, nodes: Mapping[str, fx.Node], expected_s: Mapping[str, float], limit_s: float
    ) -> dict[str, float]:
        """`times` of the operators that are expected to be quickest, within seconds.

        An operator is left out, with all that follow, if it is expected to end too late. It takes
        as many times its expected time as the one before.
        """
        found: dict[str, float] = {}
        end_s, slowdown = time.monotonic() + limit_s, 1.0
        for key in sorted(nodes, key=expected_s.__getitem__):
            wanted_s, begin_s = _LEAST_RUNS * expected_s[key] + _LEAST_TIMING_S, time.monotonic()
            if begin_s + slowdown * wanted_s > end_s:
                break
            found |= self.times({key: nodes[key]})
            slowdown = (time.monotonic() - begin_s) / wanted_s
        return found

    def _batch(self, nodes: Mapping[str, fx.Node]) -> dict[str, float]:
        bound = {key: runnable(node) for key, node in nodes.items()}
        calls = {key: call for key, call in bound.items() if call is not None}
        runs: dict[str, list[float]] = {key: [] for key in calls}

        def wants_more(times: list[float]) -> bool:
            many = len(times) >= _MOST_RUNS or sum(times) >= self.budget_s
            return len(times) < _LEAST_RUNS or not many

        while waiting := [key for key, times in runs.items() if wants_more(times)]:
            self._ballast.fill_(1)  # evicts the cache
            for key in waiting:
                start = self.clock()
                calls[key]()
                runs[key].append(self.clock() - start)
        return {key: statistics.median(times) for key, times in runs.items()}


def time_dispatch(device: str) -> float:
    """Seconds of a call from Python that computes nothing: a view."""
    tensor = torch.empty(8, 8, device=device)
    view = torch.ops.aten.view.default
    runs = []
    with torch.no_grad():
        for _ in range(_DISPATCHES):
            start = time.perf_counter()
            view(tensor, [64])
            runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention, 0 of others."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _CPU_ATTENTION:
        first, products = _CPU_ATTENTION[packet]
        q, k = (node.args[first + i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
        return 2.0 * products * q.numel() * k.shape[-2]
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return 0.0


def _batches(nodes: Mapping[str, fx.Node]) -> Iterator[dict[str, fx.Node]]:
    """Batches of operators whose tensors fit into memory together; too large ones are left out."""
    limit = operator_limit("cpu")
    batch: dict[str, fx.Node] = {}
    total = 0
    for key, node in nodes.items():
        need = operator_bytes(node)
        if need > limit:
            continue
        if total + need > limit:
            yield batch
            batch, total = {}, 0
        batch[key] = node
        total += need
    yield batch


def operator_limit(device: str) -> float:
    """Most bytes for the tensors of one operator under test on "cpu" or "cuda"."""
    return _MEMORY_SHARE * (free_memory_bytes(device) or math.inf)


def operator_bytes(node: fx.Node) -> int:
    """Bytes of an operator's inputs and results."""
    return sum(extent_bytes(t) for n in (node, *node.all_input_nodes) for t in tensors(n))


def runnable(node: fx.Node) -> Callable[[], object] | None:
    """The operator on random tensors, after one run to warm up; None if it cannot be run."""
    for low, high in integer_ranges(node):
        with contextlib.suppress(Exception):  # operators that fail are modelled instead
            call = bind(node, low, high)
            call()
            return call
    return None


def bind(node: fx.Node, low: int, high: int) -> Callable[[], object]:
    """The operator on random tensors with integers from `low` to below `high`."""
    made: dict[fx.Node, Any] = {}

    def real(source: fx.Node) -> Any:
        if source not in made:
            made[source] = random_like(source.meta["val"], low, high)
        return made[source]

    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), real)
    return lambda: target(*args, **kwargs)
