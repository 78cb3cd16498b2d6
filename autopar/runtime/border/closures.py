"""`with_closure`: closures that optimizers' steps call, as hooks before the step see them.

`optimizer.step(closure)` runs forward and backward inside of the step, as LBFGS and Lightning do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a step, the optimizer first."""


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, None without one."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(
    args: Sequence[Any], kwargs: Mapping[str, Any], closure: Callable[[], Any]
) -> Arguments:
    """The arguments of a step with another closure."""
    return (args[0],), {**kwargs, "closure": closure}


def after_gradients(
    args: Sequence[Any], kwargs: Mapping[str, Any], then: Callable[[], None]
) -> Arguments | None:
    """Calls `then` as soon as the gradients of a step are there.

    Returns:
        Arguments with which to step, if a closure computes them; None to step as planned.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        then()
        return None

    # The closure may run the last micro-batch of a window: before it, gradients are held back.
    def evaluate() -> Any:
        result = closure()
        then()
        return result

    return with_closure(args, kwargs, evaluate)
