"""Train a causal language model of transformers in a loop of one's own.

torchrun --nproc-per-node 2 examples/causal_lm.py
"""

import argparse

import torch
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--strategy", default="zero3")
args = parser.parse_args()

torch.manual_seed(0)
sizes = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": 4}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes)
)
text = torch.tensor(list(__doc__.encode() * 20))  # bytes are tokens; take a tokenizer and data set


def batch(rows: int = 8, length: int = 64) -> dict[str, torch.Tensor]:
    starts = torch.randint(len(text) - length, (rows, 1))
    tokens = text[starts + torch.arange(length)]
    return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels itself


model = autopar.compile(model, example_inputs=batch(), strategy=args.strategy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, args.steps + 1):
    loss = model(**batch()).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
