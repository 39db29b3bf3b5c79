"""Models as users write them, each with something that an engine may get wrong; inputs are images [1, 8, 8]."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 8


class Standardised(nn.Conv2d):
    """A convolution of standardised weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class OneConvolution(nn.Module):
    """A convolution, ReLU and a dense layer."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first = layer or nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Linear(4 * SIDE * SIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu().flatten(1))


class SubclassOfLayer(OneConvolution):
    """Its convolution has a forward of its own."""

    def __init__(self) -> None:
        super().__init__(Standardised(1, 4, 3, padding=1))


def _half(module: nn.Module, inputs: Any, made: torch.Tensor) -> torch.Tensor:
    return made * 0.5


class Hooked(OneConvolution):
    """A hook halves what its convolution gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(_half)


class _Row(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self[0](x)
        return self[2](self[1](first)) + first.mean()


def _block() -> list[nn.Module]:
    return [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


class SubclassOfRow(nn.Module):
    """Its row of layers has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.last = _Row(*_block()), nn.Linear(SIDE * SIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.row(x).flatten(1))


class LayerByLayer(nn.Module):
    """It goes through a row of layers itself and reads what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.last = nn.Sequential(*_block()), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for i, layer in enumerate(self.row):
            x = layer(x)
            kept = x if i == 1 else kept
        return self.last(kept.mean((2, 3)) + x.mean((2, 3)))


class InBlocks(nn.Module):
    """Two blocks that are computed as one layer each."""

    def __init__(self) -> None:
        super().__init__()
        second = [nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.ReLU()]
        self.row, self.last = nn.Sequential(*_block(), *second), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.row(x).mean((2, 3)))


class ReadTwice(nn.Module):
    """What a dense layer gives for rows is read in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, 5, bias=False)
        self.one, self.other = nn.Linear(5 * SIDE, 3), nn.Linear(5 * SIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x[:, 0])
        return self.one(made.relu().flatten(1)) + self.other(made.flatten(1).sigmoid())


class Dense(nn.Module):
    """Two dense layers with something between."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x.flatten(1))))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


class WrittenZeros(Dense):
    """Zeros that are written into, and then added."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(x)
        zeros[:, 0] = 3 * x[:, 1]
        return (zeros + x).tanh()


class Frozen(Dense):
    """Its first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class AllFrozen(Dense):
    """No layer of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Buffered(Dense):
    """It scales by a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).tanh()


class Unreached(Dense):
    """It has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class TwoOfOneGradient(nn.Module):
    """Two weights that are added, and so have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(0.1 * torch.randn(3, SIDE * SIDE))
        self.other = nn.Parameter(0.1 * torch.randn(3, SIDE * SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.flatten(1), self.one + self.other)


class Counting(Buffered):
    """It changes a buffer while it trains."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale += 0.1
        return super().between(x)


class Remembering(Dense):
    """It keeps a running mean in a buffer, part of its weights or not; ``anew`` by another tensor each time."""

    seen: torch.Tensor

    def __init__(self, anew: bool = False, persistent: bool = False) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("seen", torch.zeros(6), persistent)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = 0.5 * self.seen + 0.5 * x.detach().mean(0)
            self.seen = mean if self.anew else self.seen.copy_(mean)
        return (x - self.seen).tanh()


class Clamping(Dense):
    """It clamps its own weights while it trains."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.last.weight.copy_(self.last.weight.clamp(-0.1, 0.1))
        return x.tanh()


class Tied(Dense):
    """Two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.weight = self.second.weight

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(x).tanh())


class DroppingTwice(Dense):
    """One dropout layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.drop(x).tanh())


class DroppingAcross(DroppingTwice):
    """Its dropout layer sees samples along the second axis."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x[None])[0]


class DroppingInARow(Dense):
    """One dropout layer has two places in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(0.5)
        self.row = nn.Sequential(drop, nn.Linear(6, 6), drop)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(x).tanh()


class Padded(nn.Module):
    """An embedding of black and white pixels, of which black is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(2, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words((x.flatten(1) > 0).long()).mean(1))


class Recurrent(nn.Module):
    """A fused LSTM over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LSTM(SIDE, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x[:, 0])[0][:, -1])


class Attentive(nn.Module):
    """Attention over the rows of an image; ``fused`` by PyTorch's kernel, which has no second derivative, or not."""

    def __init__(self, fused: bool = True, outputs: int = 3) -> None:
        super().__init__()
        self.fused = fused
        self.attention = nn.MultiheadAttention(SIDE, 2, batch_first=True)
        self.last = nn.Linear(SIDE * SIDE, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, 0]
        seen, _ = self.attention(rows, rows, rows, need_weights=not self.fused)
        return self.last(seen.flatten(1))


class Softmaxed(OneConvolution):
    """It gives probabilities, where a loss takes logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(1)


class Backbone(nn.Module):
    """A frozen body with batch norms, dropout and a buffer; then a batch norm that trains in part, and a head."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        plain = nn.BatchNorm1d(6, affine=False)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 6), nn.BatchNorm1d(6), plain, nn.Dropout(0.5))
        self.body.requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, outputs)
        self.norm.weight.requires_grad_(False)
        self.body.register_buffer("mean", torch.linspace(-0.1, 0.1, SIDE * SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x + self.body.get_buffer("mean").view(SIDE, SIDE)).relu()))


class LowRank(nn.Module):
    """A frozen dense layer with an adapter (LoRA), named as in peft."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T


class Adapted(nn.Module):
    """Dense layers, all but the last frozen and with adapters."""

    def __init__(self, width: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.middle = LowRank(nn.Linear(SIDE * SIDE, width)), LowRank(nn.Linear(width, width))
        self.last = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x.flatten(1)).tanh()).tanh())


class Transformer(nn.Module):
    """A vision transformer of two layers of width 32 with adapters of peft, whose head is trained, too."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        import peft
        import transformers

        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        images = {"image_size": SIDE, "patch_size": 4, "num_channels": 1, "num_labels": outputs}
        dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(**small, **images, **dropouts))
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        self.net = peft.get_peft_model(vit, lora)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(pixel_values=x).logits
