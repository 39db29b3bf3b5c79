"""The commented site file that ``fedblend site init`` writes, and its audit log in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedblend.flower.site import KINDS, SAFE

TEXT = """# What this site lets out of the house, whatever a federation's server asks for. fedblend reads it before it
# answers any message. Start the SuperNode with: --node-config 'partition-id=K site="{path}"'

# Kinds of payload that may leave. Others there are: {others}.
#   weights   a model after training          outputs   mean outputs by label
#   means     means of samples                seeds     mixed samples
#   raw       samples as they are             answers   to a server step, from this site's own model
#   scores    how many test samples are right   masked    a model or mean of which the server learns only a sum
#   keys      what masks are made of (public keys, sealed shares)
# Without "weights" this site's model leaves masked, or not at all.
allow = {allow}

# Fewest samples that a shared mean may cover; the experiment's own minimum holds as well.
min_mean = {min_mean}

# Fewest sites whose masked models (or means) make a sum that the server may learn; the experiment's number holds too.
min_sum = 3

# Most seeds (single samples, mixed or encoded) that a server may ask for at a time; without this line no limit.
# max_seeds = 100

# Rounds in which this site trains, over all runs in its audit log; without this line no limit.
# rounds = 200

# Where this site computes: cpu, cuda, cuda:1.
device = "cpu"

# The record of everything that left and of everything that was refused: JSON lines.
audit = "audit.jsonl"
{data}
# What is done to every model before it leaves, after what the experiment itself does. Noise is drawn from the
# system's entropy. `fedblend list protection` names what there is.
# [protection]
# name = "noise"
# clip = 1.0               # norm to which an update is scaled down
# multiplier = 0.1         # standard deviation of the noise, in clips
"""

NO_DATA = """
# This site's samples. Without this table it works on its client's part of the experiment's data (for trials).
# [data]
# name = "npz"
# path = "samples.npz"
"""

DATA = """
# This site's samples; its test half stays here and is not used.
[data]
name = "npz"
path = {path}
"""


def site_text(path: Path, data: Path | None, allow: tuple[str, ...] = SAFE, min_mean: int = 2) -> str:
    """The content of a new site file at ``path``, with the site's samples in ``data`` (an ``.npz`` file)."""
    others = ", ".join(kind for kind in KINDS if kind not in allow) or "none"
    # A JSON text is a TOML one too.
    table = NO_DATA if data is None else DATA.format(path=json.dumps(str(data.absolute())))
    return TEXT.format(
        path=path.absolute(), others=others, allow=json.dumps(list(allow)), min_mean=min_mean, data=table
    )


def audit_rows(lines: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """An audit log as rows of text: time, run, round, kind, what, bytes, digest."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if "refused" in line:
            what, size, digest = f"refused: {line['refused']}", "", ""
        else:
            shapes = [f"{name} {'x'.join(map(str, form[1:])) or '1'}" for name, form in line["tensors"].items()]
            more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
            what, size, digest = ", ".join(shapes[:3]) + more, f"{line['bytes']:,}", line["sha256"][:12]
        rows.append((line["time"], line["run"], str(line["round"] + 1), line["kind"], what, size, digest))
    return rows
