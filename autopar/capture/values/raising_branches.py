"""`RaisingBranches`: conditions on values of tensors, of which one answer raises an error.

    if labels.max() >= self.vocabulary:
        raise ValueError(...)

A trace knows no values. It goes on as if nothing was raised, and its program checks the condition.
"""

from __future__ import annotations

import dis
import functools
import linecache
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from autopar.core.operators.checked import checked
from autopar.errors import CaptureError

_ASKS = ("TO_BOOL", "COMPARE_OP")
"""Operations that ask for a truth value before a jump, from Python 3.13 on."""

_OTHER_WORK = ("STORE_", "RETURN_", "YIELD_", "DELETE_", "IMPORT_")
"""Operations that do more than make an error."""


class RaisingBranches:
    """The conditions of one trace.

    Attributes:
        failures: 0-dim tensors that are true where forward raises, with what to say.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[Tensor, str]] = []

    def read(
        self, func: Callable[..., Any], args: tuple[Any, ...], frame: FrameType
    ) -> tuple[bool] | None:
        """The answer that does not raise, in a tuple; None where both or none do."""
        if func not in (Tensor.__bool__, Tensor.item) or args[0].numel() != 1:
            return None
        if func is Tensor.item and frame.f_code.co_name == "__bool__" and frame.f_back:
            frame = frame.f_back  # a functional tensor answers by its item
        raising = _raising_answer(frame.f_code, frame.f_lasti)
        if raising is None:
            return None
        holds = args[0].detach().reshape(()).bool()
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = f"forward raises an error at {file}:{line}: {linecache.getline(file, line).strip()}"
        self.failures.append((holds if raising else holds.logical_not(), text))
        return (not raising,)

    def check_in(self, result: Any, arguments: Iterable[Tensor]) -> Any:
        """The result of forward's next function, which comes with the checks so far.

        So they precede what is computed from it. Views, arguments changed in place and results of
        other kinds wait for more.
        """
        if not self.failures or not isinstance(result, Tensor) or result._is_view():
            return result
        if any(result is each for each in arguments):
            return result
        return self._checked(result)

    def check_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, of which the first comes with the checks that nothing followed."""
        if not self.failures:
            return list(outputs)
        if not outputs:
            raise CaptureError("forward may raise an error, and returns no tensor to check first")
        first, *others = outputs
        return [self._checked(first), *others]

    def _checked(self, x: Tensor) -> Tensor:
        failures, self.failures = self.failures, []
        for fails, text in failures:
            x = checked(x, fails, text)
        return x


@functools.lru_cache(maxsize=1024)
def _raising_answer(code: CodeType, offset: int) -> bool | None:
    """The answer to the condition at an offset of bytecode after which nothing but an error comes.

    None if there is no condition, or if what follows a false or true one may go on.
    """
    every = list(dis.get_instructions(code))
    instructions = [each for each in every if each.offset >= offset]
    if _ends_in_item([each for each in every if each.offset <= offset]):
        del instructions[0]  # x.item() asks just before the jump
    if instructions and instructions[0].opname in _ASKS:
        del instructions[0]
    if not instructions or "POP_JUMP" not in instructions[0].opname:
        return None
    jump, *following = instructions
    if not jump.opname.endswith(("IF_FALSE", "IF_TRUE")):
        return None
    answer_that_jumps = jump.opname.endswith("IF_TRUE")
    target = (each for each in following if each.offset >= jump.argval)
    raises_there, raises_here = _only_raises(target), _only_raises(following)
    if raises_there == raises_here:
        return None
    return answer_that_jumps if raises_there else not answer_that_jumps


def _ends_in_item(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether the last instruction is the call of `x.item()`, not of `any` or `map`."""
    if not instructions or not instructions[-1].opname.startswith(("CALL", "PRECALL")):
        return False
    before = [each for each in instructions if "CALL" not in each.opname]
    lookup = before[-1] if before else instructions[-1]
    return lookup.opname in ("LOAD_METHOD", "LOAD_ATTR") and lookup.argval == "item"


def _only_raises(instructions: Iterable[dis.Instruction]) -> bool:
    """Whether these make an error and raise it, and do nothing else."""
    for each in instructions:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return False
        if each.opname.startswith(_OTHER_WORK):
            return False
    return False
