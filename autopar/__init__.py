"""autopar: an ordinary single-device PyTorch model, trained across all the machines at hand."""

from autopar.api import compile, plan
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.measure import measure
from autopar.deviation import Deviation, Verification
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    BatchError,
    CaptureError,
    CommunicationError,
    DisagreementError,
    FallbackWarning,
    LossyWarning,
    MeasurementWarning,
    ModelError,
    NumericsWarning,
    OutOfMemoryError,
    PassError,
    PlanError,
    StrategyError,
    VerificationError,
)
from autopar.placement import Replicate, Shard
from autopar.plan import Plan
from autopar.runtime.module import DistributedModule
from autopar.strategy import Strategy
from autopar.verification import verify

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "BatchError",
    "CaptureError",
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
    "OutOfMemoryError",
    "PassError",
    "Plan",
    "PlanError",
    "Replicate",
    "Shard",
    "Strategy",
    "StrategyError",
    "Verification",
    "VerificationError",
    "compile",
    "measure",
    "plan",
    "verify",
]
