"""Similarity of rebuilt images to the originals: MSE, PSNR and SSIM, after a one-to-one matching."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedblend.core.context import Scale
from fedblend.core.errors import FedblendError, missing_package

WINDOW = 7  # Side of SSIM's window in pixels

C1, C2 = 0.01**2, 0.03**2
"""SSIM's constants for images in [0, 1]: (K1 L)^2 and (K2 L)^2 with K1 = 0.01, K2 = 0.03, L = 1 (Wang et al. 2004)."""


@dataclass(frozen=True)
class ImageSimilarity:
    """Similarity of each original image to its matched rebuilt image."""

    mse: np.ndarray
    """Mean squared error on the model's scale, float64 [B]."""
    psnr: np.ndarray
    """Peak signal-to-noise ratio in decibels, float64 [B]."""
    ssim: np.ndarray
    """Structural similarity, float64 [B]."""
    order: np.ndarray
    """Row of the rebuilt image that is matched with each original, int64 [B]."""


def compare(original: torch.Tensor, rebuilt: torch.Tensor, scale: Scale) -> ImageSimilarity:
    """Compare images [B, C, H, W] on the model's scale.

    An attack rebuilds several images in an arbitrary order. :func:`match` therefore pairs them one to one. MSE is
    computed on the model's scale, PSNR and SSIM on images in [0, 1].
    """
    _require_same_shape(original, rebuilt)
    original, rebuilt = original.detach().cpu().double(), rebuilt.detach().cpu().double()
    order = match(original, rebuilt)
    rebuilt = rebuilt[torch.from_numpy(order)]
    unit, rebuilt_unit = (scale.to_unit(images) for images in (original, rebuilt))
    return ImageSimilarity(mse(original, rebuilt), psnr(unit, rebuilt_unit), ssim(unit, rebuilt_unit), order)


def require_scipy() -> None:
    """Raise :class:`FedblendError` if scipy is not installed; an attack calls this before its slow part."""
    if importlib.util.find_spec("scipy") is None:
        raise missing_package("an attack, to match rebuilt images with originals,", "scipy", "analysis")


def match(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Return the row of ``rebuilt`` matched with each original, int64 [B]: one to one, with the least sum of MSE.

    Raises :class:`FedblendError` if scipy (extra ``analysis``) is not installed.
    """
    require_scipy()
    from scipy.optimize import linear_sum_assignment  # slow import (1 s), needed only here

    distances = (original[:, None] - rebuilt[None]).square().flatten(2).mean(2)
    return linear_sum_assignment(distances.numpy())[1].astype(np.int64)


def mse(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Return the mean squared difference of the pixels of each image, float64 [B]."""
    _require_same_shape(original, rebuilt)
    return (original.double() - rebuilt.double()).square().flatten(1).mean(1).cpu().numpy()


def psnr(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Return -10 log10(MSE) of images in [0, 1], in dB, float64 [B]; infinite for equal images."""
    with np.errstate(divide="ignore"):
        return -10 * np.log10(mse(original, rebuilt))


def ssim(original: torch.Tensor, rebuilt: torch.Tensor) -> np.ndarray:
    """Return the structural similarity of images in [0, 1] (Wang et al. 2004), mean over channels, float64 [B].

    At each place of the window, with means m, sample variances v and the sample covariance c of the two images x, y:
    (2 m_x m_y + C1) (2 c + C2) / ((m_x^2 + m_y^2 + C1) (v_x + v_y + C2)). The result is the mean over all places where
    the window lies inside the image. The window is uniform, 7 x 7: scikit-image's defaults, and its numbers. Raises
    :class:`FedblendError` for images smaller than the window.
    """
    _require_same_shape(original, rebuilt)
    if min(original.shape[-2:]) < WINDOW:
        raise FedblendError(
            f"images: shape {list(original.shape[1:])} is too small for SSIM's windows of {WINDOW} x {WINDOW} pixels; "
            f"valid: at least {WINDOW} x {WINDOW}"
        )
    x, y = original.detach().cpu().double(), rebuilt.detach().cpu().double()
    mean_x, mean_y, xx, yy, xy = (functional.avg_pool2d(z, WINDOW, stride=1) for z in (x, y, x * x, y * y, x * y))
    sample = WINDOW**2 / (WINDOW**2 - 1)
    variances = sample * (xx - mean_x**2) + sample * (yy - mean_y**2)
    covariance = sample * (xy - mean_x * mean_y)
    above = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
    below = (mean_x**2 + mean_y**2 + C1) * (variances + C2)
    return (above / below).flatten(1).mean(1).numpy()


def _require_same_shape(original: torch.Tensor, rebuilt: torch.Tensor) -> None:
    if original.shape != rebuilt.shape or original.dim() != 4:
        raise FedblendError(
            f"images: shapes {list(original.shape)} and {list(rebuilt.shape)} differ or are not [B, C, H, W]; "
            "valid: equal shapes [B, C, H, W]"
        )
