"""The engine whose clients are sites of a real federation, over Flower (extra ``flower``).

SuperLink and ServerApp stand at the server, a SuperNode and a ClientApp at each site:

- ``messages``: words and tensors as Flower's records, and back;
- ``sites``: which site is which client, and one exchange of messages with some of them;
- ``engine``: the engine of the round loop, which runs in the ServerApp (``server``); ``scoring`` asks how well it does;
- ``client``: the ClientApp, which works on its own client (``work``) where it is (``here``), with what it remembers
  (``memory``).

Nothing here is imported unless a federation runs, since Flower is an extra.
"""
