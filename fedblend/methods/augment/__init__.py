"""Augmentation on tensors, for batches and stacks of clients: AugMix, and crops and flips of local training."""

from fedblend.methods.augment.augmix import VIEWS, augmix, draw_augmix
from fedblend.methods.augment.operations import NOTHING, OPERATIONS, apply
from fedblend.methods.augment.pictures import HorizontalFlip, RandomCrop

__all__ = ["NOTHING", "OPERATIONS", "VIEWS", "HorizontalFlip", "RandomCrop", "apply", "augmix", "draw_augmix"]
