"""`ON_STREAM`: CUDA's attention kernels with dropout, drawing from a stream of their own.

Ranks that share a model share a random generator, and a fused kernel numbers its draws by the heads
that it is given. Shards of one call would therefore drop the same elements. These operators run the
kernel with another seed, and leave the generator as the kernel alone would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar._torch import OpOverload

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_SEED_STEP = 1_000_003
_KERNELS: dict[str, OpOverload] = {
    "flash_attention": aten._scaled_dot_product_flash_attention.default,
    "efficient_attention": aten._scaled_dot_product_efficient_attention.default,
    "cudnn_attention": aten._scaled_dot_product_cudnn_attention.default,
}


@contextlib.contextmanager
def other_stream(generator: Any, stream: int) -> Iterator[None]:
    """Gives a CUDA generator another seed inside; its offset moves on as with its own."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed((seed + _SEED_STEP * (stream + 1)) % 2**63)
    generator.set_offset(offset)
    try:
        yield
        offset = generator.get_offset()
    finally:
        generator.manual_seed(seed)
        generator.set_offset(offset)


def _define(name: str, kernel: OpOverload) -> OpOverload:
    arguments, _, results = str(kernel._schema).partition("(")[2].rpartition(" -> ")
    own = f"{name}_on_stream"
    _LIBRARY.define(
        f"{own}({arguments[:-1]}, int stream=0) -> {results}",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    def run(*args: Any, stream: int = 0, **kwargs: Any) -> Any:
        with other_stream(torch.cuda.default_generators[args[0].device.index or 0], stream):
            return kernel(*args, **kwargs)

    def fake(*args: Any, stream: int = 0, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    _LIBRARY.impl(own, run, "CUDA")
    torch.library.register_fake(f"autopar::{own}", fake, lib=_LIBRARY)
    found: OpOverload = getattr(torch.ops.autopar, own).default
    return found


ON_STREAM = {kernel: _define(name, kernel) for name, kernel in _KERNELS.items()}
"""The operator on a stream of its own, by the kernel."""
