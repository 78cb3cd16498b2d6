"""`verify`: some training steps under a plan beside those of the plain model on one process."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.api import compile
from autopar.arguments import PRECISIONS, check
from autopar.capture.batch_shards import batch_shard_of
from autopar.capture.model_info import describe_parameters, device_of
from autopar.capture.offline import flattened
from autopar.common.notices import NumericsNote, warn_once
from autopar.cost_model.memory.optimizer_memory import Optimizer, make_optimizer
from autopar.errors import FallbackWarning, StrategyError, VerificationError
from autopar.plan.spec import fingerprint
from autopar.report.plan import Plan
from autopar.report.table import compressed
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import broadcast_from_rank0, materialize
from autopar.runtime.process_groups import ensure_process_group, rank
from autopar.verification.deviation import TOLERANCES, Comparison, Deviation, Verification
from autopar.verification.draws import ConstantDraws

TakeLoss = Callable[[Any], Tensor]


def verify(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_inputs: Any,
    loss: TakeLoss | None = None,
    optimizer: Optimizer | None = None,
    steps: int = 3,
    double: bool = True,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """Trains a plan, or what `compile` chooses, and the plain model for some steps; compares both.

    Compared in every step are the loss, every gradient, and every parameter and buffer behind the
    optimizer's step. Rank 0 prints the verdict. Every rank calls this at once, each with the
    arguments that it would call the compiled model with. The model, its buffers, the optimizer and
    the states of random numbers stay as they are. While both train, random operators yield
    constants (`Verification.draws` names them).

    Args:
        model: the model; both sides are copies, with the parameters and buffers of rank 0.
        plan: a plan for the ranks that are running; None to let `compile` choose.
        example_inputs: a tuple of arguments or a dict of keyword arguments; under batch="global"
            the same on every rank, under batch="local" the rank's own rows.
        loss: takes the loss out of what the model returns. By default that is the result, its
            `loss`, or its first scalar; without a scalar the mean square of what is returned.
        optimizer: class, factory, or an optimizer whose class and options are used; by default
            SGD with momentum 0.9 and a learning rate of 1e-2.
        steps: number of steps, all on the same batch.
        double: train in float64, where both sides differ by the order of summation alone.
        tolerance: relative difference up to which tensors count as the same; by default 1e-9 in
            float64, 1e-5 in float32, 1e-2 in float16 and 5e-2 in bfloat16, by the least precise
            dtype that the plain model computes in.
        options: of `compile`.

    Raises:
        StrategyError: `steps` is not positive, `example_inputs` have no values, the model returns
            nothing to train, or it draws random numbers in code compiled by a backend.
    """
    if not isinstance(example_inputs, _Call):
        named = {"model": model, "plan": plan, "example_inputs": example_inputs, "loss": loss}
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            named["optimizer"] = optimizer
        check("example_inputs", **named, steps=steps, double=double, **options)
    with _same_random_state():
        ensure_process_group(options.get("world_size"), options.get("timeout_s", 300.0))
        plain = copy.deepcopy(model)
        materialize(plain, device_of(plain))
        if is_multi_rank():
            broadcast_from_rank0(plain)
        given = isinstance(example_inputs, _Call)
        leaves, structure = example_inputs if given else flattened(example_inputs)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            raise StrategyError("example_inputs are on the meta device: verify needs their values")
        if double:
            plain, leaves = plain.double(), [_double(leaf) for leaf in leaves]
            plan = None if plan is None else _in_double(plan, plain)
        if optimizer is not None:
            made = isinstance(optimizer, torch.optim.Optimizer)
            options = {"optimizer": type(optimizer) if made else optimizer, **options}
        if plan is None:
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            options["example_inputs"] = kwargs if kwargs else args
        parallel = compile(copy.deepcopy(plain), plan=plan, **options)
        batch = _Batch.of(leaves, structure, options.get("batch", "global"), parallel)
        training = _Training(loss, optimizer or _sgd, options)
        result = _compared(plain, parallel, batch, training, steps, tolerance)
    if rank() == 0:
        print(result, flush=True)
    return result


def verify_first_call(module: DistributedModule, leaves: Sequence[Any], structure: Any) -> None:
    """Verifies a compiled module's plan on the batch of a call, before that trains.

    Args:
        module: the module; stays as it is.
        leaves: the flattened arguments of the call.
        structure: that of the arguments.

    Raises:
        VerificationError: on every rank, if the plan trains to other numbers.
    """
    if module.plan is None:
        message = "verify=True does not compare what trains without a plan"
        warn_once(FallbackWarning, f"{message}: autopar.verify(model, ...) does")
        return
    options = module._options
    result = verify(
        plain_copy(module),
        module.plan,
        example_inputs=_Call(list(leaves), structure),
        loss_fn=options.loss_fn,
        batch=options.batch,
        precision=options.precision,
        backend=options.backend,
    )
    if not result.passed:
        raise VerificationError(
            f"this plan does not train as the plain model does.\n{result}\nTrain under another "
            "strategy, and please report the model."
        )


def plain_copy(module: DistributedModule) -> nn.Module:
    """The plain model with the module's values, on every rank; all ranks call this at once."""
    assert module.plan is not None
    (model,) = module._wrapped
    fetched = module.state_dict() if module.plan.pp_size > 1 else {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        value = _whole(fetched.get(name, parameter)).detach().clone()
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


class _Call(NamedTuple):
    """The flattened arguments of a call that is made anyway."""

    leaves: list[Any]
    structure: Any


@dataclass(frozen=True)
class _Batch:
    """Arguments of both sides.

    Attributes:
        own: arguments and keyword arguments of this rank's call.
        whole: those of the plain model's, with the rows of all ranks.
        weight: this rank's share of all rows, over the number of ranks with the same rows.
    """

    own: tuple[Any, Any]
    whole: tuple[Any, Any]
    weight: float

    @staticmethod
    def of(leaves: list[Any], structure: Any, mode: str, parallel: DistributedModule) -> _Batch:
        ranks, place = parallel.data_parallel_size, parallel.data_parallel_rank
        share = batch_shard_of(leaves, structure, mode=mode, rank=place, ranks=ranks)
        own = pytree.tree_unflatten(leaves, structure)
        twins = _world_size() / ranks
        whole = own
        if mode == "local" and ranks > 1:
            parts = dict(gather_objects((place, leaves)))
            ordered = [parts[index] for index in range(ranks)]
            joined = [
                torch.cat(column) if has_rows else column[0]
                for has_rows, column in zip(
                    share.call.has_batch_dim, zip(*ordered, strict=True), strict=True
                )
            ]
            whole = pytree.tree_unflatten(joined, structure)
        return _Batch(own, whole, share.rows / share.global_rows / twins)


@dataclass(frozen=True)
class _Training:
    """How both sides train.

    Attributes:
        take: takes the loss out of a result; None for `_found_loss`.
        optimizer: makes the optimizer.
        options: of `compile`.
    """

    take: TakeLoss | None
    optimizer: Optimizer
    options: Mapping[str, Any]

    @property
    def precision(self) -> torch.dtype | None:
        """Dtype of autocast."""
        given = self.options.get("precision")
        return PRECISIONS[given] if isinstance(given, str) else given

    def plain_result(self, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> Any:
        """What the plain model returns, or the loss function given to `compile`."""
        loss_fn = self.options.get("loss_fn")
        with torch.autocast(device.type, self.precision, enabled=self.precision is not None):
            if loss_fn is None:
                return model(*args, **kwargs)
            return loss_fn(model(*args[:-1], **kwargs), args[-1])

    def loss_of(self, result: Any) -> Tensor:
        """The loss that is differentiated."""
        return _found_loss(result)[0] if self.take is None else self.take(result)


def _compared(
    plain: nn.Module,
    parallel: DistributedModule,
    batch: _Batch,
    training: _Training,
    steps: int,
    tolerance: float | None,
) -> Verification:
    """Trains both sides step by step."""
    plain_draws, draws, device = ConstantDraws(), ConstantDraws(), device_of(plain)
    tuned, notes = [_optimizer(training.optimizer, m) for m in (plain, parallel)], list[str]()
    comparison: Comparison | None = None
    dtype = torch.float64
    for step in range(1, steps + 1):
        with plain_draws, torch.enable_grad():
            args, kwargs = pytree.tree_map(_apart, batch.whole)
            result = training.plain_result(plain, args, kwargs, device)
            want = training.loss_of(result)
            want.backward()
        _check_draws(plain_draws, training.options.get("backend", "eager"))
        if comparison is None:
            dtype = _least_precise(plain, plain_draws.narrowest)
            tolerance = TOLERANCES.get(dtype, 1e-5) if tolerance is None else tolerance
            comparison = Comparison(tolerance, torch.finfo(dtype).eps)
            notes += _stand_in(result, training)
        if not math.isfinite(want.item()):
            notes.append(f"the plain model's loss is {want.item()} in step {step}")
            comparison.add("loss", step, {"": want.detach()}, {})
            break
        with draws, torch.enable_grad():
            args, kwargs = pytree.tree_map(_apart, batch.own)
            have = training.loss_of(parallel(*args, **kwargs))
            have.backward()
        comparison.add("loss", step, {"": _mean(have, batch.weight)}, {"": want.detach()})
        comparison.add("gradient", step, _gradients(parallel), _gradients(plain))
        for optimizer in tuned:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        for kind, name in (("parameter", "named_parameters"), ("buffer", "named_buffers")):
            comparison.add(kind, step, *(_values(m, name) for m in (parallel, plain)))
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
        (*notes, *_known_differences(parallel)),
    )


def _known_differences(parallel: DistributedModule) -> list[str]:
    """Reasons to differ that were told before."""
    plan = parallel.plan
    if plan is None:
        alone = _world_size() == 1
        return [] if alone else ["the model trained without a plan, under torch's data parallelism"]
    found = [note for note in plan.notes if isinstance(note, NumericsNote)]
    return [*found, *(f"under the plan {line}" for line in compressed(plan))]


def _found_loss(result: Any) -> tuple[Tensor, bool]:
    """The loss in what a model returns, and whether it is one."""
    inside = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(inside, Tensor):
        return inside, True
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


def _stand_in(result: Any, training: _Training) -> list[str]:
    if training.take is not None or _found_loss(result)[1]:
        return []
    return ["the mean square of what the model returns stood in for a loss"]


def _check_draws(draws: ConstantDraws, backend: str) -> None:
    """Random numbers inside of compiled code cannot be held still."""
    if draws.names and backend != "eager":
        raise StrategyError(
            f"the model draws random numbers ({', '.join(draws.names)}), which verify cannot hold "
            f"still in code compiled by {backend!r}. Verify with backend='eager', or model.eval()."
        )


def _mean(loss: Tensor, weight: float) -> Tensor:
    """The mean of the ranks' losses by their rows; a loss that all ranks share stays the same."""
    own = loss.detach().double()
    if not is_multi_rank():
        return own
    return own.new_tensor(sum(gather_objects(own.item() * weight)))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n: _whole(p.grad).detach() for n, p in named if p.grad is not None}


def _values(model: nn.Module, names: str) -> dict[str, Tensor]:
    return {name: _whole(value.detach()) for name, value in getattr(model, names)()}


def _optimizer(make: Optimizer, model: nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer of what a rank holds; of a stage that may be nothing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return make_optimizer(make, trained) if trained else None


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _least_precise(model: nn.Module, narrowest: torch.dtype | None) -> torch.dtype:
    """The dtype that the plain model computes in, or casts to on the way."""
    found = {t.dtype for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()}
    found |= {narrowest} if narrowest is not None else set()
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _in_double(plan: Plan, model: nn.Module) -> Plan:
    """A plan of the same model in float64: sizes of buckets stay what they were."""
    parameters = describe_parameters(model)
    sizes = tuple((name, p.bytes) for name, p in parameters.items())
    return replace(plan, fingerprint=fingerprint(parameters.values()), parameter_bytes=sizes)


def _world_size() -> int:
    return dist.get_world_size() if is_multi_rank() else 1


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _apart(value: Any) -> Any:
    """An argument of which nobody else sees changes or gradients."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _double(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Puts the states of all random numbers back."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    state = random.getstate()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
