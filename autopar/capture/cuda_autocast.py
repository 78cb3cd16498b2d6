"""`autocast_for`: autocast as a device has it, on a machine without the device.

CUDA's autocast computes norms, softmax, powers and losses in float32; a CPU's does not. A capture
on a CPU for GPUs would therefore have other casts, other node names, and another plan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar._torch import cpu_autocast_kernels, cpu_autocast_names, pytree

FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
"""Operators whose operands CUDA's autocast casts to float32 (torch's `AT_FORALL_FP32`)."""

FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
"""Operators that it lets compute in float32 (`AT_FORALL_FP32_SET_OPT_DTYPE`, and norms)."""

LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm
mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
"""Operators whose operands it casts to the lower dtype (`AT_FORALL_LOWER_PRECISION_FP`)."""

PROMOTED = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
"""Operators whose operands it casts to the widest of their dtypes (`AT_FORALL_PROMOTE`)."""


@contextlib.contextmanager
def autocast_for(device: torch.device, dtype: torch.dtype | None, backend: str) -> Iterator[None]:
    """Autocast to a dtype on a device; that of CUDA on a CPU that captures for GPUs.

    Args:
        device: device of the capture.
        dtype: dtype of autocast, None to turn it off.
        backend: backend of torch.distributed of the ranks; "nccl" is for GPUs.
    """
    with contextlib.ExitStack() as stack:
        if dtype is not None and backend == "nccl" and device.type == "cpu":
            stack.enter_context(cpu_autocast_kernels(_cuda_kernels()))
        stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=dtype is not None))
        yield


Call = Callable[..., Any]


@functools.cache
def _cuda_kernels() -> dict[str, Call | None]:
    """Kernels unlike those of the CPU's autocast, by name in aten; None for untouched operators."""
    policies: tuple[tuple[str, Callable[[Any], Call]], ...] = (
        (FLOAT32, _in_float32),
        (FLOAT32_RESULT, _with_float32_result),
        (LOWER, _in_lower),
        (PROMOTED, _in_widest),
    )
    known, on_cpu = {name for names, _ in policies for name in names.split()}, cpu_autocast_names()
    found: dict[str, Call | None] = dict.fromkeys(on_cpu - known)
    for names, policy in policies:
        same = on_cpu if policy in (_in_float32, _in_lower) else set()
        for name in names.split():
            if name not in same and (op := _overload(name)) is not None:
                found[name] = policy(op)
    return found


def _overload(name: str) -> Any:
    """The operator of this name, None if this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _casting(op: Call, dtype_of: Callable[[list[torch.Tensor]], torch.dtype]) -> Call:
    """The operator on cast operands; the last is cast first, as compiled C++ does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        dtype = dtype_of([x for x in leaves if _is_cast(x)])
        cast = [x.to(dtype) if _is_cast(x) else x for x in reversed(leaves)]
        args, kwargs = pytree.tree_unflatten(cast[::-1], structure)
        return op(*args, **kwargs)

    return run


def _in_float32(op: Call) -> Call:
    return _casting(op, lambda tensors: torch.float32)


def _in_lower(op: Call) -> Call:
    return _casting(op, lambda tensors: torch.get_autocast_dtype("cpu"))


def _in_widest(op: Call) -> Call:
    def widest(tensors: list[torch.Tensor]) -> torch.dtype:
        has_float32 = any(t.dtype == torch.float32 for t in tensors)
        return torch.float32 if has_float32 else torch.get_autocast_dtype("cpu")

    return _casting(op, widest)


def _with_float32_result(op: Any) -> Call:
    """The operator in float32, unless the caller gives a dtype or an operand that is not cast."""
    names = [argument.name for argument in op._schema.arguments]
    into = op if "dtype" in names else _overload(_WITH_DTYPE[op._overloadname])
    place = names.index("dtype") if "dtype" in names else len(names)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is not None or not _is_cast(args[0]):
            return op(*args, **kwargs)
        return into(*args[:place], **{**kwargs, "dtype": torch.float32})

    return run


_WITH_DTYPE = {"Scalar": "norm.ScalarOpt_dtype", "ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}


def _is_cast(value: Any) -> bool:
    """Whether autocast casts a value: floating-point tensors but those of float64."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and value.dtype != torch.float64
