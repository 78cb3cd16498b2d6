"""torch's own data parallelism (DDP, fully_shard) for models that cannot be captured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    local_tensor,
    pytree,
)
from autopar.capture.call import BatchShard, TensorSpec
from autopar.capture.model_info import find_separate_blocks
from autopar.capture.provenance import user_frame
from autopar.capture.values.checkpoint_calls import without_reentrant_checkpoints
from autopar.core.common.containers import flatten
from autopar.core.common.world import world
from autopar.errors import AutoparError, BatchError, CaptureError, ModelError, StrategyError
from autopar.formatting import first_line
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.replicas import checksum
from autopar.runtime.options import Options
from autopar.runtime.parameters.sharded import distribute_replicated
from autopar.runtime.parameters.sharded_view import version_of
from autopar.runtime.parameters.whole_gradient import none_for_none
from autopar.runtime.plain_call import has_values, run_plain
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.replicated_model import ReplicatedModel

_TRACING_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def check_can_fall_back(model: nn.Module, reason: CaptureError, *, shard: bool) -> None:
    """Raises StrategyError if fully_shard would have to train the model and cannot."""
    if not shard:
        return
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise StrategyError(
            f"{reason} An optimizer may hold shards of the parameters already, so that fully_shard "
            'cannot train the model instead. Change forward, give strategy="ddp", or give '
            "autopar.compile example_inputs."
        ) from reason
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise StrategyError(
            f"{reason} fully_shard cannot train the model instead, for its parameter {scalars[0]} "
            'has no dim. Give it the shape [1], change forward, or give strategy="ddp".'
        ) from reason


def wrap_with_ddp_or_fsdp(
    model: nn.Module, mesh: DeviceMesh, reason: CaptureError, *, shard: bool
) -> nn.Module:
    """The model under DDP, or under fully_shard block by block.

    Blocks that share a parameter are sharded together with the root module.

    Raises:
        StrategyError: fully_shard refuses the model.
    """
    if not shard:
        rows = _WritesByRows()
        model.register_forward_pre_hook(rows.before)
        model.register_forward_hook(rows.after)
        has_dtensors = any(isinstance(p, DTensor) for p in model.parameters())
        return ReplicatedModel(model) if has_dtensors else with_ddp(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    blocks = list(find_separate_blocks(model))
    try:
        for block in (*blocks, model):
            fully_shard(block, mesh=mesh)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise StrategyError(
            f"{reason} fully_shard cannot train the model instead: {first_line(error)} Change "
            'forward, or give strategy="ddp".'
        ) from error
    for name, parameter in model.named_parameters():
        if name in gradients:  # of backwards of the plain model
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_replicated(gradients[name], mesh, parameter.placements)
    for module in (*blocks, model):
        writes = _ParameterWrites()
        # inside of fully_shard's own hooks, where parameters are whole
        module.register_forward_pre_hook(writes.before)
        module.register_forward_hook(writes.after, prepend=True)
    return model


class _ParameterWrites:
    """Refuses a block's forward that changes its parameters, as fully_shard drops changes.

    Writes through `.data` leave no trace but the values, compared in the first call.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._values: dict[str, torch.Tensor] | None = {}

    def before(self, module: nn.Module, args: Any) -> None:
        parameters = _unsharded_parameters(module)
        self._versions = {name: p._version for name, p in parameters.items()}
        if self._values is None:
            return
        self._values = {name: p.detach().clone() for name, p in parameters.items()}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(_refuse_sparse, name))

    def after(self, module: nn.Module, args: Any, result: Any) -> None:
        values, self._values = self._values or {}, None
        for name, parameter in _unsharded_parameters(module).items():
            is_written = parameter._version != self._versions.get(name, parameter._version)
            if is_written or (name in values and not _are_equal(values[name], parameter)):
                raise StrategyError(
                    f"forward of {type(module).__name__} changes its parameter {name} in place. "
                    "The model cannot be captured, and fully_shard drops such changes. Change "
                    "parameters in the loop, between steps, or change the line that the warning "
                    'before this error names. If every rank makes the same change, strategy="ddp" '
                    "keeps it."
                )


class _WritesByRows:
    """Refuses a forward that changes parameters by the rows of its rank, so that copies part."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}

    def before(self, module: nn.Module, args: Any) -> None:
        self._versions = {name: version_of(p) for name, p in module.named_parameters()}

    def after(self, module: nn.Module, args: Any, result: Any) -> None:
        versions, parameters = self._versions, dict(module.named_parameters())
        written = [n for n, p in parameters.items() if version_of(p) != versions.get(n)]
        if not written:
            return
        sums = [checksum(local_tensor(parameters[name])) for name in written]
        of_ranks = gather_objects((written, sums), "compares parameters that forward changes")
        if any(each != (written, sums) for each in of_ranks):
            raise StrategyError(
                f"forward of {type(module).__name__} changes its parameter {written[0]} in place "
                "by the rows of each rank (as Embedding(max_norm=) does). The model cannot be "
                "captured, so that copies of the parameter part. Change parameters in the loop, "
                "between steps, or change the line that the warning before this error names."
            )


def _refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise StrategyError(
            f"the gradient of {name} is sparse, and the model cannot be captured: fully_shard does "
            'not reduce such gradients. Make it dense (sparse=False), or give strategy="ddp".'
        )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other.detach(), rtol=0, atol=0, equal_nan=True)


def _unsharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}


def describe_fallback_differences(model: nn.Module) -> str:
    """The results that differ between torch's data parallelism and one device, in words."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [name for name, m in model.named_modules() if isinstance(m, kinds) and m.training]
    more = f" and {len(norms) - 3} more" if len(norms) > 3 else ""
    names = f"{', '.join(norms[:3])}{more}"
    batch_norm = f" Batch norm takes its statistics over a rank's own rows: {names}."
    return (
        "A loss that is a mean over rows trains as on one device, with uneven rows too. Others "
        "differ: a mean over anything else (such as tokens that are not ignored) weighs each "
        "rank's mean by its rows, a sum over rows is divided by the number of ranks, and rows "
        "see only those of their own rank (contrastive losses, a maximum over the batch)."
        + (batch_norm if norms else "")
    )


def run_fallback(
    inner: nn.Module,
    shard: BatchShard,
    options: Options,
    autocast: contextlib.AbstractContextManager[Any],
    *,
    holds: bool,
) -> Any:
    """A call of torch's module on this rank's rows; `holds` keeps its gradients unreduced."""
    tensors = iter(shard.tensors)
    leaves = [next(tensors) if isinstance(x, TensorSpec) else x for x in shard.call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, shard.call.structure)
    hold = getattr(inner, "no_sync", None) if holds else None
    held_back = contextlib.nullcontext() if hold is None else hold()
    with held_back, autocast, running_rows(options.ranks):
        if options.loss_fn is None:
            result = inner(*args, **kwargs)
        else:
            result = options.loss_fn(inner(*args[:-1], **kwargs), args[-1])
    return result if options.ranks == 1 else average_over_batch(result, shard, options.ranks)


def average_over_batch(result: Any, shard: BatchShard, ranks: int) -> Any:
    """A rank's result with scalars replaced by their mean over the global batch.

    Each rank weights its gradients by its rows, so that a mean loss trains as on one device. This
    covers uneven rows, and losses computed from returned rows.

    Raises:
        StrategyError: a value is a DTensor.
    """
    values, structure = flatten(result)
    if any(isinstance(x, DTensor) for x in values):
        raise StrategyError(
            "forward returns a DTensor, since it uses sharded parameters outside of their modules, "
            "as a penalty on weights does. fully_shard cannot train that: give autopar.compile "
            'strategy="ddp", or change what the warning before this error names.'
        )
    scalars = {
        i: x
        for i, x in enumerate(values)
        if isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point()
    }
    # DDP and fully_shard divide the sum of gradients by the number of ranks
    weight = shard.rows * ranks / shard.slices.rows
    if scalars:
        fraction = shard.rows / shard.slices.rows
        means = torch.stack([x.detach().double() * fraction for x in scalars.values()])
        with torch.no_grad(), explaining_comm_errors("forward"):
            dist.all_reduce(means, group=world())
        for (index, scalar), mean in zip(scalars.items(), means, strict=True):
            values[index] = _Weighted.apply(scalar, mean.to(scalar.dtype), weight)
    for index, value in enumerate(values):
        trains = isinstance(value, torch.Tensor) and value.requires_grad
        if trains and index not in scalars and weight != 1:
            values[index] = _Weighted.apply(value, None, weight)
    return pytree.tree_unflatten(values, structure)


class _Weighted(torch.autograd.Function):
    """A rank's rows, or the mean of the ranks' scalars; the rank's gradients get its weight."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, mean: torch.Tensor | None, weight: float
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return value.view_as(value) if mean is None else mean.clone()

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] * ctx.weight, None, None


@contextlib.contextmanager
def running_rows(ranks: int) -> Iterator[None]:
    """Runs a model on a rank's rows, under checkpoints that DDP and fully_shard can follow.

    Raises:
        BatchError: the model raises on several ranks.
    """
    try:
        with without_reentrant_checkpoints():
            yield
    except AutoparError:
        raise
    except Exception as error:
        where = user_frame(error)
        if ranks == 1 or not where:
            raise
        raise BatchError(
            f"the model raised {type(error).__name__}{where}: {first_line(error)}. It "
            "could not be captured, so each rank was given its rows of every argument whose dim 0 "
            "has the size of the batch. Change what the warning before this error names, or run "
            "the model on one rank."
        ) from error


def with_ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP that allows unused parameters.

    Ranks have equal parameters since autopar.compile. Written again by the first call, they would
    invalidate the graphs of a loop that has used them.
    """
    # models that cannot be captured often branch, and DDP stops at parameters that go unused
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=True, init_sync=False
    )


def check_runs(
    model: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    loss_fn: Callable[..., Any] | None,
    autocast: contextlib.AbstractContextManager[Any],
    reason: CaptureError,
) -> None:
    """Runs a call of the plain model and drops the result.

    Parameters, buffers, inputs and random generators keep their values. Nothing runs if autopar
    itself refused the model, if only tracing can cause the error, or if
    parameters are sharded or without values.

    Raises:
        ModelError: the model raises; its error is the cause.
    """
    from_autopar = reason.__cause__ is None or isinstance(reason.__cause__, _TRACING_ERRORS)
    if from_autopar or not has_values(model):
        return
    try:
        with torch.enable_grad():
            run_plain(model, leaves, structure, loss_fn, autocast)
    except torch.OutOfMemoryError:
        return  # the whole batch may be too large for one rank
    except Exception as error:
        raise ModelError(
            f"your model raised {type(error).__name__}{user_frame(error)}: {first_line(error)}. "
            "The plain model raises it, too."
        ) from error
