"""Every private name of torch that autopar uses, and nothing else.

Supported: torch 2.11 to 2.13. A release that moves one of these breaks here and only here.
"""

from datetime import timedelta

from torch._dynamo.backends.common import aot_autograd as aot_backend
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._inductor import compile as inductor_compile
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import ProcessGroup
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.node import _format_arg as format_argument
from torch.utils import _pytree as pytree

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
    "aot_backend",
    "aot_export_joint_with_descriptors",
    "default_partition",
    "format_argument",
    "group_timeout",
    "inductor_compile",
    "make_boxed_func",
    "pytree",
]


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long a collective of the group waits for the other ranks."""
    return group._get_backend(group._device_types[0]).options._timeout
