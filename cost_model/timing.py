"""`Stopwatch`: times an operator on the real device, called as the compiled step calls it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar.cost_model.aliases import extent_bytes
from autopar.cost_model.host import free_memory_bytes
from autopar.cost_model.signature import moved_bytes
from autopar.graph import tensors

aten = torch.ops.aten

_LEAST_RUNS, _MOST_RUNS = 3, 30
_CACHE_BYTES = 32 * 2**20
_COLD_BYTES = 2**20  # operators that move more find nothing in the cache
_MEMORY_SHARE = 0.25  # of what is free, that the tensors of one operator may take


class Stopwatch:
    """Times operators one by one.

    In a step, small values are still in the processor's cache when the next operator reads them
    and large ones are not. So before each run of an operator on large tensors the cache is filled
    with something else.

    Attributes:
        budget_s: seconds to spend on an operator, but at least three runs.
    """

    def __init__(self, budget_s: float = 0.02) -> None:
        self.budget_s = budget_s
        self._ballast = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)

    def time(self, node: fx.Node) -> float | None:
        """Median seconds of an operator on random tensors like its own, None if it cannot be run.

        Allocation of the result and the dispatch from Python are part of it. The generators of
        the caller are left as they were.
        """
        if not _fits(node):
            return None
        devices = {t.device.type for n in (node, *node.all_input_nodes) for t in tensors(n)}
        generators = [torch.cuda.current_device()] if "cuda" in devices else []
        with torch.random.fork_rng(generators), torch.no_grad():
            for low, high in ((0, index_bound(node)), (1, 2)):
                try:
                    call = _bind(node, low, high)
                    if "cuda" in devices:
                        return self._on_gpu(call)
                    return self._on_cpu(call, cold=moved_bytes(node) > _COLD_BYTES)
                except Exception:  # whatever an operator dislikes, it is modelled instead
                    continue
        return None

    def _on_cpu(self, call: Callable[[], object], cold: bool) -> float:
        call()  # allocations, and the choice of a kernel
        runs: list[float] = []
        spent = 0.0
        while len(runs) < _LEAST_RUNS or (spent < self.budget_s and len(runs) < _MOST_RUNS):
            begin = time.perf_counter()
            if cold:
                self._ballast.fill_(len(runs))
            start = time.perf_counter()
            call()
            end = time.perf_counter()
            runs.append(end - start)
            spent += end - begin
        return statistics.median(runs)

    def _on_gpu(self, call: Callable[[], object]) -> float:
        """Runs are queued several at a time, as in a step: a kernel hides the next's launch."""

        def batch(count: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / count

        batch(1)
        count = max(1, min(100, int(self.budget_s / _LEAST_RUNS / batch(3))))
        return statistics.median(batch(count) for _ in range(_LEAST_RUNS))


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention, 0 of others."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return 0.0


def _fits(node: fx.Node) -> bool:
    need = sum(extent_bytes(t) for n in (node, *node.all_input_nodes) for t in tensors(n))
    free = free_memory_bytes()
    return not free or need <= _MEMORY_SHARE * free


def _bind(node: fx.Node, low: int, high: int) -> Callable[[], object]:
    """The operator with its tensors filled in: floats in 0..1, integers from low to below high."""
    made: dict[fx.Node, Any] = {}

    def real(source: fx.Node) -> Any:
        if source not in made:
            made[source] = _real(source.meta["val"], low, high)
        return made[source]

    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), real)
    return lambda: target(*args, **kwargs)


def _real(val: Any, low: int, high: int) -> Any:
    if isinstance(val, (list, tuple)):
        return type(val)(_real(v, low, high) for v in val)
    if not isinstance(val, torch.Tensor):
        return val
    count = extent_bytes(val) // val.element_size()
    if val.dtype == torch.bool:
        flat = torch.randint(0, 2, (count,), device=val.device).bool()
    elif not (val.dtype.is_floating_point or val.dtype.is_complex):
        flat = torch.randint(low, high, (count,), device=val.device).to(val.dtype)
    else:
        flat = torch.rand(count, device=val.device).to(val.dtype)
    return flat.as_strided(val.shape, val.stride())


def index_bound(node: fx.Node) -> int:
    """What the integers given to an operator stay below: rows of the table that they index.

    Where that is not known, 1: an index of 0 is never out of range (on a GPU that would be fatal).
    """
    args: Any = node.args
    target = node.target
    if target is aten.embedding.default:
        return tensors(args[0])[0].shape[0]
    if target is aten.embedding_dense_backward.default:
        return int(args[2])
    if target is aten.nll_loss_forward.default:
        return tensors(args[0])[0].shape[-1]
    if target is aten.nll_loss_backward.default:
        return tensors(args[1])[0].shape[-1]
    if target in (aten.gather.default, aten.scatter.value, aten.scatter.src):
        shape = tensors(args[0])[0].shape
        return shape[args[1]] if shape else 1
    return 1
