"""`Run`: configuration and result of a published run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from autopar.core.plan.strategy import Strategy
from benchmarks.published import llama
from benchmarks.published.gpt import Sizes, make
from examples.plan_llama import Size


@dataclass(frozen=True)
class Run:
    name: str  # name of the model, and of the mode where there are several
    cluster: str  # name of a shipped cluster
    gpus: int  # number of GPUs
    sizes: Sizes  # sizes of the model
    rows: int  # rows of the global batch
    strategy: Strategy  # strategy as published
    work: float  # FLOPs of a step by the source's count, or tokens; 0 if it states none
    published: float  # TFLOP/s or tokens/s of a GPU, or GiB of activations on the first stage
    unit: str  # unit of `published`
    assumed: str = ""  # assumptions where the source is silent
    tp_overlap: bool = False  # whether collectives of tp overlap their matrix products in pieces
    scatters: bool = False  # whether ranks of tp each send a part of what goes to the next stage
    awaits: bool = False  # whether ranks compute nothing while messages between stages are sent
    backend: str = "ts"  # compiler that fuses small operators: "ts" for Megatron's fused kernels
    device: str = ""  # name of the GPU, if not that of the cluster
    node_gbit: float = 0.0  # network of a node in Gbit/s, if not that of the cluster
    reserved_gib: float = 0.0  # memory that torch reserved on a GPU; 0 if not stated
    llama: Size | None = None  # size of a llama; a GPT of `sizes` otherwise
    half_products: bool = False  # whether every other matrix product is recomputed
    held_bytes: int = 0  # bytes that its program holds at its peak, unlike autopar's
    versions: Mapping[str, str] = field(default_factory=dict)  # software (see `Cluster.versions`)
    float8: bool = False  # whether a llama's products of blocks are in float8

    def make(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Return the model and a global batch, on the meta device."""
        if self.llama is None:
            return make(self.sizes, self.rows)
        return llama.make(self.llama, self.sizes.length, self.rows, float8=self.float8)
