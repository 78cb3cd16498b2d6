"""Places from which a forward may read a Python value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Source text of a place.

    Attributes:
        forward: expression of the value in forward; `{get}` is replaced by its read.
        at: expression of the place after `m` was made, to assign to and to mutate; "" where a
            value cannot be assigned.
        module: statements of the module.
        init: statements of the model's `__init__`.
        members: text of the model's class.
        body: statements at the begin of forward.
        signature: parameters of forward after `x`.
        number: expression in forward of the number itself, where a function reads the value.
        rebind: statement that puts the value `new` in the place; the assignment to `at` if "".
    """

    at: str
    forward: str = ""
    module: str = ""
    init: str = "pass"
    members: str = ""
    body: str = "pass"
    signature: str = ""
    number: str = ""
    rebind: str = ""


PLACES = {
    "global": Place("G", "G", "G = {first}"),
    "helper": Place("G", module="G = {first}\ndef helper(): return {read:G}", number="helper()"),
    "helper_of_helper": Place(
        "G",
        module="G = {first}\ndef inner(): return {read:G}\ndef helper(): return inner()",
        number="helper()",
    ),
    "closure": Place(
        "HANDLE()",
        module="""
def build():
    value = {first}
    def get(): return {read:value}
    def handle(): return value
    def rebind(new):
        nonlocal value
        value = new
    return get, handle, rebind
GET, HANDLE, REBIND = build()
""",
        number="GET()",
        rebind="REBIND(new)",
    ),
    "attribute": Place("m.value", "self.value", init="self.value = {first}"),
    "submodule": Place("m.layer.value", "self.layer.value", init="self.layer.value = {first}"),
    "attribute_of_object": Place(
        "m.config.value",
        "self.config.value",
        init="self.config = Plain(1); self.config.value = {first}",
    ),
    "attribute_of_slots": Place(
        "m.config.more",
        "self.config.more",
        init="self.config = Slotted(1); self.config.more = {first}",
    ),
    "slot_of_global": Place("G.more", "G.more", "G = Slotted(1)\nG.more = {first}"),
    "item_of_list": Place("m.values[0]", "self.values[0]", init="self.values = [{first}]"),
    "item_of_dict": Place("G['a']", "G['a']", "G = {{'a': {first}}}"),
    "class_attribute": Place("Model.value", "self.value", members="value = {first}"),
    "type_attribute": Place("Model.value", "type(self).value", members="value = {first}"),
    "other_class": Place(
        "Settings.value", "Settings.value", "class Settings:\n    value = {first}"
    ),
    "inherited": Place(
        "Settings.value",
        "Later.value",
        "class Settings:\n    value = {first}\nclass Later(Settings):\n    pass",
    ),
    "metaclass": Place(
        "Meta.value",
        "Later.value",
        "class Meta(type):\n    value = {first}\nclass Later(metaclass=Meta):\n    pass",
    ),
    "default": Place(
        "helper.__defaults__[0]",
        module="def helper(value={first}): return {read:value}",
        number="helper()",
        rebind="helper.__defaults__ = (new,)",
    ),
    "keyword_default": Place(
        "helper.__kwdefaults__['value']",
        module="def helper(*, value={first}): return {read:value}",
        number="helper()",
    ),
    "default_of_forward": Place(
        "Model.forward.__defaults__[0]",
        "value",
        signature=", value={first}",
        rebind="Model.forward.__defaults__ = (new,)",
    ),
    "default_of_method": Place(
        "Model.scale.__defaults__[0]",
        members="def scale(self, value={first}): return {read:value}",
        number="self.scale()",
        rebind="Model.scale.__defaults__ = (new,)",
    ),
    "keyword_of_partial": Place(
        "FN.keywords['value']",
        module="""
def helper(value): return {read:value}
FN = functools.partial(helper, value={first})
""",
        number="FN()",
    ),
    "argument_of_partial": Place(
        "m.fn.args[0]",
        module="def helper(value): return {read:value}",
        init="self.fn = functools.partial(helper, {first})",
        number="self.fn()",
        rebind="m.fn = functools.partial(helper, new)",
    ),
    "partial_of_partial": Place(
        "m.fn.keywords['value']",
        module="def helper(a, value): return {read:value}",
        init="self.fn = functools.partial(functools.partial(helper, 1), value={first})",
        number="self.fn()",
    ),
    "attribute_of_function": Place(
        "helper.value",
        module="def helper(): return {read:helper.value}\nhelper.value = {first}",
        number="helper()",
    ),
    "other_module": Place(
        "other.value", "other.value", "import {other} as other\nother.value = {first}"
    ),
    "imported_in_forward": Place(
        "other.value",
        "late.value",
        "import {other} as other\nother.value = {first}",
        body="import {other} as late",
    ),
    "function_of_other_module": Place(
        "other.value",
        module="""
import {other} as other
other.value = {first}
exec('''def get(): return {read:value}''', other.__dict__)
""",
        number="other.get()",
    ),
    "contextvar": Place(
        "VAR.get()",
        "VAR.get()",
        "VAR = contextvars.ContextVar('VAR')\nVAR.set({first})",
        rebind="VAR.set(new)",
    ),
    "bound_method": Place(
        "m.get.__self__.value",
        module="""
class Holder:
    def __init__(self, value): self.value = value
    def get(self): return {read:self.value}
""",
        init="self.get = Holder({first}).get",
        number="self.get()",
    ),
    "method_of_global": Place(
        "H.value",
        module="""
class Holder:
    def get(self): return {read:self.value}
H = Holder()
H.value = {first}
""",
        number="H.get()",
    ),
    "operator": Place(
        "m.factor.value",
        module="class Factor:\n    def __rmul__(self, h): return h * {read:self.value}",
        init="self.factor = Factor(); self.factor.value = {first}",
        number="(1.0 * self.factor)",
    ),
    "without_gradients": Place(
        "G",
        module="G = {first}\n@torch.no_grad()\ndef helper(): return {read:G}",
        number="helper()",
    ),
    "wrapped": Place(
        "G",
        module="""
G = {first}
def twice(f):
    @functools.wraps(f)
    def call(): return f()
    return call
@twice
def helper(): return {read:G}
""",
        number="helper()",
    ),
    "property_of_model": Place(
        "m._value",
        members="@property\n    def scale(self): return {read:self._value}",
        init="self._value = {first}",
        number="self.scale",
    ),
    "property_of_global": Place(
        "G",
        module="G = {first}",
        members="@property\n    def scale(self): return {read:G}",
        number="self.scale",
    ),
    "static_method": Place(
        "G",
        module="G = {first}",
        members="@staticmethod\n    def scale(): return {read:G}",
        number="self.scale()",
    ),
    "inherited_method": Place(
        "G",
        module="G = {first}\nclass Base(nn.Module):\n    def scale(self): return {read:G}",
        members="def scale(self): return super().scale()",
        number="self.scale()",
    ),
    "table_of_functions": Place(
        "G",
        module="G = {first}\nTABLE = {{'a': lambda: {read:G}}}",
        number="TABLE['a']()",
    ),
    "function_in_attribute": Place(
        "G",
        module="G = {first}\ndef helper(): return {read:G}",
        init="self.fns = [helper]",
        number="self.fns[0]()",
    ),
    "made_by_function": Place(
        "G",
        module="G = {first}\ndef make():\n    def inner(): return {read:G}\n    return inner",
        number="make()()",
    ),
    "returned": Place("G", "current()", "G = {first}\ndef current(): return G"),
    "getattr": Place("m.config.value", "getattr(self.config, 'val' + 'ue')",
                     init="self.config = Plain(1); self.config.value = {first}"),
    "getattr_of_class": Place("Settings.value", "getattr(Settings, 'val' + 'ue')",
                              "class Settings:\n    value = {first}"),
    "getattr_of_module": Place("other.value", "getattr(other, 'val' + 'ue')",
                               "import {other} as other\nother.value = {first}"),
    "globals": Place("G", "globals()['G']", "G = {first}"),
    "thread_local": Place(
        "LOCAL.value",
        "LOCAL.value",
        "import threading\nLOCAL = threading.local()\nLOCAL.value = {first}",
    ),
    "generator": Place("G", module="G = {first}",
                       number="sum({read:G} for _ in range(1))"),
    "context_manager": Place(
        "G",
        module="""
G = {first}
class Scaled:
    def __enter__(self): return {read:G}
    def __exit__(self, *error): pass
""",
        body="with Scaled() as number: pass",
        number="number",
    ),
    "weak_reference": Place(
        "KEPT.value",
        "WEAK().value",
        "import weakref\nKEPT = Plain(1)\nKEPT.value = {first}\nWEAK = weakref.ref(KEPT)",
    ),
    "hook": Place(
        "G",
        module="G = {first}\ndef hook(module, given, result): return result * {read:G}",
        init="self.layer.register_forward_hook(hook)",
        number="1.0",
    ),
    "autograd_function": Place(
        "G",
        module="""
G = {first}
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h): return h * {read:G}
    @staticmethod
    def backward(ctx, g): return g
""",
        number="Scale.apply(x)",
    ),
}  # fmt: skip

ASIDE = {
    "metaclass", "operator", "context_manager", "weak_reference", "thread_local",
    "table_of_functions", "autograd_function", "inherited_method", "getattr_of_module",
}  # fmt: skip
"""Places that nobody looked at while the guards were written."""
