"""`StatefulModule`: state dicts of a planned module, sharded and whole."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autopar._torch import local_tensor, storage_key
from autopar.core.common.world import rank
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.parameters.compression_state import STATE_DICT_KEY
from autopar.runtime.parameters.distribute import distribute_like, is_remote, parameter_like
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.pipeline.stage_parameters import fetch_remote_parameters
from autopar.runtime.planned_module import PlannedModule
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.states.gathered import Gathered, whole_values
from autopar.runtime.states.methods import explaining_shards, save_pretrained
from autopar.runtime.states.optimizer_states import full_optimizer_state, load_optimizer_state
from autopar.runtime.states.whole_optimizer import WholeParameters

OptimizerState = dict[str, Any]
"""`state` by name of parameter, and `param_groups` with names."""


class StatefulModule(PlannedModule):
    """A planned module with state dicts of its parameters, and of their optimizers."""

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The plain model's state dict: whole tensors on the CPU; all ranks call this at once.

        Tied tensors have all their names and share memory. The tensors are copies.

        Args:
            rank0_only: return an empty dict on all ranks but 0, to spare the hosts' memory.
        """
        if not self._execution.is_gathered:
            # Inside of gathered() nothing has to be gathered, so a rank may call this alone.
            self._agree("gathers the state dict of")
        found = self.state_dict()
        found.pop(STATE_DICT_KEY, None)
        keeps = not rank0_only or rank() == 0
        whole: dict[Any, Any] = {}
        with torch.no_grad(), explaining_comm_errors("full_state_dict"):
            for key, value in {_memory(x): x for x in found.values()}.items():
                if isinstance(value, torch.Tensor):
                    full = whole_tensor(value.detach())
                    if keeps:
                        whole[key] = full.to("cpu", copy=True)
        if not keeps:
            return {}
        return {name: whole.get(_memory(value), value) for name, value in found.items()}

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a plain model's state dict; all ranks call this at once, with equal values.

        Raises:
            StrategyError: a value is a DTensor, which `load_state_dict` takes.
            RuntimeError: names or shapes differ from the model's, as in `load_state_dict`.
            DisagreementError: the load fails on other ranks.
        """
        self._agree("loads a full state dict into")
        if sharded := [name for name, x in state.items() if isinstance(x, DTensor)]:
            raise StrategyError(
                f"{sharded[0]} is sharded: load_full_state_dict takes whole tensors, and "
                "load_state_dict sharded ones."
            )
        return run_on_all_ranks(lambda: self.load_state_dict(state, strict))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yields the user's own module with whole parameters; all ranks enter and leave at once.

        Inside, the module and its submodules run on this rank as written: `generate`, calls of
        submodules, changes of values. Changed values are kept if they are equal on all ranks.
        Each rank needs the memory of the whole model.

        Raises:
            StrategyError: the model runs under fully_shard, parameters were added, removed or given
                another shape or dtype, or an optimizer stepped inside.
            DisagreementError: the ranks changed values differently.
        """
        if self._execution.is_gathered:
            yield self._wrapped[0]
            return
        self._agree("gathers the parameters of")
        self.materialize_parameters()
        self._check_can_gather()
        with self._gather().in_module(self._execution.protocol):
            self._execution.is_gathered = True
            try:
                yield self._wrapped[0]
            finally:
                self._execution.is_gathered = False

    def _method(self, name: str, method: MethodType) -> Any:
        """A method of the user's module; one that needs whole parameters asks for them."""
        if self._options.ranks == 1 or self._execution.is_gathered:
            return method
        if name == "save_pretrained":
            return partial(save_pretrained, self, method)
        return explaining_shards(method) if self._execution.fallback is None else method

    def whole_optimizer(
        self, make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """An optimizer that sees whole parameters and gradients, under any plan.

        For optimizers that read whole matrices, such as Shampoo, LAMB and Adafactor, or flatten all
        parameters, such as LBFGS. Each step gathers all gradients, all ranks step alike, and each
        keeps its part. Each rank needs the memory of one device for it.

        Args:
            make: makes the optimizer, given names and whole parameters; on all ranks alike.
        """
        self._agree("makes an optimizer of whole parameters of")
        self.materialize_parameters()
        self._check_can_gather()
        values, names = self._whole_values(), self._wrapped[0].named_parameters()
        copies = {p: parameter_like(p, values[p]) for _, p in names}
        named = [(name, copies[p]) for name, p in self._wrapped[0].named_parameters()]
        for name, copy in named:
            copy.name_in_model = name  # type: ignore[attr-defined]
        optimizer = make(named)
        WholeParameters(copies, self._whole_values, lambda: self._pipeline_group).attach(optimizer)
        return optimizer

    def _gather(self) -> Gathered:
        with explaining_comm_errors("gathered"):
            return Gathered.of(self._wrapped[0], self._remote_values())

    def _whole_values(self) -> dict[nn.Parameter, torch.Tensor]:
        with torch.no_grad():
            return whole_values(self._wrapped[0], self._remote_values())

    def _remote_values(self) -> dict[nn.Parameter, torch.Tensor]:
        """Values of the parameters on other stages, sharded as this rank's."""
        if (group := self._pipeline_group) is None:
            return {}
        assert self.plan is not None
        assert self.plan.pipeline is not None
        pipeline = self.plan.pipeline
        return fetch_remote_parameters(self._wrapped[0], pipeline, group, self._context.device)

    def _check_can_gather(self) -> None:
        if isinstance(self._execution.fallback, FSDPModule):
            raise StrategyError(
                "the model runs under torch's fully_shard, since it could not be captured, and its "
                "parameters cannot be gathered. Its own methods gather them as they run; read "
                "values by full_state_dict() and write them by load_full_state_dict()."
            )

    def check_not_gathered(self) -> None:
        """Raises StrategyError inside of `gathered`, where the plan's program cannot run."""
        if self._execution.is_gathered:
            raise StrategyError(
                "the compiled model was called inside of model.gathered(), where its parameters "
                "are whole. Call the module that gathered() yields, or leave it before."
            )

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """The state of an optimizer of this model by parameter names; all ranks call this at once.

        Every rank gets the states of all stages as whole tensors on the CPU. Groups list the names
        of their parameters, as torch.distributed.checkpoint.state_dict does, whose
        `set_optimizer_state_dict` loads the result into an optimizer of the plain model.

        Raises:
            StrategyError: the optimizer has parameters of another model, or a state that differs
                between ranks without being sharded.
        """
        self._agree("gathers the state of an optimizer of")
        return full_optimizer_state(
            self._wrapped[0], optimizer, self._pipeline_group, self._context.device
        )

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Loads what `full_optimizer_state_dict` returned, under this or another plan.

        All ranks call this at once, with equal values.

        Raises:
            StrategyError: the state has other groups or parameters than the optimizer.
            DisagreementError: the load fails on other ranks.
        """
        self._agree("loads the state of an optimizer of")
        run_on_all_ranks(lambda: load_optimizer_state(self._wrapped[0], optimizer, state))

    def _agree(self, action: str) -> None:
        if self._execution.protocol is not None:
            self._execution.protocol.agree_on_states(action)

    @property
    def _pipeline_group(self) -> torch.distributed.ProcessGroup | None:
        if self.plan is None or self.mesh is None or self.plan.pp_size == 1:
            return None
        return self.mesh.get_group("pp")

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The whole model under the plain model's names, on every rank; sharded values as DTensors.

        With pipeline stages all ranks call this at once, to exchange their parameters.
        """
        options = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        if self._execution.is_gathered:
            return self._wrapped[0].state_dict(**options)
        self.materialize_parameters()
        has_stages = self.plan is not None and self.plan.pp_size > 1
        if has_stages:
            self._agree("takes the state dict, of several stages, of")
        found: dict[str, Any] = self._wrapped[0].state_dict(**options)
        if self.mesh is not None:
            compression = self._context.compression_state.state_dict(self._stage_mesh)
            if compression:
                found[prefix + STATE_DICT_KEY] = compression
        if self.plan is None or not has_stages:
            return found
        assert self.mesh is not None
        assert self.plan.pipeline is not None
        model, group = self._wrapped[0], self.mesh.get_group("pp")
        remote = fetch_remote_parameters(model, self.plan.pipeline, group, self._context.device)
        for name, parameter in model.named_parameters(prefix[:-1], remove_duplicate=False):
            if parameter in remote:
                found[name] = remote[parameter]
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads unsharded tensors or DTensors under the plain model's names.

        Each rank takes its part of the whole model. With pipeline stages `assign` copies too.
        """
        if self._execution.is_gathered:
            return self._wrapped[0].load_state_dict(state_dict, strict)
        state_dict = dict(state_dict)
        self._load_compression_state(state_dict.pop(STATE_DICT_KEY, None))
        if self._execution.deferred is None or self.plan is not None:
            return self._load_values(state_dict, strict, assign)
        with warnings.catch_warnings(action="ignore"):  # onto shapes alone, to compare names
            result = self._copy_values(state_dict, strict)
        load = partial(self._load_values, state_dict, strict)
        self._execution.deferred.load_later(state_dict, load)
        return result

    def _load_values(
        self, state_dict: Mapping[str, Any], strict: bool, assign: bool = False
    ) -> Any:
        self.make_room({n: x.shape for n, x in state_dict.items() if isinstance(x, torch.Tensor)})
        return self._copy_values(state_dict, strict, assign)

    def _copy_values(
        self, state_dict: Mapping[str, Any], strict: bool, assign: bool = False
    ) -> Any:
        known = dict(self._wrapped[0].named_parameters(remove_duplicate=False))
        values = {name: distribute_like(known.get(name), x) for name, x in state_dict.items()}
        assign = assign and not any(is_remote(parameter) for parameter in known.values())
        return self._wrapped[0].load_state_dict(values, strict=strict, assign=assign)


def _memory(value: Any) -> Any:
    """The same key for values of a state dict that are one tensor under several names."""
    if not isinstance(value, torch.Tensor):
        return id(value)
    part = local_tensor(value)
    return storage_key(part), part.storage_offset(), tuple(part.shape), part.stride(), value.shape
