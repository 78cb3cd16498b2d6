"""Parsers of nccl-tests' outputs: text of any launcher, JSON of `-J`, and CSV.

Text and JSON: NVIDIA/nccl-tests (src/util.cu, src/common.cu) from 2019 on, and ROCm/rccl-tests,
which has more columns. CSV: a table copied from such a text, with `# key: value` lines above the
columns size_bytes, count, dtype, oop_time_us, oop_algbw, oop_busbw, ip_time_us, ip_algbw, ip_busbw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from autopar.core.common.documents import read
from autopar.cost_model.cost import ClusterError

PROGRAMS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "broadcast",
    "reduce",
    "sendrecv",
    "gather",
    "scatter",
    "hypercube",
)
_PREFIX = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:)\s?")
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})_perf")
_RANK = re.compile(r"#\s+Rank\s+\d+\s.*?\son\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+)")
_CODE = re.compile(r"nccl-library=(\d+)")
_SPELT = re.compile(r"\b(R?N?CCL) version\s*:?\s*(\d[\w.]*)")
_COLUMNS = ("size", "count", "type", "time", "busbw")
_CSV_COLUMNS = ("size_bytes", "count", "dtype", "oop_time_us")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LEAST = re.compile(r"use >=\s*(\d+)\s*([KMG]?)B rows only")


class RawRow(NamedTuple):
    """One size, as text of the file; empty where the file has nothing.

    Times are in microseconds, out of place and in place. `wrong` is the number of wrong elements,
    or "N/A". `line` counts results in JSON.
    """

    line: int
    size: str
    dtype: str
    time: str
    busbw: str = ""
    in_place: str = ""
    wrong: str = ""


@dataclass
class RawRun:
    """One run of one test program, as text of the file; empty or None where the file has nothing.

    `hosts` has the host of each rank. `least_bytes` is the smallest usable size in bytes. `ended`
    tells whether the file continues after the last row as expected.
    """

    collective: str | None = None
    ranks: int | None = None
    hosts: list[str] = field(default_factory=list)
    nodes: int | None = None
    device: str = ""
    version: str = ""
    source: str = ""
    hardware: str = ""
    least_bytes: int = 0
    rows: list[RawRow] = field(default_factory=list)
    ended: bool = False


def parse(text: str) -> list[RawRun]:
    """The runs in a file of any of the three formats."""
    if text.lstrip().startswith("{"):
        return [_parse_json(text)]
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    if any(line.startswith("size_bytes,") for line in lines):
        return [_parse_csv(lines)]
    return list(_parse_text(lines))


def _parse_text(lines: Iterable[str]) -> Iterator[RawRun]:
    run, columns = RawRun(), []  # type: tuple[RawRun, list[str]]
    for number, line in enumerate(lines, 1):
        words = line.lstrip("# ").split()
        if words[:3] == ["size", "count", "type"]:
            if run.rows:
                yield run
                run = RawRun(run.collective, None, run.hosts, None, run.device, run.version)
            columns = words
            if missing := [name for name in _COLUMNS if name not in words]:
                hint = ": this is CPU time, run without -C" if "cputime" in words else ""
                raise ClusterError(f"line {number}: the table has no column {missing[0]}{hint}")
        elif line.lstrip().startswith("#") or not (columns and words and words[0].isdigit()):
            next_run = _RANK.search(line) or (_PROGRAM.search(line) and "concluded" not in line)
            if run.ended and next_run:
                yield run
                run, columns = RawRun(), []
            _note(run, line, words, number)
        else:
            run.rows.append(_row(columns, words, number))
    if columns:
        yield run


def _note(run: RawRun, line: str, words: Sequence[str], number: int) -> None:
    """Reads facts about the run from a line that is no row."""
    if words[:1] == ["(B)"] and "(us)" not in words:
        raise ClusterError(f"line {number}: times are not in (us): {line.strip()!r}")
    if match := _PROGRAM.search(line):
        run.collective = match[1]
    if match := _RANK.search(line):
        run.hosts.append(match[1])
        run.device = match[2].strip()
    if match := _CODE.search(line):
        run.version = f"nccl {_version(int(match[1]))}"
    if match := _SPELT.search(line):
        run.version = f"{match[1].lower()} {match[2]}"
    if run.rows and ("Avg bus bandwidth" in line or "Out of bounds values" in line):
        run.ended = True


def _row(columns: Sequence[str], words: list[str], number: int) -> RawRow:
    names = list(columns)
    if len(words) == len(names) + 1 and names[-1] == "timestamp":
        words = words[:-1]  # a date and a time of day
    if len(words) < len(names):
        blank = _blank(len(names) - len(words), words)
        names = [name for name in names if name not in blank]
    if len(words) != len(names):
        raise ClusterError(
            f"line {number}: {len(words)} columns where {len(columns)} are expected, was it cut "
            f"short? {' '.join(words)[:60]!r}"
        )
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    for name, word in zip(names, words, strict=True):
        (second if name in first else first)[name] = word
    size, dtype, time, busbw = (first[name] for name in ("size", "type", "time", "busbw"))
    in_place, wrong = second.get("time", ""), first.get("#wrong", "")
    return RawRow(number, size, dtype, time, busbw, in_place, wrong)


def _blank(short: int, words: Sequence[str]) -> tuple[str, ...]:
    """Columns that a row leaves blank, as some programs do."""
    if short == 1 and len(words) > 3:
        return ("redop",) if re.fullmatch(r"-?\d[\d.e+]*", words[3]) else ("root",)
    return ("redop", "root") if short == 2 else ()


def _version(code: int) -> str:
    """The version of an NCCL_VERSION_CODE: 22809 is 2.28.9, 2708 is 2.7.8."""
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def _parse_json(text: str) -> RawRun:
    try:
        data = json.loads(text, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"not JSON, was it cut short? {error}") from error
    advice = "Is this what nccl-tests -J wrote?"
    output = read(data, _Output, "no output of nccl-tests -J", ClusterError, advice)
    program, devices = _PROGRAM.search(str(output.args[:1])), output.config.devices
    code = output.nccl_version
    return RawRun(
        collective=program[1] if program else None,
        hosts=[device.hostname for device in devices],
        device=devices[0].device_info if devices else "",
        version=f"nccl {_version(code)}" if isinstance(code, int) else "",
        rows=[_json_row(row, number) for number, row in enumerate(output.results, 1)],
        ended=True,
    )


class _Device(msgspec.Struct):
    hostname: str
    device_info: str


class _Config(msgspec.Struct):
    devices: list[_Device] = []


class _Output(msgspec.Struct):
    args: list[str]
    results: list[dict[str, Any]]
    config: _Config = msgspec.field(default_factory=_Config)
    nccl_version: Any = None


def _json_row(row: Mapping[str, Any], number: int) -> RawRow:
    try:
        first, second = row["out_of_place"], row.get("in_place") or {}
        size, dtype, time = str(row["size"]), row["type"], str(first["time"])
        in_place, wrong = str(second.get("time", "")), str(first.get("nwrong") or 0)
        return RawRow(number, size, dtype, time, str(first["bus_bw"]), in_place, wrong)
    except (KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"result {number}: no out-of-place {error}") from error


def _parse_csv(lines: Sequence[str]) -> RawRun:
    notes: dict[str, str] = {}
    found = RawRun(ended=True)
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            key, _, value = line.lstrip("# ").partition(":")
            notes[key.strip()] = value.strip()
        elif not columns:
            columns = line.strip().split(",")
        elif line.strip():
            found.rows.append(_csv_row(columns, line.strip().split(","), number))
    found.collective = notes.get("collective")
    found.ranks = _leading_int(notes.get("ranks", ""))
    found.nodes = _leading_int(notes.get("nodes", ""))
    found.source = notes.get("source", "")
    found.hardware = notes.get("hardware", "")
    if match := _LEAST.search(notes.get("note", "")):
        found.least_bytes = int(match[1]) * _UNITS[match[2]]
    return found


def _csv_row(columns: Sequence[str], words: Sequence[str], number: int) -> RawRow:
    if len(words) != len(columns):
        raise ClusterError(
            f"line {number}: {len(words)} columns where {len(columns)} are expected, was it cut "
            f"short?"
        )
    row = dict(zip(columns, words, strict=True))
    if missing := [name for name in _CSV_COLUMNS if name not in row]:
        raise ClusterError(f"line {number}: the table has no column {missing[0]}")
    size, dtype, time = row["size_bytes"], row["dtype"], row["oop_time_us"]
    return RawRow(number, size, dtype, time, row.get("oop_busbw", ""), row.get("ip_time_us", ""))


def _leading_int(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None
