"""Makes every reduction over the batch run over the global batch, and types the graph by that."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from autopar.graph import (
    Buffer,
    Evidence,
    Gradient,
    Input,
    Output,
    Parameter,
    RowWeight,
    Tangent,
    TrainingGraph,
    Update,
    Verdict,
    elements,
    has_rows,
    tensors,
    user_line,
)
from autopar.notices import Difference
from autopar.passes.base import PassResult
from autopar.passes.build import add_input, aten, call, fake_like, is_random
from autopar.passes.collectives import collective, start_all_reduce
from autopar.passes.statistics_rules import (
    JOINTLY_LINEAR,
    RULES,
    SHAPE_ONLY,
    is_training_norm,
    mixes_rows,
    synchronize_batch_norm,
)
from autopar.placement import Partial, Placement, Replicate, Varying

R, V, P = Replicate(), Varying(), Partial()


@dataclass(frozen=True)
class SynchronizeStatistics:
    """Reduces over the global batch whatever the model reduces over its rows.

    Before: the graph as captured at one rank's rows, with `meta["rows"]`. After: every node has
    `meta["placement"]`; means, sums and losses over the batch are those of the global batch,
    their gradients weighted accordingly; gradients of parameters are Partial, and returned
    scalars are Replicate. Batch norm takes its statistics over the global batch unless
    `batch_statistics` is "local"; then running statistics are averaged. A reduction without a
    rule stays a rank's own, is averaged where it is returned (DDP's semantics), and is noted.
    Tier: exact.

    Attributes:
        axis: the mesh axis over which ranks hold different rows.
        batch_statistics: "global", or "local" as DDP has it.
        agree: whether the ranks add up evidence that they were given what they must be.
    """

    axis: str
    batch_statistics: Literal["global", "local"] = "global"
    agree: bool = True
    tier: ClassVar[Literal["exact", "lossy"]] = "exact"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        work = Typing(graph.copy(), self.axis, self.batch_statistics)
        work.run()
        if self.agree:
            work.agree()
        return PassResult(work.finished())


class Typing:
    """One walk over the graph in execution order, which types it and writes collectives."""

    def __init__(self, graph: TrainingGraph, axis: str, batch_statistics: str) -> None:
        self.graph, self.axis, self.batch_statistics = graph, axis, batch_statistics
        self.fx = graph.graph
        self.notes: list[str] = []
        self.graph, self.weight = add_input(
            self.graph, RowWeight(), "row_weight", fake_like(graph, (), torch.float64)
        )
        self.type(self.weight, V)
        self.from_tangents: set[fx.Node] = set()
        self.owners: dict[int, fx.Node] = {}  # by autograd's number, the operator that bears it
        for node in self.graph.calls():
            self.owners.setdefault(node.meta["seq_nr"], node)
        self.local: set[fx.Node] = set()  # reductions that stay a rank's own
        self.whole: set[int] = set()  # numbers of operators that count the global batch
        self.weighed_entries: set[fx.Node] = set()  # backwards that divide by a rank's own rows

    def run(self) -> None:
        """Types the forward, then what it returns, then the backward."""
        self.type_inputs()
        self.walk("forward")
        self.returned()
        self.walk("backward")
        self.gradients()

    def finished(self) -> TrainingGraph:
        """The graph, with what was noted on the way."""
        return replace(self.graph, notes=(*self.graph.notes, *dict.fromkeys(self.notes)))

    def walk(self, phase: str) -> None:
        """Types the nodes of a phase, but those that rules have written."""
        for node in self.fx.nodes:
            runs = node.op in ("call_function", "get_attr") and node.meta["phase"] == phase
            if runs and "placement" not in node.meta:
                self.visit(node)

    def type_inputs(self) -> None:
        returned = dict(zip(self.graph.outputs, self.graph.results, strict=True))
        for role, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            if isinstance(role, Input):
                self.type(node, V if has_rows(node) else R)
            elif isinstance(role, Tangent):
                self.from_tangents.add(node)
                source = returned[Output(role.index)]
                self.type(node, V if source is not None and has_rows(source) else R)
            elif isinstance(role, (Parameter, Buffer)):
                self.type(node, R)
            elif isinstance(role, Evidence):
                self.type(node, V)
        for role, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            if isinstance(role, Tangent) and node.meta["placement"] == V:
                self.weigh_uses(node, V)

    def visit(self, node: fx.Node) -> None:
        self.count_whole_batch(node)
        types = {n: n.meta["placement"] for n in node.all_input_nodes}
        if any(n in self.from_tangents for n in types):
            return self.visit_cotangent(node, types)
        if self.is_of_local(node):
            return self.type(node, V)
        if mixes := mixes_rows(node):
            self.note(node, mixes)
        if all(t == R for t in types.values()) and not (has_rows(node) or is_random(node)):
            return self.type(node, R)
        if node.target in SHAPE_ONLY and not has_rows(node):
            return self.type(node, R)
        if node.target is operator.getitem:
            return self.type(node, self.element_type(node))
        if is_training_norm(node):
            return self.visit_norm(node)
        if has_rows(node) and not self.loses_rows(node):
            return self.type(node, V)
        rule = RULES.get(node.target)
        reduces = any(has_rows(n) for n in types)
        even = not any(n.meta.get("uneven") for n in types)
        if reduces and even and rule is not None and rule(self, node):
            return None
        if reduces:
            self.local.add(node)
            if not all("_assert_async" in str(user.target) for user in node.users):
                self.note(node, "reduces over the batch and has no rule")
        return self.type(node, V)

    def count_whole_batch(self, node: fx.Node) -> None:
        """Numbers in the code that count rows count those of the global batch."""
        if not (whole := node.meta.get("whole")):
            return
        one_dim = all(len(rows) < 2 for rows in node.meta["rows"])
        if node.meta["phase"] == "backward":
            counted = node.meta["seq_nr"] in self.whole and not self.is_of_local(node)
            applies = counted and one_dim
        elif has_rows(node):
            applies = one_dim and tensors(node)[0].is_floating_point()
        else:
            applies = all(n.meta["placement"] == R for n in node.all_input_nodes)
            applies = applies or node.target in SHAPE_ONLY
        if not applies:
            if node.meta["phase"] == "backward" and one_dim and not self.is_of_local(node):
                text = f"{node.target} counts a rank's own rows ({user_line(node)})"
                self.notes.append(Difference(text))
            return
        self.whole.add(node.meta["seq_nr"])
        if node.op == "get_attr":
            constants = {**self.graph.constants, str(node.target): whole[""]}
            self.graph = replace(self.graph, constants=constants)
            return
        node.args = tuple(whole.get(i, x) for i, x in enumerate(node.args))
        node.kwargs = {k: whole.get(k, x) for k, x in node.kwargs.items()}

    def is_of_local(self, node: fx.Node) -> bool:
        """Whether a node belongs to the backward of a reduction that stays a rank's own."""
        late = node.meta["phase"] == "backward"
        return late and self.owners.get(node.meta["seq_nr"]) in self.local

    def loses_rows(self, node: fx.Node) -> bool:
        """Whether some floating-point result of `node` does not run over rows."""
        rows = node.meta["rows"]
        return len(rows) > 1 and not rows[0]

    def element_type(self, node: fx.Node) -> Placement:
        types = node.args[0].meta.get("placements")  # type: ignore[union-attr]
        return types[node.args[1]] if types else node.args[0].meta["placement"]  # type: ignore

    def visit_norm(self, node: fx.Node) -> None:
        over_rows = 0 in node.args[0].meta["rows"][0]  # type: ignore[union-attr]
        if over_rows and self.batch_statistics == "global":
            return synchronize_batch_norm(self, node)
        node.meta["placements"] = (V,) * len(elements(node))
        self.type(node, V)

    def visit_cotangent(self, node: fx.Node, types: dict[fx.Node, Placement]) -> None:
        """A node of the backward: linear in what came from the tangents."""
        self.from_tangents.add(node)
        if node.target is operator.getitem:
            parent = node.args[0]
            rows = parent.meta["rows"][node.args[1]]  # type: ignore[union-attr]
            parent_type = parent.meta["placement"]  # type: ignore[union-attr]
            return self.type(node, R if parent_type == R else V if rows else P)
        if has_rows(node):
            self.enter(node, types)
            return self.type(node, V)
        if all(t == R for t in types.values()):
            return self.type(node, R)
        if node.target in JOINTLY_LINEAR:
            for operand, placement in types.items():
                if placement == R:
                    self.fx.inserting_before(node)
                    node.replace_input_with(operand, self.weighed(operand, node))
        self.type(node, P)

    def enter(self, node: fx.Node, types: dict[fx.Node, Placement]) -> None:
        """Gradients of values without rows enter what has rows: whole, unless these are local."""
        for operand, placement in types.items():
            if placement == P and not self.is_of_local(node):
                node.replace_input_with(operand, self.reduced(operand, before=node))
        if node in self.weighed_entries:
            cotangent = node.args[0]
            assert isinstance(cotangent, fx.Node)
            self.fx.inserting_before(node)
            weighed = self.weighed(cotangent, node)
            self.from_tangents.add(weighed)
            node.replace_input_with(cotangent, weighed)

    def returned(self) -> None:
        """Returned scalars become means over the global batch; float buffers agree."""
        own: dict[Output | Update, fx.Node] = {}
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is None or not isinstance(role, (Output, Update)):
                continue
            if has_rows(node) or node.meta["placement"] == R:
                continue
            if tensors(node)[0].is_floating_point():
                own[role] = node
            elif isinstance(role, Update):
                text = f"{role.of} is an integer that differs between ranks"
                self.notes.append(Difference(text))
        if not own:
            return
        self.fx.inserting_before(self.last_forward().next)
        self.graph = self.graph.with_results(
            dict(zip(own, self.means(list(own.values())), strict=True))
        )
        for role in own:
            tangent = isinstance(role, Output) and self.graph.placeholder(Tangent(role.index))
            if tangent:
                self.weigh_uses(tangent, P)

    def gradients(self) -> None:
        """Gradients of parameters are Partial, those of inputs that all ranks share are whole."""
        changed: dict[Any, fx.Node] = {}
        self.fx.inserting_before(self.graph.output_node)
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if not isinstance(role, Gradient) or node is None:
                continue
            placement = node.meta["placement"]
            if isinstance(role.of, Parameter) and placement == R:
                changed[role] = self.weighed(node, node)
            elif isinstance(role.of, Input) and placement == P:
                changed[role] = self.all_reduce([node], node)[0]
        self.graph = self.graph.with_results(changed)

    def agree(self) -> None:
        """The ranks add up evidence of what they were given."""
        fake = fake_like(self.graph, (EVIDENCE_SIZE,), torch.float64)
        self.graph, evidence = add_input(self.graph, Evidence(), "evidence", fake)
        self.type(evidence, P)
        first = next(iter(self.graph.calls()), self.graph.output_node)
        like = first if first.op == "call_function" else evidence
        self.fx.inserting_before(first)  # early, so that it can travel with a later statistic
        verdict = self.all_reduce([evidence], like)[0]
        self.graph = self.graph.with_results({Verdict(): verdict})

    # What rules are written with: each writes at the insertion point.

    def last_forward(self) -> fx.Node:
        return self.graph.backward_start.prev

    def type(self, node: fx.Node, placement: Placement) -> None:
        node.meta["placement"] = placement
        node.meta.setdefault("rows", ((),) * len(elements(node)))

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = call(self.fx, like, target, *args, **kwargs)
        self.type(node, V)
        if like in self.from_tangents:
            self.from_tangents.add(node)
        return node

    def weighed(self, node: fx.Node, like: fx.Node, placement: Placement = P) -> fx.Node:
        """`node` times this rank's share of the rows."""
        dtype = tensors(node)[0].dtype
        weight = self.weight
        if dtype != torch.float64:
            weight = self.call(like, aten._to_copy.default, weight, dtype=dtype)
        result = self.call(like, aten.mul.Tensor, node, weight)
        self.type(result, placement)
        return result

    def weigh_uses(self, node: fx.Node, placement: Placement) -> None:
        """Every use of `node` takes it times this rank's share of the rows."""
        users = list(node.users)
        if not users:
            return
        self.fx.inserting_before(min(users))
        result = self.weighed(node, min(users), placement)
        self.from_tangents.add(result)
        for user in users:
            user.replace_input_with(node, result)

    def all_reduce(self, nodes: list[fx.Node], like: fx.Node) -> list[fx.Node]:
        """Sums over ranks; small values travel as float64, so that they can share a bucket."""
        dtypes = [tensors(node)[0].dtype for node in nodes]
        wide = torch.float64
        sent = [
            n if d == wide else self.call(like, aten._to_copy.default, n, dtype=wide)
            for n, d in zip(nodes, dtypes, strict=True)
        ]
        received = collective(self.fx, like, start_all_reduce, sent, self.axis)
        done = received[0].args[0]
        for node in (done.args[0], done, *received):  # type: ignore[union-attr]
            self.type(node, R)  # type: ignore[arg-type]
        result = []
        for node, dtype in zip(received, dtypes, strict=True):
            back = (
                node if dtype == wide else self.call(like, aten._to_copy.default, node, dtype=dtype)
            )
            self.type(back, R)
            result.append(back)
        return result

    def means(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """The ranks' means of many values: those of one dtype are joined, weighted and sent."""
        if len(nodes) == 1:
            return [self.mean(nodes[0])]
        fakes = {node: tensors(node)[0] for node in nodes}
        found: dict[fx.Node, fx.Node] = {}
        for dtype in dict.fromkeys(fake.dtype for fake in fakes.values()):
            alike = [node for node in fakes if fakes[node].dtype == dtype]
            like = alike[0]
            flat = [self.call(like, aten.reshape.default, node, [-1]) for node in alike]
            mean = self.mean(self.call(like, aten.cat.default, flat))
            sizes = [fakes[node].numel() for node in alike]
            pieces = self.call(like, aten.split_with_sizes.default, mean, sizes)
            self.type(pieces, R)
            for index, node in enumerate(alike):
                piece = self.call(like, operator.getitem, pieces, index)
                self.type(piece, R)
                found[node] = self.call(like, aten.view.default, piece, list(fakes[node].shape))
                self.type(found[node], R)
        return [found[node] for node in nodes]

    def mean(self, node: fx.Node) -> fx.Node:
        """The mean of the ranks' values, weighted by their rows."""
        return self.all_reduce([self.weighed(node, node)], node)[0]

    def reduced(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The sum over ranks of a Partial value, for a use by `before`."""
        self.fx.inserting_before(before)
        result = self.all_reduce([node], before)[0]
        self.from_tangents.add(result)
        return result

    def erase(self, node: fx.Node, replacement: fx.Node | None = None) -> None:
        """Takes a node out of the graph and out of this walk."""
        self.type(node, V)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
        self.fx.erase_node(node)

    def note(self, node: fx.Node, what: str) -> None:
        if node.meta["phase"] == "backward":
            return  # the forward has been noted
        line = user_line(node)
        text = f"{node.target} {what}: each rank does so for its own rows, as under DDP"
        self.notes.append(Difference(f"{text} ({line})" if line else text))


EVIDENCE_SIZE = 4
