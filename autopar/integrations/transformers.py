"""`AutoparTrainer`: `transformers.Trainer` under a plan of autopar."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer

from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.integrations.accelerate import AutoparAccelerator
from autopar.integrations.optimizers import follow_parameters
from autopar.integrations.rows import whole_rows
from autopar.runtime.module import DistributedModule
from autopar.runtime.states.methods import same_config

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class AutoparTrainerMixin(Base):
    """A mix-in in front of a `Trainer` class, such as `trl.SFTTrainer`.

    The loop runs as on one device with the batch of all ranks: `per_device_train_batch_size` times
    the number of ranks, whatever the plan. Every rank loads the whole batch, and the model computes
    this rank's rows of it. With `compile_options={"batch": "local"}` each rank loads rows of its
    own, as under `Trainer`.

    Args:
        strategy: as in `autopar.compile`.
        memory: as in `autopar.compile`.
        cluster: as in `autopar.compile`.
        plan: as in `autopar.compile`.
        compile_options: further arguments of `autopar.compile`.
    """

    model: Any
    model_wrapped: Any
    optimizer: Any
    _predicts_loss_only = False

    def __init__(
        self,
        *args: Any,
        strategy: str | Strategy = "auto",
        memory: int | str | None = None,
        cluster: Cluster | None = None,
        plan: Plan | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"strategy": strategy, "memory": memory, "cluster": cluster, "plan": plan}
        self._compile_options = {**given, **(compile_options or {})}
        super().__init__(*args, **kwargs)

    # The loop's view: one process with the whole batch.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        options = dict(self._compile_options)
        if self.args.torch_compile:
            options.setdefault("backend", self.args.torch_compile_backend or "inductor")
        AutoparAccelerator.adopt(self.accelerator, options)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        self._predicts_loss_only = prediction_loss_only
        found = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        loss, logits, labels = found
        if self.accelerator.brings_rows:
            return found
        # evaluation repeats a loss for each of a device's rows
        return loss if loss is None else loss.repeat(self.args.world_size), logits, labels

    def store_flos(self) -> None:
        if self.accelerator.brings_rows:
            super().store_flos()
            return
        self.state.total_flos += self.current_flos  # every rank counts the whole batch
        self.current_flos = 0

    # The model.

    def compile_model(self) -> None:
        """Compiles the model, unless it is compiled; training and evaluation do so themselves."""
        if isinstance(self.model, DistributedModule):
            return
        before = dict(self.model.named_parameters())
        model = self.accelerator.compile(self.model, self._whole_result)
        if self.optimizer is not None:  # Trainer(optimizers=...), made of the plain model
            follow_parameters([self.optimizer], before, model)
        self.model = self.model_wrapped = self.callback_handler.model = model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.compile_model()
        return super().create_optimizer(model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.compile_model()
        return super().evaluation_loop(*args, **kwargs)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # clip_grad_norm_ of the model covers all meshes

    def _whole_result(self, model: DistributedModule, args: Any, kwargs: Any, result: Any) -> Any:
        """Gathers the rows of a result if the loop reads them."""
        reads_loss_only = torch.is_grad_enabled() or self._predicts_loss_only
        if reads_loss_only and self._takes_loss_of_model:
            return result
        return whole_rows(model, args, kwargs, result)

    @property
    def _takes_loss_of_model(self) -> bool:
        """Whether the loss is the one that the model returns."""
        plain = type(self).compute_loss is Trainer.compute_loss
        return plain and self.compute_loss_func is None and self.label_smoother is None

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and isinstance(self.model, DistributedModule):
            rank0_only = not self.args.save_on_each_node
            state_dict = self.model.full_state_dict(rank0_only=rank0_only)
        with same_config(self.model):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        gather = self.optimizer.state_dict  # on all ranks, of which Trainer asks one
        self.optimizer.state_dict = functools.partial(dict, gather())
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer.state_dict = gather


class AutoparTrainer(AutoparTrainerMixin, Trainer):
    """`transformers.Trainer` under a plan of autopar; a drop-in with compile's options.

    The arguments are those of `transformers.Trainer` and of `AutoparTrainerMixin`.
    """
