"""`Steps`: the steps of a LightningModule as calls of a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule

from autopar._torch import pytree
from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, CaptureError, StrategyError
from autopar.integrations.lightning.module import MetricAt, MetricResult, Record, Step
from autopar.integrations.lightning.run import Run
from autopar.integrations.rows import whole_rows
from autopar.runtime.module import DistributedModule

MANY_FACTS = 8
"""Captures of a step for different facts after which a warning names them."""


class Steps:
    """Calls a step of a LightningModule through its compiled model, in the place of DDP's forward.

    A step is captured with its loss. Its logged values and the arguments of its metrics are further
    results, for all rows; `self.log` and the metrics run with them after the call.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, None]] = {}  # facts that a step reads
        self._seen: dict[str, set[tuple[Any, ...]]] = {}
        self._eager: set[str] = set()

    def __call__(
        self,
        compiled: DistributedModule,
        module: LightningModule,
        name: str,
        batch: Any,
        *numbers: int,
    ) -> Any:
        """Runs a step on the batch of all ranks; `numbers` are its batch_idx and dataloader_idx."""
        trainer = module.trainer
        is_first_check = trainer.sanity_checking and not compiled.is_planned
        if is_first_check or name in self._eager:  # the training step is what to plan for
            return _run_whole(compiled, getattr(module, name), batch, *numbers)
        run = Run(trainer, numbers[0] if numbers else 0)
        step = self._step(name, run, len(numbers) > 0)
        args = step, batch, *numbers[1:]
        try:
            with run.current():
                found = compiled(*args)
        except CaptureError as error:
            if name == "training_step":
                raise
            warn_once(
                AutoparWarning,
                f"{name} of {type(module).__name__} runs on gathered parameters, and each rank "
                f"computes all rows: {error}",
            )
            self._eager.add(name)
            return _run_whole(compiled, getattr(module, name), batch, *numbers)
        self._known.setdefault(name, {}).update(dict.fromkeys(run.read))
        result, records = whole_rows(compiled, args, {}, found)
        return _replay(module, result, records)

    def _step(self, name: str, run: Run, has_index: bool) -> Step:
        """The step with the current values of the facts that it is known to read."""
        known = self._known.get(name, {})
        facts = tuple((fact, run.value_of(fact)) for fact in known)
        seen = self._seen.setdefault(name, set())
        seen.add(facts)
        if len(seen) == MANY_FACTS:
            warn_once(
                AutoparWarning,
                f"{name} reads {', '.join(known)}, and is captured again for each value, which "
                "takes seconds. Read it in on_train_batch_start and keep it in a buffer.",
            )
        return Step(name, has_index, facts)


def _run_whole(compiled: DistributedModule, step: Callable[..., Any], *args: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad(), compiled.gathered():
        return step(*args)


def _replay(module: LightningModule, result: Any, records: list[Record]) -> Any:
    """Runs the metrics and logs of a step in their order; returns the result of the step."""
    metrics, results = dict(module.named_modules()), dict[int, Any]()

    def real(value: Any) -> Any:
        if isinstance(value, MetricAt):
            return metrics[value.name]
        return results[value.index] if isinstance(value, MetricResult) else value

    for index, (owner, method, args, kwargs) in enumerate(records):
        of: Any = module if owner is None else metrics[owner]
        args, kwargs = pytree.tree_map(real, (args, kwargs))
        results[index] = getattr(of, method)(*args, **kwargs)
    return pytree.tree_map(real, result)


def check_steps(module: LightningModule) -> None:
    """Checks that the training step of a module can be captured as a whole.

    Raises:
        StrategyError: it runs the backward or the optimizers itself.
    """
    if not module.automatic_optimization:
        raise StrategyError(
            f"{type(module).__name__} sets automatic_optimization = False, and a training step "
            "that runs the backward itself cannot be captured. Write the loop with Fabric and "
            "AutoparFabricStrategy, or let the Trainer optimize."
        )
