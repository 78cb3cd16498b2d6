"""`kernel_settings`: switches of torch, and facts of the GPU, that decide an operator's time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

_backends: Any = torch.backends

_EVERYWHERE: tuple[tuple[str, Callable[[], Any], Any], ...] = (
    ("fp32_precision", lambda: _backends.fp32_precision, "none"),
    ("float32_matmul_precision", lambda: torch.get_float32_matmul_precision(), "highest"),
    ("deterministic", lambda: torch.are_deterministic_algorithms_enabled(), False),
    ("mkldnn", lambda: _backends.mkldnn.enabled, True),
    ("mkldnn.matmul", lambda: _backends.mkldnn.matmul.fp32_precision, "none"),
    ("mkldnn.conv", lambda: _backends.mkldnn.conv.fp32_precision, "none"),
    ("flash_sdp", lambda: _backends.cuda.flash_sdp_enabled(), True),
    ("mem_efficient_sdp", lambda: _backends.cuda.mem_efficient_sdp_enabled(), True),
    ("math_sdp", lambda: _backends.cuda.math_sdp_enabled(), True),
    ("cudnn_sdp", lambda: _backends.cuda.cudnn_sdp_enabled(), True),
)
"""Name, reading and default of each switch that also concerns a CPU."""

_CUDA: tuple[tuple[str, Callable[[], Any], Any], ...] = (
    ("cuda.matmul", lambda: _backends.cuda.matmul.fp32_precision, "none"),
    ("cudnn.conv", lambda: _backends.cudnn.conv.fp32_precision, "tf32"),
    ("cudnn.rnn", lambda: _backends.cudnn.rnn.fp32_precision, "tf32"),
    ("fp16_sums", lambda: _backends.cuda.matmul.allow_fp16_reduced_precision_reduction, True),
    ("bf16_sums", lambda: _backends.cuda.matmul.allow_bf16_reduced_precision_reduction, True),
    ("fp16_accumulation", lambda: _backends.cuda.matmul.allow_fp16_accumulation, False),
    ("blas", lambda: str(_backends.cuda.preferred_blas_library()), ""),
    ("cudnn", lambda: _backends.cudnn.enabled, True),
    ("cudnn.benchmark", lambda: _backends.cudnn.benchmark, False),
    ("cudnn.deterministic", lambda: _backends.cudnn.deterministic, False),
    ("cuda.version", lambda: torch.version.cuda, None),
    ("cudnn.version", lambda: _backends.cudnn.version(), None),
)
_ENVIRONMENT = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING")
_PROPERTIES = ("multi_processor_count", "total_memory", "clock_rate", "memory_clock_rate")


def kernel_settings(device: str) -> str:
    """Settings of "cpu" or "cuda" that differ from torch's defaults, as text for cache keys.

    Of a GPU also the versions of its libraries, its size and its clock rates.
    """
    switches = _EVERYWHERE if device == "cpu" else (*_EVERYWHERE, *_CUDA)
    found = [(name, _value(read, default), default) for name, read, default in switches]
    facts = [f"{name}={value}" for name, value, default in found if value != default]
    if device != "cpu":
        facts += [f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ]
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts += [f"{name}={getattr(properties, name, '?')}" for name in _PROPERTIES]
    return ", ".join(facts)


def _value(read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except AttributeError:  # an older torch without this switch
        return default
    except RuntimeError:  # torch refuses to tell, because old and new switches were mixed
        return "mixed"
