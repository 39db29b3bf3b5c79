"""fedblend's methods in a Flower app of the user's own, who keeps model, data and training loop.

- ``inputs``: what the user's model takes, which is all that has to be told;
- ``fitting``: which methods fit this form;
- ``strategy``: at the server, around any of Flower's strategies;
- ``mod``: at a client, around the user's training function; and its answer to the request to share;
- ``loss``: what the user's loop minimises.

Nothing here is imported without the extra ``flower``; all of it is offered as ``fedblend.flower``.
"""
