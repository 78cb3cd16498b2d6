"""`AutoparAccelerator`: `accelerate.Accelerator` under a plan of autopar."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, recursively_apply
from torch import nn
from torch.utils.data import DataLoader

from autopar.api import compile
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import StrategyError
from autopar.integrations.loaders import whole_batches
from autopar.integrations.optimizers import follow_parameters, load_optimizer_state, model_of
from autopar.integrations.rows import gather_results
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.safetensors_files import read_whole
from autopar.train.checkpoints.plain_data import load_plain

ReadResult = Callable[[Any, Any, Any, Any], Any]
"""Takes a compiled model, the arguments of its call and its result; returns the loop's result."""


class AutoparAccelerator(Accelerator):
    """An accelerator whose loops see one process with the batch of all ranks.

    Every rank loads the whole batch: the loader's batch size times the number of ranks, whatever
    the plan. The model computes this rank's rows, and results for all rows come back. Values are
    not gathered again, since every rank has those of all rows.

    With `compile_options={"batch": "local"}` the loop sees this rank's batch, as under accelerate:
    such as packed rows, whose lengths differ between ranks. Gradients are averaged over ranks.

    Args:
        strategy: as in `autopar.compile`.
        memory: as in `autopar.compile`.
        cluster: as in `autopar.compile`.
        plan: as in `autopar.compile`.
        compile_options: further arguments of `autopar.compile`.

    Raises:
        StrategyError: accelerate is configured to divide models or batches itself.
    """

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
        super().__init__(*args, **kwargs)
        given = {"strategy": strategy, "memory": memory, "cluster": cluster, "plan": plan}
        self.take_over({**given, **(compile_options or {})})

    @classmethod
    def adopt(cls, accelerator: Accelerator, options: Mapping[str, Any]) -> None:
        """Turns an accelerator into one of this class, with these options of `compile`."""
        accelerator.__class__ = cls
        accelerator.take_over(options)

    def take_over(self, options: Mapping[str, Any]) -> None:
        """Keeps the options of `compile`, and the rows of all ranks on every rank."""
        _check(self)
        self.compile_options = dict(options)
        self.brings_rows = options.get("batch") == "local"
        if self.brings_rows and options.get("plan") is None:
            strategy = Strategy.of(options.get("strategy") or "auto")
            self.compile_options["strategy"] = replace(strategy, batch_semantics="local")
        self.dataloader_config.dispatch_batches = False
        self.rng_types = ["torch"]  # samplers and collators draw the same on all ranks
        self.register_load_state_pre_hook(_load_models)

    # The loop's view: one process with the whole batch, unless each brings rows.

    @property
    def num_processes(self) -> int:
        """Number of processes that the loop divides a batch over: one for the whole batch."""
        return self.state.num_processes if getattr(self, "brings_rows", False) else 1

    def gather(self, tensor: Any) -> Any:
        return super().gather(tensor) if self.brings_rows else tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if self.brings_rows:
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(lambda x: x * scale, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self.brings_rows:
            return super().gather_for_metrics(input_data, use_gather_object)
        state = self.gradient_state
        rows = state.remainder if state.end_of_dataloader else 0
        if rows <= 0:
            return input_data
        if isinstance(input_data, list) and not any(torch.is_tensor(x) for x in input_data):
            return input_data[:rows]
        return recursively_apply(lambda x: x[:rows] if x.dim() else x, input_data)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if not (is_prepared or self.split_batches or self.brings_rows):
            data_loader = whole_batches(data_loader, self.state.num_processes)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if not self.brings_rows:
            prepared.split_batches = True  # one step of the schedule for a step of all ranks
        return prepared

    # The model.

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate; compiles models, also after an optimizer was made of them."""
        before = [dict(x.named_parameters()) if isinstance(x, nn.Module) else {} for x in args]
        prepared = super().prepare(*args, **kwargs)
        after = prepared if isinstance(prepared, tuple) else (prepared,)
        for old, model in zip(before, after, strict=True):
            if old:
                follow_parameters(self._optimizers, old, model)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not isinstance(model, DistributedModule):
            if evaluation_mode:
                return super().prepare_model(model, device_placement, evaluation_mode)
            model = self.compile(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def compile(
        self, model: nn.Module, read_result: ReadResult = gather_results
    ) -> DistributedModule:
        """Compiles a model under the options of this accelerator.

        Args:
            model: plain model.
            read_result: forward hook with keyword arguments that gathers rows for the loop.
        """
        precision = None if self.mixed_precision == "no" else self.mixed_precision
        options = {"precision": precision, "device": self.device, **self.compile_options}
        compiled = compile(model, **options)
        if not self.brings_rows:
            compiled.register_forward_hook(read_result, with_kwargs=True)
        return compiled

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with model.no_sync() if isinstance(model, DistributedModule) else super().no_sync(model):
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        self.unscale_gradients()
        found = set(parameters)
        for model in self._models:
            if isinstance(model, DistributedModule) and found == set(model.parameters()):
                return model.clip_grad_norm_(max_norm, norm_type)
        return nn.utils.clip_grad_norm_(found, max_norm, norm_type)

    # States.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if isinstance(model, DistributedModule):
            return OrderedDict(model.full_state_dict())  # its tied tensors are saved once
        return super().get_state_dict(model, unwrap)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The user's own module, whose parameters may be sharded."""
        return (
            model.user_module
            if isinstance(model, DistributedModule)
            else super().unwrap_model(model, *args, **kwargs)
        )

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        prepared.state_dict = functools.partial(self.optimizer_state, prepared)
        prepared.load_state_dict = functools.partial(self.load_optimizer_state, prepared)
        return prepared

    def optimizer_state(self, prepared: Any) -> dict[str, Any]:
        """The whole state of a prepared optimizer; all ranks call this at once."""
        model = model_of(prepared.optimizer, self._models)
        if model is None:
            return prepared.optimizer.state_dict()
        return model.full_optimizer_state_dict(prepared.optimizer)

    def load_optimizer_state(self, prepared: Any, state: Mapping[str, Any]) -> None:
        """Loads a whole state, after the first call of a model that has no plan yet."""
        model = model_of(prepared.optimizer, self._models)
        if model is None:
            prepared.optimizer.load_state_dict(state)
        else:
            load_optimizer_state(model, prepared.optimizer, state)


def _check(accelerator: Accelerator) -> None:
    if accelerator.dataloader_config.dispatch_batches:
        raise StrategyError(
            "dispatch_batches=True hands each rank its part of a batch, and autopar divides "
            "batches itself: leave it out."
        )
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise StrategyError(
            f"accelerate is configured for {kind}, which divides the model itself: configure it "
            "for plain training on several CPUs or GPUs, or run without autopar."
        )


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Loads compiled models from a checkpoint; accelerate loads those left in the list."""
    for index in reversed(range(len(models))):
        model, ending = models[index], f"_{index}" if index else ""
        if isinstance(model, DistributedModule):
            file = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
            if file.exists():
                state = read_whole(file)
            else:
                state = load_plain(Path(folder, f"{MODEL_NAME}{ending}.bin"))
            model.load_full_state_dict(state, strict=False)  # tied tensors are saved once
            del models[index]
