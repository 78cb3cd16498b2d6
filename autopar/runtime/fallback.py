"""What trains a model that cannot be captured: torch's own DDP or fully_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar._torch import pytree
from autopar.capture.batch_shards import BatchShard
from autopar.capture.model_info import find_separate_blocks
from autopar.capture.provenance import first_line, user_frame
from autopar.common.containers import flatten
from autopar.errors import AutoparError, BatchError, StrategyError
from autopar.runtime.batch_checks import batch_checksum, check_checksum_sum
from autopar.runtime.parameters.distribute import local_part
from autopar.runtime.process_groups import explaining_comm_errors


def wrap_with_ddp_or_fsdp(model: nn.Module, mesh: DeviceMesh, *, shard: bool) -> nn.Module:
    """The model under DDP, or under fully_shard block by block.

    What cannot be captured often branches, so that parameters go unused: DDP looks for them.
    Blocks that share a parameter are sharded with the rest of the model.

    Raises:
        StrategyError: the parameters are DTensors already and would have to be sharded: an
            optimizer may hold them.
    """
    lazy = any(isinstance(p, DTensor) for p in model.parameters())
    if not shard:
        return AliasedDDP(model) if lazy else as_ddp(model)
    if lazy:
        raise StrategyError(
            "this model cannot be captured and must be sharded to fit. Give autopar.compile "
            "example_inputs, so that fully_shard is applied before an optimizer is made."
        )
    for block in find_separate_blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def describe_fallback_differences(model: nn.Module) -> str:
    """The results that torch's data parallelism computes otherwise than one device, in words."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [name for name, m in model.named_modules() if isinstance(m, kinds) and m.training]
    more = f" and {len(norms) - 3} more" if len(norms) > 3 else ""
    own = f" Batch norm takes its statistics over a rank's own rows: {', '.join(norms[:3])}{more}."
    return (
        "A loss that is a mean over rows trains as on one device, with uneven rows too. Others "
        "differ: a mean over anything else (such as tokens that are not ignored) weighs each "
        "rank's mean by its rows, a sum over rows is divided by the number of ranks, and rows "
        "see only those of their own rank (contrastive losses, a maximum over the batch)."
        + (own if norms else "")
    )


def as_ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP that lets parameters go unused."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)


def average_over_batch(
    result: Any,
    leaves: Sequence[Any],
    share: BatchShard,
    *,
    mode: str,
    ranks: int,
    device: torch.device,
) -> Any:
    """A result with scalars that are means over the global batch, as captured calls return them.

    Gradients of a mean loss come out as on one device, even with unlike numbers of rows: of a
    scalar here, and of a loss that is computed from returned rows. The ranks also find out whether
    they were given what they must be.

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
    proof = batch_checksum(leaves, share.rows, mode, device)
    own = [x.detach().double() * (share.rows / share.global_rows) for x in scalars.values()]
    vector = torch.cat([proof, torch.stack(own)]) if own else proof
    with torch.no_grad(), explaining_comm_errors("forward"):
        dist.all_reduce(vector)
    check_checksum_sum(vector[: len(proof)], ranks, mode)
    weight = share.rows * ranks / share.global_rows
    for (index, scalar), mean in zip(scalars.items(), vector[len(proof) :], strict=True):
        values[index] = _Mean.apply(scalar, mean.to(scalar.dtype), weight)
    for index, value in enumerate(values):
        trains = isinstance(value, torch.Tensor) and value.requires_grad
        if trains and index not in scalars and weight != 1:
            values[index] = _Weighed.apply(value, weight)
    return pytree.tree_unflatten(values, structure)


class _Mean(torch.autograd.Function):
    """The mean of the ranks' scalars, through which gradients go to this rank's by its weight."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, mean: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] * ctx.weight, None, None


class _Weighed(torch.autograd.Function):
    """A rank's rows, whose gradients count by its share of all rows."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.weight, None


class AliasedDDP(nn.Module):
    """DDP over plain parameters that share the memory of a model's replicated DTensors.

    An optimizer made over the DTensors goes on working: it changes the same memory, and finds
    the reduced gradients in their `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        aliases: dict[int, nn.Parameter] = {}
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                alias = aliases.setdefault(
                    id(parameter),
                    nn.Parameter(
                        local_part(parameter.detach()), requires_grad=parameter.requires_grad
                    ),
                )
                self.places.append((module, name, parameter, alias))
        self.outer = {id(alias): parameter for _, _, parameter, alias in self.places}
        self.used: set[int] = set()
        self.holding = self.inside_no_sync = False
        for alias in aliases.values():
            if alias.requires_grad:
                alias.register_post_accumulate_grad_hook(lambda tensor: self.used.add(id(tensor)))
        with self._aliased():
            self.ddp = as_ddp(_Hidden(model))
        # DDP reads annotations, and a lambda has none to mistake
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce_and_share(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs DDP's forward on the aliases."""
        for _, _, parameter, alias in self.places:
            if parameter.grad is None and not self.holding:
                alias.grad = None
        self.holding = self.holding or self.inside_no_sync
        with self._aliased():
            return self.ddp(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """DDP's no_sync; gradients stay with the aliases meanwhile."""
        self.inside_no_sync = True
        try:
            with self.ddp.no_sync():
                yield
        finally:
            self.inside_no_sync = False

    def _aliased(self) -> _Aliased:
        return _Aliased(self.places)

    def _reduce_and_share(self, bucket: Any) -> Any:
        """DDP's own mean over ranks, whose results are the gradients of the DTensors too.

        A parameter that no rank has used keeps what gradient it has.
        """
        self.holding = False
        aliases = bucket.parameters()
        used = torch.tensor([id(alias) in self.used for alias in aliases], dtype=torch.uint8)
        used = used.to(bucket.buffer().device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for alias, gradient, is_used in zip(
            aliases, bucket.gradients(), used.tolist(), strict=True
        ):
            self.used.discard(id(alias))
            parameter = self.outer[id(alias)]
            assert isinstance(parameter, DTensor)
            if is_used:
                parameter.grad = DTensor.from_local(
                    gradient, parameter.device_mesh, parameter.placements, run_check=False
                )
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)


class _Hidden(nn.Module):
    """A model whose parameters are seen as they are while DDP is made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class _Aliased:
    """Puts aliases into their modules for the time of a call."""

    def __init__(self, places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]) -> None:
        self.places = places

    def __enter__(self) -> None:
        for module, name, _, alias in self.places:
            module._parameters[name] = alias

    def __exit__(self, *error: object) -> None:
        for module, name, parameter, _ in self.places:
            module._parameters[name] = parameter


@contextlib.contextmanager
def explaining_row_errors(ranks: int) -> Iterator[None]:
    """Explains what a model raises that was given a rank's rows instead of the whole batch.

    Args:
        ranks: size of the world; alone, a rank is given the whole batch.

    Raises:
        BatchError: the model raises an error.
    """
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
