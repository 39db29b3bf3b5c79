"""Attacks that rebuild a client's images from what it sent, and measures of how well they did."""

from fedblend.attacks.inversion import ATTACKS, Rebuilt, invert
from fedblend.attacks.labels import infer_labels, read_off
from fedblend.attacks.metrics import Likeness, compare, mse, psnr, ssim
from fedblend.attacks.moment import Moment
from fedblend.attacks.outcome import Attacked, attack_run, attacks_on
from fedblend.attacks.scene import Scene, stage
from fedblend.attacks.search import DLG, IDLG, Attack, InvGrad
from fedblend.attacks.victim import Steps, Victim

__all__ = [
    "ATTACKS",
    "DLG",
    "IDLG",
    "Attack",
    "Attacked",
    "InvGrad",
    "Likeness",
    "Moment",
    "Rebuilt",
    "Scene",
    "Steps",
    "Victim",
    "attack_run",
    "attacks_on",
    "compare",
    "infer_labels",
    "invert",
    "mse",
    "psnr",
    "read_off",
    "ssim",
    "stage",
]
