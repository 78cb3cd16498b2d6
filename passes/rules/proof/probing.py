"""Probing: loops of an operator without a rule, found by running it.

A hypothesis is a loop over one dim of each result and a dim of the same size, or none, of each
operand. The oracle runs the operator on shards of small random tensors; a hypothesis that is
correct for 2 and for 3 ranks is a loop with equal chunks. Operators that draw random numbers, write
to operands, have data-dependent shapes, or take integers for places or bytes, stay whole.

Loops are kept in this process only, as long as it registers no kernel. In the next one an operator
may compute something else under the same name, even one of torch's own: anybody may replace its
kernel, or that of an operator which it calls.

Operators run on the model's device, or else on another one that is here. Those with a kernel for
none of them stay whole, too, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch

from autopar._torch import (
    FakeTensorMode,
    OpOverload,
    decomposition,
    mute_fake_tensor_log,
    python_kernels,
    pytree,
    registrations_of,
    without_modes,
)
from autopar.core.common.notices import warn_once
from autopar.core.ir.placement import OpStrategy
from autopar.core.random_inputs import takes_any
from autopar.errors import MeasurementWarning
from autopar.passes.rules.local_args import local_arguments
from autopar.passes.rules.loops import DimAccess, Loop, Operator, split_loop
from autopar.passes.rules.proof.oracle import is_correct, run_operator, shard_tensor

RANKS = (2, 3)
LARGEST = 1 << 16
"""Largest number of elements of a tensor to probe."""

OWN = ("aten", "prims")
"""Namespaces of torch's own operators."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_MAX_HYPOTHESES = 200  # for each dim of the result
_UNFIT = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


def probe_loops(operator: Operator) -> list[Loop]:
    """The loops of an operator that running it shows; none if it cannot be probed."""
    if not can_be_probed(operator):
        return []

    def text(leaf: Any) -> Any:
        return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

    arguments = str(pytree.tree_map(text, (operator.args, operator.kwargs)))

    def question() -> _Question:
        kernels = registrations_of(operator.target.name()), hash(frozenset(python_kernels))
        return operator.target, arguments, kernels

    asked = question()
    if asked in _REFUSED:
        return []
    errors: dict[str, str] = {}
    for device in _devices(operator):
        loops = _FOUND.get((device, asked))
        if loops is None:
            with without_modes():  # a capture's fake tensors have no values to compare
                loops, error = _probe(operator, device)
            if operator.target.namespace not in OWN and error is not None:
                errors[device] = f"on {device}: {type(error).__name__}: {str(error)[:200]}"
                continue  # perhaps another device runs it
            _FOUND[device, question()] = loops  # torch registers some kernels when it first runs
        return [*loops]
    _REFUSED.add(question())
    warn_once(
        MeasurementWarning,
        f"{operator.target} cannot run here, so autopar does not learn how to divide it: it stays "
        f"whole, on gathered tensors ({'; '.join(errors.values())}). Plan where it runs, or "
        "register a kernel for the CPU.",
    )
    return []


_Question = tuple[OpOverload, str, tuple[str, int]]
"""An operator, its arguments with shapes for tensors, and the kernels registered for it and all."""

_FOUND: dict[tuple[str, _Question], list[Loop]] = {}
"""Loops found in this process, by device."""

_REFUSED: set[_Question] = set()
"""Operators that run on no device of this process."""


def _devices(operator: Operator) -> list[str]:
    """Devices to try, the model's first.

    A kernel on a GPU that reads wrong integers as indices would end all work on that GPU. Operators
    run there only if they take any integers.
    """
    devices = ["cpu"]
    if torch.cuda.is_available() and takes_any(operator.target, operator.operands):
        on_gpu = any(tensor.device.type == "cuda" for tensor in operator.operands)
        devices.insert(0 if on_gpu else 1, "cuda")
    return devices


def can_be_probed(operator: Operator) -> bool:
    """Whether an operator is a pure function from tensors to tensors."""
    target = operator.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    if any(tag in target.tags for tag in _UNFIT) or not operator.operands:
        return False
    # Compiled kernels take integers for places unchecked, and may write outside of their results.
    unsafe = _INTEGERS if target.namespace in OWN else (torch.uint8,)
    has_unsafe = any(t.dtype in unsafe for t in operator.operands)
    if has_unsafe and not takes_any(target, operator.operands):
        return False
    return all(isinstance(t, torch.Tensor) and t.dim() > 0 for t in operator.results)


# -- small tensors of the same structure -------------------------------------------------------


def _probe(operator: Operator, device: str) -> tuple[list[Loop], Exception | None]:
    """The loops of an operator, found on small tensors, or on its own sizes if it refuses those.

    With the error if it refuses both.
    """
    refused: Exception | None = None
    for size in (_shrunk(operator), lambda n: n):
        try:
            sample = _sampled(operator, size, device)
        except Exception as error:  # operators raise anything for arguments that they refuse
            refused = refused or error
            continue
        if sample is not None:
            return list(_loops(operator, sample)), None
    return [], refused


def _shrunk(operator: Operator) -> Callable[[int], int]:
    """Maps sizes to small ones that 2 and 3 ranks divide, equal sizes to equal ones."""
    shapes = [t.shape for t in (*operator.operands, *operator.results)]
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    small = {size: 6 * (place + 1) for place, size in enumerate(sizes)}
    return lambda size: small.get(size, size)


def _sampled(operator: Operator, size: Callable[[int], int], device: str) -> Operator | None:
    """The operator on random tensors of other sizes; None if these, or its results, do not fit."""
    generator = torch.Generator().manual_seed(0)
    largest = max(t.numel() for t in (*operator.operands, *operator.results))

    def made(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _random([size(n) for n in leaf.shape], leaf.dtype, generator).to(device)
        is_size = isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 1
        return size(leaf) if is_size else leaf

    shapes = [[size(n) for n in t.shape] for t in operator.operands]
    if max(torch.Size(s).numel() for s in shapes) > LARGEST or largest == 0:
        return None
    args, kwargs = pytree.tree_map(made, (list(operator.args), operator.kwargs))
    # Decompositions check their operands, where kernels may read beyond them.
    target = decomposition(operator.target) or operator.target
    sample = Operator(target, tuple(args), kwargs, ())
    results = run_operator(sample)
    want = [[size(n) for n in t.shape] for t in operator.results]
    fits = [list(t.shape) for t in results] == want
    return replace(sample, results=results) if fits else None


def _random(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers from 0.1 to 1.1, or integers below the sizes that are tried."""
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.rand(shape, dtype=torch.float64, generator=generator) + 0.1).to(dtype)
    top = 2 if dtype == torch.bool else 6
    return torch.randint(0, top, shape, generator=generator).to(dtype)


# -- hypotheses --------------------------------------------------------------------------------


def _loops(operator: Operator, sample: Operator) -> Iterator[Loop]:
    """The loops that are correct on a sample, at the sizes of the operator itself."""
    first, *others = sample.results
    count = len(sample.operands)
    for dim, size in enumerate(first.shape):
        choices = [_dims_of(size, t, dim) for t in (*sample.operands, *others)]
        for places in islice(product(*choices), _MAX_HYPOTHESES):
            results = (DimAccess(dim), *places[count:])
            loop = Loop(size, places[:count], results, interleavable=False, even_only=True)
            if any(places[:count]) and None not in places[count:] and _is_loop(sample, loop):
                yield replace(loop, size=operator.results[0].shape[dim])
                break


def _dims_of(size: int, tensor: torch.Tensor, dim: int) -> list[DimAccess | None]:
    """Possible accesses of a loop to a tensor: the same dim, others of its size, none."""
    same = [d for d, n in enumerate(tensor.shape) if n == size]
    return [*(DimAccess(d) for d in sorted(same, key=lambda d: (d != dim, d))), None]


def _check_shards(sample: Operator, op_strategy: OpStrategy, ranks: int) -> None:
    """Runs an operator on fake shards, which raises where kernels might read out of bounds."""
    pairs = zip(sample.operands, op_strategy.operands, strict=True)
    parts = [shard_tensor(tensor, placement, ranks)[0] for tensor, placement in pairs]
    with mute_fake_tensor_log(), FakeTensorMode() as mode:
        shards = [mode.from_tensor(part) for part in parts]
        run_operator(local_arguments(sample, op_strategy, shards, ranks))


def _is_loop(sample: Operator, loop: Loop) -> bool:
    """Whether a loop is correct for each number of ranks that divides it."""
    tried = [ranks for ranks in RANKS if loop.size % ranks == 0 and loop.size > 1]
    try:
        for ranks in tried:
            _check_shards(sample, split_loop(loop), ranks)
        return bool(tried) and all(is_correct(sample, split_loop(loop), ranks) for ranks in tried)
    except Exception:  # operators raise anything for shards that they refuse
        return False
