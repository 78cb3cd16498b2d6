"""`direct_calls`: forms of attention kernels that a model calls by their names in aten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar._torch import OpOverload, without_torch_function
from autopar.core.operators.attention import canonical_call

aten = torch.ops.aten


class KernelResults:
    """Results of a kernel: the first by `autopar::attention`, others by the kernel itself.

    Most callers read the first alone. A caller that unpacks all gets the kernel's own.
    """

    def __init__(self, out: Any, kernel: Callable[[], Any]) -> None:
        self._out, self._kernel = out, kernel
        self._results: Any = None

    def _all(self) -> Any:
        if self._results is None:
            with without_torch_function():  # this form would be called again
                self._results = self._kernel()
        return self._results

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._out() if index == 0 else self._all()[index]


def _form(kernel: OpOverload) -> Callable[..., Any]:
    """A kernel that reads (query, key, value, ...), by `autopar::attention` where that fits."""
    schema = kernel._schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        named: dict[str, Any] = {a.name: a.default_value for a in schema} | kwargs
        named |= zip((a.name for a in schema), args, strict=False)
        mask = named.get("attn_bias", named.get("attn_mask"))
        given = [named[name] for name in ("query", "key", "value")]
        given += [mask, *(named[name] for name in ("dropout_p", "is_causal", "scale"))]
        found = canonical_call(*given, grouped=True)
        if found is None or named.get("return_debug_mask"):
            return kernel(*args, **kwargs)
        return KernelResults(found, lambda: kernel(*args, **kwargs))

    return call


_KERNELS = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
DIRECT_CALLS: dict[Any, Callable[..., Any]] = {
    name: _form(packet.default) for packet in _KERNELS for name in (packet, packet.default)
}
"""The form of each kernel, by its operator and packet."""
