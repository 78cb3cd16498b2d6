"""A small model with its loss, a loader and an optimizer."""

import torch

import autopar  # noqa: F401


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, y):
        return (self.layer(x) - y).square().mean()


model = Model()
x, y = torch.randn(8, 4), torch.randn(8, 1)
example, loader = (x, y), [(x, y)] * 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
