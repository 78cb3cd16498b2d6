"""The tuner configuration: written whole, read as NCCL's plugin reads it."""

import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.nccl.model import Tuning
from autopar.cost_model.nccl.tuner import ANY, MAX_BYTES, NAMES, check, export, parse
from tests.cost_model.nccl.test_model import ONE_H100, TWO_A100

TWO = Tuning.of(TWO_A100)


def match(rules, collective, nbytes, nodes, ranks, unavailable=()):
    """The setting that the plugin applies: its first line that matches."""
    return next(
        (rule.algorithm, rule.protocol, rule.channels)
        for rule in rules
        if rule.collective == collective
        and rule.min_bytes <= nbytes <= rule.max_bytes
        and rule.nodes in (ANY, nodes)
        and rule.ranks in (ANY, ranks)
        and (rule.algorithm, rule.protocol) not in unavailable
    )


def test_every_size_of_every_collective_has_a_line_with_channels():
    text = export([TWO, Tuning.of(ONE_H100)])
    rules = check(text)
    assert all(len(line) < 255 for line in text.splitlines())
    for ours, theirs in NAMES.items():
        for nbytes in (0, 1, 1000, 2**20 + 1, 2**33, MAX_BYTES):
            for nodes, ranks in ((2, 16), (1, 8), (7, 21)):  # the last is no one's
                assert match(rules, theirs, nbytes, nodes, ranks)[2] >= 1
        choice = TWO.pick(ours, 2**20 + 1)
        assert match(rules, theirs, 2**20 + 1, 2, 16) == (
            choice.algorithm,
            choice.protocol,
            choice.channels,
        )
    assert match(rules, "allreduce", 2**20, 1, 8, {("nvls", "simple")})[0] == "ring"


def test_measured_combinations_decide_where_there_are_some():
    sizes = (2**10, 2**30)
    forced = {
        ("all_reduce", "ring", "ll"): Curve(sizes, (1e-5, 1e-1)),
        ("all_reduce", "ring", "simple"): Curve(sizes, (1e-4, 1e-2)),
    }
    text = export([TWO], forced)
    assert "# allreduce, 16 ranks on 2 nodes: measured: 2 combinations" in text
    assert "# broadcast, 16 ranks on 2 nodes: modelled" in text
    rules = parse(text)
    assert [match(rules, "allreduce", n, 2, 16)[1] for n in sizes] == ["ll", "simple"]
    with pytest.raises(ClusterError, match="does not run nvls/simple here"):
        export([TWO], {("all_reduce", "nvls", "simple"): Curve(sizes, (1e-5, 1e-2))})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,0,9,rings,simple,4,2,16", "'rings' is none of tree, ring"),
        ("all_reduce,0,9,ring,simple,4,2,16", "'all_reduce' is none of"),
        ("allreduce,0,9,ring,simple,-1,2,16", "the plugin makes that 1"),
        ("allreduce,9,0,ring,simple,4,2,16", "sizes from 9 to 0"),
        ("allreduce,0,9,ring,simple,4,2", "8 to 10 fields"),
        (" # indented", "8 to 10 fields"),
        ("# " + "x" * 300, "302 characters"),
    ],
)
def test_what_the_plugin_would_misread_is_refused(line, message):
    with pytest.raises(ClusterError, match=f"line 2.*{message}"):
        parse(f"# header\n{line}\n")


def test_gaps_are_found():
    lines = export([TWO]).splitlines(keepends=True)
    specific = [line for line in lines if not line.rstrip().endswith("-1,-1")]
    check("".join(specific))
    at = next(i for i, line in enumerate(specific) if line.startswith("allreduce,") and i > 5)
    size = specific[at].split(",")[1]
    with pytest.raises(ClusterError, match=f"allreduce of {size} bytes over 16 ranks on 2 nodes"):
        check("".join(specific[:at] + specific[at + 1 :]))
    with pytest.raises(ClusterError, match="broadcast of 0 bytes"):
        check("".join(line for line in specific if not line.startswith("broadcast")))
