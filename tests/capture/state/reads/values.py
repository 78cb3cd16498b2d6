"""Kinds of Python values that a forward may read: how each is made, read and changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Source text of a kind of value.

    Attributes:
        first, other: expressions that make two different values of the kind.
        read: expression of the number in the value `{v}`.
        mutate: statement that changes the value `{v}` in place; "" where there is none.
    """

    first: str
    other: str
    read: str
    mutate: str = ""


HELPERS = """
import array, collections, contextvars, ctypes, dataclasses, enum, fractions, functools, types
import numpy as np
import torch
from torch import nn

@dataclasses.dataclass
class Data:
    scale: float = 1.0

@dataclasses.dataclass
class Outer:
    inner: Data = dataclasses.field(default_factory=Data)

@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0

@dataclasses.dataclass(slots=True)
class SlotData:
    scale: float = 1.0

class Slotted:
    __slots__ = ("scale", "more")
    def __init__(self, scale): self.scale = scale

class Derived(Slotted):
    pass

class Plain:
    def __init__(self, scale): self.scale = scale

class Guarded:
    def __init__(self, scale): self._scale = scale
    @property
    def scale(self): return self._scale

class Cached:
    def __init__(self, base): self.base = base
    @functools.cached_property
    def scale(self): return self.base * 1.0

class Forwarding:
    def __init__(self, scale): self._values = {"scale": scale}
    def __getattr__(self, name):
        if name.startswith("_"): raise AttributeError(name)
        return self._values[name]

class Level(enum.Enum):
    LOW = types.SimpleNamespace(scale=1.0)
    HIGH = types.SimpleNamespace(scale=3.0)

class Tagged(enum.Enum):
    LOW = 1
    HIGH = 2
    def __init__(self, number): self.scale = float(number)

class Point(collections.namedtuple("Point", "x y")):
    pass

class Many(list):
    def __init__(self, scale): super().__init__([1]); self.scale = scale

class Number(float):
    pass

class Field(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_double)]

class Described:
    class Scale:
        def __get__(self, one, kind=None): return one.__dict__["hidden"]
    scale = Scale()
    def __init__(self, hidden): self.__dict__["hidden"] = hidden

class Callable:
    def __init__(self, scale): self.scale = scale
    def __call__(self): return self.scale

class WithList:
    __slots__ = ("numbers",)
    def __init__(self, scale): self.numbers = [scale]

def closing(scale):
    box = [scale]
    def read(): return box[0]
    read.box = box
    return read

def rebound(scale):
    def read(): return scale
    def write(new):
        nonlocal scale
        scale = new
    read.write = write
    return read

def numbered(scale):
    var = contextvars.ContextVar("number")
    var.set(scale)
    return var

def partial(scale):
    return functools.partial(lambda *, scale: scale, scale=scale)
"""

KINDS = {
    "int": Kind("1", "3", "{v}"),
    "float": Kind("1.0", "3.0", "{v}"),
    "float_subclass": Kind("Number(1.0)", "Number(3.0)", "float({v})"),
    "tuple": Kind("(1.0, 2)", "(3.0, 2)", "{v}[0]"),
    "tuple_of_list": Kind("([1.0],)", "([3.0],)", "{v}[0][0]", "{v}[0][0] = 3.0"),
    "namedtuple_of_list": Kind(
        "Point([1.0], 0)", "Point([3.0], 0)", "{v}.x[0]", "{v}.x[0] = 3.0"
    ),
    "list": Kind("[1.0]", "[3.0]", "{v}[0]", "{v}[0] = 3.0"),
    "list_grown": Kind("[1.0]", "[1.0, 2.0]", "sum({v})", "{v}.append(2.0)"),
    "list_subclass": Kind("Many(1.0)", "Many(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "dict": Kind("{'a': 1.0}", "{'a': 3.0}", "{v}['a']", "{v}['a'] = 3.0"),
    "dict_of_lists": Kind("{'a': [1.0]}", "{'a': [3.0]}", "{v}['a'][0]", "{v}['a'][0] = 3.0"),
    "set": Kind("{1}", "{1, 2}", "float(len({v}))", "{v}.add(2)"),
    "deque": Kind(
        "collections.deque([1.0])", "collections.deque([3.0])", "{v}[0]", "{v}[0] = 3.0"
    ),
    "defaultdict": Kind(
        "collections.defaultdict(lambda: 1.0)",
        "collections.defaultdict(lambda: 1.0, a=3.0)",
        "{v}.get('a', 1.0)",
        "{v}['a'] = 3.0",
    ),
    "counter": Kind(
        "collections.Counter('a')", "collections.Counter('aa')", "{v}['a']", "{v}.update('a')"
    ),
    "ordered": Kind(
        "collections.OrderedDict(a=1.0)",
        "collections.OrderedDict(a=3.0)",
        "{v}['a']",
        "{v}['a'] = 3.0",
    ),
    "proxy": Kind("types.MappingProxyType({'a': 1.0})", "types.MappingProxyType({'a': 3.0})",
                  "{v}['a']"),
    "namespace": Kind(
        "types.SimpleNamespace(scale=1.0)",
        "types.SimpleNamespace(scale=3.0)",
        "{v}.scale",
        "{v}.scale = 3.0",
    ),
    "data": Kind("Data(1.0)", "Data(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "nested_data": Kind(
        "Outer(Data(1.0))", "Outer(Data(3.0))", "{v}.inner.scale", "{v}.inner.scale = 3.0"
    ),
    "frozen_data": Kind("Frozen(1.0)", "Frozen(3.0)", "{v}.scale"),
    "slot_data": Kind("SlotData(1.0)", "SlotData(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "slots": Kind("Slotted(1.0)", "Slotted(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "slots_and_dict": Kind("Derived(1.0)", "Derived(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "list_in_slot": Kind("WithList(1.0)", "WithList(3.0)", "{v}.numbers[0]",
                         "{v}.numbers[0] = 3.0"),
    "object": Kind("Plain(1.0)", "Plain(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "property": Kind("Guarded(1.0)", "Guarded(3.0)", "{v}.scale", "{v}._scale = 3.0"),
    "cached": Kind("Cached(1.0)", "Cached(3.0)", "{v}.scale", "{v}.__dict__['scale'] = 3.0"),
    "getattr": Kind("Forwarding(1.0)", "Forwarding(3.0)", "{v}.scale",
                    "{v}._values['scale'] = 3.0"),
    "enum": Kind("Level.LOW", "Level.HIGH", "{v}.value.scale", "{v}.value.scale = 3.0"),
    "enum_attribute": Kind("Tagged.LOW", "Tagged.HIGH", "{v}.scale", "{v}.scale = 3.0"),
    "numpy": Kind("np.array([1.0])", "np.array([3.0])", "float({v}[0])", "{v}[0] = 3.0"),
    "numpy_scalar": Kind("np.float64(1.0)", "np.float64(3.0)", "float({v})"),
    "bytearray": Kind("bytearray(b'\\x01')", "bytearray(b'\\x03')", "float({v}[0])", "{v}[0] = 3"),
    "array": Kind(
        "array.array('d', [1.0])", "array.array('d', [3.0])", "{v}[0]", "{v}[0] = 3.0"
    ),
    "callable": Kind("Callable(1.0)", "Callable(3.0)", "{v}()", "{v}.scale = 3.0"),
    "method": Kind("Callable(1.0).__call__", "Callable(3.0).__call__", "{v}()",
                   "{v}.__self__.scale = 3.0"),
    "closure": Kind("closing(1.0)", "closing(3.0)", "{v}()", "{v}.box[0] = 3.0"),
    "cell": Kind("rebound(1.0)", "rebound(3.0)", "{v}()", "{v}.write(3.0)"),
    "lambda": Kind("(lambda: 1.0)", "(lambda: 3.0)", "{v}()"),
    "default": Kind("(lambda a=1.0: a)", "(lambda a=3.0: a)", "{v}()", "{v}.__defaults__ = (3.0,)"),
    "kwdefault": Kind("(lambda *, a=1.0: a)", "(lambda *, a=3.0: a)", "{v}()",
                      "{v}.__kwdefaults__['a'] = 3.0"),
    "code": Kind("(lambda: 1.0)", "(lambda: 3.0)", "{v}()",
                 "{v}.__code__ = (lambda: 3.0).__code__"),
    "partial": Kind("partial(1.0)", "partial(3.0)", "{v}()", "{v}.keywords['scale'] = 3.0"),
    "partial_argument": Kind(
        "functools.partial(lambda a: a[0], [1.0])", "functools.partial(lambda a: a[0], [3.0])",
        "{v}()", "{v}.args[0][0] = 3.0"),
    "contextvar": Kind("numbered(1.0)", "numbered(3.0)", "{v}.get()", "{v}.set(3.0)"),
    "fraction": Kind("fractions.Fraction(1)", "fractions.Fraction(3)", "float({v})"),
    "ctypes": Kind("ctypes.c_double(1.0)", "ctypes.c_double(3.0)", "{v}.value", "{v}.value = 3.0"),
    "structure": Kind("Field(1.0)", "Field(3.0)", "{v}.scale", "{v}.scale = 3.0"),
    "userdict": Kind("collections.UserDict(a=1.0)", "collections.UserDict(a=3.0)", "{v}['a']",
                     "{v}['a'] = 3.0"),
    "chain": Kind("collections.ChainMap({'a': 1.0})", "collections.ChainMap({'a': 3.0})",
                  "{v}['a']", "{v}['a'] = 3.0"),
    "memory": Kind("memoryview(bytearray(b'\\x01'))", "memoryview(bytearray(b'\\x03'))",
                   "float({v}[0])", "{v}[0] = 3"),
    "descriptor": Kind("Described(1.0)", "Described(3.0)", "{v}.scale", "{v}.hidden = 3.0"),
    "tensor": Kind("torch.tensor(1.0)", "torch.tensor(3.0)", "{v}", "{v}.fill_(3.0)"),
    "list_of_tensors": Kind("[torch.tensor(1.0)]", "[torch.tensor(3.0)]", "{v}[0]",
                            "{v}[0].fill_(3.0)"),
    "frozen_parameter": Kind(
        "nn.Parameter(torch.tensor(1.0), requires_grad=False)",
        "nn.Parameter(torch.tensor(3.0), requires_grad=False)", "{v}", "{v}.data.fill_(3.0)"),
    "size": Kind("torch.Size([1])", "torch.Size([3])", "float({v}[0])"),
    "iterator": Kind("__import__('itertools').count(1.0)", "__import__('itertools').count(3.0)",
                     "next({v})"),
    "cycle_in_a_list": Kind("[__import__('itertools').cycle([1.0, 2.0])]",
                            "[__import__('itertools').cycle([3.0, 4.0])]", "next({v}[0])"),
    "random": Kind("__import__('random').Random(1)", "__import__('random').Random(2)",
                   "{v}.random()", "{v}.seed(9)"),
}  # fmt: skip

ASIDE = {"ctypes", "structure", "userdict", "chain", "memory", "descriptor", "random", "method"}
"""Kinds that nobody looked at while the guards were written."""
