"""The core: one round loop over plain state, and the interfaces that parts, engines and callbacks implement.

Read ``loop`` first; ``setup``, ``engine`` and the modules named after a kind of part say what the loop calls.
Nothing here imports another package of fedblend.
"""
