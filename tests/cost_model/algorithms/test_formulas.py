"""The formulas against the textbook, and their crossovers against those found numerically."""

import itertools
import math

import pytest
import sympy
from scipy.optimize import brentq

from autopar.cost_model.algorithms.crossover import crossover, crossovers, fastest
from autopar.cost_model.algorithms.formulas import (
    ALGORITHMS,
    N,
    S,
    alpha,
    alpha_N,
    beta,
    beta_N,
    formula,
    formulas,
    p,
)
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.topology.link_levels import Levels

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
FABRIC = Levels(2e-6, 3e11, 6e-6, 2e11, "a - b", "modelled by the test")


def lg(n):
    return math.ceil(math.log2(n))


# Thakur, Rabenseifner & Gropp 2005, tables 1-3, and Chan et al. 2007; n ranks, no reduction cost.
TEXTBOOK = {
    ("all_reduce", "ring"): lambda n: 2 * (n - 1) * alpha + 2 * (n - 1) * S / n / beta,
    ("all_gather", "ring"): lambda n: (n - 1) * alpha + (n - 1) * S / n / beta,
    ("broadcast", "tree"): lambda n: lg(n) * (alpha + S / beta),
    ("all_reduce", "tree"): lambda n: 2 * lg(n) * (alpha + S / beta),
    ("all_reduce", "halving_doubling"): lambda n: 2 * lg(n) * alpha + 2 * (n - 1) * S / n / beta,
    ("reduce_scatter", "halving_doubling"): lambda n: lg(n) * alpha + (n - 1) * S / n / beta,
    ("all_to_all", "halving_doubling"): lambda n: lg(n) * (alpha + S / 2 / beta),
    ("all_to_all", "direct"): lambda n: (n - 1) * alpha + (n - 1) * S / n / beta,
    ("broadcast", "halving_doubling"): lambda n: 2 * lg(n) * alpha + 2 * (n - 1) * S / n / beta,
}


@pytest.mark.parametrize(("collective", "algorithm"), TEXTBOOK)
@pytest.mark.parametrize("nodes", [1, 4])
def test_on_equal_links_they_are_the_textbooks(collective, algorithm, nodes):
    """One machine, or four whose links to each other are as good as those inside."""
    seconds = formula(collective, algorithm).seconds.subs({p: 16, N: nodes})
    flat = seconds.subs({beta_N: beta * 16 / nodes, alpha_N: alpha})
    assert sympy.simplify(flat - TEXTBOOK[collective, algorithm](16)) == 0


def test_ranks_that_are_no_power_of_two_pay_for_folding_or_not_at_all():
    halving = formula("all_reduce", "halving_doubling").seconds.subs({N: 1})
    folded = halving.subs({p: 6}) - TEXTBOOK["all_reduce", "halving_doubling"](4).subs(S, 0)
    assert sympy.simplify(folded.subs(S, 0) - 2 * alpha) == 0  # two steps more than 4 ranks
    bytes_sent = sympy.expand(halving.subs({p: 6})).coeff(S) * beta
    assert bytes_sent == 2 * sympy.Rational(5, 6) + 2
    bruck = formula("all_gather", "halving_doubling").seconds.subs({N: 1, p: 6})
    assert sympy.simplify(bruck - (3 * alpha + sympy.Rational(5, 6) * S / beta)) == 0


def packets_through_two_trees(ranks: int, packets: int) -> int:
    """Steps until `packets` packets are everywhere: Sanders et al. 2009, 2 steps a level."""
    return packets + 2 * lg(ranks)


@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_the_double_tree_is_within_a_packet_of_the_best_cut(nbytes):
    ours = formula("broadcast", "double_tree")(nbytes, 16, 1, FABRIC)

    def cut(k: int) -> float:
        return packets_through_two_trees(16, k) * (
            FABRIC.latency_s + nbytes / k / FABRIC.bytes_per_s
        )

    best = min(cut(k) for k in range(1, 2000))
    assert best <= ours <= best + FABRIC.latency_s * 1.01


def found_numerically(first, second, ranks, nodes):
    """Sizes from 1 B to 1 TB at which two times cross, by bisection."""
    figures = {p: ranks, N: nodes, alpha: FABRIC.latency_s, beta: FABRIC.bytes_per_s}
    figures |= {alpha_N: FABRIC.node_latency_s, beta_N: FABRIC.node_bytes_per_s}
    one, other = (sympy.lambdify(S, f.seconds.subs(figures)) for f in (first, second))

    def gap(log_size: float) -> float:
        return one(math.exp(log_size)) / other(math.exp(log_size)) - 1

    grid = [math.log(10) * k / 8 for k in range(97)]
    return [
        math.exp(brentq(gap, low, high, xtol=1e-12))
        for low, high in itertools.pairwise(grid)
        if gap(low) * gap(high) < 0 and max(abs(gap(low)), abs(gap(high))) > 1e-9
    ]


@pytest.mark.parametrize(("ranks", "nodes"), [(6, 1), (16, 2), (48, 3)])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_crossover_in_closed_form_is_the_one_found_numerically(collective, ranks, nodes):
    for first, second in itertools.combinations(formulas(collective, ranks, nodes), 2):
        closed = crossovers(first, second, ranks, nodes, FABRIC)
        numeric = found_numerically(first, second, ranks, nodes)
        assert [c for c in closed if 1 <= c <= 1e12] == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_fastest_by_size_is_the_fastest_at_every_size(nodes):
    ways = formulas("all_reduce", 16, nodes)
    stretches = fastest(ways, 16, nodes, FABRIC)
    assert stretches[0][1] == 0
    assert stretches[-1][2] is None
    for size in [10 ** (k / 3) for k in range(36)]:
        best = min(ways, key=lambda way: way(size, 16, nodes, FABRIC)).algorithm
        assert best == next(n for n, low, high in stretches if low <= size < (high or math.inf))


def test_a_crossover_is_an_expression():
    found = crossover(formula("all_reduce", "ring"), formula("all_reduce", "tree"), 16, 1)
    (size,) = [sympy.simplify(f) for f in found]  # where 30 a + 15/8 S/b = 8 a + 8 S/b
    assert sympy.simplify(size - alpha * beta * sympy.Rational(22 * 8, 49)) == 0


def test_between_machines_the_hierarchy_sends_each_byte_once():
    def sent(algorithm):
        seconds = formula("all_reduce", algorithm).seconds.subs({p: 16, N: 2})
        slow = seconds.subs({beta: 10**15, beta_N: 1, alpha: 0, alpha_N: 0})
        return float(slow.subs(S, 1))

    assert sent("hierarchical") == pytest.approx(1.0)
    assert sent("ring") == pytest.approx(2 * 15 / 16)
    assert sent("halving_doubling") == pytest.approx(8.0)  # every rank of a machine by itself


def test_what_does_not_exist_is_refused():
    assert {f.algorithm for f in formulas("all_reduce", 8, 1)} == set(ALGORITHMS) - {"hierarchical"}
    with pytest.raises(ClusterError, match="no tree algorithm for all_to_all"):
        formula("all_to_all", "tree")
    with pytest.raises(ClusterError, match="do not fill 3 nodes"):
        formulas("all_reduce", 8, 3)
    with pytest.raises(ClusterError, match="two ranks"):
        formulas("send", 4, 2)
