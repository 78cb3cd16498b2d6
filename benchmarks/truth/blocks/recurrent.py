"""Recurrent layers, over time and over the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


@register("sequence")
class Lstm(nn.Module):
    """An LSTM, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.rnn(h)[0]


@register("sequence")
class TimeMajorLstm(nn.Module):
    """An LSTM over time-major sequences, with its last states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True)

    def forward(self, h: Tensor) -> Tensor:
        out, (_, cell) = self.rnn(h.transpose(0, 1))
        return out.transpose(0, 1) + cell.sum(0).repeat(1, 2)[:, None]


@register("sequence")
class Gru(nn.Module):
    """A GRU of two layers, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.rnn(h)[0]


@register("sequence")
class TimeMajorGru(nn.Module):
    """A GRU over time-major sequences from a learnt first state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        first = self.first.expand(-1, h.shape[0], -1).contiguous()
        return self.rnn(h.transpose(0, 1), first)[0].transpose(0, 1)


@register("sequence")
class Rnn(nn.Module):
    """A plain recurrent layer of rectified units."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.rnn(h)[1].transpose(0, 1)


@register("sequence")
class CellLoop(nn.Module):
    """A cell in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        state = torch.zeros(h.shape[0], WIDTH, dtype=h.dtype)
        states = []
        for t in range(h.shape[1]):
            state = self.cell(h[:, t], state)
            states.append(state)
        return torch.stack(states, 1)


@register("rows")
class LstmOverRows(nn.Module):
    """The batch as one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.rnn(h[:, None])[0][:, 0]


@register("rows")
class CellOverRows(nn.Module):
    """A cell in a loop over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        state, states = h.new_zeros(1, WIDTH), []
        for row in h:
            state = self.cell(row[None], state)
            states.append(state)
        return torch.cat(states)
