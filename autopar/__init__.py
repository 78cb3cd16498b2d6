"""autopar: a compiler that trains a single-device PyTorch model on many ranks."""

from autopar.api import compile, plan, verify
from autopar.checkpoints.checkpointer import Checkpointer
from autopar.common.padding import pad_to_bucket
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.measure import measure
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
    VerificationError,
)
from autopar.ir.placement import Replicate, Shard
from autopar.offload.optimizer import OffloadedOptimizer
from autopar.plan.outer import Outer
from autopar.plan.strategy import Strategy
from autopar.report.plan import Plan
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
    "Verification",
    "VerificationError",
    "compile",
    "load_pretrained",
    "measure",
    "pad_to_bucket",
    "plan",
    "verify",
]
