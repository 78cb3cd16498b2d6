"""`Device`: what one accelerator can do at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_model.cost import ClusterError


@dataclass(frozen=True)
class Device:
    """Published or measured figures of a device.

    Attributes:
        name: as torch.cuda.get_device_name has it.
        memory_bytes: its memory.
        memory_bytes_per_s: peak bandwidth of its memory.
        flops_per_s: peak of dense matrix products by dtype ("float32", "bfloat16", ...).
        source: where these come from, starting with measured, imported or modelled.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**dataclasses.asdict(self), "flops_per_s": dict(self.flops_per_s)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """The device that `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ClusterError(f"a device has {', '.join(sorted(names))}, this has {data!r:.200}")
        return cls(**data)
