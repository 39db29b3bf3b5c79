"""Objectives: the loss that a client minimises on a batch, and terms that are added to it."""

import torch

Tables = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""What a part keeps at a client, and what it sends; or at the server the next weights, and what the part keeps."""
