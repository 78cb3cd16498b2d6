"""Configurations of NCCL's example tuner plugin: algorithm, protocol and channels by size.

A line is `collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks`. The plugin
(ext-tuner/example/plugin.c of NCCL 2.27 to 2.30) applies the first line that matches. It skips
unavailable combinations and reads unknown names as allreduce, ring and simple. Without a match, or
with `channels = -1`, a collective runs on one channel. `export` therefore covers every size of
every collective and communicator with explicit channels, and checks its own output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, pairwise

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.nccl.constants import ALGORITHMS, PROTOCOLS
from autopar.cost_model.nccl.model import COLLECTIVES, Tuning

NAMES = {name: name.replace("_", "") for name in COLLECTIVES}
"""Names of collectives in autopar -> in the plugin."""
MAX_BYTES = 2**64 - 1
ANY = -1
_MAX_LINE = 254  # the plugin reads 255 characters at a time, the line end among them
_LARGEST_SAMPLE = 2**40
"""Size whose choice holds for all larger sizes, in bytes."""

Setting = tuple[str, str, int]
"""Algorithm, protocol, channels."""
Forced = Mapping[tuple[str, str, str], Curve]
"""Curves measured with NCCL_ALGO and NCCL_PROTO set, by collective, algorithm and protocol."""


@dataclass(frozen=True)
class Rule:
    """One line of a configuration, under the plugin's name of its collective.

    Nodes and ranks are those of the communicator, or ANY.
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
        return ",".join(map(str, astuple(self)))


def export(tunings: Sequence[Tuning], forced: Forced | None = None) -> str:
    """The text of a configuration for the communicators of some models.

    Each size gets the fastest measured combination of its collective, or NCCL's own choice where
    none was measured. `forced` has measured curves of the first communicator.
    """
    if not tunings:
        raise ClusterError("a tuner configuration needs at least one communicator")
    lines = [f"# Made by autopar from the tuning model of NCCL {tunings[0].constants.name}."]
    for index, tuning in enumerate(tunings):
        nodes, ranks = tuning.communicator.nodes, tuning.communicator.ranks
        for collective in COLLECTIVES:
            curves = {} if index else _curves(forced or {}, collective, tuning)
            source = f"measured: {len(curves)} combinations" if curves else "modelled"
            lines.append(f"# {NAMES[collective]}, {ranks} ranks on {nodes} nodes: {source}")
            choices = choices_by_size(tuning, collective, curves)
            lines += map(str, _rules(NAMES[collective], choices, nodes, ranks))
    lines.append("# every other communicator, and combinations that NCCL has switched off: rings")
    for collective in COLLECTIVES:
        choices = _choices(partial(_ring, tunings[0], collective))
        lines += map(str, _rules(NAMES[collective], choices, ANY, ANY))
    text = "\n".join(lines) + "\n"
    check(text)
    return text


def _curves(forced: Forced, collective: str, tuning: Tuning) -> dict[tuple[str, str], Curve]:
    curves = {(a, p): curve for (name, a, p), curve in forced.items() if name == collective}
    for algorithm, protocol in curves:
        if tuning.seconds(collective, 1 << 20, algorithm, protocol) is None:
            raise ClusterError(f"{collective}: NCCL does not run {algorithm}/{protocol} here")
    return curves


def choices_by_size(
    tuning: Tuning, collective: str, curves: Mapping[tuple[str, str], Curve] | None = None
) -> list[tuple[int, Setting]]:
    """The choice from each size in bytes on, ascending: the fastest of `curves`, or NCCL's own."""

    def choose(nbytes: int) -> Setting:
        if not curves:
            choice = tuning.pick(collective, nbytes)
            return choice.algorithm, choice.protocol, choice.channels
        algorithm, protocol = min(curves, key=lambda combination: curves[combination](nbytes))
        return algorithm, protocol, tuning.channels(nbytes, algorithm, protocol)

    return _choices(choose)


def _ring(tuning: Tuning, collective: str, nbytes: int) -> Setting:
    """Rings under LL or Simple, which every communicator has."""
    times = {p: tuning.seconds(collective, nbytes, "ring", p) for p in ("ll", "simple")}
    protocol = min(times, key=lambda p: times[p] or float("inf"))
    return "ring", protocol, tuning.channels(nbytes, "ring", protocol)


def _choices(choose: Callable[[int], Setting]) -> list[tuple[int, Setting]]:
    sizes = [0, *(2**power for power in range(_LARGEST_SAMPLE.bit_length()))]
    changes = (_changes(choose, low, high) for low, high in pairwise(sizes))
    return [(start, choose(start)) for start in [0, *chain.from_iterable(changes)]]


def _changes(choose: Callable[[int], Setting], low: int, high: int) -> list[int]:
    """The sizes in (low, high] at which the choice changes."""
    if choose(low) == choose(high):
        return []
    if high - low == 1:
        return [high]
    middle = (low + high) // 2
    return _changes(choose, low, middle) + _changes(choose, middle, high)


def _rules(
    collective: str, choices: Sequence[tuple[int, Setting]], nodes: int, ranks: int
) -> list[Rule]:
    """Rules that cover the sizes from 0 to MAX_BYTES."""
    ends = [start - 1 for start, _ in choices[1:]] + [MAX_BYTES]
    return [
        Rule(collective, start, end, *setting, nodes, ranks)
        for (start, setting), end in zip(choices, ends, strict=True)
    ]


def parse(text: str) -> list[Rule]:
    """The lines of a configuration, strictly.

    Raises:
        ClusterError: the plugin would misread a line; the message has its number.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if len(line) > _MAX_LINE:
                raise ValueError(f"{len(line)} characters, the plugin reads {_MAX_LINE}")
            if line and not line.startswith("#"):
                rules.append(_parse_line(line))
        except ValueError as error:
            raise ClusterError(f"line {number}: {error}") from error
    return rules


def _parse_line(line: str) -> Rule:
    fields = [field.strip(" \t") for field in line.split(",")]
    if not 8 <= len(fields) <= 10 or "" in fields:
        raise ValueError(f"8 to 10 fields, not {line!r}")
    collective, low, high, algorithm, protocol, *rest = fields
    names = ((collective, NAMES.values()), (algorithm, ALGORITHMS), (protocol, PROTOCOLS))
    for name, known in names:
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    first, last, channels, nodes, ranks, *_ = map(int, (low, high, *rest))
    if not 0 <= first <= last <= MAX_BYTES:
        raise ValueError(f"sizes from {low} to {high}")
    if channels < 1:
        raise ValueError(f"{channels} channels; the plugin makes that 1, so say how many")
    if min(nodes, ranks) < ANY or 0 in (nodes, ranks):
        raise ValueError(f"{rest[1]} nodes, {rest[2]} ranks")
    return Rule(collective, first, last, algorithm, protocol, channels, nodes, ranks)


def check(text: str) -> list[Rule]:
    """The lines of a configuration that covers every size of every collective.

    Raises:
        ClusterError: the plugin would misread a line, or a size is not covered.
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
