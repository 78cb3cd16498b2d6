"""`mutate`: breaks a file in a way drawn at random."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Mutation = Callable[[Path, random.Random], Any]

NOBODY = 65534


class Payload:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


EXPRESSIONS = (
    "__import__('os').system('true')",
    "autopar.cli.script:launch",
    "posix:system",
    "aten.from_file.default",
    "FakeTensor((9223372036854775807, 9), (1, 1), 0, torch.float32, device('cpu'))",
    "Constant('AAAA', (1000000000000,), torch.float32, device('cuda:7'))",
    "(" * 5000 + ")" * 5000,
    "-" * 100_000 + "1",
    "../../outside",
    "/etc/hostname",
    "\0",
    "\ud800",
    "",
)
"""Text that hostile files hold where names and expressions are expected."""

VALUES: tuple[Any, ...] = (None, True, -1, 0, 1.5, 1e308, 10**18, 10**4000, float("nan"), [], {})


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 3, 20])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _noise(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice([0, 1, 100, 10_000])))


def _shuffled(path: Path, draw: random.Random) -> None:
    """The content with one part of it somewhere else."""
    data = path.read_bytes()
    begin, end = sorted(draw.randrange(len(data)) for _ in range(2))
    path.write_bytes(data[end:] + data[begin:end] + data[:begin])


def _deep(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(["[", '{"a":']) * draw.choice([900, 100_000]))


def _huge(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        os.truncate(path, 1 << 42)  # of holes
    else:
        path.write_text("[" + "0," * (1 << 25) + "0]")


def _in_place(make: Callable[[Path], Any]) -> Mutation:
    """Something else under the name of the file."""

    def change(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return change


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")  # names of sockets are short
        os.close(folder)


def _linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def _closed(path: Path, draw: random.Random) -> None:
    path.chmod(0)


def _folder_closed(path: Path, draw: random.Random) -> None:
    path.parent.chmod(0)


def _pickled(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        path.write_bytes(pickle.dumps(Payload()))
    else:
        with path.open("wb") as file:
            torch.save({"model": Payload()}, file)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    yield path
    items = document.items() if isinstance(document, dict) else ()
    for key, value in enumerate(document) if isinstance(document, list) else items:
        yield from places(value, (*path, key))


def _value(path: Path, draw: random.Random) -> None:
    """Another value at a random place of a JSON document, or none."""
    document = copy.deepcopy(json.loads(path.read_text()))
    *outer, last = draw.choice([place for place in places(document) if place])
    inner = document
    for key in outer:
        inner = inner[key]
    if draw.random() < 0.2:
        del inner[last]
    elif isinstance(inner[last], str) and draw.random() < 0.7:
        inner[last] = draw.choice(EXPRESSIONS)
    else:
        inner[last] = copy.deepcopy(draw.choice([*VALUES, *EXPRESSIONS]))
    path.write_text(json.dumps(document))


def _header(path: Path, draw: random.Random) -> None:
    """Another value in the header of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    inner = path.with_name("header")
    inner.write_bytes(data[8 : 8 + size])
    _value(inner, draw)
    header = inner.read_bytes()
    inner.unlink()
    length = draw.choice([len(header), len(header), 1 << 62])
    path.write_bytes(length.to_bytes(8, "little") + header + data[8 + size :])


ANY: dict[str, Mutation] = {
    "cut short": _cut,
    "bits flipped": _flip,
    "noise": _noise,
    "shuffled": _shuffled,
    "deep": _deep,
    "huge": _huge,
    "a pickle that runs code": _pickled,
    "a pipe": _in_place(os.mkfifo),
    "a socket": _in_place(_socket),
    "a folder": _in_place(Path.mkdir),
    "a link to a pipe": _in_place(_linked_pipe),
    "a link to a device": _in_place(lambda path: path.symlink_to("/dev/zero")),
    "a link to a log of the kernel": _in_place(lambda path: path.symlink_to("/proc/kmsg")),
    "a link in a circle": _in_place(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _in_place(lambda path: path.symlink_to("nothing")),
    "a link to another file": _in_place(lambda path: path.symlink_to("/etc/hostname")),
    "nobody may read it": _closed,
    "nobody may look into its folder": _folder_closed,
}
WRONG_VALUE = "another value"


def mutate(path: Path, draw: random.Random) -> str:
    """Break a file; return how."""
    inside = {".json": _value, ".safetensors": _header}.get(path.suffix)
    if inside is not None and draw.random() < 0.5:
        inside(path, draw)
        return WRONG_VALUE
    how = draw.choice(sorted(ANY))
    ANY[how](path, draw)
    return how
