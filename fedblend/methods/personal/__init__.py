"""Personal models: what each client trains for itself beside the global model."""

from fedblend.core.objective import NoPersonal, Personal

__all__ = ["NoPersonal", "Personal"]
