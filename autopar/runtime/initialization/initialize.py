"""Initialises modules on the meta device, one block after the other.

A unit is a repeated block, or another part of the model without repeated blocks. Units, and the
modules inside of each, are initialised in the order of `nn.Module.apply`: children first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import TorchDispatchMode, pytree
from autopar.capture.model_info import find_blocks
from autopar.capture.provenance import user_frame
from autopar.errors import AutoparError, ModelError
from autopar.formatting import first_line

InitFunction = Callable[[nn.Module], Any]
"""Initialises the parameters and buffers of one module, as for `nn.Module.apply`."""

RandomState = tuple[Tensor, Tensor | None]
"""States of the default generators of the CPU and of the device."""

INTEGER_MARK = 0x5A
"""Integer that marks elements without a value; floating-point ones are NaN."""


@dataclass(frozen=True)
class Slot:
    """A place of a parameter or buffer in a module.

    Attributes:
        name: first name of its tensor in the model.
        is_first: whether the tensor has no earlier slot.
    """

    module: nn.Module
    key: str
    name: str
    is_first: bool

    @property
    def table(self) -> dict[str, Any]:
        parameters = self.module._parameters
        return parameters if self.key in parameters else self.module._buffers

    @property
    def tensor(self) -> Tensor:
        return self.table[self.key]


@dataclass(frozen=True)
class Unit:
    """Modules that are initialised together.

    Attributes:
        modules: names, modules and the function that initialises each.
        slots: their parameters and buffers.
        below: those of other modules inside, outside of repeated blocks.
    """

    modules: tuple[tuple[str, nn.Module, InitFunction | None], ...]
    slots: tuple[Slot, ...]
    below: tuple[Slot, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that belong to this unit; a tied tensor belongs to its first one."""
        return tuple(slot.name for slot in self.slots if slot.is_first)

    @property
    def is_initialized(self) -> bool:
        """Whether there is anything to do: tensors, or a function that may write to others."""
        return bool(self.slots) or any(hook or _reset_of(m) for _, m, hook in self.modules)


def units_of(model: nn.Module, init_fn: InitFunction | None = None) -> Iterator[Unit]:
    """The units of a model in the order of initialisation.

    `init_fn` initialises every module. Without it, the nearest module around one that has
    `_init_weights(module)` does, as in transformers.
    """
    blocks = {block for block in find_blocks(model).values() if block}
    ancestors = {"", *(b[:i] for b in blocks for i, c in enumerate(b) if c == ".")}
    first_names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first_names.setdefault(id(tensor), name)
    known, seen = set[str](), set[nn.Module]()

    def visit(
        name: str, module: nn.Module, hook: InitFunction | None, split: bool
    ) -> Iterator[list[Any]]:
        if module in seen:
            return
        seen.add(module)
        own = getattr(module, "_init_weights", None)
        hook = own if init_fn is None and own is not None and _takes_module(own) else hook
        split, inside = split and name in ancestors, list[Any]()
        for key, child in module.named_children():
            for modules in visit(f"{name}.{key}" if name else key, child, hook, split):
                if split:
                    yield modules
                else:
                    inside += modules
        yield [*inside, (name, module, hook)]

    outside: list[tuple[str, Slot]] = []
    for modules in visit("", model, init_fn, split=True):
        slots = []
        for _, module, _ in modules:
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    name = first_names[id(tensor)]
                    slots.append(Slot(module, key, name, name not in known))
                    known.add(name)
        path = modules[-1][0]
        inside = (slot for other, slot in outside if not path or other.startswith(f"{path}."))
        yield Unit(tuple(modules), tuple(slots), tuple(inside))
        # a rank holds one block at a time, so no module around blocks may write to them
        if path not in blocks:
            outside += [(path, slot) for slot in slots]


def _takes_module(hook: Any) -> bool:
    parameters = inspect.signature(hook).parameters.values()
    return sum(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters) == 1


@contextlib.contextmanager
def only_shapes(units: Collection[Unit]) -> Iterator[None]:
    """Puts meta tensors into all slots, so that no module reaches tensors of another unit."""
    slots = [slot for unit in units for slot in unit.slots]
    before = [slot.tensor for slot in slots]
    shapes = {id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in before}
    try:
        for slot, tensor in zip(slots, before, strict=True):
            shape = shapes[id(tensor)]
            is_parameter = isinstance(tensor, nn.Parameter)
            requires_grad = tensor.requires_grad
            slot.table[slot.key] = nn.Parameter(shape, requires_grad) if is_parameter else shape
        yield
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.table[slot.key] = tensor


def initialize(
    unit: Unit, names: Collection[str], device: torch.device, state: RandomState
) -> tuple[dict[str, Tensor], RandomState]:
    """New values of the tensors of a unit, and the generators' states afterwards.

    The module's tensors and the generators of the process stay as they are. A module is
    initialised by its function, if any. Without one, or where it leaves some of the module's
    tensors without a value, `reset_parameters()` runs, and the function again. Every slot gets its
    own values; a tied tensor takes those of its first slot. A module that writes to tensors below
    it runs again with new ones; those that it writes are among the values.

    Args:
        unit: modules to initialise.
        names: tensors whose values are wanted.
        device: device of the values.
        state: states of the generators before.

    Raises:
        ModelError: the modules leave tensors without values, raise, or write to tensors of others.
    """
    try:
        values, after = _run(unit, unit.slots, device, state)
    except _ForeignWriteError:
        if not unit.below:
            raise
        values, after = _run(unit, unit.slots + unit.below, device, state)
        for name in {slot.name for slot in unit.below if slot.is_first}:
            # nothing wrote to this one: it keeps the values that another unit gave it
            if _lacks_values(values[name], everywhere=True):
                del values[name]
    values = {name: value for name, value in values.items() if name in names}
    if missing := [name for name, value in values.items() if _lacks_values(value)]:
        raise ModelError(
            f"{', '.join(missing[:8])} on the meta device got no value: neither "
            "reset_parameters() nor _init_weights(module) of the modules that have them write "
            "them. Define reset_parameters(), give autopar.compile init_fn=, build the module "
            "under torch.device('cpu'), or call autopar.load_pretrained before the first call."
        )
    return values, after


def _run(
    unit: Unit, slots: Collection[Slot], device: torch.device, state: RandomState
) -> tuple[dict[str, Tensor], RandomState]:
    """Initialises the modules of a unit, with new tensors in the given slots meanwhile."""
    before, values = [slot.tensor for slot in slots], dict[str, Tensor]()
    try:
        for slot, tensor in zip(slots, before, strict=True):
            slot.table[slot.key] = _without_value(tensor, device)
        with _generators_at(state, device) as states_after, torch.device(device):
            for name, module, hook in unit.modules:
                _initialize_module(name, module, hook)
        for slot, tensor in zip(slots, before, strict=True):
            if slot.tensor.shape != tensor.shape:
                raise ModelError(f"initialising {slot.name} changes its shape.")
            if slot.is_first:
                values[slot.name] = slot.tensor.detach().to(device, tensor.dtype)
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.table[slot.key] = tensor
    return values, states_after()


class _ForeignWriteError(ModelError):
    """A module initialises tensors of other modules."""


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _initialize_module(name: str, module: nn.Module, hook: InitFunction | None) -> None:
    title = f"{name} ({type(module).__name__})" if name else type(module).__name__
    reset = _reset_of(module)

    def lacks_values() -> bool:
        own = [*module._parameters.values(), *module._buffers.values()]
        return any(_lacks_values(tensor) for tensor in own if tensor is not None)

    try:
        with _NoForeignWrites(title):
            if hook is not None:
                hook(module)
            if reset is not None and (hook is None or lacks_values()):
                reset()
                if hook is not None:
                    hook(module)
    except AutoparError:
        raise
    except Exception as error:
        raise ModelError(
            f"initialising {title} raised {type(error).__name__}{user_frame(error)}: "
            f"{first_line(error)}"
        ) from error


class _NoForeignWrites(TorchDispatchMode):
    """Refuses to write to tensors outside of the unit, which are on the meta device."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument, value in [
            *zip(func._schema.arguments, args, strict=False),
            *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
        ]:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    raise _ForeignWriteError(
                        f"initialising {self.title} writes to tensors of other modules, of shape "
                        f"{list(tensor.shape)}. A model on the meta device is initialised block "
                        "by block: let each module write its own parameters, or give "
                        "autopar.compile init_fn=, which is called for each module."
                    )
        return func(*args, **kwargs)


@contextlib.contextmanager
def _generators_at(state: RandomState, device: torch.device) -> Iterator[Callable[[], RandomState]]:
    """The default generators in a state; yields the function that returns their states at exit."""
    devices = [] if device.type == "cpu" else [device]
    last: list[RandomState] = []
    with torch.random.fork_rng(devices, device_type=device.type):
        set_random_state(state, device)
        yield last.pop
        last.append(random_state(device))


def random_state(device: torch.device) -> RandomState:
    """The states of the default generators of the CPU and a device."""
    own = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    return torch.get_rng_state(), own


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Sets the states of the default generators of the CPU and a device."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


def _without_value(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like another one, filled with the mark of a missing value."""
    mark = float("nan") if tensor.is_floating_point() or tensor.is_complex() else INTEGER_MARK
    # torch writes 0 or 1 to a bool: any other byte is one that nothing wrote
    if tensor.dtype == torch.bool:
        made = torch.full(tensor.shape, mark, dtype=torch.uint8, device=device).view(torch.bool)
    else:
        made = torch.full(tensor.shape, mark, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _lacks_values(tensor: Tensor, everywhere: bool = False) -> bool:
    """Whether elements have the mark of a missing value; all must, for integers."""
    tensor = tensor.detach()
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        # a sum allocates nothing, but infinities of both signs make it NaN too
        missing = bool(tensor.sum().isnan()) and tensor.isnan()
        return missing is not False and bool(missing.all() if everywhere else missing.any())
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    return bool((tensor == INTEGER_MARK).all())
