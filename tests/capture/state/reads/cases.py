"""Random models that read Python state, trained beside their plain copies across a change."""

from __future__ import annotations

import itertools
import random
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.core.common import notices
from tests.capture.state.reads import places, values
from tests.harness.training import fixed

MODEL = """
{module}

class Model({base}):
    {members}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        {init}

    def forward(self, x{signature}):
        {body}
        number = {number}
        return (torch.tanh(self.layer(x)) * number).square().mean()

def change(m, new):
    {change}
"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """A kind of value at a place, and the change between two calls.

    Attributes:
        change: "rebind", "mutate" or "nothing".
    """

    kind: str
    place: str
    change: str

    def source(self) -> str:
        """Text of the module with the model."""
        kind, place = values.KINDS[self.kind], places.PLACES[self.place]
        number = place.number or kind.read.replace("{v}", f"({place.forward})")
        change = {
            "rebind": place.rebind or f"global G; {place.at} = new",
            "mutate": kind.mutate.replace("{v}", f"({place.at})") or "pass",
            "nothing": "pass",
        }[self.change]
        fields = {
            "module": place.module,
            "members": place.members or "pass",
            "init": place.init,
            "signature": place.signature,
            "body": place.body,
            "number": number,
        }
        fields = {key: _filled(text, kind) for key, text in fields.items()}
        base = "Base" if "class Base" in place.module else "nn.Module"
        return values.HELPERS + MODEL.format(**fields, base=base, change=change)


def _filled(text: str, kind: values.Kind) -> str:
    text = re.sub(r"\{read:([^}]*)\}", lambda m: kind.read.replace("{v}", m[1]), text)
    return text.replace("{first}", kind.first).replace("{{", "{").replace("}}", "}")


def every(*, aside: bool) -> list[Case]:
    """All cases, of the kinds and places kept aside or of the others."""
    found = []
    for (kind, value), place in itertools.product(values.KINDS.items(), places.PLACES):
        if (kind in values.ASIDE or place in places.ASIDE) is not aside:
            continue
        found += [Case(kind, place, "rebind"), Case(kind, place, "nothing")]
        if value.mutate:
            found.append(Case(kind, place, "mutate"))
    return found


def drawn(seed: int, count: int, *, aside: bool) -> list[Case]:
    return random.Random(seed).sample(every(aside=aside), count)


def load(case: Case, folder: Path) -> Iterator[types.ModuleType]:
    """Two fresh modules of a case: for the plain model and for the compiled one."""
    for _ in range(2):
        name = f"state_read_{next(_numbers)}"
        (folder / f"{name}_other.py").write_text(values.HELPERS)
        (folder / f"{name}.py").write_text(case.source().replace("{other}", f"{name}_other"))
        sys.path.insert(0, str(folder))
        try:
            yield __import__(name)
        finally:
            sys.path.remove(str(folder))


def losses(module: types.ModuleType, m: Any, new: Any) -> list[float]:
    """Losses of two steps, one more after the change, and one after that."""
    generator, found = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            module.change(m, new)
        loss = m(torch.randn(6, 3, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def verdict(case: Case, folder: Path) -> tuple[str, str]:
    """The end of a case under its compiled model: exact, told, silent or raw, and a message.

    A case is "void" where the plain model fails.
    """
    one, two = load(case, folder)
    other = values.KINDS[case.kind].other
    try:
        expected = losses(one, one.Model(), eval(other, vars(one)))
    except Exception as error:
        return "void", repr(error)[:200]
    notices.ISSUED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            m = autopar.compile(two.Model(), strategy=fixed(0), fallback=False)
            have = losses(two, m, eval(other, vars(two)))
        except autopar.AutoparError as error:
            return "told", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "raw", f"{type(error).__name__}: {error}"
    told = "; ".join(
        str(w.message) for w in caught if issubclass(w.category, autopar.AutoparWarning)
    )
    if have == pytest.approx(expected, rel=1e-5):
        return ("exact", "") if not told else ("warned", told)
    return ("told", told) if told else ("silent", f"{expected} {have}")
