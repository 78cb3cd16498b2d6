"""Models whose forward reads or changes Python state, trained beside their plain copies."""

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.harness.reference import relative_error
from tests.harness.training import fixed, whole

Between = Callable[[Any, int], None]
STEPS = 4
SCALE = 1.0
SEEN: list[Tensor] = []


class Settings:
    """Numbers of a class, as configurations often are."""

    scale = 1.0


class Tuned:
    """An object with a property of a number of its class."""

    _factor = 1.0

    @property
    def factor(self) -> float:
        return self._factor


def reset() -> None:
    """Gives globals and classes their first values."""
    global SCALE
    SCALE = Settings.scale = Tuned._factor = 1.0


class Layer(nn.Module):
    """A linear layer and a loss; what forward does with Python is in `step`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.act: nn.Module = nn.Tanh()
        self.tuned = Tuned()
        self.register_buffer("ema", torch.zeros(4))
        self.last = torch.zeros(4).double()
        self.queue = torch.zeros(6, 4).double()
        self.first: Any = None
        self.cache: dict[int, Tensor] = {}
        self.k, self.ks, self.ready, self.aux = 1, [1, 2], False, None
        self.config = types.SimpleNamespace(inner=Inner())
        self.mode = Mode.MEAN

    def step(self, h: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.act(self.layer(x)))
        return (h * self.step(h)).square().mean()


@dataclasses.dataclass
class Inner:
    scale: float = 1.0


class Mode(enum.Enum):
    MEAN = 1
    SUM = 2


def model(step: Callable[[Any, Tensor], Any]) -> type[Layer]:
    """A Layer with this step."""
    return type(step.__name__.title().replace("_", ""), (Layer,), {"step": step})


def rebinds_a_buffer(self: Any, h: Tensor) -> Any:
    old = self.ema
    self.ema = 0.5 * self.ema + h.detach().mean(0)
    return 1 + old


def rebinds_and_mutates(self: Any, h: Tensor) -> Any:
    self.ema.mul_(0.5)
    self._buffers["ema"] = self.ema + h.detach().mean(0)
    return 1 + self.ema


def rebinds_an_attribute(self: Any, h: Tensor) -> Any:
    old, self.last = self.last, h.detach().mean(0)
    return 1 + old


def mutates_an_attribute(self: Any, h: Tensor) -> Any:
    scale = 1 + self.last.sum()
    self.last.mul_(0.5).add_(h.detach().mean(0))
    return scale


def queues(self: Any, h: Tensor) -> Any:
    similar = (h @ self.queue.T).mean()
    self.queue = torch.cat([self.queue[1:], h.detach().mean(0)[None]])
    return 1 + similar


def begins_with_none(self: Any, h: Tensor) -> Any:
    mean = h.detach().mean(0)
    self.first = mean if self.first is None else 0.5 * self.first + mean
    return 1 + self.first


def fills_a_cache(self: Any, h: Tensor) -> Any:
    if 4 not in self.cache:
        self.cache[4] = torch.arange(4, dtype=h.dtype)
    return self.cache[4]


def keeps_a_loss(self: Any, h: Tensor) -> Any:
    self.aux = h.abs().mean()
    return 1.0


def sets_a_flag(self: Any, h: Tensor) -> Any:
    scale = 1.0 if self.ready else 2.0
    self.ready = True
    return scale


def counts(self: Any, h: Tensor) -> Any:
    self.k += 1
    return 1.0


CARRIED = [
    rebinds_a_buffer,
    rebinds_and_mutates,
    rebinds_an_attribute,
    mutates_an_attribute,
    queues,
]


def warms(self: Any, h: Tensor) -> Any:
    self.k = min(4, self.k + 2)
    return self.k / 4


def takes_turns(self: Any, h: Tensor) -> Any:
    self.mode = Mode.SUM if self.mode is Mode.MEAN else Mode.MEAN
    return 2.0 if self.mode is Mode.SUM else 1.0


REPLAYED = [
    begins_with_none,
    fills_a_cache,
    keeps_a_loss,
    sets_a_flag,
    counts,
    warms,
    takes_turns,
]


class Numbered(nn.Module):
    """A block that rebinds its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.0
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x)) * self.scale - self.ema
        if self.scale < 2:
            self.ema = 0.5 * self.ema + h.detach().mean(0)
        return x + h


class Blocks(nn.Module):
    """Blocks that are traced once where they do not change their buffers."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Numbered() for _ in range(5))
        for block in self.blocks:
            block.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def reads_everything(self: Any, h: Tensor) -> Any:
    scale = self.k * self.ks[0] * self.config.inner.scale * SCALE
    scale *= Settings.scale * self.tuned.factor
    return scale * (2.0 if self.mode is Mode.SUM else 1.0) * (3.0 if self.layer.training else 1.0)


def set_k(m: Any, step: int) -> None:
    m.k = step


def set_item(m: Any, step: int) -> None:
    m.ks[0] = step


def set_config(m: Any, step: int) -> None:
    m.config.inner.scale = float(step)


def set_mode(m: Any, step: int) -> None:
    m.mode = Mode.SUM if step % 2 else Mode.MEAN


def set_global(m: Any, step: int) -> None:
    global SCALE
    SCALE = float(step)


def set_class(m: Any, step: int) -> None:
    Settings.scale = float(step)


def set_property(m: Any, step: int) -> None:
    Tuned._factor = float(step)


def set_probability(m: Any, step: int) -> None:
    m.drop.p = 1.0 if step % 2 else 0.0


def eval_a_part(m: Any, step: int) -> None:
    m.layer.train(step % 2 == 0)


def freeze_a_part(m: Any, step: int) -> None:
    m.layer.bias.requires_grad_(step % 2 == 1)


def add_a_hook(m: Any, step: int) -> None:
    if step == 1:
        m.layer.register_forward_hook(lambda module, given, result: result * 2)
        m.layer.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def add_a_backward_hook(m: Any, step: int) -> None:
    def triple(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if g is None else g * 3 for g in grad_input)

    if step == 1:
        m.act.register_full_backward_hook(triple)


def hook_a_parameter(m: Any, step: int) -> None:
    if step == 1:
        m.layer.weight.register_hook(lambda gradient: gradient * 2)


def replace_forward(m: Any, step: int) -> None:
    if step == 1:
        m.act.forward = types.MethodType(lambda self, x: torch.sin(x), m.act)


def replace_a_module(m: Any, step: int) -> None:
    if step == 1:
        m.act = nn.Sigmoid()


CHANGES = [
    set_k,
    set_item,
    set_config,
    set_mode,
    set_global,
    set_class,
    set_property,
    set_probability,
    eval_a_part,
    freeze_a_part,
    add_a_hook,
    add_a_backward_hook,
    hook_a_parameter,
    replace_forward,
    replace_a_module,
]


def set_scales(m: Any, step: int) -> None:
    for block in m.blocks:
        block.scale = float(step + 2)
    m.blocks[3].scale = 7.0


def train(m: Any, between: Between | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the state and tensors at the end."""
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for step in range(STEPS):
        if between is not None and step:
            between(m, step)
        loss = m(torch.randn(6, 4, dtype=torch.float64, generator=generator))
        if getattr(m, "aux", None) is not None:
            loss = loss + m.aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: whole(value).detach() for name, value in m.state_dict().items()}
    for name in ("last", "queue", "first", "aux"):
        if isinstance(value := getattr(m, name, None), Tensor):
            state[name] = value.detach()
    return losses, state


def alike(
    make: Callable[[], Any], between: Between | None = None, zero: int = 0, **options: Any
) -> Any:
    """Trains a model plain and compiled: all is the same. Returns both."""
    plain = make().double()
    want = train(plain, between)
    reset()
    m = autopar.compile(make().double(), strategy=fixed(zero, **options), fallback=False)
    have = train(m, between)
    reset()
    errors = {n: relative_error(have[1][n], want[1][n]) for n in want[1]}
    errors |= {f"step {i}": relative_error(have[0][i], want[0][i]) for i in range(STEPS)}
    assert have[1].keys() == want[1].keys()
    assert max(errors.values()) < 1e-9, errors
    return plain, m
