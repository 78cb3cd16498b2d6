"""`AutoparFabricStrategy`: Lightning Fabric under a plan of autopar."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autopar.api import compile
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import StrategyError
from autopar.integrations.lightning.ranks import (
    PRECISIONS,
    backends_for,
    load_whole_batches,
    synchronize_rng,
)
from autopar.integrations.optimizers import (
    Order,
    follow_parameters,
    load_numbered_state,
    model_of,
    numbered_state,
    order_of,
)
from autopar.integrations.rows import gather_results
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import is_remote


class AutoparFabricStrategy(DDPStrategy):
    """A strategy of `lightning.Fabric` that compiles the models it sets up.

    The loop runs as on one device with the batch of all ranks: the loader's batch size times the
    number of ranks, whatever the plan. Every rank loads the whole batch, the model computes this
    rank's rows, and results for all rows come back.

    Args:
        strategy: as in `autopar.compile`.
        memory: as in `autopar.compile`.
        cluster: as in `autopar.compile`.
        plan: as in `autopar.compile`.
        split_batches: whether loaders make the batches of all ranks, rather than one rank's.
        compile_options: further arguments of `autopar.compile`.
        options: arguments of Fabric's `DDPStrategy`, such as `timeout`.
    """

    distributed_sampler_kwargs: Any = None

    def __init__(
        self,
        strategy: str | Strategy = "auto",
        *,
        memory: int | str | None = None,
        cluster: Cluster | None = None,
        plan: Plan | None = None,
        split_batches: bool = False,
        compile_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        given = {"strategy": strategy, "memory": memory, "cluster": cluster, "plan": plan}
        self.compile_options = {**given, **(compile_options or {})}
        self.split_batches = split_batches
        self._backward_sync_control: Any = _NoSync()
        self._models: list[DistributedModule] = []
        self._orders: dict[int, Order] = {}  # by the id of an optimizer

    # Setup.

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or backends_for(self.root_device)

    def setup_environment(self) -> None:
        with isolate_rng():  # which DDP seeds again
            super().setup_environment()
        synchronize_rng(self)

    def module_to_device(self, module: nn.Module) -> None:
        """Leaves the module where it is: each rank gets its part on the device."""

    def setup_module(self, module: nn.Module) -> Any:
        precision = PRECISIONS.get(getattr(self.precision, "precision", ""))
        options = {"precision": precision, "device": self.root_device, **self.compile_options}
        compiled = compile(module, **options)
        compiled.register_forward_pre_hook(_refuse_other_methods)
        compiled.register_forward_hook(gather_results, with_kwargs=True)
        self._models.append(compiled)
        return compiled

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[DistributedModule, list[Optimizer], Any]:
        before = dict(module.named_parameters())
        compiled = self.setup_module(module)
        follow_parameters(optimizers, before, compiled)
        return compiled, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        model = self._model_of(optimizer)
        names = {p: name for name, p in model.user_module.named_parameters()}
        self._orders[id(optimizer)] = order_of(optimizer, names)
        return optimizer

    def _model_of(self, optimizer: Optimizer) -> DistributedModule:
        if (model := model_of(optimizer, self._models)) is not None:
            return model
        raise StrategyError(
            f"{type(optimizer).__name__} has no parameter of a model that Fabric has set up: call "
            "fabric.setup(model, optimizer), or make the optimizer after fabric.setup_module."
        )

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        if self.split_batches:
            return dataloader
        return load_whole_batches(dataloader, self.world_size)

    # The loop's view: one process with the whole batch.

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = super().all_reduce(
            torch.tensor(int(decision), device=self.root_device), None, "sum"
        )
        return bool(votes == self.world_size) if all else bool(votes)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        self.precision.unscale_gradients(optimizer)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        model = self._model_of(optimizer)
        if held >= {p for p in model.parameters() if not is_remote(p)}:
            return model.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return nn.utils.clip_grad_norm_(held, max_norm, norm_type, error_if_nonfinite)

    # Checkpoints.

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        """The state dict of one process; empty on all ranks but 0."""
        if isinstance(module, DistributedModule):
            return module.full_state_dict(rank0_only=True)
        return super().get_module_state_dict(module)

    def load_module_state_dict(
        self, module: Any, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        if isinstance(module, DistributedModule):
            module.load_full_state_dict(state_dict, strict)
        else:
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer as on one process."""
        return numbered_state(self._model_of(optimizer), optimizer, self._orders[id(optimizer)])

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if isinstance(state, Optimizer):
            found = super().load_checkpoint(path, weights_only=weights_only)
            _LoadState(self, state).load_state_dict(found)
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        loads = {
            name: _LoadState(self, x) if isinstance(x, Optimizer) else x
            for name, x in state.items()
        }
        rest = super().load_checkpoint(path, loads, strict, weights_only)
        state |= {name: x for name, x in loads.items() if not isinstance(x, _LoadState)}
        return rest


class _LoadState:
    """An optimizer to Fabric's `load_checkpoint`: loads a state of one process."""

    def __init__(self, strategy: AutoparFabricStrategy, optimizer: Optimizer) -> None:
        self._strategy, self._optimizer = strategy, optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        strategy, optimizer = self._strategy, self._optimizer
        model, order = strategy._model_of(optimizer), strategy._orders[id(optimizer)]
        load_numbered_state(model, optimizer, order, state)


class _NoSync:
    """Keeps gradients of calls unreduced while Fabric accumulates."""

    def no_backward_sync(
        self, module: DistributedModule, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return module.no_sync() if enabled else contextlib.nullcontext()


def _refuse_other_methods(model: DistributedModule, args: Any) -> None:
    """Raises StrategyError if Fabric runs another method in the place of forward."""
    if "wrapped_forward" in getattr(vars(model.user_module).get("forward"), "__qualname__", ""):
        raise StrategyError(
            f"a method of {type(model.user_module).__name__} other than forward was called under "
            "Fabric, such as training_step: call the model itself and compute the loss from its "
            "result, or use the Trainer with AutoparStrategy."
        )
