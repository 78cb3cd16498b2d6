"""What nccl-tests wrote, in all its forms, and what is not it."""

import json

import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.nccl.nccl_tests import read_tables

RANKS = "".join(
    f"#  Rank {rank:2} Group  0 Pid  42 on  host{rank // 2} device  {rank % 2} [0x07] NVIDIA H100\n"
    for rank in range(4)
)
NEW = f"""\
# nccl-tests version 2.17.1 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 8388608 step: 4(factor) warmup iters: 1 iters: 20
#
# Using devices
{RANKS}#
#                                       out-of-place                in-place
#      size    count   type  redop  root    time  algbw  busbw #wrong    time  algbw  busbw #wrong
#       (B) (elements)                (us) (GB/s) (GB/s)           (us) (GB/s) (GB/s)
          0        0  float    sum    -1    0.10   0.00   0.00      0    0.10   0.00   0.00      0
    1048576   262144  float    sum    -1   50.00  20.97  31.46      0   52.00  20.16  30.25      0
    8388608  2097152  float    sum    -1  200.00  41.94  62.91      0  200.00  41.94  62.91    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 47.1825
#
# Collective test concluded: all_reduce_perf
"""
OLD = """\
NCCL version 2.7.8+cuda11.0
#                                             out-of-place                in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576         65536    half    40.00   19.66   19.66  5e-07    41.00   19.18   19.18  0e+00
     8388608        524288    half   160.00   39.32   39.32  5e-07   160.00   39.32   39.32  0e+00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 29
"""
"""All-gather over 4 ranks before June 2020: algbw has the factor in it already."""


def write(folder, text, name="run.log"):
    path = folder / name
    path.write_text(text)
    return path


def test_the_new_columns(tmp_path):
    (table,) = read_tables(write(tmp_path, NEW))
    assert (table.collective, table.ranks, table.ranks_per_node) == ("all_reduce", 4, 2)
    assert (table.dtype, table.version, table.device) == ("float32", "nccl 2.28.9", "NVIDIA H100")
    assert table.bytes == (1048576, 8388608)  # 0 bytes send nothing
    assert table.seconds == pytest.approx((50e-6, 200e-6))
    assert table.in_place_s == pytest.approx((52e-6, 200e-6))


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", "12:"])
def test_prefixes_of_launchers_are_dropped(tmp_path, prefix):
    noisy = "host0:42:42 [0] NCCL INFO Bootstrap\n" + NEW
    text = "".join(prefix + line for line in noisy.splitlines(keepends=True))
    assert read_tables(write(tmp_path, text)) == read_tables(write(tmp_path, NEW))


def test_old_columns_are_recomputed_from_time(tmp_path):
    path = write(tmp_path, OLD, "a100_all-gather.txt")
    (table,) = read_tables(path, ranks_per_node=4)
    assert (table.collective, table.ranks, table.dtype) == ("all_gather", 4, "float16")
    assert table.seconds == pytest.approx((40e-6, 160e-6))
    assert table.version == "nccl 2.7.8"


def test_a_run_of_one_process_under_blank_headings(tmp_path):
    ranks = "".join(
        f"#   Rank  {rank} Pid 167261 on localhost device  {rank} [0x00] A100-SXM4-40GB\n"
        for rank in range(8)
    )
    heading = OLD.splitlines()[2].replace("type ", "type   redop")
    rows = """\
           0             0   float         1.35  0.00  0.00  N/A  1.34  0.00  0.00  N/A
          32             1   float         89.00  0.00  0.00  N/A  85.13  0.00  0.00  N/A
    16777216        524288   float         160.4  104.62  91.55  N/A  158.8  105.64  92.43  N/A
  4294967296     134217728   float         16860  254.74  222.90  N/A  16678  257.53  225.34  N/A
# Out of bounds values : 0 OK
"""
    path = write(tmp_path, f"{ranks}#\n{heading}\n{rows}", "nccl_alltoall.log")
    (table,) = read_tables(path)
    assert (table.collective, table.ranks, table.ranks_per_node) == ("all_to_all", 8, 8)
    assert (table.device, table.bytes) == ("A100-SXM4-40GB", (32, 2**24, 2**32))
    assert table.seconds == pytest.approx((89e-6, 160.4e-6, 16860e-6))


@pytest.mark.parametrize(
    ("headings", "values"),
    [("redop    root", ""), ("redop    root", "none"), ("redop    root", "-1"), ("redop", "")],
)
def test_headings_over_nothing_are_left_out(tmp_path, headings, values):
    text = OLD.replace("type     time", f"type   {headings}     time")
    text = text.replace("half  ", f"half   {values}  ").replace("5e-07", "0").replace("0e+00", "0")
    path = write(tmp_path, text.replace(" error", "#wrong"), "all_gather.txt")
    assert read_tables(path, ranks_per_node=4)[0].seconds == pytest.approx((40e-6, 160e-6))


def test_more_columns_as_rccl_has_them_and_several_runs_in_a_file(tmp_path):
    text = NEW.replace("#wrong\n", "#wrong  algo  proto  nchannels  timestamp\n")
    text = text.replace("  0\n", "  0  Ring  LL  4  2026-01-01 10:00:00\n")
    text = text.replace("N/A\n", "N/A  Ring  LL  4  2026-01-01 10:00:00\n")
    second = NEW.replace("all_reduce", "reduce_scatter").replace("31.46", "15.73")
    second = second.replace("62.91", "31.46")
    tables = read_tables(write(tmp_path, text + second))
    assert [table.collective for table in tables] == ["all_reduce", "reduce_scatter"]
    assert tables[0].seconds == tables[1].seconds
    assert [table.ranks for table in tables] == [4, 4]


def in_json(**changes):
    rows = [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "sum",
            "root": "    -1",
            "out_of_place": {"time": time, "alg_bw": 1.0, "bus_bw": bus, "nwrong": 0.0},
            "in_place": {"time": time, "alg_bw": 1.0, "bus_bw": bus, "nwrong": None},
        }
        for size, time, bus in ((1048576, 50.0, 31.45728), (8388608, 200.0, 62.91456))
    ]
    devices = [
        {"rank": r, "hostname": f"h{r // 2}", "device_info": "NVIDIA H100"} for r in range(4)
    ]
    data = {
        "version": 1,
        "args": ["./build/all_reduce_perf", "-J", "out.json"],
        "nccl_version": 22809,
        "config": {"devices": devices},
        "results": rows,
    }
    return json.dumps({**data, **changes})


def test_json(tmp_path):
    (table,) = read_tables(write(tmp_path, in_json(), "out.json"))
    (text,) = read_tables(write(tmp_path, NEW))
    same = ("collective", "ranks", "ranks_per_node", "dtype", "bytes", "device", "version")
    assert [getattr(table, name) for name in same] == [getattr(text, name) for name in same]
    assert table.seconds == pytest.approx(text.seconds)


CSV = """\
# source: https://example.org/log
# ranks: 16 (busbw/algbw=1.875)
# nodes: 2
# collective: all_reduce
# note: very noisy below 4MB - use >=8MB rows only
size_bytes,count,dtype,oop_time_us,oop_algbw,oop_busbw,ip_time_us,ip_algbw,ip_busbw
1024,256,float,900.0,0.00,0.00,90.0,0.01,0.02
8388608,2097152,float,906.8,9.25,17.34,847.9,9.89,18.55
16777216,4194304,float,2041.5,8.22,15.41,1618.6,10.37,19.44
"""


def test_csv_and_what_its_header_says(tmp_path):
    (table,) = read_tables(write(tmp_path, CSV, "t.csv"))
    assert (table.ranks, table.ranks_per_node, table.least_bytes) == (16, 8, 2**23)
    assert table.source == "https://example.org/log"
    assert table.curve().bytes == (8388608, 16777216)
    assert "below 8388608 bytes left out" in table.measured().provenance


def test_times_that_do_not_repeat_are_refused_where_they_are_many(tmp_path):
    bare = CSV.replace("use >=8MB rows only", "")
    (one,) = read_tables(write(tmp_path, bare, "t.csv"))
    assert one.curve().bytes == (8388608, 16777216)
    assert "1024 bytes left out" in one.measured().provenance
    (two,) = read_tables(write(tmp_path, bare.replace("847.9", "84.79"), "t.csv"))
    with pytest.raises(
        ClusterError, match=r"repeat at 2 of 3 sizes: 1024 bytes take 0\.0009 s out"
    ):
        two.curve()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NEW[: NEW.index("200.00")], r"run\.log: line 16: 5 columns where 13 are expected"),
        (NEW[: NEW.index("# Out of")], "line 16: nothing follows this row"),
        ("make: *** [all] Error 2\n", "no table of nccl-tests"),
        ("", "no table of nccl-tests"),
        (NEW.replace("   50.00", "  -50.00"), "line 15: the time at 1048576 bytes is -50.00 us"),
        (NEW.replace("   50.00", "     nan"), "line 15: the time at 1048576 bytes is nan us"),
        (NEW.replace("   50.00", "    fast"), "line 15: the time is 'fast', no number"),
        (NEW.replace("      0   52", "      3   52"), "line 15: 3 wrong values"),
        (NEW.replace("(us)", "(ms)"), r"line 13: times are not in \(us\)"),
        (NEW.replace("  time", "  cputime"), "line 12: the table has no column time: this is CPU"),
        (NEW.replace(RANKS, RANKS * 2), "busbw x time / size is that of 4 ranks, not"),
        (NEW.replace("all_reduce", "all_gather"), r"not the 0\.750 of 4 ranks"),
        (NEW.replace("8388608  2097152  float", "8388608 2097152 half"), "several types"),
        (in_json()[:-200], "not JSON, was it cut short"),
        (in_json(results=None), "no output of nccl-tests -J"),
        (in_json(results=[{"size": 8, "type": "float"}]), "result 1: no out-of-place"),
        (CSV[:-10], r"line 9: 7 columns where 9|line 9: 8 columns where 9|ip_time"),
        ("size_bytes,count\n8,2\n", "line 2: the table has no column dtype"),
    ],
)
def test_truncated_foreign_and_contradictory_files_are_refused_with_the_place(tmp_path, text, says):
    with pytest.raises(ClusterError, match=says):
        read_tables(write(tmp_path, text))


def test_what_is_not_stated_must_be_given(tmp_path):
    bare = NEW.replace(RANKS, "").replace("all_reduce_perf", "perf")
    with pytest.raises(ClusterError, match="does not say which collective"):
        read_tables(write(tmp_path, bare))
    with pytest.raises(ClusterError, match="does not list the hosts: give ranks_per_node"):
        read_tables(write(tmp_path, bare), collective="all_reduce")
    (table,) = read_tables(write(tmp_path, bare), collective="all_reduce", ranks_per_node=4)
    assert table.ranks == 4  # the ratio of the bandwidths tells
    with pytest.raises(ClusterError, match="a table of broadcast does not tell the ranks"):
        read_tables(write(tmp_path, bare), collective="broadcast", ranks_per_node=4)
    with pytest.raises(ClusterError, match=r"that of 4 ranks, not the 1\.750 of 8 ranks"):
        read_tables(write(tmp_path, bare), collective="all_reduce", ranks=8, ranks_per_node=8)
