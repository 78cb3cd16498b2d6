"""`Gathered`: whole parameters in the user's module for a while, written back where they change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar._torch import local_tensor, storage_key, without_weight_references
from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, DisagreementError, StrategyError
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank, run_on_all_ranks
from autopar.runtime.agreement.protocol import Protocol
from autopar.runtime.parameters.distribute import distribute_like, is_remote, parameter_like
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.states.checksum import checksum

MAX_NAMED = 5


@dataclass(frozen=True)
class Slot:
    """A name of a parameter: the module that has it, and its attribute there."""

    module: nn.Module
    key: str
    original: nn.Parameter


@dataclass(frozen=True)
class Gathered:
    """Whole parameters of a model.

    Attributes:
        slots: every name of every parameter.
        whole: whole parameter of each name; tied names share one.
        checksums: checksum of each value as it was gathered.
    """

    model: nn.Module
    slots: Mapping[str, Slot]
    whole: Mapping[str, nn.Parameter]
    checksums: Mapping[str, int]

    @staticmethod
    def of(model: nn.Module, remote: Mapping[nn.Parameter, torch.Tensor]) -> Gathered:
        """Gathers the parameters of a model; `remote` has those of other stages."""
        whole = {
            parameter: parameter_like(parameter, value)
            for parameter, value in whole_values(model, remote).items()
        }
        slots = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module, _, key = name.rpartition(".")
            slots[name] = Slot(model.get_submodule(module), key, parameter)
        by_name = {name: whole[slot.original] for name, slot in slots.items()}
        return Gathered(model, slots, by_name, {n: checksum(x) for n, x in by_name.items()})

    @contextlib.contextmanager
    def in_module(self, protocol: Protocol | None) -> Iterator[None]:
        """Puts the whole parameters into the module; writes changes back at the end.

        An error of the body reaches the other ranks and drops the changes.
        """
        versions = {name: _version(slot.original) for name, slot in self.slots.items()}
        self._put(self.whole)
        try:
            with contextlib.nullcontext() if protocol is None else protocol.reporting_errors():
                yield
            changed = run_on_all_ranks(lambda: self._changed(versions))
        finally:
            self._put({name: slot.original for name, slot in self.slots.items()})
        self._write_back(changed)

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        with without_weight_references(self.model):
            for name, slot in self.slots.items():
                slot.module._parameters[slot.key] = parameters[name]

    def _changed(self, versions: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The values that the body changed.

        Raises:
            StrategyError: a value cannot be written back.
        """
        now = dict(self.model.named_parameters(remove_duplicate=False))
        if names := sorted(now.keys() ^ self.slots.keys()):
            raise StrategyError(
                f"parameter {names[0]} was added or removed inside of model.gathered(), which "
                "keeps changed values only. Change the model before autopar.compile."
            )
        found = {}
        for name, slot in self.slots.items():
            if _version(slot.original) != versions[name]:
                raise StrategyError(
                    f"parameter {name} was trained inside of model.gathered(), whose values are "
                    "those of before. Step the optimizer outside."
                )
            value, known = now[name], self.whole[name]
            if value.shape != known.shape or value.dtype != known.dtype:
                raise StrategyError(
                    f"parameter {name} was {_described(known)} and is {_described(value)} after "
                    "model.gathered(), which keeps changed values only. Change the model before "
                    "autopar.compile."
                )
            if value.grad is not None:
                warn_once(
                    AutoparWarning,
                    "gradients of calls inside of model.gathered() are dropped. Train by calls of "
                    "the compiled model.",
                )
            # Versions do not tell: writes to `.data` count none, and a parameter may be replaced.
            if checksum(value) != self.checksums[name]:
                found[name] = value.detach()
        return found

    def _write_back(self, changed: Mapping[str, torch.Tensor]) -> None:
        """Writes changed values into the parameters, after a check that the ranks agree."""
        if is_multi_rank():
            sums = gather_objects({name: checksum(value) for name, value in changed.items()})
            names = sorted({name for each in sums for name in each})
            odd = [name for name in names if len({each.get(name) for each in sums}) > 1]
            if odd:
                more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
                raise DisagreementError(
                    f"the ranks changed {', '.join(odd[:MAX_NAMED])}{more} to different values "
                    "inside of model.gathered(). Make the same changes on every rank, with equal "
                    "seeds; none was kept."
                )
        with torch.no_grad():
            for name, value in changed.items():
                original = self.slots[name].original
                if not is_remote(original):
                    original.copy_(distribute_like(original, value))


def _version(parameter: nn.Parameter) -> int:
    return local_tensor(parameter)._version


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def whole_values(
    model: nn.Module, remote: Mapping[nn.Parameter, torch.Tensor]
) -> dict[nn.Parameter, torch.Tensor]:
    """Copies of the whole values of all parameters; `remote` has those of other stages."""
    found = {}
    for parameter in model.parameters():
        value = whole_tensor(remote.get(parameter, parameter).detach())
        # In shared memory changes would reach the parameter at once: no error could drop them.
        is_shared = storage_key(value) == storage_key(local_tensor(parameter))
        found[parameter] = value.clone() if is_shared else value
    return found
