"""`TracedCall`: one call of a model as a function of parameters, buffers and tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar import _torch
from autopar._torch import pytree
from autopar.capture.call import Call, TensorSpec
from autopar.capture.provenance import Annotate
from autopar.capture.repeated_blocks import RepeatedBlocks
from autopar.capture.state.contents import Attribute
from autopar.capture.state.effects import CounterProxy, Effects
from autopar.capture.state.python_backward import BackwardReads, PythonBackward
from autopar.capture.state.side_effects import StatePolicy, rebound_buffers, writes_of
from autopar.capture.state.variables import VariableSearch
from autopar.capture.symbolic_sizes import SymbolicSizes
from autopar.capture.traceable import traceable_modules
from autopar.capture.values.argument_reads import AnswerReads, ReadArguments
from autopar.capture.values.compiler_branches import CompilerBranches
from autopar.capture.values.constant_values import ConstantValues
from autopar.capture.values.executed_code import ExecutedCode
from autopar.capture.values.known_values import KnownValues
from autopar.capture.values.norm_statistics import with_kernels_dtypes
from autopar.capture.values.parameter_reads import ParameterReads
from autopar.capture.values.raising_branches import RaisingBranches
from autopar.capture.values.replay import Step
from autopar.core.common.containers import Unreturned, flatten, hidden_tensors
from autopar.core.common.deadline import check_time
from autopar.core.ir.graph import ParameterInfo
from autopar.errors import CaptureError

UNUSED_SEED = 0x5EED_0F_A_7ACE
"""A seed that no forward takes, so that the same state afterwards means that none was set."""


class TimedFakeMode(_torch.FakeTensorMode):
    """A fake mode that ends a trace after the enforced deadline, in forward and backward.

    Attributes:
        random_state: state that forward must leave torch's generator in; empty outside of it.
    """

    random_state = b""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_time()
        # fork_rng restores the state, so a check at the end alone would miss a seed inside.
        if self.random_state and torch.Tag.nondeterministic_seeded in func.tags:
            self._check_random_state()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        return with_kernels_dtypes(func, args, results)

    @contextlib.contextmanager
    def refusing_seeds(self) -> Iterator[None]:
        """Checks inside that torch's generator is left alone; fake draws do.

        Raises:
            CaptureError: the generator has been seeded, at the next draw or the end.
        """
        with _plainly():
            before = torch.default_generator.get_state()
            torch.default_generator.manual_seed(UNUSED_SEED)
        self.random_state = _random_state()
        try:
            yield
            self._check_random_state()
        finally:
            self.random_state = b""
            with _plainly():
                torch.default_generator.set_state(before)

    def _check_random_state(self) -> None:
        if self.random_state != _random_state():
            raise CaptureError(
                "forward seeds torch's generator (torch.manual_seed, fork_rng, set_rng_state); a "
                "graph would draw from it as it is at each call. Seed it in the loop instead."
            )


def _random_state() -> bytes:
    """The state of torch's default generator."""
    with _plainly():
        return bytes(torch.default_generator.get_state().numpy())


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Runs functions of torch apart from the trace."""
    with _torch.without_modes(), _torch.without_torch_function():
        yield


class TracedCall(nn.Module):
    """A call on fake tensors; every run of `forward` records its outputs and Python effects.

    Attributes:
        infos: parameters by name, without lifted ones.
        buffer_names: names of buffers and lifted tensors.
        positions: indices of the tensors among the flattened arguments.
        known: static arguments, by index; forward reads their values.
        sizes: symbols for sizes of the arguments, None for plain numbers.
        branches: answers to `torch.compiler.is_compiling()` in forward.
        keep: whether runs leave their Python changes in the model.
        steps: how constants came about in the last run, and what Python read of them.
        values_of_arguments: tensor arguments whose values forward may read.
        reads_of_arguments: what it read of them in the last run.
        backward: the Python code of the backward, if the last run had one.
        linked: which outputs of the last run others were computed from, with gradients.
        effects, leaves, tensor_leaves, differentiable, structure, rebound: as in `Capture`, of the
            last run.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        parameters: Mapping[str, ParameterInfo],
        device: torch.device,
        all_tangents: bool,
        loss_fn: Callable[..., Any] | None,
        differentiate: bool,
        policy: StatePolicy,
        sizes: SymbolicSizes | None = None,
        *,
        branches: CompilerBranches,
    ) -> None:
        super().__init__()
        self.model = (model,)  # a tuple hides its parameters from this module
        self.loss_fn = (loss_fn,)
        # gradients inside of the graph end the shared blocks' inputs and outputs elsewhere
        sharing = () if call.derivatives or call.answers else parameters.values()
        blocks = dict.fromkeys(info.block for info in sharing if info.block)
        self.repeats = RepeatedBlocks(model, tuple(blocks))
        self.call, self.all_tangents = call, all_tangents
        self.branches = branches
        lifted = {a: ".".join(filter(None, a)) for a in sorted(policy.lifted)}
        self.lifted = tuple(lifted.values())
        self.infos = {n: info for n, info in parameters.items() if n not in self.lifted}
        self.names = tuple(self.infos)
        self.differentiate, self.policy, self.keep = differentiate, policy, False
        self.sizes, env = sizes, None if sizes is None else sizes.env
        self.fake_mode = TimedFakeMode(allow_non_fake_inputs=True, shape_env=env)
        state = dict(model.named_buffers())
        state |= {name: getattr(model.get_submodule(m), k) for (m, k), name in lifted.items()}
        self.buffer_names = tuple(state)
        self.positions = call.tensor_indices
        with self.fake_mode:
            self.values = nn.ParameterList(
                nn.Parameter(
                    TensorSpec(p.shape, p.dtype, device).fake(),
                    requires_grad=p.requires_grad and differentiate,
                )
                for p in self.infos.values()
            )
            for index, buffer in enumerate(state.values()):
                spec = TensorSpec(tuple(buffer.shape), buffer.dtype, device)
                self.register_buffer(f"b{index}", spec.fake())
            self.inputs = [self._fake_input(i, device) for i in self.positions]
        specs = {i: call.leaves[i] for i in self.positions}
        self.known = {i: spec.value() for i, spec in specs.items() if spec.values is not None}
        self.search = VariableSearch(model, loss_fn)
        self.backward = PythonBackward(model, self.search)
        self.effects = Effects(model)
        self.steps: list[Step] = []
        self.rebound: tuple[str, ...] = ()
        self.values_of_arguments: Sequence[torch.Tensor] | None = None
        self.reads_of_arguments: ReadArguments | None = None
        self.leaves: tuple[Any, ...] = ()
        self.tensor_leaves: tuple[bool, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.structure: Any = None
        self.linked: tuple[bool, ...] = ()

    def _fake_input(self, index: int, device: torch.device) -> torch.Tensor:
        spec = self.call.leaves[index]
        spec = replace(spec, device=device) if spec.device.type == "meta" else spec
        fake = spec.fake() if self.sizes is None else self.sizes.fake(index, spec)
        return fake if self.differentiate else fake.detach()

    def trace_all_blocks(self) -> None:
        self.repeats = RepeatedBlocks(self.model[0], ())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.call.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = self.known.get(position, tensor)
        tree = pytree.tree_unflatten(leaves, self.call.structure)
        (args, kwargs), *tangents = tree if self.call.derivatives else (tree,)
        (model,), (loss_fn,) = self.model, self.loss_fn
        known = dict(zip(self.names, self.values, strict=True))
        known |= {name: getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        first_names = _first_names(model) | {name: name for name in self.lifted}
        before = {name: known[first] for name, first in first_names.items()}
        state = dict(before)
        self.effects = Effects(
            model, self.search.watched, self.policy.counters, self.keep, tuple(known.values())
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fake_mode.refusing_seeds())
            self.steps = (constants := ConstantValues()).steps
            known_values = KnownValues(self.known.values())
            executed = ExecutedCode()
            parameters = ParameterReads(known, self.infos)
            raising = RaisingBranches()
            arguments: AnswerReads | ReadArguments = AnswerReads(self.call.answers)
            if self.values_of_arguments is not None:
                constants.add_arguments(tensors, self.values_of_arguments)
                arguments = self.reads_of_arguments = ReadArguments(constants)
            annotate = Annotate(
                model, known_values, constants, parameters, executed, raising, arguments
            )
            if self.call.derivatives:  # fused attention has one derivative
                annotate.is_dense = True
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(annotate)
            stack.enter_context(self.branches.answering())
            stack.enter_context(_torch.check_tensors_in_graph())
            stack.enter_context(_torch.skip_causal_mask_detection())
            stack.enter_context(traceable_modules())
            stack.enter_context(self.repeats.marking())
            stack.enter_context(self.effects.recording())
            stack.enter_context(executed.recording())
            stack.enter_context(self.backward.recorded())
            target = None
            if loss_fn is not None:
                *args, target = args
            result = torch.func.functional_call(
                model, state, tuple(args), kwargs, tie_weights=False
            )
            if loss_fn is not None:
                annotate.module = ""
                result = loss_fn(result, target)
            inputs = known | dict(zip(self.positions, tensors, strict=True))
            for derivative, gradients in zip(self.call.derivatives, tangents, strict=True):
                result = derivative.of(result, inputs, gradients)
        # saved_tensors_hooks calls no function of a tensor, so only the profile hook sees it.
        packs = saved_tensors_hooks.__enter__.__code__ in executed.globals
        self.backward.has_hooks = annotate.has_hooks or packs
        self.search.add_executed(executed.globals)
        self.rebound = rebound_buffers(type(model).__name__, before, state, self.names)
        given = (*known.values(), *tensors)
        outputs = raising.check_outputs(self._outputs_of(result, given))
        return (*outputs, *(state[name].detach() for name in self.rebound))

    def reads(self) -> tuple[Attribute, ...]:
        """Attributes that the graph depends on, for all blocks that share a trace."""
        read = (*self.effects.reads, *self.policy.lifted, *self.backward.reads.attributes)
        return tuple(each for each in self._of_all_blocks(read) if each not in self.policy.counters)

    def reads_of_backward(self) -> BackwardReads:
        """State that the Python code of the backward reads, for all blocks that share a trace."""
        reads = self.backward.reads
        return replace(reads, attributes=self._of_all_blocks(reads.attributes))

    def _of_all_blocks(self, attributes: Iterable[Attribute]) -> tuple[Attribute, ...]:
        names = {module: name for name, module in self.model[0].named_modules()}
        columns = [[names[m] for m in column] for column in self.repeats.columns()]
        keys: dict[str, dict[str, None]] = {}
        for name, key in attributes:
            keys.setdefault(name, {})[key] = None
        for column in columns:
            if every := {key: None for name in column for key in keys.get(name, ())}:
                keys |= dict.fromkeys(column, every)
        return tuple((name, key) for name, known in keys.items() for key in known)

    def _outputs_of(self, result: Any, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        results, _ = flatten(result)
        written = writes_of(self.effects)
        if written and not self.call.derivatives:  # the call itself has written them
            result = (result, list(written.values()))
        leaves, self.structure = flatten(result)
        leaves = [x.as_result() if type(x) is CounterProxy else x for x in leaves]
        name = type(self.model[0]).__name__
        leaves = [
            Unreturned(name, type(x).__qualname__) if hidden_tensors(x) else x for x in leaves
        ]
        self.tensor_leaves = tuple(isinstance(x, torch.Tensor) for x in leaves)
        self.leaves = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        self.differentiable = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        self.linked = _linked(leaves)
        outputs = [_copied_if_in(given, x) for x in leaves if isinstance(x, torch.Tensor)]
        has_loss = any(
            isinstance(x, torch.Tensor) and x.requires_grad and not x.dim() for x in results
        )
        if has_loss and not self.all_tangents and not self.call.derivatives:
            # Logits beside a loss would need a gradient of zeros, a full-size tensor in every step.
            outputs = [x if x.dim() == 0 else x.detach() for x in outputs]
        return tuple(_apart(outputs))


def _linked(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Outputs that another one was computed from, with gradients, and those returned twice."""
    nodes = [x.grad_fn if isinstance(x, torch.Tensor) else None for x in leaves]
    behind = set[Any]()
    for node in filter(None, nodes):
        waiting = [following for following, _ in node.next_functions]
        while waiting:
            following = waiting.pop()
            if following is not None and following not in behind:
                behind.add(following)
                waiting += [node for node, _ in following.next_functions]
    return tuple(n is not None and (n in behind or nodes.count(n) > 1) for n in nodes)


def _copied_if_in(given: Iterable[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """A copy of a trained output that is a given tensor or a view of one.

    AOTAutograd would make it anew outside of the graph, and leave out its gradient.
    """
    base = _base_of(output)
    is_given = any(x is base or x is output or x._base is base for x in given)
    return output.clone() if is_given and output.requires_grad else output


def _apart(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Outputs, with copies of trained ones that share memory with an earlier one, as `h, h[:, 0]`.

    AOTAutograd would make these anew, too, but for a tensor of its own that is returned twice.
    """
    earlier: list[torch.Tensor] = []
    for output in outputs:
        is_again = output._base is None and any(output is other for other in earlier)
        shares = any(_base_of(output) is _base_of(other) for other in earlier)
        earlier.append(output)
        yield output.clone() if shares and not is_again and output.requires_grad else output


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of the tensor at every parameter and buffer slot, by the slot's name."""
    slots: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                slots.setdefault((id(module), key), (name, tensor))
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in slots.values()}
