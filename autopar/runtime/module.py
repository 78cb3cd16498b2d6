"""`DistributedModule`: the model as a training script uses it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Self

import torch
from torch import distributed as dist
from torch import nn

from autopar.capture.call import BatchShard, UnevenRowsError
from autopar.core.common.containers import flatten
from autopar.core.common.notices import warn_once
from autopar.core.common.world import rank
from autopar.core.ir.placement import Shard, rows_of_parts
from autopar.errors import AutoparWarning, CaptureError, NumericsWarning, StrategyError
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.optimizer_steps import OptimizerSteps
from autopar.runtime.agreement.protocol import OtherSizesError, Told, call_entries
from autopar.runtime.agreement.ragged import warn_of_other_sizes
from autopar.runtime.agreement.replicas import Replicas, compare_replicas
from autopar.runtime.agreement.transforms import check_not_transformed
from autopar.runtime.agreement.turn import in_turn
from autopar.runtime.border.border import Border
from autopar.runtime.border.gradient_hooks import reads_gradients
from autopar.runtime.border.linked_results import with_links
from autopar.runtime.border.loop_checks import check_arguments, check_not_wrapped, check_prepared
from autopar.runtime.execution import CheckCall
from autopar.runtime.fallback import run_fallback
from autopar.runtime.parameters.distribute import is_remote
from autopar.runtime.parameters.remote import check_no_values_needed
from autopar.runtime.parameters.sharded_norm import total_norm
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.spmd.executor import SpmdExecutor
from autopar.runtime.states.module_states import StatefulModule
from autopar.runtime.watch.balance import why_not_balanced

_UNDIVIDED = "Each computes all of its rows instead: exact, but no faster than one of them."


class DistributedModule(StatefulModule):
    """A model that runs this rank's share of every call under a plan.

    It has the parameters, buffers, submodules, names and attributes of the plain model. Parameters
    that the plan shards are DTensors.

    Attributes:
        plan: the plan, None until the first call if there were no example inputs.
        mesh: mesh of the plan, None for one rank.
    """

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that the rows of a batch are split over."""
        return self._options.dp_size

    @property
    def data_parallel_rank(self) -> int:
        """Index among these ranks; ranks that share a model have the same one."""
        return self._options.dp_rank(rank())

    @property
    def row_shares(self) -> tuple[float, ...]:
        """Share of a batch's rows of each data-parallel rank; () for equal ones."""
        return self._options.row_shares

    def own_rows(self, rows: int) -> slice:
        """The rows of a global batch that results have on this rank, for targets in the loop.

        They are all rows, unless `outputs="own"`.
        """
        options = self._options
        if options.is_replicated or rows < options.dp_size or rows in options.undivided:
            return slice(0, rows)
        held = rows_of_parts(rows, self._options.dp_size, self.row_shares)
        index = self.data_parallel_rank
        return slice(sum(held[:index]), sum(held[: index + 1]))

    def rebalance(self) -> tuple[float, ...]:
        """Divides the rows of later batches by the speeds seen in the last training steps.

        All ranks call this at once, between two steps. Parameters stay where they are.

        Returns:
            The share of each data-parallel rank.

        Raises:
            StrategyError: the plan has no rows to divide, or no step was seen.
        """
        if self.plan is None:
            raise StrategyError("rebalance() needs a plan, and steps under it: train first")
        if (reason := why_not_balanced(self.plan)) is not None:
            raise reason
        per_row = gather_objects(self._execution.watch.seconds_per_row, "divides rows anew")
        if not all(each > 0.0 for each in per_row):
            raise StrategyError("rebalance() needs training steps to judge speeds by: train first")
        self.divide_rows(tuple(round(min(per_row) / each, 3) for each in per_row))
        return self.row_shares

    def divide_rows(self, shares: tuple[float, ...]) -> None:
        """Divides the rows of later batches in these shares, the same on every rank."""
        assert self.plan is not None
        self._context.plan = replace(self.plan, row_shares=shares)
        self._context.options = replace(self._options, row_shares=shares)
        self._execution.watch.restart()

    @property
    def ranks_of_rows(self) -> list[int]:
        """The first rank with each slice of the rows of a batch."""
        slices = [self._options.dp_rank(r) for r in range(self._options.ranks)]
        return [slices.index(part) for part in range(self._options.dp_size)]

    @property
    def rows_of_results(self) -> tuple[Shard | None, ...] | None:
        """The shard of each tensor or value of the latest result; None under a fallback."""
        captured = self._context.last_capture
        return None if captured is None else captured.rows_of_outputs

    def group_arguments(self, leaves: list[Any], structure: Any) -> tuple[list[Any], Any]:
        """The flattened arguments of a call that the ranks of the plan share."""
        return leaves, structure

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients of calls inside unreduced; the next call outside adds and reduces them.

        `zero_grad` discards them. Where all ranks read one, or step by it, all are reduced; under
        pipelines, cp, ep and compression that raises StrategyError.
        """
        execution = self._execution
        before, execution.holds_gradients = execution.holds_gradients, self._options.dp_size > 1
        try:
            yield
        finally:
            execution.holds_gradients = before

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True, so that accelerate does not wrap the model in DDP."""
        check_prepared(self._options)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Accepts what accelerate sets."""

    @property
    def rng_state(self) -> torch.Tensor:
        """State of this rank's random stream (dropout), to save and restore with checkpoints."""
        return self._context.rng.get_state()

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        self._context.rng.set_state(state)

    def train(self, mode: bool = True) -> Self:
        """Sets training mode as the plain model does."""
        self._wrapped[0].train(mode)
        self.training = self._wrapped[0].training
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes or unfreezes the whole model, on all stages."""
        self._wrapped[0].requires_grad_(requires_grad)
        return self

    def metrics(self) -> dict[str, float]:
        """Figures of the last training steps on this rank, to log; reads no other rank.

        A step lasts from one training call to the next. Times and rates are medians of the last
        32 steps. A figure that is unknown is left out: docs/metrics.md lists them all.
        """
        predicted = None if self.plan is None else self.plan.prediction
        ranks, device = self._options.ranks, self._context.device
        return self._execution.watch.metrics(predicted, device, ranks, sees_waits=self._sees_waits)

    @property
    def _sees_waits(self) -> bool:
        """Whether the log has all waits for other ranks."""
        on_host = self._context.device.type == "cpu" and self._options.backend == "eager"
        return on_host and self._execution.fallback is None

    @in_turn
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on this rank's rows; scalar results are means over the global batch."""
        if torch.is_inference_mode_enabled():  # DTensors do not support inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        check_not_transformed()
        self.check_not_gathered()
        execution = self._execution
        execution.watch.begin(trains=torch.is_grad_enabled())
        if not execution.was_called and self._options.ranks > 1:
            check_not_wrapped()
            execution.was_called = True
        leaves, structure = flatten((args, kwargs))
        check_arguments(leaves)
        if self.plan is not None:
            self.materialize_parameters()
        if execution.fallback is None:
            self._context.index_model()
        check = execution.check_first_call if torch.is_grad_enabled() else None
        if check is not None:
            execution.check_first_call = None  # copies made by planning skip the check
        self._compare_rowless(leaves, structure)
        may_differ = self._options.batch == "local" and not self._options.ragged
        stream = self._context.rng.state if may_differ else None
        try:
            number, result = self._call(leaves, structure, check)
        except OtherSizesError:  # on all ranks, before any has communicated
            self._compute_apart(stream)
            number, result = self._call(leaves, structure, check)
        captured = None if execution.fallback is not None else self._context.last_capture
        if torch.is_grad_enabled() and execution.fallback is None:
            execution.retracing.called(self._context)
        if execution.protocol is not None:
            execution.protocol.agree_on_backward(
                result,
                number,
                compares_scale=self._options.batch == "global",
                compares_rows=self._options.is_replicated,
                finishes=self._programs_finish_exchanges,
            )
            execution.protocol.optimizer_steps.restart(self._context.index.parameters.values())
        return with_links(result, captured)

    def _call(self, leaves: list[Any], structure: Any, check: CheckCall | None) -> tuple[int, Any]:
        """Agrees on a call, plans before the first one, and runs it; its number and result."""
        number = self._agree_on_call(leaves, structure)
        if check is not None or not self._programs_finish_exchanges:
            finish_exchange()
        if not self.is_planned:
            self.plan_for(leaves, structure)
            self.materialize_parameters()
        if check is not None:
            check(self, leaves, structure)
        return number, self._run(leaves, structure, number)

    def _compute_apart(self, stream: torch.Tensor | None) -> None:
        """Lets each rank compute on its own tensors, which have other sizes on other ranks.

        The call begins anew, with the random numbers that `stream` has.
        """
        warn_of_other_sizes(type(self._wrapped[0]).__name__, is_apart=self._options.local)
        self._context.rng.state = stream
        self._context.options = replace(self._options, local=True, ragged=True)

    @property
    def _programs_finish_exchanges(self) -> bool:
        """Whether programs finish exchanges themselves, just before they communicate."""
        is_spmd = isinstance(self._execution.executor, SpmdExecutor)
        return is_spmd and self._options.backend == "eager"

    def _run(self, leaves: list[Any], structure: Any, number: int) -> Any:
        shard = self._batch_shard(leaves, structure)
        try:
            return self._run_rows(shard, leaves, structure, number)
        except UnevenRowsError as reason:  # before anything was computed
            warn_once(AutoparWarning, f"{reason} {_UNDIVIDED}")
            undivided = self._options.undivided | {shard.slices.rows}
        self._context.options = replace(self._context.options, undivided=undivided)
        shard = self._batch_shard(leaves, structure)
        return self._run_rows(shard, leaves, structure, number)

    def _run_rows(self, shard: BatchShard, leaves: list[Any], structure: Any, number: int) -> Any:
        self._execution.watch.take(shard)
        if self._execution.protocol is not None:
            self._context.announce = partial(self._execution.protocol.agree_on_rows, number)
        if self._options.dp_size == 1:
            return self._run_shard(shard, leaves, structure)
        border = self._border(shard)
        result = self._run_shard(border.enter(leaves), leaves, structure)
        return border.leave(result, self.rows_of_results)

    def _border(self, shard: BatchShard) -> Border:
        return Border(
            shard,
            self._options.is_replicated,
            tuple(self.ranks_of_rows),
            averages=self._execution.fallback is not None,
            announce=self._context.announce,
        )

    def _run_shard(self, shard: BatchShard, leaves: list[Any], structure: Any) -> Any:
        execution = self._execution
        holds, executor = execution.holds_gradients, execution.executor
        if execution.fallback is not None:
            autocast = self._context.autocast()
            return run_fallback(execution.fallback, shard, self._options, autocast, holds=holds)
        assert executor is not None
        if execution.protocol is not None:
            self._context.train_remote(execution.protocol.trained_elsewhere)
        parameters = self._context.index.local.values()
        holds_back = holds and not reads_gradients(parameters)
        try:
            return executor.run(shard, holds_back)
        except CaptureError as error:
            values = execution.argument_values
            if not values.explain(error, self._context, leaves, structure):
                self._check_runs(leaves, structure, error)
                raise
        answered = values.answer(shard, self._context, leaves, structure)
        return self._run_shard(answered, leaves, structure)

    def _compare_rowless(self, leaves: list[Any], structure: Any) -> None:
        """Compares arguments without rows, which under batch="local" each rank brings itself.

        Where they differ there is no batch of all ranks that one device could train on: from then
        on ranks compute on their own rows alone, as under DistributedDataParallel.
        """
        options, protocol = self._options, self._execution.protocol
        is_alone = options.local or options.dp_size == 1
        if options.batch != "local" or is_alone or self._execution.fallback is not None:
            return
        with protocol.reporting_errors() if protocol else contextlib.nullcontext():
            dims = self._batch_shard(leaves, structure).call.row_dims
        pairs = enumerate(zip(leaves, dims, strict=True))
        rowless = {i: x for i, (x, dim) in pairs if dim is None and isinstance(x, torch.Tensor)}
        if not rowless or protocol is None:
            return
        equal = protocol.have_equal([*rowless.values()])
        different = [i for i, same in zip(rowless, equal, strict=True) if not same]
        if different:
            shape = tuple(leaves[different[0]].shape)
            warn_once(
                NumericsWarning,
                f"argument {different[0]} of {type(self._wrapped[0]).__name__}, of shape {shape}, "
                "has no rows and other values on other ranks: from now on each rank computes what "
                "it would of its own arguments alone, and gradients are averaged, as under "
                "DistributedDataParallel. If it has rows, say so by autopar.compile(rows=).",
            )
            self._context.options = replace(options, local=True)

    def _agree_on_call(self, leaves: list[Any], structure: Any) -> int:
        execution, protocol = self._execution, self._execution.protocol
        if protocol is None:
            execution.retracing.check(self._context)
            return 0
        with protocol.reporting_errors():
            check_no_values_needed(leaves)
            shard = self._batch_shard(leaves, structure)
            self._check_steps_apart(protocol.optimizer_steps)
            execution.retracing.check(self._context)
        entries = call_entries(
            self._context,
            leaves,
            structure,
            shard,
            protocol,
            no_sync=execution.holds_gradients,
            has_fallback=execution.fallback is not None,
        )
        trained = self._context.trained_here if self._options.pp_size > 1 else {}
        pace = execution.watch.pace(self._context.stage) if self._sees_waits else None
        return protocol.agree_on_call(entries, self._replicas, Told(trained, pace))

    def _check_steps_apart(self, steps: OptimizerSteps) -> None:
        """Raises StrategyError if an optimizer steps parameters together that stages divide."""
        coupling, steps.coupling = steps.coupling, ""
        if coupling and self._options.pp_size > 1:
            raise StrategyError(
                f"{coupling} steps all its parameters together, but under pipeline stages each "
                "rank has those of its stage alone: the last step was not that of one device. "
                "Make it by model.whole_optimizer(), or leave pipelines out."
            )

    @property
    def _replicas(self) -> Replicas:
        """Parameters and buffers; DDP broadcasts buffers itself at each call."""
        index = self._context.index
        return Replicas(index.local, index.buffers() if self._execution.fallback is None else {})

    def check_replicas(
        self, optimizer: torch.optim.Optimizer | None = None, *, tolerance: float = 0.0
    ) -> None:
        """Checks that all ranks have equal copies of replicated tensors.

        Compares every parameter and buffer, or shards that several ranks have, and how often
        sharded parameters were changed. All ranks call this at once. Each training call compares
        a few elements by itself.

        Args:
            optimizer: optimizer whose state and hyperparameters are compared too.
            tolerance: largest absolute difference that passes; 0 for equal bits.

        Raises:
            DisagreementError: on every rank, with the names and ranks of differing copies.
        """
        self.materialize_parameters()
        if self._execution.protocol is not None:
            stage = self._context.stage
            self._execution.protocol.agree_on_writes(self._context.index.local.values(), stage)
            compare_replicas(self._replicas, optimizer, stage, tolerance)

    # Parameters.

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the whole model.

        All ranks call this at once.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite`.
        """
        if self._execution.protocol is not None:
            self._execution.protocol.agree_on_clipping(max_norm, norm_type)
        order = float(norm_type)
        own = [p for p in self.parameters() if not is_remote(p)]
        gradients = [p.grad for p in own if p.grad is not None]
        has_stages = self.plan is not None and self.plan.pp_size > 1
        if gradients or not has_stages:
            norm = total_norm(gradients, order, foreach)
        else:
            norm = torch.tensor(0.0 if order >= 0 else math.inf, device=self._context.device)
        if has_stages:
            norm = self._norm_over_stages(norm, order)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {order} of all gradients is {norm.item()}, so they cannot be "
                "clipped. With error_if_nonfinite=False they are scaled by it anyway."
            )
        nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=foreach)
        return norm

    def _norm_over_stages(self, norm: torch.Tensor, order: float) -> torch.Tensor:
        """The norm of all stages' norms, in the widest dtype of a parameter."""
        assert self.mesh is not None
        group = self.mesh.get_group("pp")
        dtypes = (info.dtype for info in self._context.parameters.values())
        norm = norm.to(reduce(torch.promote_types, dtypes))
        gathered = [torch.empty_like(norm) for _ in range(group.size())]
        with explaining_comm_errors("clip_grad_norm_"):
            dist.all_gather(gathered, norm, group=group)
        norms = torch.stack(gathered)
        return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)
