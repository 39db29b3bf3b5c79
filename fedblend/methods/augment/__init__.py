"""AugMix on tensors: nine operations, chains of them, and their mixture, for whole batches and stacks of clients."""

from fedblend.methods.augment.augmix import VIEWS, augmix, draw_augmix
from fedblend.methods.augment.operations import NOTHING, OPERATIONS, apply

__all__ = ["NOTHING", "OPERATIONS", "VIEWS", "apply", "augmix", "draw_augmix"]
