"""Augmentation on tensors, for batches and stacks of clients: AugMix, and crops and flips of local training."""
