"""`PythonBackward`: the Python code that runs in the backward of a trace, and the state it reads.

    h.register_hook(lambda g: g * self.scale)

A hook, or the backward of an `autograd.Function`, runs once, while the graph is made. So what it
reads is guarded as forward's reads are, and what it changes is refused. It may also be changed
after the call: a backward compares it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar._torch import patched
from autopar.capture.state.contents import Attribute
from autopar.capture.state.effects import Effects
from autopar.capture.state.side_effects import check_backward_changes
from autopar.capture.state.variables import Variable, VariableSearch
from autopar.capture.values.executed_code import ExecutedCode
from autopar.capture.values.pure_calls import tensors_in


@dataclass(frozen=True)
class BackwardReads:
    """State that the Python code of a backward reads.

    Attributes:
        attributes: of modules.
        classes: class attributes.
        variables: globals, closures and the like, by display name.
    """

    attributes: tuple[Attribute, ...] = ()
    classes: tuple[tuple[type, str], ...] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.attributes or self.classes or self.variables)

    def __or__(self, other: BackwardReads) -> BackwardReads:
        return BackwardReads(
            tuple(dict.fromkeys((*self.attributes, *other.attributes))),
            tuple(dict.fromkeys((*self.classes, *other.classes))),
            {**self.variables, **other.variables},
        )


@dataclass
class PythonBackward:
    """Records the backward of one trace, where it runs Python code at all.

    Attributes:
        has_hooks: whether forward may have hooked tensors, or nodes of their graph.
        reads: state that the last backward read.
    """

    model: nn.Module
    search: VariableSearch
    has_hooks: bool = False
    reads: BackwardReads = field(default_factory=BackwardReads)
    _is_recorded: bool = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Gradients inside have a record already, such as forward's own."""
        self._is_recorded = True
        try:
            yield
        finally:
            self._is_recorded = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records gradients that are computed inside.

        Raises:
            CaptureError: they change Python values.
        """
        compute = torch.autograd.grad

        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # a record takes as long as the backward itself
            if self._is_recorded or not (self.has_hooks or _has_python_nodes(outputs)):
                return compute(outputs, *args, **kwargs)
            effects, executed = Effects(self.model, self.search.watched), ExecutedCode()
            # torch calls the function once more, by its name, where a mode is active
            with self.recorded(), effects.recording(), executed.recording():
                gradients = compute(outputs, *args, **kwargs)
            self._take(effects, executed)
            return gradients

        with patched(torch.autograd, "grad", grad):
            yield

    def _take(self, effects: Effects, executed: ExecutedCode) -> None:
        check_backward_changes(effects)
        self.search.add_executed(executed.globals)
        variables = self.search.read_by(executed.globals.keys())
        self.reads = BackwardReads(tuple(effects.reads), tuple(effects.classes), variables)


def _has_python_nodes(outputs: Any) -> bool:
    """Whether an `autograd.Function` is behind outputs; full backward hooks of modules are, too."""
    waiting = [x.grad_fn for x in tensors_in(outputs)]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and not _is_own(function):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _is_own(function: type) -> bool:
    """Whether a Function, or the operator that torch made one for, is autopar's."""
    is_of_operator = function.__name__.startswith("GeneratedBackwardFor_autopar_")
    return is_of_operator or function.__module__.startswith("autopar.")
