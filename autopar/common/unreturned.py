"""`Unreturned`: stands in a result for an object whose tensors autopar does not return."""

from __future__ import annotations

from typing import Any, NoReturn

from autopar.errors import ModelError


class Unreturned:
    """Stands for an object in the result of a model; every use of it is an error.

    Models of transformers return a cache of keys and values beside their loss, which training does
    not read. Such an object is no reason to refuse the model.

    Args:
        model: name of the model's class.
        kind: name of the object's class.
    """

    def __init__(self, model: str, kind: str) -> None:
        self._names = model, kind

    def __repr__(self) -> str:
        return f"<{self._names[1]} of {self._names[0]}, not returned>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_names":
            raise AttributeError(name)  # copying and pickling ask for methods that may be absent
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        model, kind = self._names
        raise ModelError(
            f"{model} returned a {kind}, whose tensors autopar does not return: it returns those "
            "in tuples, lists, dicts, dataclasses and SimpleNamespaces. Return the tensors that "
            "you read, or call the model inside model.gathered()."
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __call__ = _refuse
