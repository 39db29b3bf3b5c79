"""The stacked engine: several clients trained together as one model with a leading dimension of clients."""
