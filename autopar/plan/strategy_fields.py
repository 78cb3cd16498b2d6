"""Checks of a strategy's individual fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from autopar.common.checks import MAX_BYTES, argument_error, choice, count, flag, text, texts
from autopar.ir.placement import Replicate, Shard
from autopar.plan.compression import CASTS, ELEMENTWISE, METHODS, Compression
from autopar.plan.pipeline import SCHEDULES
from autopar.plan.recompute import Level

SEARCHABLE = ("pp", "tp", "cp", "ep", "dp_shard")
MOST_PREFETCH = 2**16


def check_fields(strategy: object) -> None:
    """Checks each field of a `Strategy` on its own.

    Raises:
        StrategyError: A field has an invalid value.
    """
    for name, check in _CHECKS.items():
        if (value := getattr(strategy, name)) is not None or name in _NEVER_NONE:
            check(name, value)


def _zero(name: str, value: Any) -> None:
    stages = value.values() if isinstance(value, Mapping) else [value]
    plain = all(isinstance(stage, int) and not isinstance(stage, bool) for stage in stages)
    blocks = all(isinstance(key, str) for key in value) if isinstance(value, Mapping) else True
    if not (plain and blocks and all(0 <= stage <= 3 for stage in stages)):
        raise argument_error(
            name, value, "a ZeRO stage is 0, 1, 2 or 3; give one, or one for each block"
        )


def _bytes(name: str, value: Any) -> None:
    count(name, value, 1, MAX_BYTES)


def _split_points(name: str, value: Any) -> None:
    names = texts(name, value, "give a tuple of names of modules or parameters")
    if len(set(names)) < len(names):
        raise argument_error(name, value, "give each name once")


def _hierarchical(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        wanted = "choose True, False, None or the number of neighbours, 2 or more"
        if not isinstance(value, int) or value < 2:
            raise argument_error(name, value, wanted)
        count(name, value, 2)


def _method(allowed: tuple[str, ...]) -> Callable[[str, Any], None]:
    """Check that a compression uses one of the allowed methods."""

    def check(name: str, value: Any) -> None:
        if value == "none":
            return
        if not isinstance(value, Compression):
            text(name, value, f"choose {', '.join(allowed)}, or as in 'powersgd(rank=2)'")
        choice(name, Compression.of(value, name).method, allowed)

    return check


def _lossy(name: str, value: Any) -> None:
    for method in texts(name, value, f"give a tuple of methods: {', '.join(METHODS)}"):
        Compression.of(method, name)


def _search(name: str, value: Any) -> None:
    wanted = f"give a tuple of axes: {', '.join(SEARCHABLE)}"
    for axis in texts(name, value, wanted):
        choice(name, axis, SEARCHABLE)


def _placements(name: str, value: Any) -> None:
    wanted = "give a dict of autopar.Shard(dim) or autopar.Replicate() by parameter name"
    if not isinstance(value, Mapping):
        raise argument_error(name, value, wanted)
    for pattern, where in value.items():
        for axis, pin in where.items() if isinstance(where, Mapping) else [("tp", where)]:
            if not isinstance(pattern, str) or not isinstance(axis, str) or not _is_pin(pin):
                raise argument_error(name, value, wanted)


def _is_pin(pin: Any) -> bool:
    if isinstance(pin, Shard):
        sizes = (pin.dim, pin.interleave)
        return all(type(size) is int for size in sizes) and pin.interleave >= 1
    return isinstance(pin, Replicate)


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "zero": _zero,
    "recompute": lambda name, value: choice(name, value, get_args(Level)),
    "gather_bytes": _bytes,
    "reduce_bytes": _bytes,
    "prefetch": lambda name, value: count(name, value, 0, MOST_PREFETCH),
    "activation_bytes": lambda name, value: count(name, value, 0, MAX_BYTES),
    "batch_semantics": lambda name, value: choice(name, value, ("global", "local")),
    **dict.fromkeys(("tp", "cp", "ep", "pp", "micro_batches", "stages_per_rank"), count),
    "schedule": lambda name, value: choice(name, value, SCHEDULES),
    "split_points": _split_points,
    "dp_shard": count,
    "hierarchical": _hierarchical,
    "compress": _method(METHODS),
    "compress_gathers": _method(ELEMENTWISE),
    "compress_activations": _method(CASTS),
    "lossy": _lossy,
    "search": _search,
    "placements": _placements,
    "keep_sharded": flag,
    "sequence_parallel": flag,
}

_NEVER_NONE = frozenset(
    ["batch_semantics", "lossy", "search", "placements", "keep_sharded", "sequence_parallel"]
)
