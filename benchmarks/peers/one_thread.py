"""Imported before anything else: one thread for each process, told before a library starts its threads."""

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
