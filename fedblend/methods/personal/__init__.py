"""Personal models: what each client keeps for itself beside the global model, or of it."""
