"""`ArgumentValues`: values that forward reads in Python from the arguments of its calls.

    if attention_mask.all():
        ...

A call is captured with the values that it reads, as answers in its key. The first call of a kind
finds them by a run on fake tensors, which also says how they follow from the arguments; later ones
evaluate that, and take the program with equal answers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.call import BatchShard, batch_shard_of
from autopar.capture.trace import read_arguments
from autopar.capture.values.argument_reads import Readings
from autopar.core.common.bounded_cache import BoundedCache
from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, CaptureError
from autopar.runtime.codegen.surroundings import apart_from_hooks
from autopar.runtime.context import MANY_SHAPES, ExecutionContext
from autopar.runtime.options import Options
from autopar.runtime.rng import keep_random_state

logger = logging.getLogger(__name__)


@dataclass
class ArgumentValues:
    """Readings of the calls of a module.

    Attributes:
        are_read: whether forward reads values of arguments; false until a capture fails by that.
        readings: those of each kind of call and state of the model, one for each set of answers.
    """

    are_read: bool = False
    readings: BoundedCache[list[Readings]] = field(default_factory=BoundedCache)

    def explain(
        self, error: CaptureError, context: ExecutionContext, leaves: list[Any], structure: Any
    ) -> bool:
        """Whether a call that failed with an error can be captured with values of arguments.

        Ranks with equal arguments get the same result. Where each brings its own, it is False.
        """
        whole = _whole_batch(leaves, structure, context.options)
        if self.are_read or whole is None:
            return False
        try:
            answers = self._read(context, whole).answers
        except CaptureError as other:  # the first error says more
            logger.debug("no values of arguments after %s: %s", error, other)
            return False
        if answers:
            warn_once(
                AutoparWarning,
                f"{type(context.model).__name__} reads values of arguments in Python, first "
                f"{answers[0].value!r}{_line(answers[0].place)}. Calls that read other values are "
                "captured and compiled anew, and the programs are kept. If the values differ in "
                "most calls, express this with tensor operations (torch.where, masks).",
            )
        self.are_read = bool(answers)
        return self.are_read

    def answer(
        self, shard: BatchShard, context: ExecutionContext, leaves: list[Any], structure: Any
    ) -> BatchShard:
        """The shard of a call with the values that forward reads from the whole batch.

        Raises:
            CaptureError: forward reads other values than those of arguments.
        """
        whole = _whole_batch(leaves, structure, context.options) if self.are_read else None
        if whole is None:
            return shard
        key = whole.call.key, torch.is_grad_enabled(), context.mode_key
        readings = self.readings.get(key) or self.readings.add(key, [], MANY_SHAPES)
        with context.autocast():
            current = next((each for each in readings if each.hold(whole.tensors)), None)
        if current is None:
            readings.append(current := self._read(context, whole))
            del readings[:-MANY_SHAPES]
        return replace(shard, call=replace(shard.call, answers=current.answers))

    def _read(self, context: ExecutionContext, whole: BatchShard) -> Readings:
        options: dict[str, Any] = context.capture_options(torch.is_grad_enabled())
        with keep_random_state(context.device), apart_from_hooks(), context.autocast():
            return read_arguments(context.model, whole.call, whole.tensors, **options)


def _line(place: tuple[str, int] | None) -> str:
    return "" if place is None else f" at {place[0]}:{place[1]}"


def _whole_batch(leaves: list[Any], structure: Any, options: Options) -> BatchShard | None:
    """The rows of all ranks; None where each rank brings its own."""
    if options.batch == "local" and options.dp_size > 1:
        return None
    static, stated = options.static, options.rows
    return batch_shard_of(
        leaves, structure, mode="global", rank=0, ranks=1, static=static, stated=stated
    )
