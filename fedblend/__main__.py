"""``python -m fedblend``: the command ``fedblend`` where its folder is not on the path."""

from fedblend.cli import main

if __name__ == "__main__":  # other processes of a run import this module under another name
    main()
