"""A configuration for NCCL's example tuner plugin: algorithm, protocol and channels by size.

One line is `collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks`. The plugin
(ext-tuner/example/plugin.c, read in 2.27 to 2.30) takes the first line that matches, passes over
one whose combination is not available, takes unknown names for allreduce, ring and simple without
a word, and **sets one channel before it looks**: no match, or `channels = -1`, is one channel. So
`export` writes explicit channels for every size of every collective, ends with lines for all other
communicators, and checks what it wrote as the plugin would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.nccl.constants import ALGORITHMS, PROTOCOLS
from autopar.cost_model.nccl.model import COLLECTIVES, Tuning

NAMES = {name: name.replace("_", "") for name in COLLECTIVES}
"""Our collectives -> the plugin's names."""
MAX_BYTES = 2**64 - 1
ANY = -1
_LINE = 254  # the plugin reads 255 characters at a time, the end of the line among them
_SAMPLED = 2**40
"""The choice at this size is taken for all larger ones."""

Setting = tuple[str, str, int]
"""Algorithm, protocol, channels."""
Forced = Mapping[tuple[str, str, str], Curve]
"""Curves measured with NCCL_ALGO and NCCL_PROTO set: (collective, algorithm, protocol) -> curve."""


@dataclass(frozen=True)
class Rule:
    """One line of the file.

    Attributes:
        collective: one of the plugin's names.
        min_bytes: first size that it is for.
        max_bytes: last size.
        algorithm: one of ALGORITHMS.
        protocol: one of PROTOCOLS.
        channels: how many, at least 1.
        nodes: of the communicator, or ANY.
        ranks: of the communicator, or ANY.
    """

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int
    nodes: int
    ranks: int

    def __str__(self) -> str:
        parts = (self.min_bytes, self.max_bytes, self.algorithm, self.protocol, self.channels)
        return ",".join(map(str, (self.collective, *parts, self.nodes, self.ranks)))

    def matches(self, collective: str, nbytes: int, nodes: int, ranks: int) -> bool:
        """Whether the plugin would take this line for a call."""
        return (
            self.collective == collective
            and self.min_bytes <= nbytes <= self.max_bytes
            and self.nodes in (ANY, nodes)
            and self.ranks in (ANY, ranks)
        )


def export(tunings: Sequence[Tuning], forced: Forced | None = None) -> str:
    """The text of a configuration for communicators of some shapes.

    Where combinations were measured for a collective, the fastest measured one is taken; otherwise
    the one that NCCL's model takes, which keeps NCCL's choice and yet is safe to extend by hand.

    Args:
        tunings: the model of each communicator; measured curves are those of the first.
        forced: what was measured with the combination forced.
    """
    if not tunings:
        raise ClusterError("a tuner configuration needs at least one communicator")
    lines = [f"# Made by autopar from the tuning model of NCCL {tunings[0].constants.name}."]
    for index, tuning in enumerate(tunings):
        nodes, ranks = tuning.communicator.nodes, tuning.communicator.ranks
        for collective in COLLECTIVES:
            curves = {} if index else _curves(forced or {}, collective, tuning)
            kind = f"measured: {len(curves)} combinations" if curves else "modelled"
            lines.append(f"# {NAMES[collective]}, {ranks} ranks on {nodes} nodes: {kind}")
            choose = _chooser(tuning, collective, curves)
            lines += map(str, _rules(NAMES[collective], choose, nodes, ranks))
    lines.append("# every other communicator, and combinations that NCCL has switched off: rings")
    for collective in COLLECTIVES:
        choose = _safe(tunings[0], collective)
        lines += map(str, _rules(NAMES[collective], choose, ANY, ANY))
    text = "\n".join(lines) + "\n"
    check(text)
    return text


def _curves(forced: Forced, collective: str, tuning: Tuning) -> dict[tuple[str, str], Curve]:
    found = {(a, p): curve for (name, a, p), curve in forced.items() if name == collective}
    for algorithm, protocol in found:
        if tuning.seconds(collective, 1 << 20, algorithm, protocol) is None:
            raise ClusterError(f"{collective}: NCCL does not run {algorithm}/{protocol} here")
    return found


def _chooser(
    tuning: Tuning, collective: str, curves: Mapping[tuple[str, str], Curve]
) -> Callable[[int], Setting]:
    def choose(nbytes: int) -> Setting:
        if not curves:
            choice = tuning.pick(collective, nbytes)
            return choice.algorithm, choice.protocol, choice.channels
        algorithm, protocol = min(curves, key=lambda way: curves[way](nbytes))
        return algorithm, protocol, tuning.channels(nbytes, algorithm, protocol)

    return choose


def _safe(tuning: Tuning, collective: str) -> Callable[[int], Setting]:
    """Rings under LL or Simple, which every communicator has."""

    def choose(nbytes: int) -> Setting:
        times = {p: tuning.seconds(collective, nbytes, "ring", p) for p in ("ll", "simple")}
        protocol = min(times, key=lambda p: times[p] or float("inf"))
        return "ring", protocol, tuning.channels(nbytes, "ring", protocol)

    return choose


def _rules(collective: str, choose: Callable[[int], Setting], nodes: int, ranks: int) -> list[Rule]:
    """The sizes from 0 to MAX_BYTES cut where the choice changes."""
    starts = [0]
    sizes = [0, *(2**power for power in range(_SAMPLED.bit_length()))]
    for low, high in pairwise(sizes):
        starts += _changes(choose, low, high)
    ends = [start - 1 for start in starts[1:]] + [MAX_BYTES]
    return [
        Rule(collective, start, end, *choose(start), nodes, ranks)
        for start, end in zip(starts, ends, strict=True)
    ]


def _changes(choose: Callable[[int], Setting], low: int, high: int) -> list[int]:
    """The sizes in (low, high] at which the choice becomes another."""
    if choose(low) == choose(high):
        return []
    if high - low == 1:
        return [high]
    middle = (low + high) // 2
    return _changes(choose, low, middle) + _changes(choose, middle, high)


def parse(text: str) -> list[Rule]:
    """The lines of a configuration, strictly.

    Raises:
        ClusterError: with the number of a line that the plugin would misread.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LINE:
            raise ClusterError(f"line {number}: {len(line)} characters, the plugin reads {_LINE}")
        if line and not line.startswith("#"):
            rules.append(_parse(number, line))
    return rules


def _parse(number: int, line: str) -> Rule:
    fields = [field.strip(" \t") for field in line.split(",")]
    if not 8 <= len(fields) <= 10 or "" in fields:
        raise ClusterError(f"line {number}: 8 to 10 fields, not {line!r}")
    collective, low, high, algorithm, protocol, *rest = fields
    for name, known in (
        (collective, NAMES.values()),
        (algorithm, ALGORITHMS),
        (protocol, PROTOCOLS),
    ):
        if name not in known:
            raise ClusterError(f"line {number}: {name!r} is none of {', '.join(known)}")
    try:
        first, last, channels, nodes, ranks, *_ = map(int, (low, high, *rest))
    except ValueError as error:
        raise ClusterError(f"line {number}: {error}") from error
    if not 0 <= first <= last <= MAX_BYTES:
        raise ClusterError(f"line {number}: sizes from {low} to {high}")
    if channels < 1:
        raise ClusterError(
            f"line {number}: {channels} channels; the plugin makes that 1, so say how many"
        )
    if min(nodes, ranks) < ANY or 0 in (nodes, ranks):
        raise ClusterError(f"line {number}: {rest[1]} nodes, {rest[2]} ranks")
    return Rule(collective, first, last, algorithm, protocol, channels, nodes, ranks)


def check(text: str) -> list[Rule]:
    """The lines of a configuration that names every size of every collective.

    Raises:
        ClusterError: with the line, or the collective, communicator and size that is not covered.
    """
    rules = parse(text)
    for nodes, ranks in dict.fromkeys((rule.nodes, rule.ranks) for rule in rules):
        for collective in NAMES.values():
            next_byte = 0
            spans = [
                (rule.min_bytes, rule.max_bytes)
                for rule in rules
                if rule.collective == collective
                and rule.nodes in (ANY, nodes)
                and rule.ranks in (ANY, ranks)
            ]
            for low, high in sorted(spans):
                if low > next_byte:
                    break
                next_byte = max(next_byte, high + 1)
            if next_byte <= MAX_BYTES:
                raise ClusterError(
                    f"{collective} of {next_byte} bytes over {ranks} ranks on {nodes} nodes has no "
                    f"line: the plugin would give it one channel"
                )
    return rules


def match(
    rules: Sequence[Rule],
    collective: str,
    nbytes: int,
    nodes: int,
    ranks: int,
    off: frozenset[tuple[str, str]] = frozenset(),
) -> Setting | None:
    """What the plugin would set, None if nothing matches (it then sets one channel).

    Args:
        rules: the lines, in order.
        collective: one of the plugin's names.
        nbytes: size.
        nodes: of the communicator.
        ranks: of the communicator.
        off: combinations that NCCL has switched off there.
    """
    for rule in rules:
        way = (rule.algorithm, rule.protocol)
        if rule.matches(collective, nbytes, nodes, ranks) and way not in off:
            return (*way, rule.channels)
    return None
