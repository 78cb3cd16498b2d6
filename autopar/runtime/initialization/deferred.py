"""`DeferredValues`: parameters and buffers without values on the device of the run.

A model on the meta device, or on another device than the run's, is planned and sharded as shapes
alone. Values follow block by block: one rank initialises a block or moves it to the device, the
ranks that hold parts of it receive its tensors one by one, and each keeps its part. A rank never
has more than its share and one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import without_weight_references
from autopar.core.common.world import rank, running_ranks, world, world_size
from autopar.core.plan.decisions import Decisions
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import broadcast_object, is_multi_rank
from autopar.runtime.initialization.initialize import (
    InitFunction,
    RandomState,
    Unit,
    initialize,
    only_shapes,
    random_state,
    units_of,
)
from autopar.runtime.parameters.distribute import (
    is_remote,
    local_part,
    parameter_like,
    swap_parameter,
)
from autopar.runtime.parameters.offloaded import store_parameters
from autopar.runtime.parameters.sharded import distribute_replicated, in_layout_of
from autopar.runtime.process_groups import explaining_comm_errors

TRIAL_VALUE = 0.01
"""Value of every element of a copy that only tries a plan."""


@dataclass(frozen=True)
class Delivery:
    """Sends whole tensors to the ranks that hold parts of them.

    Attributes:
        mesh: mesh of the plan; None without a plan or on one rank.
        owners: index along "pp" of the ranks that hold each parameter; others are on all ranks.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    owners: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def under(
        decisions: Decisions | None, mesh: DeviceMesh | None, device: torch.device
    ) -> Delivery:
        if decisions is None or decisions.pipeline is None or decisions.pp_size == 1:
            return Delivery(device, mesh)
        stages, rank_of = decisions.pipeline.owners.items(), decisions.pipeline.rank_of
        owners = {n: rank_of(stage) for n, stage in stages if n not in decisions.changed}
        return Delivery(device, mesh, owners)

    def source_of(self, names: Collection[str]) -> int:
        """Rank that makes the values of a unit: the first one of the first owner."""
        stage = next((self.owners[name] for name in names if name in self.owners), 0)
        if not stage or self.mesh is None:
            return 0
        return running_ranks(range(world_size())).index(int(self.mesh.mesh[stage].flatten()[0]))

    def send(self, name: str, value: Tensor | None, like: Tensor, source: int) -> Tensor | None:
        """The tensor that rank `source` has; None on ranks that do not hold it."""
        if not is_multi_rank():
            return value
        if name not in self.owners:
            value = self._room(value, like)
            dist.broadcast(value, group=world(), group_src=source)
            return value
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or ()
        place = dict(zip(names, self.mesh.get_coordinate() or (), strict=True))
        inner, owner = [axis for axis in names if axis != "pp"], self.owners[name]
        is_source = self.mesh.mesh == running_ranks([source])[0]
        from_stage = int(is_source.nonzero()[0, 0])  # pp is the first axis
        # Process groups run along single axes. So a value goes along pp first, then along one axis
        # after the other.
        if from_stage != owner and not any(place[axis] for axis in inner):
            value = self._room(value, like)
            dist.broadcast(value, group=self.mesh.get_group("pp"), group_src=from_stage)
        if place["pp"] != owner:
            return None
        for i, axis in enumerate(inner):
            if not any(place[later] for later in inner[i + 1 :]):
                value = self._room(value, like)
                dist.broadcast(value, group=self.mesh.get_group(axis), group_src=0)
        return value

    def _room(self, value: Tensor | None, like: Tensor) -> Tensor:
        if value is not None:
            return value
        return torch.empty(like.shape, dtype=like.dtype, device=self.device)


@dataclass
class DeferredValues:
    """Tensors of a model that await values; their parameters have the shapes of the plan's shards.

    Attributes:
        random_state: states of the generators for the next unit; first, those at `compile`.
        awaiting: first names of the tensors, the same on every rank.
        elsewhere: values on another device; None on ranks other than 0.
        loads: functions that load values as soon as the shards are known.
    """

    model: nn.Module
    device: torch.device
    init_fn: InitFunction | None
    random_state: RandomState
    awaiting: set[str] = field(default_factory=set)
    elsewhere: dict[str, Tensor | None] = field(default_factory=dict)
    loads: list[Callable[[], object]] = field(default_factory=list)

    @staticmethod
    def of(
        model: nn.Module, device: torch.device, init_fn: InitFunction | None
    ) -> DeferredValues | None:
        """Defers the values of all tensors that are not on the device; None if all are.

        Tensors of another device become meta tensors; rank 0 keeps their values.
        """
        made = DeferredValues(model, device, init_fn, random_state(device))
        with torch.no_grad(), without_weight_references(model):
            for name, tensor in made.tensors().items():
                if tensor.device == device:
                    continue
                made.awaiting.add(name)
                if not tensor.is_meta:
                    made.elsewhere[name] = tensor.detach() if rank() == 0 else None
                    made._replace(tensor, tensor.detach().to("meta"))
        return made if made.awaiting else None

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their first name."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def give_values(self, decisions: Decisions | None, mesh: DeviceMesh | None) -> None:
        """Gives all tensors their values, block by block; all ranks call this at once.

        Raises:
            ModelError: on every rank, naming tensors that nothing initialises.
        """
        delivery = Delivery.under(decisions, mesh, self.device)
        tensors, drawn = self.tensors(), self.awaiting - self.elsewhere.keys()
        units, parameters = list(units_of(self.model, self.init_fn)), list(self.model.parameters())
        with torch.no_grad(), without_weight_references(self.model), only_shapes(units):
            for unit in units:
                self._give_unit(unit, drawn, tensors, delivery)
                # after each unit, or all weights would be in memory before the first is stored
                store_parameters(parameters, decisions)

    def _give_unit(
        self,
        unit: Unit,
        drawn: set[str],
        tensors: Mapping[str, Tensor],
        delivery: Delivery,
    ) -> None:
        """Gives the tensors of a unit their values; those in `drawn` are initialised."""
        names = [name for name in unit.names if name in self.awaiting]
        source, values = delivery.source_of(names), dict[str, Tensor]()

        def draw() -> tuple[RandomState, list[str]]:
            made, state = initialize(unit, drawn, self.device, self.random_state)
            values.update(made)
            return state, list(made)

        if drawn and unit.is_initialized and not drawn.isdisjoint(unit.names or drawn):
            with torch.enable_grad():
                self.random_state, made = broadcast_object(source, draw)
            names = list(dict.fromkeys([*names, *made]))
        for name in names:
            value, sender = values.pop(name, None), source
            if name in self.elsewhere:
                value, sender = self.elsewhere.pop(name), 0
                value = None if value is None else value.to(self.device)
            with explaining_comm_errors("the distribution of parameters"):
                value = delivery.send(name, value, tensors[name], sender)
            if value is not None:
                self._place(tensors[name], value)
            self.awaiting.discard(name)

    def _place(self, tensor: Tensor, value: Tensor) -> None:
        """Puts this rank's part of a whole value into a tensor."""
        if isinstance(tensor, DTensor):
            value = distribute_replicated(value, tensor.device_mesh, tensor.placements)
        self._replace(tensor, value)

    def for_copy(self, model: nn.Module) -> DeferredValues:
        """The same for a copy of the model, without values elsewhere."""
        return replace(self, model=model, awaiting={*self.awaiting}, elsewhere={}, loads=[])

    def fill(self, held: Collection[str] | None) -> None:
        """Gives this rank's parts a constant value, which suffices to time steps."""
        awaiting = [tensor for name, tensor in self.tensors().items() if name in self.awaiting]
        self.make_room({name: x.shape for name, x in self.tensors().items()}, held)
        for tensor in awaiting:
            if not is_remote(tensor):
                local_part(tensor).detach().fill_(TRIAL_VALUE)

    def make_room(self, shapes: Mapping[str, torch.Size], held: Collection[str] | None) -> None:
        """Allocates this rank's parts of tensors that will be loaded from values of these shapes.

        Tied tensors may have any of their names. `held` names the parameters of this rank, None
        for all.
        """
        first_names = {id(tensor): name for name, tensor in self.tensors().items()}
        tensors = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        with torch.no_grad(), without_weight_references(self.model):
            for alias, tensor in tensors:
                name = first_names[id(tensor)]
                if shapes.get(alias) != tensor.shape or name not in self.awaiting:
                    continue
                if held is None or name in held or not isinstance(tensor, nn.Parameter):
                    part = torch.empty_like(local_part(tensor), device=self.device)
                    self._replace(tensor, in_layout_of(tensor, part))
                self.awaiting.discard(name)
                self.elsewhere.pop(name, None)

    def load_later(self, values: Mapping[str, object], load: Callable[[], object]) -> None:
        """Loads values once the shards are known.

        The load raises StrategyError if the values have changed in place by then.
        """
        # inference tensors have no version counter
        tensors = [x for x in values.values() if isinstance(x, Tensor) and not x.is_inference()]
        versions = [x._version for x in tensors]

        def load_unchanged() -> None:
            if versions != [x._version for x in tensors]:
                raise StrategyError(
                    "a state dict was loaded before the model's first call and has changed since. "
                    "The model takes its values at that call: give load_state_dict a copy, or "
                    "give autopar.compile example_inputs."
                )
            load()

        self.loads.append(load_unchanged)

    def _replace(self, tensor: Tensor, value: Tensor) -> None:
        """Puts a value into a tensor, whose identity, hooks and attributes stay."""
        if isinstance(tensor, nn.Parameter):
            made = parameter_like(tensor, value)
            vars(made).update(vars(tensor))
            swap_parameter(tensor, made)
        else:
            torch.utils.swap_tensors(tensor, value)
