"""autopar: a compiler that trains a single-device PyTorch model on many ranks."""

import importlib
from typing import TYPE_CHECKING, Any

from autopar.environment import check_log_level
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
    from autopar.checkpoints.checkpointer import Checkpointer
    from autopar.common.padding import pad_to_bucket
    from autopar.cost_model.cluster.cluster import Cluster
    from autopar.cost_model.measurement.measure import measure
    from autopar.ir.placement import Replicate, Shard
    from autopar.offload.optimizer import OffloadedOptimizer
    from autopar.plan.outer import Outer
    from autopar.plan.plan import Plan
    from autopar.plan.strategy import Strategy
    from autopar.runtime.module import DistributedModule
    from autopar.runtime.pretrained import load_pretrained
    from autopar.verification.deviation import Deviation, Verification

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
    "Checkpointer": "autopar.checkpoints.checkpointer",
    "Cluster": "autopar.cost_model.cluster.cluster",
    "Deviation": "autopar.verification.deviation",
    "DistributedModule": "autopar.runtime.module",
    "OffloadedOptimizer": "autopar.offload.optimizer",
    "Outer": "autopar.plan.outer",
    "Plan": "autopar.plan.plan",
    "Replicate": "autopar.ir.placement",
    "Shard": "autopar.ir.placement",
    "Strategy": "autopar.plan.strategy",
    "Verification": "autopar.verification.deviation",
    "compile": "autopar.api",
    "load_pretrained": "autopar.runtime.pretrained",
    "measure": "autopar.cost_model.measurement.measure",
    "pad_to_bucket": "autopar.common.padding",
    "plan": "autopar.api",
    "verify": "autopar.api",
}
"""Modules that load when one of their names is first used: what is not used costs no time."""

# loading the package `autopar.plan` later would bind it here, in the place of the function
importlib.import_module("autopar.plan")
globals().pop("plan", None)


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
