"""`AutoparStrategy`: Lightning's Trainer under a plan of autopar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader

from autopar.api import compile
from autopar.core.common.notices import warn_once
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import AutoparWarning
from autopar.integrations.lightning.module import route_steps
from autopar.integrations.lightning.ranks import (
    PRECISIONS,
    backends_for,
    load_whole_batches,
    synchronize_rng,
)
from autopar.integrations.lightning.steps import Steps, check_steps
from autopar.integrations.optimizers import (
    Order,
    load_numbered_state,
    numbered_state,
    order_of,
)
from autopar.runtime.module import DistributedModule


class AutoparStrategy(DDPStrategy):
    """A strategy of `lightning.pytorch.Trainer` that compiles the whole LightningModule.

    The loop runs as on one device with the batch of all ranks: the loader's batch size times the
    number of ranks, whatever the plan. Every rank loads the whole batch, and computes its rows of
    each step, with its loss. Checkpoints are those of one process.

    Args:
        strategy: as in `autopar.compile`.
        memory: as in `autopar.compile`.
        cluster: as in `autopar.compile`.
        plan: as in `autopar.compile`.
        split_batches: whether loaders make the batches of all ranks, rather than one rank's.
        compile_options: further arguments of `autopar.compile`.
        options: arguments of Lightning's `DDPStrategy`, such as `timeout`.
    """

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
        self.compiled: DistributedModule | None = None
        self._forward_redirection: Any = Steps()
        self._orders: list[Order] = []

    # Setup.

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or backends_for(self.root_device)

    def setup_environment(self) -> None:
        with isolate_rng():  # which DDP seeds again
            super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module: Any = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False
        self.precision_plugin.convert_module(module)
        if self.compiled is None or self.compiled.user_module is not module:
            check_steps(module)
            self._compile(module, trainer)
        self.model = self.compiled
        synchronize_rng(self)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            names = {p: name for name, p in module.named_parameters()}
            self._orders = [order_of(optimizer, names) for optimizer in self.optimizers]
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self.clip_grad_by_norm

    def _compile(self, module: Any, trainer: Trainer) -> None:
        if trainer.num_sanity_val_steps and any(p.is_meta for p in module.parameters()):
            warn_once(AutoparWarning, "no sanity check: it would need the whole model on each rank")
            trainer.num_sanity_val_steps = 0
        route_steps(module)
        precision = PRECISIONS.get(self.precision_plugin.precision)
        options = {"precision": precision, "device": self.root_device, **self.compile_options}
        self.compiled = compile(module, **options)
        module._device = self.root_device

    def process_dataloader(self, dataloader: object) -> object:
        if self.split_batches or not isinstance(dataloader, DataLoader):
            return dataloader
        return load_whole_batches(dataloader, self.world_size)

    # The loop's view: one process with the whole batch.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), None, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    # Steps.

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.compiled is not None
        with self.compiled.no_sync():
            yield

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clips gradients over all ranks and stages, as one device does."""
        assert self.compiled is not None
        if len(self.optimizers) == 1:
            self.compiled.clip_grad_norm_(clip_val)
        else:
            nn.utils.clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of one process; empty on all ranks but 0."""
        assert self.compiled is not None
        return self.compiled.full_state_dict(rank0_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.compiled is not None
        self.compiled.load_full_state_dict(checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer as on one process."""
        assert self.compiled is not None
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return numbered_state(self.compiled, plain, self._orders[self.optimizers.index(plain)])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.compiled is not None
        states = checkpoint["optimizer_states"]
        for optimizer, order, state in zip(self.optimizers, self._orders, states, strict=True):
            load_numbered_state(self.compiled, optimizer, order, state)

    def teardown(self) -> None:
        """Ends the run; the model stays compiled, for the next one."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
