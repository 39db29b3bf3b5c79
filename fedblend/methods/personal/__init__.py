"""Personal models: what each client keeps for itself beside the global model, or of it."""

from fedblend.core.objective import NoPersonal, Personal

__all__ = ["NoPersonal", "Personal"]
