"""Every private name of torch that autopar uses and that costs no import of Dynamo.

Supported: torch 2.11 to 2.15. Names whose module loads Dynamo are in `_torch_dynamo.py`.
"""

import contextlib
import functools
import linecache
import logging
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch import _functionalize_mutation_counter as count_mutations
from torch import _is_functional_tensor as is_functional
from torch._C import _AutoDispatchBelowAutograd as skip_autograd
from torch._C import _current_graph_task_id as current_backward
from torch._C import _dispatch_dump as registrations_of
from torch._C import _will_engine_execute_node as will_run
from torch._C._autograd import _disable_profiler_legacy as disable_profiler
from torch._C._autograd import _enable_profiler_legacy as enable_profiler
from torch._C._autograd import _get_current_graph_task_keep_graph as backward_keeps_graph
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch._C._autograd import _saved_tensors_hooks_set_tracing as hide_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed
from torch._C._functorch import is_legacy_batchedtensor as is_batched
from torch._C._functorch import peek_interpreter_stack as current_transform
from torch._C._profiler import ProfilerConfig, ProfilerState
from torch._C._profiler import _ExperimentalConfig as ExperimentalProfilerConfig
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd import descriptors
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.amp import GradScaler
from torch.autograd import forward_ad
from torch.cuda import _sleep as sleep_on_gpu
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _abort_process_group as abort_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.graph_module import _loader as fx_code_loader
from torch.fx.node import _format_arg as format_argument
from torch.library import _impls as python_kernels
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

HOMES_OF_BINDINGS = (torch, torch._C._nn)
"""Modules with the Python bindings of operators."""

_KINDS_OF_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
HOOKS_OF_ALL_MODULES = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in _KINDS_OF_HOOKS
)
"""Tables of the hooks that every module calls."""

HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter with its hooks."""


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute inside, then restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def answer_is_compiling(answer: Callable[[], bool]) -> Iterator[None]:
    """Answers `torch.compiler.is_compiling()`, also where a module imported it by name."""
    function = torch.compiler.is_compiling
    with (
        patched(function, "__code__", (lambda: _is_compiling_flag()).__code__),  # type: ignore[name-defined] # noqa: F821
        patched(torch.compiler, "_is_compiling_flag", answer),
    ):
        yield


def check_tensors_in_graph() -> contextlib.AbstractContextManager[None]:
    """Lets `torch._check_tensor_all` and its kin write an assertion, and read no value."""

    def check(error: type[Exception], condition: Tensor, message: Any = None) -> None:
        text = "a check of the model failed: it expects a tensor to be true everywhere"
        torch.ops.aten._assert_async.msg(condition.all(), text)

    return patched(torch, "_check_tensor_all_with", check)


def skip_causal_mask_detection() -> contextlib.AbstractContextManager[None]:
    """Keeps torch's Transformer layers from comparing a mask with a causal one.

    The comparison only selects a faster kernel; without it the mask is applied unchanged.
    """
    from torch.nn.modules import transformer

    def by_hint(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return is_causal is True

    return patched(transformer, "_detect_is_causal_mask", by_hint)


@contextlib.contextmanager
def dense_flex_attention(tell: Callable[[], None]) -> Iterator[None]:
    """Lets FlexAttention run its dense formula, uncompiled; each call first calls `tell`.

    Nothing changes before torch.nn.attention.flex_attention is imported.
    """
    functions = sys.modules.get("torch.nn.attention.flex_attention")
    if functions is None:
        yield
        return
    from torch._higher_order_ops.flex_attention import math_attention

    class Uncompiled:
        """The module torch, whose `compile` returns its argument."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def compile(self, function: Any, **options: Any) -> Any:
            return function

    def dense(*args: Any, **kwargs: Any) -> Any:
        tell()
        return math_attention(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(functions, "flex_attention_hop", dense))
        stack.enter_context(patched(functions, "torch", Uncompiled()))
        # the kernels for CPUs have no backward; the formula has
        stack.enter_context(patched(functions, "_validate_device", lambda *tensors: None))
        yield


without_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager: functions of torch run without `__torch_function__` of subclasses."""

without_torch_function = torch._C.DisableTorchFunction
"""Context manager: functions of torch run without modes that replace them."""

GROUPED_MM = torch._grouped_mm
live_storage = torch.UntypedStorage._new_with_weak_ptr
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
FUSED_ATTENTION = torch._C._SDPBackend.FLASH_ATTENTION.value
"""Number of the flash kernels among the kernels of attention."""


def fused_attention_choice(query: Tensor, key: Tensor, *call: Any, scale: float | None) -> int:
    """Number of the kernel that `scaled_dot_product_attention` would run."""
    grouped = query.shape[1] != key.shape[1]
    return torch._fused_sdp_choice(query, key, *call, scale=scale, enable_gqa=grouped)


def decomposition(target: OpOverload) -> Callable[..., Any] | None:
    """The decomposition of an operator, None if there is none."""
    return torch._decomp.decomposition_table.get(target)


@contextlib.contextmanager
def without_weight_references(model: nn.Module) -> Iterator[None]:
    """Clears the weak references of recurrent layers, which forbid swapping parameters."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs.clear()  # in place: guards compare the list by identity
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


@contextlib.contextmanager
def cpu_autocast_kernels(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Replaces kernels of the CPU's autocast inside, by name in aten; None for none.

    A kernel runs its operator below autocast.
    """
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def below(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return kernel(*args, **kwargs)

        return run

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of kernels that are replaced
            for name, kernel in kernels.items():
                found = torch.library.fallthrough_kernel if kernel is None else below(kernel)
                library.impl(name, found, "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


def cpu_autocast_names() -> set[str]:
    """Names in aten of the operators for which the CPU's autocast has a kernel."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def without_effect_tokens() -> contextlib.AbstractContextManager[None]:
    """Keeps torch from adding effect tokens to the checks of torch.linalg while tracing."""
    entry = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors")
    holder = getattr(entry, "effect", None)
    return contextlib.nullcontext() if holder is None else patched(holder, "_effect", None)


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """Traces backwards as `loss.backward()` runs them, after the autocast of the forward."""
    return patched(torch._functorch.config, "backward_pass_autocast", "off")


def mute_fake_tensor_log() -> contextlib.AbstractContextManager[None]:
    """Mutes torch's log of operators that fail on fake tensors."""
    return patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Turns oneDNN (MKL-DNN) off; its public switch also warns about TF32."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def around_checkpoints(around: Callable[[], Any]) -> Iterator[None]:
    """Enters `around()` while a function that `torch.utils.checkpoint` got runs at first."""
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(checkpoint, f"{name}_impl") else ""  # since torch 2.14
    begin = getattr(checkpoint, name)

    def steps(*args: Any, **kwargs: Any) -> Iterator[None]:
        with around():
            yield from begin(*args, **kwargs)

    with patched(checkpoint, name, steps):
        yield


def inductor_compile(
    module: fx.GraphModule, examples: Sequence[Tensor], donated: Sequence[int]
) -> Callable[[list[Any]], Any]:
    """Compiles a module by inductor; the result takes a list of tensors and empties it.

    Operators keep their order: inductor would move independent ones to the start of a backward.

    Args:
        module: module of one argument, a list marked `steal_arg`.
        examples: tensors of the shapes, dtypes and strides of the list.
        donated: indices of tensors whose storage kernels may overwrite.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        context = TracingContext.try_get()
        if donated and context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = list(donated)
            # donation applies to backwards only
            options |= {"is_backward": True, "is_inference": False}
        return compile_fx_inner(graph, inputs, **options)

    options = config.patch(reorder_for_peak_memory=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(x) for x in examples]  # inductor keeps its examples alive
    with tracing(TracingContext(mode)), options:
        return compile_fx(module, [fake], inner_compile=inner)  # type: ignore[list-item, return-value]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` of tensors that no functorch transform wraps, without looking for those."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_transforming() -> bool:
    """Whether a transform of torch.func is active, or torch's forward mode."""
    return current_transform() is not None or forward_ad._current_level >= 0


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or a plain tensor, as it is stored; costs no dispatch."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def clear_dtensor_caches() -> None:
    """Forgets how DTensor shards results; as in torch's `debug` module, which loads Dynamo."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def dtensor_like(part: Tensor, like: DTensor) -> DTensor:
    """A DTensor of a local shard, with the mesh, placements and global shape of another."""
    return DTensor(part, like._spec, requires_grad=False)


def after_unscaling(
    change: Callable[[Optimizer, Tensor, dict[torch.device, Tensor]], dict[torch.device, Tensor]],
) -> None:
    """Passes the overflow flags of every unscaling by a GradScaler through `change`.

    GradScaler has no public hook. `change` is given the optimizer, a flag on the scaler's device,
    and the flags by device.
    """
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def changed(
        scaler: GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        found = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        return change(optimizer, found_inf, found)

    GradScaler._unscale_grads_ = changed  # type: ignore[assignment]


def fake_result_cache(mode: FakeTensorMode) -> dict[Any, Any]:
    """Cached fake results of operators, for the lifetime of a fake mode."""
    known: dict[Any, Any] = vars(mode).setdefault("autopar_results", {})
    return known


def hint_of(size: int | torch.SymInt) -> int:
    """A size, or the size that a symbol was made from; no condition is set on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def forget_code_with(module: fx.GraphModule) -> None:
    """Has torch drop the text of a module's generated code together with the module."""
    weakref.finalize(module, _forget_code, module.forward.__code__.co_filename)


def _forget_code(file: str) -> None:
    fx_code_loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)


def storage_key(tensor: Tensor) -> int:
    """A number that tensors share while they share memory, on any device."""
    return tensor.untyped_storage()._cdata


def high_priority_nccl(timeout: timedelta) -> Any:
    """Options of NCCL groups whose kernels go before those of compute; None without NCCL."""
    kind = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if kind is None:
        return None
    options = kind.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def group_timeout(group: ProcessGroup) -> timedelta:
    """The timeout of the group's collectives; torch's default for a fake group."""
    options = group._get_backend(group._device_types[0]).options
    return default_pg_timeout if options is None else options._timeout


def skip_rendezvous_stacks() -> None:
    """Keeps torch's rendezvous from reading its own stack at every step, for events' names.

    It takes so long with many modules loaded that nodes on a busy machine never join.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"


def nodes_present(meeting: "DynamicRendezvousHandler") -> int:
    """Number of nodes in a running round of an elastic run; 0 if this one has been left out."""
    present = meeting._state_holder.state.participants
    return len(present) if meeting._this_node in present else 0


def rank_processes(context: "PContext | None") -> dict[int, subprocess.Popen[bytes]]:
    """The processes that torchrun's agent has started, by local rank."""
    handlers = getattr(context, "subprocess_handlers", {})
    return {local_rank: handler.proc for local_rank, handler in handlers.items()}


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its nodes and their meta.

    `Graph.graph_copy` also searches arguments for symbols, most of the time of passes.
    """
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    names, insert, known = new._graph_namespace, new._insert, new._find_nodes_lookup_table
    for node in graph.nodes:
        args, kwargs = (fx.map_arg(old, made.__getitem__) for old in (node.args, node.kwargs))
        name = names.create_name(node.name, None)
        made[node] = copy = fx.Node(new, name, node.op, node.target, args, kwargs, node.type)
        names.associate_name_with_obj(name, copy)
        insert(copy)
        known.insert(copy)
        new._len += 1
        copy.meta = dict(node.meta)
    return new


def empty_subclass(
    kind: type[Tensor], shape: tuple[int, ...], strides: tuple[int, ...], like: Tensor
) -> Any:
    """A tensor of a subclass without memory of its own, with the dtype and device of `like`."""
    return Tensor._make_wrapper_subclass(
        kind, shape, strides=strides, dtype=like.dtype, device=like.device
    )
