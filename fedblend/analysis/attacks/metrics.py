"""How like the originals rebuilt images are: MSE, PSNR and SSIM, each image matched with the original it fits best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Scale

WINDOW = 7
"""Pixels of the side of SSIM's window."""


@dataclass(frozen=True)
class Likeness:
    """Of each original image, how like it what was rebuilt of it is, float64 [B] each; ``rebuilt`` says what that is.

    ``rebuilt`` int64 [B] are rows of the rebuilt images.
    """

    mse: np.ndarray
    psnr: np.ndarray
    ssim: np.ndarray
    rebuilt: np.ndarray


def compare(original: torch.Tensor, rebuilt: torch.Tensor, scale: Scale) -> Likeness:
    """Compare images [B, C, H, W] on the model's scale.

    An attack on several images rebuilds them in no order, so they are matched one to one, such that the sum of their
    MSE is least. MSE is taken on the model's scale, PSNR and SSIM on pictures in [0, 1].
    """
    _require_alike(original, rebuilt)
    original, rebuilt = original.detach().cpu().double(), rebuilt.detach().cpu().double()
    order = match(original, rebuilt)
    rebuilt = rebuilt[torch.from_numpy(order)]
    pictures, made = (scale.to_unit(images) for images in (original, rebuilt))
    return Likeness(mse(original, rebuilt), psnr(pictures, made), ssim(pictures, made), order)


def match(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """The row of ``rebuilt`` that goes with each original, int64 [B]: one to one, with the least sum of MSE."""
    from scipy.optimize import linear_sum_assignment  # a second's import that trainings do without

    apart = (original[:, None] - rebuilt[None]).square().flatten(2).mean(2)
    return linear_sum_assignment(apart.numpy())[1].astype(np.int64)


def mse(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Mean squared difference of the pixels of each image, float64 [B]."""
    _require_alike(original, rebuilt)
    return (original.double() - rebuilt.double()).square().flatten(1).mean(1).cpu().numpy()


def psnr(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """-10 log10(MSE) of pictures in [0, 1], in decibels, float64 [B]; infinite for the same picture."""
    with np.errstate(divide="ignore"):
        return -10 * np.log10(mse(original, rebuilt))


def ssim(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Structural similarity of pictures in [0, 1] (Wang et al. 2004), mean over channels, float64 [B], at most 1.

    With a uniform window of 7 x 7, sample covariances and a range of 1, as scikit-image computes it by default.
    Raises :class:`FedblendError` for pictures smaller than the window.
    """
    from skimage.metrics import structural_similarity  # a second's import that trainings do without

    _require_alike(original, rebuilt)
    if min(original.shape[-2:]) < WINDOW:
        raise FedblendError(
            f"images: SSIM looks at windows of {WINDOW} x {WINDOW} pixels, but they are of shape "
            f"{list(original.shape[1:])}; valid: at least {WINDOW} x {WINDOW}"
        )
    pairs = zip(original.double().cpu().numpy(), rebuilt.double().cpu().numpy(), strict=True)
    return np.array([structural_similarity(a, b, win_size=WINDOW, data_range=1.0, channel_axis=0) for a, b in pairs])


def _require_alike(original: torch.Tensor, rebuilt: torch.Tensor) -> None:
    if original.shape != rebuilt.shape or original.dim() != 4:
        raise FedblendError(
            f"images: of shapes {list(original.shape)} and {list(rebuilt.shape)}; valid: the same [B, C, H, W]"
        )
