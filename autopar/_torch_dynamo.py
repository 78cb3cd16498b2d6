"""Private names of torch whose modules load Dynamo, which takes a second.

Functions import this where they need it, so that `import autopar` costs nothing of it. Import it
before a trace: modules that load while torch traces would run on fake tensors.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dynamo.backends.common import aot_autograd as aot_backend
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._ops import OpOverload
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action as PipelineAction
from torch.distributed.pipelining.schedules import _add_send_recv as add_transfers
from torch.distributed.pipelining.schedules import _ComputationType as PipelineWork
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def new_size_symbol(env: ShapeEnv, size: int, name: str) -> torch.SymInt:
    """A size as a symbol of its own, at least 2."""
    source = ConstantSource(name)
    symbol = env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    made: Any = env.create_symintnode(symbol, hint=size, source=source)
    return made


def give_actions(
    runtime: PipelineRuntime, actions: list[list[PipelineAction]], places: Sequence[int]
) -> None:
    """Gives a runtime the actions of each rank, transfers included, and the rank of each stage.

    From torch 2.15 on it asks for an action that waits for each send, too.
    """
    runtime.stage_index_to_group_rank = dict(enumerate(places))
    for stage in runtime._stages:
        stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
    by_rank = dict(enumerate(actions))
    add_waits = getattr(schedules, "_add_wait_send", None)
    runtime.pipeline_order_with_comms = by_rank if add_waits is None else add_waits(by_rank)


def v_schedule(schedule: str, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """The order of each rank in a schedule of torch with two stages a rank in a V.

    Actions are their kind, stage and micro-batch. A forward and a backward that torch lets a
    rank run at once come one after the other. torch would ask for processes to make a schedule.
    """
    kind: dict[str, Any] = {
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipe_v": schedules.ScheduleDualPipeV,
    }
    sizes: Any = SimpleNamespace(
        pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=micro_batches
    )
    each = (kind[schedule]._calculate_single_rank_operations(sizes, rank) for rank in range(ranks))
    orders = []
    for order in each:
        flat = (part for a in order if a is not None for part in a.sub_actions or (a,))
        orders.append([(a.computation_type.value, a.stage_index, a.microbatch_index) for a in flat])
    return orders


@contextlib.contextmanager
def kernels_before_formulas() -> Iterator[None]:
    """Records operators that have a derivative as they are, not as torch's formulas for them.

    Under the Python dispatcher torch takes a formula in Python for some operators before autograd
    sees them, and one need not be what the kernel computes.
    """
    formulas = {target: target.py_kernels.pop(DispatchKey.Autograd) for target in _replaceable()}
    try:
        for target in formulas:
            target._dispatch_cache.clear()
        yield
    finally:
        for target, formula in formulas.items():
            target.py_kernels[DispatchKey.Autograd] = formula
            target._dispatch_cache.clear()


@functools.cache
def _replaceable() -> tuple[OpOverload, ...]:
    """Operators with a formula before autograd whose kernel's derivative autograd has as well.

    Kernels that change arguments unsaid in their schema, such as running means, need the formula.
    """
    table = torch._decomp.decomposition_table
    return tuple(
        target
        for target in table
        if isinstance(target, OpOverload)
        and DispatchKey.Autograd in target.py_kernels
        and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), DispatchKey.Autograd)
        and not _is_composite(target)
        and not _changes_arguments(target)
    )


def _is_composite(target: OpOverload) -> bool:
    key = DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


def _changes_arguments(target: OpOverload) -> bool:
    """Whether a kernel changes an argument under some settings."""
    facts = torch._C._SchemaInfo(target._schema)
    for argument in target._schema.arguments:
        if str(argument.type) == "bool":
            facts.add_argument_value(argument.name, True)
    return any(facts.is_mutable(argument.name) for argument in target._schema.arguments)
