"""Import this before pfl, which takes any GPU that it sees unless its environment says otherwise."""

import os
import sys

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
os.environ["PFL_PYTORCH_DEVICE"] = DEVICE
