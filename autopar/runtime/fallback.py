"""torch's own data parallelism (DDP, fully_shard) for models that cannot be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar._torch import DataDependentOutputException, DynamicOutputShapeException, pytree
from autopar.capture.call import BatchShard
from autopar.capture.model_info import find_separate_blocks
from autopar.capture.provenance import user_frame
from autopar.common.containers import flatten
from autopar.common.world import world
from autopar.errors import AutoparError, BatchError, CaptureError, ModelError, StrategyError
from autopar.formatting import first_line
from autopar.runtime.border.held_gradients import HeldGradients
from autopar.runtime.parameters.distribute import local_part, parameter_like
from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.parameters.whole_gradient import none_for_none
from autopar.runtime.plain_call import has_values, run_plain
from autopar.runtime.process_groups import explaining_comm_errors

_TRACING_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def wrap_with_ddp_or_fsdp(model: nn.Module, mesh: DeviceMesh, *, shard: bool) -> nn.Module:
    """The model under DDP, or under fully_shard block by block.

    Blocks that share a parameter are sharded together with the root module.

    Raises:
        StrategyError: parameters that an optimizer may hold as DTensors would be sharded.
    """
    has_dtensors = any(isinstance(p, DTensor) for p in model.parameters())
    if not shard:
        return AliasedDDP(model) if has_dtensors else with_ddp(model)
    if has_dtensors:
        raise StrategyError(
            "this model cannot be captured, and an optimizer may hold its shards already, so that "
            "fully_shard cannot take over. Change the line that the error above names, give "
            'strategy="ddp", or give autopar.compile example_inputs.'
        )
    for block in find_separate_blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


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
def explaining_row_errors(ranks: int) -> Iterator[None]:
    """Raises BatchError for an error of a model that runs on a rank's rows alone."""
    try:
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
    """DDP that allows unused parameters."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)


class AliasedDDP(nn.Module):
    """DDP over plain parameters that alias the memory of replicated DTensors.

    An optimizer of the DTensors keeps working: it updates the same memory, and finds the reduced
    gradients in their `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        aliases: dict[int, nn.Parameter] = {}
        self.slots: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                plain = parameter_like(parameter, local_part(parameter.detach()))
                alias = aliases.setdefault(id(parameter), plain)
                self.slots.append((module, name, parameter, alias))
        self.parameter_of = {id(alias): parameter for _, _, parameter, alias in self.slots}
        self.used: set[int] = set()
        self.shared: dict[int, nn.Parameter] = {}  # aliases with the gradients of their DTensors
        self.held, self.unreduced = HeldGradients(), dict[int, nn.Parameter]()
        self.is_checked, self.reduces = False, True
        for alias in aliases.values():
            if alias.requires_grad:
                alias.register_hook(lambda _: self._follow_parameters())
                alias.register_post_accumulate_grad_hook(self._accumulated)
        with self._aliased():
            self.ddp = with_ddp(_Submodule(model))
        # DDP checks annotations of hooks; a lambda has none
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce_and_share(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.is_checked = False
        self.reduces = self.ddp.require_backward_grad_sync
        with self._aliased():
            return self.ddp(*args, **kwargs)

    def _follow_parameters(self) -> None:
        """Takes up what a script did to gradients since; each backward begins so.

        `zero_grad` cleared them, or other tensors were put in their places. Every gradient of a
        backward calls this, and the first one does the work.
        """
        if self.is_checked:
            return
        self.is_checked = True
        for number in [*self.unreduced]:
            if self.held.take(str(number)) is None:
                self.unreduced[number].grad = None
                self.shared.pop(number, None)
        self.unreduced.clear()
        for number, alias in [*self.shared.items()]:
            given, own = self.parameter_of[number].grad, alias.grad
            if given is None or own is None:
                self.shared.pop(number).grad = None
            elif (new := local_part(given)).data_ptr() != own.data_ptr():
                own.copy_(new)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """DDP's no_sync; the aliases keep the gradients that it holds back."""
        return self.ddp.no_sync()

    def _accumulated(self, alias: torch.Tensor) -> None:
        """Holds back what DDP has not reduced."""
        number = id(alias)
        self.used.add(number)
        if not self.reduces and number not in self.unreduced:
            assert isinstance(alias, nn.Parameter)
            assert alias.grad is not None
            self.unreduced[number] = alias
            self.held.add(str(number), self.parameter_of[number], alias.grad)

    @contextlib.contextmanager
    def _aliased(self) -> Iterator[None]:
        for module, name, _, alias in self.slots:
            module._parameters[name] = alias
        try:
            yield
        finally:
            for module, name, parameter, _ in self.slots:
                module._parameters[name] = parameter

    def _reduce_and_share(self, bucket: Any) -> Any:
        """Averages gradients as DDP does, and assigns those that a rank used to the DTensors."""
        self.is_checked = False  # another backward may follow without a call
        aliases = bucket.parameters()
        used = torch.tensor([id(alias) in self.used for alias in aliases], dtype=torch.uint8)
        used = used.to(bucket.buffer().device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=world())
        rows = zip(aliases, bucket.gradients(), used.tolist(), strict=True)
        for alias, gradient, is_used in rows:
            self.used.discard(id(alias))
            parameter = self.parameter_of[id(alias)]
            assert isinstance(parameter, DTensor)
            if is_used:
                self.shared[id(alias)] = alias
                parameter.grad = in_layout_of(parameter, gradient)
        return allreduce_hook(world(), bucket)


class _Submodule(nn.Module):
    """A module around a model, so that DDP reads the model's current parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


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
            f"{type(model).__name__} does so without autopar too."
        ) from error
