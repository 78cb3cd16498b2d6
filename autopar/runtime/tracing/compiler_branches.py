"""`warn_of_branches`: compares the plain model with the branches for compilers in its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from autopar.capture.call import BatchShard
from autopar.capture.trace import Capture
from autopar.capture.values.compiler_branches import CompilerBranches, Site
from autopar.core.common.constant_draws import ConstantDraws
from autopar.core.common.containers import flatten
from autopar.core.common.notices import warn_once
from autopar.core.common.tolerances import TOLERANCES, relative_difference
from autopar.errors import NumericsWarning
from autopar.formatting import first_line
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.context import ExecutionContext
from autopar.runtime.plain_call import has_values, run_plain


def warn_of_branches(context: ExecutionContext, shard: BatchShard, captured: Capture) -> None:
    """Warns if results of the plain model differ from those of the branches that a graph follows.

    Both run on this rank's rows, without gradients. All ranks call this at once and warn alike.
    """
    if not captured.compiled:
        return
    own = _compare(context, shard, captured)
    every = gather_objects(own) if is_multi_rank() else [own]
    if told := next(filter(None, every), ""):
        asked = "; ".join(sorted(map(_named, captured.compiled)))
        warn_once(
            NumericsWarning,
            f"{type(context.model).__name__} asks for a compiler at {asked}. Its plain branch "
            "reads values of tensors there, so autopar trains the other one, as torch.compile "
            f"does. {told}",
        )


def _compare(context: ExecutionContext, shard: BatchShard, captured: Capture) -> str:
    """The difference on this rank's rows, or why none can be seen; "" where both agree."""
    if not has_values(context.model) or any(x.is_meta for x in shard.tensors):
        return "Their results were not compared, for want of values: use autopar.verify."
    branches = CompilerBranches(captured.compiled)
    try:
        plain, narrowest = _results(context, shard, CompilerBranches())
        compiled, _ = _results(context, shard, branches)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"Their results were not compared, since a call raised {reason}."
    if not captured.compiled <= branches.asked.keys():
        return (
            "Their results were not compared, since a plain call did not ask: use autopar.verify."
        )
    dtypes = [narrowest, *(x.dtype for x in plain)]
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes if dtype), default=0.0)
    difference = _difference(compiled, plain)
    if difference <= tolerance:
        return ""
    return (
        f"On the first batch the results differ by {difference:.1e}, relative to the plain "
        "branch's. Give arguments for which both agree, or change the model."
    )


def _results(
    context: ExecutionContext, shard: BatchShard, branches: CompilerBranches
) -> tuple[list[Tensor], torch.dtype | None]:
    """Tensors that a plain call returns, and the narrowest dtype that it casts to."""
    model, options = context.model, context.options
    leaves = list(shard.call.leaves)
    for index, tensor in zip(shard.call.tensor_indices, shard.tensors, strict=True):
        leaves[index] = tensor
    loss_fn, structure = options.loss_fn, shard.call.structure
    with branches.answering(tracing=False), torch.no_grad(), ConstantDraws() as draws:
        result = run_plain(model, leaves, structure, loss_fn, context.autocast())
    return [x for x in flatten(result)[0] if isinstance(x, Tensor)], draws.narrowest


def _difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of two lists of tensors; infinite for other lengths."""
    if len(actual) != len(expected):
        return math.inf
    return max(map(relative_difference, actual, expected), default=0.0)


def _named(site: Site) -> str:
    return ", called at ".join(f"{Path(file).name}:{line}" for file, line in site)
