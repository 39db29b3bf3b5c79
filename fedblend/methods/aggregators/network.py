"""Comparator networks: sorting as a fixed list of (minimum, maximum) steps, the same for every parameter.

A network has no branches, so that one step can work on many parameters at once, and the steps that do not lead to
the places asked for can be left out beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np


def stages(places: int) -> Iterator[np.ndarray]:
    """Batcher's merge exchange for any number of places: stages of comparators (i, j), i < j, int32 [n, 2].

    Knuth, The Art of Computer Programming, volume 3, section 5.2.2, Algorithm M. A comparator puts the smaller
    value at i and the larger at j; those of one stage touch each place at most once.

    >>> [stage.tolist() for stage in stages(3)]
    [[[0, 2]], [[0, 1]], [[1, 2]]]
    """
    top = 1 << max(0, (places - 1).bit_length() - 1)
    p = top if places > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            i = np.arange(places - d, dtype=np.int32)
            i = i[i & p == r]
            yield np.stack([i, i + d], axis=1)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2


@functools.lru_cache(maxsize=8)
def comparators(places: int, low: int, high: int) -> np.ndarray:
    """Comparators, int32 [n, 2] in order, after which places ``low`` to ``high - 1`` hold what sorting puts there.

    >>> comparators(3, 0, 1).tolist()
    [[0, 2], [0, 1]]
    """
    needed = np.zeros(places, bool)
    needed[low:high] = True
    kept = []
    for stage in reversed(list(stages(places))):
        used = needed[stage].any(axis=1)
        needed[stage[used]] = True
        kept.append(stage[used])
    found = np.concatenate([np.empty((0, 2), np.int32), *reversed(kept)])
    found.flags.writeable = False
    return found
