"""Attacks that rebuild a client's images from what it sent, and measures of how well they did."""

from fedblend.analysis.attacks.inversion import ATTACKS, Rebuilt, invert
from fedblend.analysis.attacks.labels import infer_labels, read_off
from fedblend.analysis.attacks.metrics import Likeness, compare, mse, psnr, ssim
from fedblend.analysis.attacks.outcome import Attacked, attack_run, attacks_on
from fedblend.analysis.attacks.search import DLG, IDLG, Attack, InvGrad
from fedblend.analysis.attacks.setup import AttackSetup, prepare
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.attacks.victim import Steps, Victim

__all__ = [
    "ATTACKS",
    "DLG",
    "IDLG",
    "Attack",
    "AttackSetup",
    "Attacked",
    "InvGrad",
    "Likeness",
    "Rebuilt",
    "RoundSnapshot",
    "Steps",
    "Victim",
    "attack_run",
    "attacks_on",
    "compare",
    "infer_labels",
    "invert",
    "mse",
    "prepare",
    "psnr",
    "read_off",
    "ssim",
]
