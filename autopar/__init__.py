"""autopar: a compiler that trains a single-device PyTorch model on many ranks."""

import importlib
from typing import TYPE_CHECKING, Any

from autopar.core.environment import check_log_level
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    BatchError,
    CaptureError,
    CheckpointError,
    CheckpointWarning,
    CommunicationError,
    DisagreementError,
    FallbackWarning,
    LossyWarning,
    MeasurementWarning,
    ModelError,
    NumericsWarning,
    OffloadError,
    OutOfMemoryError,
    PassError,
    PlanError,
    StragglerWarning,
    StrategyError,
    ThreadError,
    VerificationError,
)

if TYPE_CHECKING:
    from autopar.api import compile, plan, verify
    from autopar.core.common.padding import pad_to_bucket
    from autopar.core.ir.placement import Replicate, Shard
    from autopar.core.plan.outer import Outer
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.strategy import Strategy
    from autopar.cost_model.cluster.cluster import Cluster
    from autopar.cost_model.measurement.measure import measure
    from autopar.runtime.module import DistributedModule
    from autopar.runtime.pretrained import load_pretrained
    from autopar.train.checkpoints.checkpointer import Checkpointer
    from autopar.train.offload.optimizer import OffloadedOptimizer
    from autopar.train.verification.deviation import Deviation, Verification

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "Cluster",
    "CommunicationError",
    "Deviation",
    "DisagreementError",
    "DistributedModule",
    "FallbackWarning",
    "LossyWarning",
    "MeasurementWarning",
    "ModelError",
    "NumericsWarning",
    "OffloadError",
    "OffloadedOptimizer",
    "OutOfMemoryError",
    "Outer",
    "PassError",
    "Plan",
    "PlanError",
    "Replicate",
    "Shard",
    "StragglerWarning",
    "Strategy",
    "StrategyError",
    "ThreadError",
    "Verification",
    "VerificationError",
    "compile",
    "load_pretrained",
    "measure",
    "pad_to_bucket",
    "plan",
    "verify",
]

_HOMES = {
    "Checkpointer": "autopar.train.checkpoints.checkpointer",
    "Cluster": "autopar.cost_model.cluster.cluster",
    "Deviation": "autopar.train.verification.deviation",
    "DistributedModule": "autopar.runtime.module",
    "OffloadedOptimizer": "autopar.train.offload.optimizer",
    "Outer": "autopar.core.plan.outer",
    "Plan": "autopar.core.plan.plan",
    "Replicate": "autopar.core.ir.placement",
    "Shard": "autopar.core.ir.placement",
    "Strategy": "autopar.core.plan.strategy",
    "Verification": "autopar.train.verification.deviation",
    "compile": "autopar.api",
    "load_pretrained": "autopar.runtime.pretrained",
    "measure": "autopar.cost_model.measurement.measure",
    "pad_to_bucket": "autopar.core.common.padding",
    "plan": "autopar.api",
    "verify": "autopar.api",
}
"""Modules that load when one of their names is first used: what is not used costs no time."""


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_log_level()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names too that are not loaded yet, for completion."""
    return sorted({*globals(), *__all__})
