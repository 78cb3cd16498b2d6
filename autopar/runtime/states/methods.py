"""Methods of the user's module, called on the compiled one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.core.common.world import rank
from autopar.errors import StrategyError
from autopar.formatting import first_line
from autopar.runtime.agreement.consensus import run_on_all_ranks
from autopar.runtime.parameters.distribute import is_remote


class Gathers(Protocol):
    """A compiled model, whose parameters can be gathered."""

    def gathered(self) -> contextlib.AbstractContextManager[nn.Module]: ...


def explaining_shards(method: MethodType) -> MethodType:
    """The same method, which runs the plain model on this rank alone.

    If it fails on sharded parameters, it raises StrategyError.
    """
    function, model = method.__func__, method.__self__
    assert isinstance(model, nn.Module)

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(self, *args, **kwargs)
        except RuntimeError as error:
            if not any(isinstance(p, DTensor) or is_remote(p) for p in model.parameters()):
                raise
            raise StrategyError(
                f"{function.__name__}() runs the plain model, whose parameters are sharded under "
                f"this plan, and raised {type(error).__name__}: {first_line(error)}. Call it "
                "inside of `with model.gathered():`, on all ranks. Changes of modules or shapes "
                "belong before autopar.compile."
            ) from error
        return result

    return MethodType(run, model)


def save_pretrained(model: Gathers, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained` of Hugging Face's models; rank 0 writes the files of the plain model.

    All ranks call this at once, unless `state_dict` is given.
    """
    if kwargs.get("state_dict") is not None:
        return method(*args, **kwargs)
    with model.gathered() as plain, same_config(plain):
        return run_on_all_ranks(lambda: method(*args, **kwargs) if rank() == 0 else None)


@contextlib.contextmanager
def same_config(model: Any) -> Iterator[None]:
    """Undoes changes of the config, which `save_pretrained` makes on one rank alone."""
    values = vars(model.config) if hasattr(model, "config") else {}
    before = dict(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del values[name]
        values |= before
