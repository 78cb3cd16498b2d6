"""`differentiated`: gradients of a call that can be differentiated again.

A program holds the forward and its first derivative. Where a backward is asked to build a graph,
both are captured as the forward of another program, whose results are the gradients
(`autopar/capture/call.py:Derivative`). It has the plan, the passes and the collectives of any
other, and its own backward may be asked for a graph in turn.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar._torch import pytree
from autopar.capture.call import BatchShard, Derivative, TensorSpec
from autopar.core.ir.placement import Shard
from autopar.errors import CaptureError, StrategyError
from autopar.runtime.border.rows import Entered, LeftWhole, ScaledGradient
from autopar.runtime.codegen.program import Program
from autopar.runtime.parameters.sharded_view import version_of
from autopar.runtime.parameters.whole_gradient import OwnPart
from autopar.runtime.tracing.earlier_modes import as_called

if TYPE_CHECKING:
    from autopar.runtime.spmd.executor import SpmdCall

Key = str | int
"""The name of a parameter, or the index of an argument."""


def differentiated(
    call: SpmdCall, tangents: dict[int, torch.Tensor], keys: Sequence[Key]
) -> dict[Key, torch.Tensor]:
    """The gradients of parameters and arguments, as functions of all that they depend on.

    All ranks call this at once.

    Args:
        call: the call whose results are differentiated.
        tangents: the gradient of each result that has one.
        keys: what the results are differentiated by.

    Raises:
        CaptureError: the gradients cannot be differentiated again.
        StrategyError: the model was changed since the call.
    """
    _check_plan(call)
    _check_unchanged(call)
    entered = _entered(call, tangents)
    shard = _shard_with(call, entered, tuple(keys))
    operands = dict(call.operands)
    first = len(call.shard.call.leaves)
    operands |= {first + i: t for i, t in enumerate(entered.values()) if t.requires_grad}
    with as_called(call.context, call.modes):
        program = call.executor.program(shard, call.no_sync)
    _check_draws(call.program, program)
    outputs = call.executor.run_again(call, shard, program, operands)
    results = zip(program.returned, outputs, strict=True)
    return {keys[index]: _left(call, keys[index], value) for index, value in results}


def _check_plan(call: SpmdCall) -> None:
    plan, options = call.context.plan, call.context.options
    assert plan is not None
    if options.local:
        raise CaptureError("ranks compute on their own rows alone (batch_semantics='local')")
    if options.ragged:
        raise CaptureError("ranks have tensors of other sizes")
    chosen = plan.compressions
    if any((*chosen.reduce, *chosen.gather, *chosen.regather)) or chosen.activations:
        raise CaptureError("the plan compresses what ranks send: leave compress= out")


def _check_unchanged(call: SpmdCall) -> None:
    call.context.guards.check_backward(call.python)
    changed = changed_operands(call, call.operands)
    if changed:
        what = changed[0] if isinstance(changed[0], str) else f"argument {changed[0]}"
        raise StrategyError(
            f"{what} was changed in place after the call that is differentiated with "
            "create_graph=True, such as by an optimizer. Differentiate before the change."
        )


def changed_operands(call: SpmdCall, keys: Container[Key]) -> list[Key]:
    """Those of some operands of a call that were changed in place since."""
    pairs = zip(call.operands.items(), call.versions, strict=True)
    return [key for (key, x), version in pairs if key in keys and version_of(x) != version]


# Arguments.


def _entered(call: SpmdCall, tangents: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gradients of results as arguments of a program, which scales those of rows itself no more."""
    rows = call.program.capture.rows_of_outputs
    arguments = {}
    for index, tangent in tangents.items():
        shard = rows[index]
        if shard is not None and shard.interleave > 1:
            raise CaptureError(f"output {index} has rows that lie between others")
        if shard is not None:
            tangent = Entered.apply(tangent, _fraction(call), _loop_weight(call))
        arguments[index] = tangent.contiguous()
    return arguments


def _shard_with(
    call: SpmdCall, tangents: dict[int, torch.Tensor], keys: tuple[Key, ...]
) -> BatchShard:
    """The arguments of a call and gradients of its results."""
    shard, before = call.shard, call.shard.call
    rows = call.program.capture.rows_of_outputs
    arguments: Any = pytree.tree_unflatten(list(range(len(before.leaves))), before.structure)
    levels = arguments if before.derivatives else (arguments,)
    structure = pytree.tree_structure((*levels, list(tangents)))
    derived = replace(
        before,
        leaves=(*before.leaves, *map(TensorSpec.of, tangents.values())),
        structure=structure,
        row_dims=(*before.row_dims, *(_dim(rows[index]) for index in tangents)),
        derivatives=(*before.derivatives, Derivative(tuple(tangents), keys)),
    )
    return replace(shard, call=derived, tensors=(*shard.tensors, *tangents.values()))


def _dim(shard: Shard | None) -> int | None:
    return None if shard is None else shard.dim


# Results.


def _left(call: SpmdCall, key: Key, value: torch.Tensor) -> torch.Tensor:
    """A gradient as the loop sees it."""
    if key in call.context.index.dtensors and not _is_local(call):
        return OwnPart.apply(value, call.operands[key])
    if isinstance(key, int) and call.shard.call.row_dims[key] is not None:
        # the program weighs gradients of rows by the rank's part of the batch
        return ScaledGradient.apply(value, 1 / _fraction(call))
    if _is_local(call):
        return LeftWhole.apply(value, _fraction(call) / call.context.options.model_parallel_size)
    return value


def _fraction(call: SpmdCall) -> float:
    """This rank's part of the batch."""
    return call.shard.rows / call.shard.slices.rows


def _loop_weight(call: SpmdCall) -> float:
    """The part of this rank's loop in the loss of all ranks, where a value of it comes in.

    A gradient's gradient has crossed the border before, with the argument that it is of.
    """
    return _fraction(call) if _is_local(call) and not call.shard.call.derivatives else 1.0


def _is_local(call: SpmdCall) -> bool:
    return call.context.options.batch == "local" and call.shard.slices.count > 1


# Random numbers.


def _check_draws(before: Program, derived: Program) -> None:
    """Checks that a program draws the random numbers of the call that it differentiates.

    Raises:
        CaptureError: it draws others.
    """
    if before.draws != derived.draws:
        raise CaptureError(
            "forward draws random numbers, which the plan divides otherwise for a second "
            "derivative: turn dropout off, or train under ddp or ZeRO"
        )
