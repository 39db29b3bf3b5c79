"""An LSTM for next-character prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.models.layers import Staged


class OneHotEmbedding(nn.Module):
    """An embedding of one-hot vectors [B, T, V], or of mixtures and means of them: x @ E.

    A mean of embeddings is the mean of one-hot vectors times E. So a mixture of inputs is a mixture of embeddings, and
    a mean that was sent once stays valid when E changes.
    """

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, V] to [B, T, size]."""
        return x @ self.weight


class LSTMLayer(nn.Module):
    """One LSTM layer made of single operations, which can be differentiated twice on every device.

    PyTorch's fused kernels (cuDNN, oneDNN) have no second derivative, which FedMix's Taylor term needs.
    Inputs [B, T, in] give hidden states [B, T, hidden], or only the last, [B, hidden].
    """

    def __init__(self, inputs: int, hidden: int, last_only: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        self.last_only = last_only
        # PyTorch's LSTM draws all its weights from U(-1/sqrt(hidden), 1/sqrt(hidden)).
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer over time, from a zero state."""
        hidden = x.new_zeros(x.shape[0], self.recurrent.in_features)
        cell = hidden
        states = []
        for projected in self.input(x).unbind(1):
            i, f, g, o = (projected + self.recurrent(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        return hidden if self.last_only else torch.stack(states, 1)


@part("model", "lstm")
class LSTM:
    """FedMix's network for Shakespeare: embedding (size 8, LEAF), 2 LSTM layers of 256, linear layer."""

    embedding: Count = 8
    """Size of a character's embedding."""
    hidden: Count = 256
    """Hidden units of each layer."""
    layers: Count = 2
    """Number of LSTM layers."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for one-hot text of ``shape`` = (time, vocabulary)."""
        if len(shape) != 2:
            found = f"this data set's samples have shape {list(shape)}"
            raise FedblendError(f"model.name: 'lstm' takes text (time x vocabulary); {found}")
        stages: list[nn.Module] = [OneHotEmbedding(shape[1], self.embedding)]
        for i in range(self.layers):
            inputs = self.hidden if i else self.embedding
            stages.append(LSTMLayer(inputs, self.hidden, last_only=i == self.layers - 1))
        return Staged(*stages, nn.Linear(self.hidden, outputs))
