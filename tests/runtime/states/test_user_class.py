"""A compiled model behaves as the user's own: its class, signature, methods and hooks."""

import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import close, fixed, whole
from tests.harness.worlds import run

transformers = pytest.importorskip("transformers")

f64 = torch.float64


class Tagger(nn.Module):
    """Overrides methods of nn.Module, as users' models do."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor | None = None, *, power: int = 2) -> Tensor:
        """The loss, or the tags."""
        out = self.layers(self.frozen(x)) * self.scale
        return out if y is None else (out - y).abs().pow(power).mean()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.frozen.eval()
        return self

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x, y)

    def width(self) -> int:
        return self.layers[0].in_features


def make_tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().double().train()


def look(rank: int, world_size: int) -> None:
    """Class, signature, attributes and hooks are the user's."""
    for zero in (0, 3):
        plain = make_tagger()
        model = autopar.compile(make_tagger(), strategy=fixed(zero), fallback=False)
        x, y = torch.randn(6, 6, dtype=f64), torch.randn(6, 3, dtype=f64)
        assert isinstance(model, Tagger)
        assert isinstance(model, autopar.DistributedModule)
        assert model.__class__ is Tagger
        for of in (lambda m: m.forward, lambda m: type(m).forward, lambda m: m.__class__.forward):
            assert inspect.signature(of(model)) == inspect.signature(of(plain))
        assert (model.scale, model.width()) == (2.0, 6)
        seen: list[str] = []
        model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("call"))
        hooks = [
            m.layers[0].register_forward_hook(lambda m, a, out: out * 3) for m in (model, plain)
        ]
        for _ in range(2):  # with the hook of a layer, then without
            losses = [m.train()(x, y, power=3) for m in (model, plain)]
            close(losses[0], losses[1])
            for loss in losses:
                loss.backward()
            close(whole(model.layers[0].weight.grad), plain.layers[0].weight.grad)
            for hook, m in zip(hooks, (model, plain), strict=True):
                hook.remove()
                m.zero_grad()
        assert seen == ["call", "call"]
        assert not model.frozen.training  # as the user's train() has it
        average = copy.deepcopy(model)
        close(average.full_state_dict(), plain.state_dict())
        copied = pickle.loads(pickle.dumps(model.full_state_dict()))
        close(copied, plain.state_dict())
        train_by_method(model, rank, zero, x, y)


def train_by_method(model: Any, rank: int, zero: int, x: Tensor, y: Tensor) -> None:
    """A method that calls forward runs the plain model, which is told."""
    if zero:
        with model.gathered():
            whole = model.loss(x, y)
        close(model.loss(x, y), whole)
    elif rank == 0:  # the one that warns
        with pytest.warns(autopar.NumericsWarning, match="not reduced over the ranks"):
            model.loss(x, y)


@pytest.mark.slow
def test_a_compiled_model_stands_for_the_users() -> None:
    run(look, 2)


def test_containers_keep_their_methods_and_losses_their_arguments() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    model = autopar.compile(layers, strategy="ddp")
    assert len(model) == 2
    assert model[1] is layers[1]
    assert [*model] == [*layers]
    model = autopar.compile(Tagger(), strategy="ddp", loss_fn=nn.functional.mse_loss)
    assert [*inspect.signature(model.forward).parameters] == ["args", "kwargs"]
    plain: Any = Tagger()
    plain.forward = lambda x, extra: x
    model = autopar.compile(plain, strategy="ddp")
    assert str(inspect.signature(model.forward)) == "(x, extra)"


def make_gpt() -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids)).double().eval()


def use_gpt(rank: int, world_size: int, folder: str) -> None:
    """Generation, files and embeddings of a language model, before training and after a call."""
    plain, ids = make_gpt(), torch.randint(1, 64, (4, 8))
    mask, options = torch.ones_like(ids), {"max_new_tokens": 4, "do_sample": False}
    want = plain.generate(ids, attention_mask=mask, **options)
    wide = make_gpt()
    wide.resize_token_embeddings(70, mean_resizing=False)
    for name in ("ddp", "zero3", "tp", "pp"):
        axes: dict[str, Any] = {"tp": {"tp": 2}, "pp": {"pp": 2, "micro_batches": 2}}.get(name, {})
        strategy = fixed(3 if name == "zero3" else 0, **axes)
        model = autopar.compile(make_gpt(), strategy=strategy, fallback=False)
        with warnings.catch_warnings(action="ignore"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        close(loss, plain(input_ids=ids, labels=ids).loss)
        assert (model.device, model.dtype) == (plain.device, plain.dtype)
        assert model.num_parameters() == plain.num_parameters()
        assert model.get_input_embeddings() is model.transformer.wte
        with model.gathered() as whole_model:
            for each in (whole_model, model):
                assert torch.equal(each.generate(ids, attention_mask=mask, **options), want)
        path = f"{folder}/{name}"
        model.save_pretrained(path)
        loaded = type(plain).from_pretrained(path, dtype=f64)
        close(loaded.state_dict(), plain.state_dict(), 0)
        if name == "ddp":
            model.resize_token_embeddings(70, mean_resizing=False)
            with pytest.raises(autopar.PlanError, match=r"was float64 \[64, 32\] when autopar"):
                model(input_ids=ids, labels=ids, use_cache=False)
        else:
            close(model(input_ids=ids, labels=ids, use_cache=False).loss, loss)  # on all ranks


@pytest.mark.slow
def test_language_models_generate_and_save_as_the_plain_one(tmp_path: Path) -> None:
    run(use_gpt, 2, folder=str(tmp_path))
