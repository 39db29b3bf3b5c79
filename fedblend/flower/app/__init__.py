"""fedblend's methods in a Flower app with a model, data and training loop of the user's own.

- ``inputs``: the form of the model's inputs and outputs;
- ``supported``: which methods run in such an app;
- ``strategy``: at the server, a wrapper of any Flower strategy;
- ``client``: at a client, the mod, the loss of a batch, and the reply to the request for shared data.

All of it needs the extra ``flower`` and is public as ``fedblend.flower``.
"""
