"""`without_foreign`: figures of operators that the next process has, too.

Another process may have other kernels under the same name: those of a user's operator, or those
that a user registers for one of torch's. Nothing tells what they compute, so caches leave them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import torch

from autopar._torch import OpOverload, registrations_of

T = TypeVar("T")

OWN = ("aten", "_c10d_functional", "autopar")
"""Namespaces of operators whose kernels follow from the versions of torch and autopar."""

_NAME = re.compile(r"\b(\w+)\.(\w+)\.(\w+)(?=\(|$)")
_SCHEMA = re.compile(r"^debug: registered at (.*)build/aten/src/ATen/RegisterSchema\.cpp:", re.M)
_KERNEL = re.compile(r"^(?!Meta\b)\S+(?: \(inactive\))?: registered at (.*):\d+ ::", re.M)


def without_foreign(figures: Mapping[str, T]) -> dict[str, T]:
    """The figures whose keys, as of `signature` and `time_key`, name no foreign operator."""
    names = {key: _NAME.search(key) for key in figures}
    foreign = {own for own in {match[0] for match in names.values() if match} if _is_foreign(own)}
    return {k: v for k, v in figures.items() if (own := names[k]) is None or own[0] not in foreign}


def _is_foreign(name: str) -> bool:
    """Whether an operator, or one of its kernels, is neither torch's nor autopar's."""
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    target = getattr(packet, overload, None)
    if namespace not in OWN or not isinstance(target, OpOverload):
        return True
    if namespace != "aten":
        return False
    # torch compiles all kernels of these from one folder, which the line of the schema names.
    described = registrations_of(target.name())
    schema = _SCHEMA.search(described)
    sources = _KERNEL.findall(described)
    return schema is None or not all(source.startswith(schema[1]) for source in sources)
