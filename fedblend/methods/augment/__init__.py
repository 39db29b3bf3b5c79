"""AugMix on tensors: nine operations, chains of operations, and their mixture, for batches and stacks of clients."""

from fedblend.methods.augment.augmix import VIEWS, augmix, draw_augmix
from fedblend.methods.augment.operations import NOTHING, OPERATIONS, apply

__all__ = ["NOTHING", "OPERATIONS", "VIEWS", "apply", "augmix", "draw_augmix"]
