"""Private names of torch whose modules load Dynamo, which takes a second.

Functions import this where they need it, so that `import autopar` costs nothing of it. Import it
before a trace: modules that load while torch traces would run on fake tensors.
"""

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd as aot_backend
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch.distributed.pipelining.schedules import _Action as PipelineAction
from torch.distributed.pipelining.schedules import _add_send_recv as add_transfers
from torch.distributed.pipelining.schedules import _ComputationType as PipelineWork
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def new_size_symbol(env: ShapeEnv, size: int, name: str) -> torch.SymInt:
    """A size as a symbol of its own, at least 2."""
    source = ConstantSource(name)
    symbol = env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    made: Any = env.create_symintnode(symbol, hint=size, source=source)
    return made
