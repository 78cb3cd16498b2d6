"""`compare_training`: compares training steps under a plan with steps of the plain model."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.capture.call import batch_shard_of
from autopar.capture.model_info import describe_parameters, device_of
from autopar.core.common.constant_draws import ConstantDraws
from autopar.core.common.notices import NumericsNote, warn_once
from autopar.core.common.tolerances import TOLERANCES
from autopar.core.common.world import rank
from autopar.core.plan.decisions import fingerprint
from autopar.core.plan.plan import Plan
from autopar.cost_model.memory.optimizer_memory import Optimizer, make_optimizer
from autopar.errors import FallbackWarning, StrategyError, VerificationError
from autopar.formatting import printable
from autopar.options import CompileOptions
from autopar.report.table import compressed
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.initialization.deferred import DeferredValues
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import broadcast_from_rank0, is_remote
from autopar.runtime.start import ensure_process_group
from autopar.session.compile_model import compile_model
from autopar.session.launchers import adopt_launcher
from autopar.train.verification.deviation import Comparison, Deviation, Verification


def compare_training(
    model: nn.Module,
    call: tuple[list[Any], Any],
    options: CompileOptions,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    steps: int = 3,
    double: bool = True,
    tolerance: float | None = None,
) -> Verification:
    """Trains copies of a model compiled and plain; rank 0 prints the verdict.

    `call` holds flattened arguments and their structure: the batch of every step. Without a plan
    in `options` one is chosen. The default optimizer is SGD with momentum. `double` trains in
    float64.

    Raises:
        StrategyError: the arguments have no values, the model returns nothing to train, or it
            draws random numbers in code compiled by a backend.
    """
    leaves, structure = call
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        adopt_launcher()
        device = device_of(model, options.device)
        ensure_process_group(device, options.world_size, options.timeout_s)
        plain = copy.deepcopy(model)
        deferred = DeferredValues.of(plain, device, options.init_fn)
        if is_multi_rank():
            broadcast_from_rank0([*plain.parameters(), *plain.buffers()])
        if deferred is not None:
            deferred.give_values(None, None)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            raise StrategyError("example_inputs are on the meta device: verify needs their values")
        if double:
            plain = plain.double()
            for index, leaf in enumerate(leaves := list(leaves)):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaves[index] = leaf.double()
            if options.plan is not None:
                options = replace(options, plan=_for_parameters(options.plan, plain))
        inputs = None
        if options.plan is None:
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            inputs = kwargs if kwargs else args
        options = replace(options, example_inputs=inputs, device=None, init_fn=None)
        parallel = compile_model(copy.deepcopy(plain), options)
        batch = _batches(leaves, structure, options.batch, parallel)
        make = optimizer or _sgd
        result = _compare_steps(plain, parallel, batch, loss, make, options, steps, tolerance)
    if rank() == 0:
        print_verdict(result)
    return result


def _for_parameters(plan: Plan, model: nn.Module) -> Plan:
    """The plan of a model whose parameters became float64, with the same buckets."""
    parameters = describe_parameters(model)
    sizes = tuple((name, p.bytes) for name, p in parameters.items())
    return replace(plan, fingerprint=fingerprint(parameters.values()), parameter_bytes=sizes)


def print_verdict(result: Verification) -> None:
    """Prints a verdict, on a terminal with PASS in green or FAIL in red."""
    text = Text(printable(str(result)))
    text.highlight_regex(r"\A(PASS|FAIL)", "bold green" if result.passed else "bold red")
    Console().print(text, soft_wrap=True, highlight=False)


def verify_first_call(module: DistributedModule, leaves: Sequence[Any], structure: Any) -> None:
    """Verifies a compiled module's plan on the flattened batch of its first training call.

    Raises:
        VerificationError: on every rank, if training under the plan deviates beyond the tolerance.
    """
    if module.plan is None:
        message = "verify=True does not compare what trains without a plan"
        warn_once(FallbackWarning, f"{message}: autopar.verify(model, ...) does")
        return
    made = module._options
    options = CompileOptions(
        plan=module.plan,
        loss_fn=made.loss_fn,
        batch=made.batch,
        outputs=made.outputs,
        rows=made.rows,
        precision=made.precision or "fp32",
        backend=made.backend,
        static=made.static,
    )
    result = compare_training(_plain_copy(module), (list(leaves), structure), options)
    if not result.passed:
        raise VerificationError(
            f"this plan does not train as the plain model does.\n{result}\nTrain under another "
            "strategy, and please report the model."
        )


def _plain_copy(module: DistributedModule) -> nn.Module:
    """The plain model with the module's values, on every rank; all ranks call this at once."""
    assert module.plan is not None
    (model,) = module._wrapped
    fetched = module.state_dict() if module.plan.pp_size > 1 else {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        value = full_value(fetched.get(name, parameter)).detach().clone()
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _batches(
    leaves: list[Any], structure: Any, mode: str, parallel: DistributedModule
) -> tuple[Any, Any, float]:
    """Arguments of this rank's call, and of the plain model with the rows of all ranks.

    The third value is this rank's fraction of all rows, divided among the ranks with the same rows.
    """
    ranks, dp_rank = parallel.data_parallel_size, parallel.data_parallel_rank
    shard = batch_shard_of(
        leaves,
        structure,
        mode=mode,
        rank=dp_rank,
        ranks=ranks,
        static=parallel._options.static,
        stated=parallel._options.rows,
        undivided=parallel._options.undivided,
    )
    own = whole = pytree.tree_unflatten(leaves, structure)
    if mode == "local" and ranks > 1:
        on_cpu = [x.cpu() if isinstance(x, Tensor) else x for x in leaves]  # pickles keep the GPU
        by_rank = dict(gather_objects((dp_rank, on_cpu)))
        columns = zip(*(by_rank[index] for index in range(ranks)), strict=True)
        joined = [
            column[0] if dim is None else torch.cat(column, dim)
            for dim, column in zip(shard.call.row_dims, columns, strict=True)
        ]
        device = device_of(parallel)
        joined = [x.to(device) if isinstance(x, Tensor) else x for x in joined]
        whole = pytree.tree_unflatten(joined, structure)
    return own, whole, shard.rows / shard.slices.rows / (_world_size() / ranks)


def _compare_steps(
    plain: nn.Module,
    parallel: DistributedModule,
    batch: tuple[Any, Any, float],
    loss: Callable[[Any], Tensor] | None,
    optimizer: Optimizer,
    options: CompileOptions,
    steps: int,
    tolerance: float | None,
) -> Verification:
    own, whole, weight = batch
    plain_draws, draws = ConstantDraws(), ConstantDraws()
    optimizers = [_make_optimizer(optimizer, m) for m in (plain, parallel)]
    take_loss = loss or (lambda result: _default_loss(result)[0])
    notes: list[str] = []
    comparison: Comparison | None = None
    dtype = torch.float64
    for step in range(1, steps + 1):
        with plain_draws, torch.enable_grad():
            result = _run_plain(plain, options, *pytree.tree_map(_detached_copy, whole))
            expected = take_loss(result)
            expected.backward()
        if plain_draws.names and (backend := options.backend) != "eager":
            raise StrategyError(
                f"the model draws random numbers ({', '.join(plain_draws.names)}), which verify "
                f"cannot hold still in code compiled by {backend!r}. Verify with backend='eager', "
                "or model.eval()."
            )
        if comparison is None:
            tensors = [*plain.parameters(), *plain.buffers()]
            dtype = least_precise((t.dtype for t in tensors), plain_draws.narrowest)
            tolerance = TOLERANCES.get(dtype, 1e-5) if tolerance is None else tolerance
            comparison = Comparison(tolerance, torch.finfo(dtype).eps)
            if loss is None and not _default_loss(result)[1]:
                notes.append("the mean square of what the model returns stood in for a loss")
        if not math.isfinite(expected.item()):
            notes.append(f"the plain model's loss is {expected.item()} in step {step}")
            comparison.add("loss", step, {"": expected.detach()}, {})
            break
        with draws, torch.enable_grad():
            args, kwargs = pytree.tree_map(_detached_copy, own)
            actual = take_loss(parallel(*args, **kwargs))
            actual.backward()
        mean = _mean_over_ranks(actual, weight)
        comparison.add("loss", step, {"": mean}, {"": expected.detach()})
        comparison.add("gradient", step, _gradients(parallel), _gradients(plain))
        for optimizer in filter(None, optimizers):
            optimizer.step()
            optimizer.zero_grad()
        for kind in ("parameter", "buffer"):
            comparison.add(kind, step, _values(parallel, kind), _values(plain, kind))
    assert comparison is not None
    assert tolerance is not None
    worst = comparison.everywhere()
    return Verification(
        worst["loss"],
        worst.get("gradient", Deviation("gradient")),
        worst.get("parameter", Deviation("parameter")),
        worst.get("buffer"),
        tolerance,
        dtype,
        steps,
        _world_size(),
        comparison.first,
        tuple(plain_draws.names),
        (*notes, *comparison.notes, *known_differences(parallel)),
    )


def _run_plain(model: nn.Module, options: CompileOptions, args: Any, kwargs: Any) -> Any:
    loss_fn, dtype = options.loss_fn, options.autocast
    with torch.autocast(device_of(model).type, dtype, enabled=dtype is not None):
        if loss_fn is None:
            return model(*args, **kwargs)
        return loss_fn(model(*args[:-1], **kwargs), args[-1])


def _default_loss(result: Any) -> tuple[Tensor, bool]:
    """The loss in a model's result, else a substitute, and whether the result has a loss."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss, True
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise StrategyError(
            "the model returns nothing that can be trained. Give verify(loss=...), which takes "
            "the loss out of what it returns."
        )
    for leaf in leaves:
        if leaf.dim() == 0:
            return leaf, True
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum(), False


def _world_size() -> int:
    return dist.get_world_size() if is_multi_rank() else 1


def known_differences(parallel: DistributedModule) -> list[str]:
    """Documented reasons for both trainings to differ."""
    plan = parallel.plan
    if plan is None:
        alone = _world_size() == 1
        return [] if alone else ["the model trained without a plan, under torch's data parallelism"]
    found = [note for note in plan.notes if isinstance(note, NumericsNote)]
    return [*found, *(f"under the plan {line}" for line in compressed(plan))]


def _mean_over_ranks(loss: Tensor, weight: float) -> Tensor:
    """The mean of the ranks' losses, weighted by rows; a loss equal on all ranks stays the same."""
    own = loss.detach().double()
    return own.new_tensor(sum(gather_objects(own.item() * weight))) if is_multi_rank() else own


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = [(name, p) for name, p in model.named_parameters() if not is_remote(p)]
    return {name: full_value(p.grad).detach() for name, p in named if p.grad is not None}


def _values(model: nn.Module, kind: str) -> dict[str, Tensor]:
    named = model.named_parameters() if kind == "parameter" else model.named_buffers()
    return {name: full_value(value.detach()) for name, value in named if not is_remote(value)}


def _make_optimizer(make: Optimizer, model: nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer of the local parameters; None for a stage without any."""
    trained = [p for p in model.parameters() if p.requires_grad and not is_remote(p)]
    return make_optimizer(make, trained) if trained else None


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def least_precise(held: Iterable[torch.dtype], narrowest: torch.dtype | None) -> torch.dtype:
    """The least precise dtype that a plain model holds or casts to."""
    dtypes = {dtype for dtype in held if dtype.is_floating_point}
    dtypes |= {narrowest} if narrowest is not None else set()
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def full_value(tensor: Any) -> Tensor:
    """The whole of a tensor; ranks that share a DTensor call this at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _detached_copy(value: Any) -> Any:
    """A copy of an argument, so that steps do not change or differentiate the original."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
