"""`specialized`: the class of a compiled model, which stands for the user's class."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

CONTAINER_METHODS = ("__getitem__", "__len__", "__iter__", "__contains__")
"""Methods that Python looks up on the class, so that they are not delegated as attributes are."""


def specialized(base: type, model: nn.Module, *, has_loss: bool) -> type:
    """A subclass of `base` with the signature of the model's forward and its container methods.

    With a loss function, forward takes the target too and keeps the signature of `base`.
    """
    if "forward" in vars(model):  # patched on this instance
        return _subclass(base, type(model), _with_self(inspect.signature(model.forward)))
    user: Any = type(model)
    return _subclass_of(base, user, has_loss)


@functools.cache
def _subclass_of(base: type, user: Any, has_loss: bool) -> type:
    return _subclass(base, user, None if has_loss else inspect.signature(user.forward))


def _subclass(base: type, user: type[nn.Module], signature: inspect.Signature | None) -> type:
    names = [name for name in CONTAINER_METHODS if hasattr(user, name)]
    content: dict[str, Any] = {name: _delegated(name) for name in names}
    content |= {"__doc__": user.__doc__, "__module__": user.__module__}
    if signature is not None:
        content["forward"] = _forward_like(base, user, signature)
    return type(f"Distributed{user.__name__}", (base,), content)


def _forward_like(base: Any, user: type[nn.Module], signature: inspect.Signature) -> Any:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    forward.__doc__ = user.forward.__doc__
    forward.__annotations__ = getattr(user.forward, "__annotations__", {})
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _delegated(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._wrapped[0], name)(*args)

    method.__name__ = name
    return method


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [p.replace() for p in signature.parameters.values()]
    if rest and rest[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        own = own.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[own, *rest])
