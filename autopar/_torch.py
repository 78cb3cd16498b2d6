"""Every private name of torch that autopar uses, and nothing else.

Supported: torch 2.11 to 2.13. A release that moves one of these breaks here and only here.
"""

from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.node import _format_arg as format_argument

__all__ = [
    "BoxedCodeGen",
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
    "format_argument",
]
