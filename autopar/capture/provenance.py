"""Provenance of operators: the user's line and the block of the model, on every node."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from autopar._torch import DataDependentOutputException
from autopar.capture.channels_last import channels_last_dims, in_channels_last
from autopar.capture.traceable import traceable
from autopar.capture.values.argument_reads import AnswerReads, ReadArguments
from autopar.capture.values.constant_values import ConstantValues
from autopar.capture.values.counted_shapes import with_counts, with_numbers
from autopar.capture.values.executed_code import ExecutedCode
from autopar.capture.values.known_values import KnownValues
from autopar.capture.values.parameter_reads import ParameterReads
from autopar.capture.values.pure_calls import tensors_in
from autopar.capture.values.raising_branches import RaisingBranches
from autopar.capture.values.real_tensors import RealTensors, explaining_writes
from autopar.core.ir.graph import ParameterInfo
from autopar.core.operators.attention import SDPA

AUTOPAR = os.path.dirname(os.path.dirname(__file__))
LIBRARIES = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), AUTOPAR))
_GRAD_FN: Any = torch.Tensor.grad_fn
_HOOKING = frozenset({torch.Tensor.register_hook, _GRAD_FN.__get__})
"""Functions that hook a tensor, or give the node to hook."""

STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


class Annotate(TorchFunctionMode):
    """Annotates every traced operator with the user's line and the module's name.

    Functions of known tensors alone run instead, and constants are read.

    Attributes:
        is_dense: whether attention keeps the form that torch traces.
    """

    is_dense = False

    def __init__(
        self,
        model: nn.Module,
        known: KnownValues,
        constants: ConstantValues,
        parameters: ParameterReads,
        executed: ExecutedCode,
        raising: RaisingBranches,
        arguments: AnswerReads | ReadArguments,
    ) -> None:
        super().__init__()
        self.raising, self.arguments = raising, arguments
        self.parameters, self.executed = parameters, executed
        self.known, self.constants, self.real = known, constants, RealTensors()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.channels_last = channels_last_dims(model)
        self.module = ""
        self.stack: list[str] = []
        self.hooks: list[Any] = []
        self.has_hooks = False

    def __enter__(self) -> Annotate:
        from torch.nn.modules import module as hooks

        self.hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            # A model may catch what a module raises: its name must leave the stack, too.
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)
        self.real.restore()

    def _enter_module(self, module: nn.Module, args: Any) -> Any:
        self.stack.append(self.module)
        self.module = self.names.get(id(module), self.module)
        dims = self.channels_last.get(module)
        return args if dims is None else tuple(in_channels_last(x, dims) for x in args)

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        self.module = self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_hooks |= func in _HOOKING
        if (read := self.parameters.read(func, args)) is not None:
            return read[0]
        if (found := self.known.run(func, args, kwargs)) is not None:
            return found[0]
        if (found := self.constants.read(func, args, kwargs)) is not None:
            return found[0]
        frame = sys._getframe(1)
        if (found := self.raising.read(func, args, frame)) is not None:
            return found[0]
        place = functools.partial(user_position, frame)
        if (found := self.arguments.read(func, args, kwargs, place)) is not None:
            return found[0]

        def read_value(func: Any, x: torch.Tensor) -> tuple[Any] | None:
            found = self.constants.read(func, (x,), {})
            return self.arguments.read(func, (x,), {}, place) if found is None else found

        func, args, kwargs = with_counts(func, args, kwargs, read_value) or (func, args, kwargs)
        self.real.meet(given := tensors_in((args, kwargs)))
        known = self.constants.know(given)
        source = place()
        fx_traceback.get_current_meta()["custom"] = {"source": source, "module": self.module}
        is_plain = not args or (self.is_dense and func is SDPA)
        form = func if is_plain else traceable(func)  # a form's first parameter has another name
        if not _calls_python(args, kwargs):
            self.executed.pause()
        try:
            with explaining_writes():
                try:
                    result = form(*args, **kwargs)
                except DataDependentOutputException:  # it takes a 0-dim tensor for a number
                    if (numbers := with_numbers(args, kwargs, read_value)) is None:
                        raise
                    args, kwargs = numbers
                    known = self.constants.know(given := tensors_in(numbers))
                    result = form(*args, **kwargs)
            result = self.raising.check_in(result, given)
        finally:
            self.executed.resume()
        self.real.check(given, result, source)
        self.constants.follow(func, args, kwargs, result, known=known)
        return result


def _calls_python(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator gets a function, which it may call."""
    return any(isinstance(x, FunctionType) for x in (*args, *kwargs.values()))


def is_library(file: str) -> bool:
    """Whether a source file is torch's or autopar's, not the user's."""
    return file.startswith(LIBRARIES)


def user_position(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame of user code, from `frame` outwards."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_frame(error: BaseException) -> str:
    """The innermost user line of an error, as " at FILE:LINE: CODE", or ""."""
    users = []
    for frame in traceback.extract_tb(error.__traceback__):
        file = frame.filename
        is_standard = file.startswith((STANDARD, "<")) and "site-packages" not in file
        if not is_library(file) and not is_standard:
            users.append(frame)
    return f" at {users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else ""


def annotate_nodes(graph: fx.Graph, parameters: Mapping[str, ParameterInfo]) -> None:
    """Sets phase, block and source of every node; backward nodes inherit from their forward."""
    blocks = tuple(dict.fromkeys(info.block for info in parameters.values() if info.block))
    notes: dict[int, dict[str, Any]] = {}
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        number = node.meta.get("seq_nr")
        note = node.meta.get("custom") or {}
        if backward:
            note = notes.get(number, note)
        elif node.op == "call_function":
            notes.setdefault(number, note)
        node.meta = {
            "val": node.meta.get("val"),
            "phase": "backward" if backward else "forward",
            "block": block_of(note.get("module", ""), blocks),
            "source": note.get("source"),
            "seq_nr": number,
        }


def block_of(module: str, blocks: Sequence[str]) -> str:
    """The block that contains a module, "" for none."""
    for block in blocks:
        if module == block or module.startswith(block + "."):
            return block
    return ""
