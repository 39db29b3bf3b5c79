"""fedblend's methods in a Flower app with a model, data and training loop of the user's own (``fedblend.flower``)."""
