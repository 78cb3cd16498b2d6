"""`precision_line`: batch and dtypes of a plan, and the bytes a parameter costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from autopar.core.plan.layout import Layout

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Usual names of dtypes."""


def precision_line(plan: Plan) -> Iterator[str]:
    """One line on the batch, the dtypes of parameters, messages and optimizer, and their bytes.

    The bytes of a parameter are those of itself, its gradient and the optimizer's state, before
    sharding. Gathered ones are those of an unsharded copy under ZeRO.
    """
    if not plan.parameter_dtypes:
        return
    sizes = {name: getattr(torch, name).itemsize for name, _ in plan.parameter_dtypes}
    stored = " and ".join(map(_short, sizes))
    main, total = plan.parameter_dtypes[0][0], sum(size for _, size in plan.parameter_dtypes)
    count = sum(size / sizes[name] for name, size in plan.parameter_dtypes)
    nbytes = total * (2 + plan.optimizer_state_ratio) / count
    compute = plan.precision or main
    gathers = Layout(plan).replicas > 1 and any(stage for _, stage in plan.zero_stages)
    if main == "bfloat16":
        stored += " (no fp32 copy: small updates are rounded away)"
    work = plan.prediction.work if plan.prediction else None
    parts = [f"global batch of {work.rows:,} rows"] if work and work.rows else []
    parts += [f"params {stored}", f"compute{' and gather' if gathers else ''} {_short(compute)}"]
    if plan.dp_size > 1:
        parts.append(f"reduce {_short(plan.reduce_precision or main)}")
    parts.append(f"{plan.optimizer} {_short(main)}")
    gathered = f" + {getattr(torch, compute).itemsize} B gathered" if gathers else ""
    yield f"{', '.join(parts)}: {nbytes:.3g} B per parameter{gathered}"


def _short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)
