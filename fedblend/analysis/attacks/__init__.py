"""Attacks that rebuild a client's images from its update, and measures of the rebuilt images."""

from fedblend.analysis.attacks.attack_setup import AttackSetup, prepare
from fedblend.analysis.attacks.image_similarity import ImageSimilarity, compare, mse, psnr, ssim
from fedblend.analysis.attacks.inversion import ATTACKS, Reconstruction, invert
from fedblend.analysis.attacks.labels import infer_labels, recover_input
from fedblend.analysis.attacks.outcome import AttackResult, attack_run, read_attacks
from fedblend.analysis.attacks.search import DLG, IDLG, Attack, InvGrad
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.attacks.victim import Steps, Victim

__all__ = [
    "ATTACKS",
    "DLG",
    "IDLG",
    "Attack",
    "AttackResult",
    "AttackSetup",
    "ImageSimilarity",
    "InvGrad",
    "Reconstruction",
    "RoundSnapshot",
    "Steps",
    "Victim",
    "attack_run",
    "compare",
    "infer_labels",
    "invert",
    "mse",
    "prepare",
    "psnr",
    "read_attacks",
    "recover_input",
    "ssim",
]
