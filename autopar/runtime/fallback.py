"""What trains a model that cannot be captured: torch's own DDP or fully_shard."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import StrategyError
from autopar.runtime.parameters import find_block_modules, local


def fall_back(model: nn.Module, mesh: DeviceMesh, *, shard: bool) -> nn.Module:
    """The model under DDP, or under fully_shard block by block.

    Raises:
        StrategyError: the parameters are DTensors already and would have to be sharded: an
            optimizer may hold them.
    """
    lazy = any(isinstance(p, DTensor) for p in model.parameters())
    if not shard:
        return AliasedDDP(model) if lazy else DistributedDataParallel(model)
    if lazy:
        raise StrategyError(
            "this model cannot be captured and must be sharded to fit. Give autopar.compile "
            "example_inputs, so that fully_shard is applied before an optimizer is made."
        )
    for block in find_block_modules(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


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
                    nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad),
                )
                self.places.append((module, name, parameter, alias))
        with self._aliased():
            self.ddp = DistributedDataParallel(_Hidden(model), gradient_as_bucket_view=True)
        outer = {id(alias): parameter for _, _, parameter, alias in self.places}
        # DDP reads annotations, and a lambda has none to mistake
        self.ddp.register_comm_hook(outer, lambda state, bucket: _reduce_and_share(state, bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs DDP's forward on the aliases."""
        for _, _, parameter, alias in self.places:
            if parameter.grad is None:
                alias.grad = None
        with self._aliased():
            return self.ddp(*args, **kwargs)

    def no_sync(self) -> Any:
        """DDP's no_sync."""
        return self.ddp.no_sync()

    def _aliased(self) -> _Aliased:
        return _Aliased(self.places)


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


def _reduce_and_share(outer: dict[int, nn.Parameter], bucket: Any) -> Any:
    """DDP's own mean over ranks, whose results are the gradients of the DTensors too."""
    for alias, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        parameter = outer[id(alias)]
        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor.from_local(
            gradient, parameter.device_mesh, parameter.placements, run_check=False
        )
    group = dist.group.WORLD
    assert group is not None
    return allreduce_hook(group, bucket)
