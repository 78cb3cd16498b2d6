"""The time of every collective by every algorithm, as sympy expressions.

Symbols: `S` bytes, as `collectives` defines them; `p` ranks on `N` machines; inside a machine a
message costs `alpha` seconds and a rank sends `beta` bytes per second; between machines a message
costs `alpha_N`, and the ranks of one machine together send `beta_N`. Ranks send and receive one
message at a time, both at once (Thakur et al. 2005). With N = 1, or with alpha_N = alpha and
beta_N = beta p / N, the formulas are the textbook's.

Each formula names its source:

- Thakur, Rabenseifner & Gropp: Optimization of collective communication operations in MPICH, 2005
- Chan, Heimlich, Purkayastha & van de Geijn: Collective communication: theory, practice, and
  experience, 2007
- Sanders, Speck & Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan,
  2009
- Bruck et al.: Efficient algorithms for all-to-all communications in multiport systems, 1997
- Patarasuk & Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009
- Jia et al.: Highly scalable deep learning training system with mixed-precision, 2018
- Rajbhandari et al.: DeepSpeed-MoE, 2022
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import sympy

from autopar.cost_model.collectives import check_collective
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.topology.link_levels import Levels

S, p, N = sympy.symbols("S p N", positive=True)
alpha, beta, alpha_N, beta_N = sympy.symbols("alpha beta alpha_N beta_N", positive=True)

ALGORITHMS = ("ring", "tree", "double_tree", "hierarchical", "halving_doubling", "direct")


class ceil_log2(sympy.Function):  # type: ignore[misc]
    """⌈log2 n⌉, exact for whole numbers."""

    @classmethod
    def eval(cls, n: Any) -> Any:
        """A number where n is one."""
        return sympy.Integer((int(n) - 1).bit_length()) if n.is_Integer else None


class not_power_of_two(sympy.Function):  # type: ignore[misc]
    """0 if n is a power of two, otherwise 1."""

    @classmethod
    def eval(cls, n: Any) -> Any:
        """A number where n is one."""
        return sympy.Integer(int(int(n).bit_count() != 1)) if n.is_Integer else None


class narrowest(sympy.Function):  # type: ignore[misc]
    """narrowest(N, x, y): x on one machine, the lesser of x and y on more."""

    @classmethod
    def eval(cls, machines: Any, inside: Any, between: Any) -> Any:
        """A number where all are."""
        if machines.is_Integer:
            return inside if machines == 1 else sympy.Min(inside, between)
        return None


class dearest(sympy.Function):  # type: ignore[misc]
    """dearest(N, x, y): x on one machine, the greater of x and y on more."""

    @classmethod
    def eval(cls, machines: Any, inside: Any, between: Any) -> Any:
        """A number where all are."""
        if machines.is_Integer:
            return inside if machines == 1 else sympy.Max(inside, between)
        return None


@dataclass(frozen=True)
class Formula:
    """How long one algorithm takes for one collective.

    Attributes:
        collective: one of `collectives.COLLECTIVES`.
        algorithm: one of ALGORITHMS.
        seconds: its time, in S, p, N, alpha, beta, alpha_N and beta_N.
        steps: messages that follow one another, in p and N (and S, if the message is cut).
        source: where the formula comes from.
    """

    collective: str
    algorithm: str
    seconds: sympy.Expr
    steps: sympy.Expr
    source: str

    def __call__(self, nbytes: float, ranks: int, nodes: int, levels: Levels) -> float:
        """Seconds for a message of `nbytes` bytes over `ranks` ranks on `nodes` machines."""
        return _value(self.seconds, ranks, nodes, levels, nbytes)

    def count(self, nbytes: float, ranks: int, nodes: int, levels: Levels) -> int:
        """Messages that follow one another."""
        return round(_value(self.steps, ranks, nodes, levels, nbytes))


def formula(collective: str, algorithm: str) -> Formula:
    """The formula of an algorithm for a collective.

    Raises:
        ClusterError: there is no such algorithm for it.
    """
    check_collective(collective)
    found = _formulas().get((collective, algorithm))
    if found is None:
        known = ", ".join(a for c, a in _formulas() if c == collective)
        raise ClusterError(f"no {algorithm} algorithm for {collective}: there is {known}")
    return found


def formulas(collective: str, ranks: int, nodes: int) -> tuple[Formula, ...]:
    """All algorithms that exist for a collective over so many ranks and machines.

    Raises:
        ClusterError: the ranks do not fill the machines evenly.
    """
    check_collective(collective)
    if nodes < 1 or ranks < 2 or ranks % nodes:
        raise ClusterError(f"{ranks} ranks do not fill {nodes} nodes evenly, or are alone")
    if collective == "send" and ranks != 2:
        raise ClusterError(f"a send has two ranks, not {ranks}")
    two_levels = 1 < nodes < ranks
    return tuple(
        found
        for (name, algorithm), found in _formulas().items()
        if name == collective and (two_levels or algorithm != "hierarchical")
    )


@lru_cache(maxsize=4096)
def parts_of(seconds: Any, ranks: int, nodes: int) -> tuple[Any, Any, Any]:
    """c0, c1 and c2 of a time c0 + c1 √S + c2 S over so many ranks and machines."""
    root = sympy.Symbol("root", positive=True)
    at = seconds.subs({p: sympy.Integer(ranks), N: sympy.Integer(nodes), S: root**2})
    parts = sympy.collect(sympy.expand(at), root, evaluate=False)
    if set(parts) - {sympy.S.One, root, root**2}:
        raise AssertionError(f"a time must be affine in S and its root, this is {seconds}")
    return tuple(parts.get(power, sympy.S.Zero) for power in (sympy.S.One, root, root**2))


@lru_cache(maxsize=4096)
def _coefficients(
    expression: Any, ranks: int, nodes: int, levels: Levels
) -> tuple[float, float, float]:
    figures = figures_of(levels)
    c0, c1, c2 = (float(part.subs(figures)) for part in parts_of(expression, ranks, nodes))
    return c0, c1, c2


def _value(expression: Any, ranks: int, nodes: int, levels: Levels, nbytes: float) -> float:
    c0, c1, c2 = _coefficients(expression, ranks, nodes, levels)
    return c0 + c1 * nbytes**0.5 + c2 * nbytes


def figures_of(levels: Levels) -> dict[Any, float]:
    """What the symbols of the links stand for."""
    return {
        alpha: levels.latency_s,
        beta: levels.bytes_per_s,
        alpha_N: levels.node_latency_s,
        beta_N: levels.node_bytes_per_s,
    }


# -- the algorithms ----------------------------------------------------------------------------

_q = p / N  # ranks on one machine
_stream = narrowest(N, beta, beta_N)  # what a stream through all machines moves
_message = dearest(N, alpha, alpha_N)  # the dearest message
_depth = ceil_log2(N) + ceil_log2(_q)
_descent = ceil_log2(N) * alpha_N + ceil_log2(_q) * alpha  # from the root of a tree to a leaf
_around = (N - 1) * alpha_N + (p - N) * alpha  # once along a ring
_to_all = (p - _q) * alpha_N + (_q - 1) * alpha  # one rank to every other
_exchange = _q * (N - 1) / N * S / beta_N + (_q - 1) / p * S / beta  # S/p to every other rank
_scatter = _descent + (N - 1) / N * S / _stream + (_q - 1) / p * S / beta
_binomial = ceil_log2(N) * (alpha_N + S / _stream) + ceil_log2(_q) * (alpha + S / beta)
_levels_ring = (N - 1) * (alpha_N + S / N / beta_N) + (_q - 1) * (alpha + S / _q / beta)
_fold = not_power_of_two(N), not_power_of_two(_q)  # extra ranks lean on a partner, on either level


def _pipelined(descent: Any, behind: Any) -> Any:
    """A message cut into 1 + k packets, the last of which arrives `behind` packets after the first.

    That takes descent + (1 + k) messages + (1 + behind / k) S / beta; k = √(behind S / (alpha
    beta)) makes it least (Sanders et al. 2009, with the first packet counted apart, so that it
    holds for the smallest messages too).
    """
    packets = sympy.sqrt(behind * _message / _stream) * sympy.sqrt(S)
    return descent + S / _stream + 2 * packets


_chain = _pipelined(_around, p - 2)
_two_trees = _pipelined(_message + 2 * _descent, 2 * _depth)
_packets = sympy.sqrt(S) / sympy.sqrt(_message * _stream)
_folded_log = _descent - _fold[0] * alpha_N - _fold[1] * alpha

THAKUR, CHAN = "Thakur, Rabenseifner & Gropp 2005", "Chan et al. 2007"
SANDERS, BRUCK = "Sanders, Speck & Träff 2009 (NCCL 2.4)", "Bruck et al. 1997"
RINGS, JIA = "Patarasuk & Yuan 2009", "Jia et al. 2018"
MOE = "Rajbhandari et al. 2022"

_Row = tuple[Any, Any, str]


def _ring() -> dict[str, _Row]:
    share = (p - 1) / p * S / _stream
    return {
        "all_reduce": (2 * (_around + share), 2 * (p - 1), RINGS),
        "all_gather": (_around + share, p - 1, THAKUR),
        "reduce_scatter": (_around + share, p - 1, THAKUR),
        "broadcast": (_chain, p - 1 + sympy.sqrt(p - 2) * _packets, CHAN),
    }


def _tree() -> dict[str, _Row]:
    return {
        "all_reduce": (2 * _binomial, 2 * _depth, CHAN),
        "all_gather": (_scatter + _binomial, 2 * _depth, CHAN),
        "reduce_scatter": (_binomial + _scatter, 2 * _depth, CHAN),
        "broadcast": (_binomial, _depth, THAKUR),
    }


def _double_tree() -> dict[str, _Row]:
    steps = 1 + 2 * _depth + sympy.sqrt(2 * _depth) * _packets
    return {
        "all_reduce": (2 * _two_trees, 2 * steps, SANDERS),
        "broadcast": (_two_trees, steps, SANDERS),
    }


def _hierarchical() -> dict[str, _Row]:
    steps = N - 1 + _q - 1
    inside = (_q - 1) / _q * S / beta
    broadcast = ceil_log2(N) * (alpha_N + S / beta_N)
    broadcast += (ceil_log2(_q) + _q - 1) * alpha + 2 * inside
    exchange = (_q - 1) * alpha + inside + (N - 1) * alpha_N + _q * (N - 1) / N * S / beta_N
    return {
        "all_reduce": (2 * _levels_ring, 2 * steps, JIA),
        "all_gather": (_levels_ring, steps, JIA),
        "reduce_scatter": (_levels_ring, steps, JIA),
        "all_to_all": (exchange, steps, MOE),
        "broadcast": (broadcast, _depth + _q - 1, CHAN),
    }


def _halving_doubling() -> dict[str, _Row]:
    far, near = _fold
    folded = _folded_log + _exchange
    whole = far * (alpha_N + _q * S / beta_N) + near * (alpha + S / beta)
    shard = far * (alpha_N + S / N / beta_N) + near * (alpha + S / p / beta)
    bruck = ceil_log2(N) * (alpha_N + _q * S / 2 / beta_N)
    bruck += ceil_log2(_q) * (alpha + S / 2 / beta)
    log = _depth - far - near
    return {
        "all_reduce": (2 * (folded + whole), 2 * (log + far + near), THAKUR),
        "all_gather": (_descent + _exchange, _depth, f"{THAKUR}; {BRUCK}"),
        "reduce_scatter": (folded + whole + shard, log + 2 * (far + near), THAKUR),
        "all_to_all": (bruck, _depth, BRUCK),
        "broadcast": (_scatter + _descent + _exchange, 2 * _depth, CHAN),
    }


def _direct() -> dict[str, _Row]:
    once = _to_all + _exchange
    flat = (p - _q) * (alpha_N + S / _stream) + (_q - 1) * (alpha + S / beta)
    return {
        "all_reduce": (2 * once, 2 * (p - 1), THAKUR),
        "all_gather": (once, p - 1, THAKUR),
        "reduce_scatter": (once, p - 1, THAKUR),
        "all_to_all": (once, p - 1, THAKUR),
        "broadcast": (flat, p - 1, CHAN),
        "send": (_around + S / _stream, sympy.Integer(1), THAKUR),
    }


@cache
def _formulas() -> dict[tuple[str, str], Formula]:
    tables: tuple[Callable[[], dict[str, _Row]], ...] = (
        _ring,
        _tree,
        _double_tree,
        _hierarchical,
        _halving_doubling,
        _direct,
    )
    return {
        (collective, algorithm): Formula(collective, algorithm, seconds, steps, source)
        for algorithm, table in zip(ALGORITHMS, tables, strict=True)
        for collective, (seconds, steps, source) in table().items()
    }
