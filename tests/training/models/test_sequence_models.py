"""Encoder-decoders of transformers with one row a rank train as on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is a test extra: pip install .[test]")

import autopar
from tests.harness.architectures import (
    ARCHITECTURES,
    HEADS,
    INNER,
    LAYERS,
    SEQ,
    VOCAB,
    WIDTH,
    Architecture,
)
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import run


def _sequences(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (rows, SEQ), generator=generator)
    labels = torch.randint(3, VOCAB, (rows, SEQ - 2), generator=generator)
    return {"input_ids": ids, "labels": labels}


_BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,  # drawn in Python: cannot be captured
    "decoder_layerdrop": 0.0,
}
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def _like_bart(name: str, model: str) -> Architecture:
    return Architecture(name, model, _BART, _DROPOUTS, _sequences)


MODELS = {
    it.name: it
    for it in (
        ARCHITECTURES["t5"],
        _like_bart("bart", "BartForConditionalGeneration"),
        _like_bart("mbart", "MBartForConditionalGeneration"),
        _like_bart("pegasus", "PegasusForConditionalGeneration"),
        _like_bart("m2m_100", "M2M100ForConditionalGeneration"),
        _like_bart("marian", "MarianMTModel"),
    )
}


def train(rank: int, world_size: int, name: str, strategy: Any) -> None:
    model = MODELS[name]
    pair = Pair(model.make, strategy=strategy)
    for step in range(2):
        batch = model.batch(world_size, step)
        want, have = pair.plain(**batch), pair.parallel(**batch)
        close(have, want)
        want.backward()
        have.backward()
        pair.step()
    pair.check_state()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_row_a_rank_trains_exactly(name: str) -> None:
    run(train, 2, name=name, strategy=fixed(0))


@pytest.mark.slow
def test_t5_in_two_stages() -> None:
    run(train, 2, name="t5", strategy=autopar.Strategy(pp=2))
