"""Which methods give raw samples away, as far as their configuration tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedblend.core import registry
from fedblend.core.errors import FedblendError

NOTE = "breaks privacy"


def part_class(config: Mapping[str, Any], kind: str) -> type | None:
    """The class of a method's part, or ``None`` where it cannot be imported here."""
    try:
        return registry.find(kind, config["method"][kind]["name"])
    except (FedblendError, KeyError, TypeError):
        return None


def gives_raw_away(config: Mapping[str, Any]) -> bool:
    """Whether a method gives raw samples away, by its sharing, its objective, or means of single samples."""
    sharing, *others = (part_class(config, kind) for kind in ("sharing", "objective", "server_step"))
    flags = [getattr(cls, flag, False) for cls in (sharing, *others) for flag in ("unsafe", "breaks_privacy")]
    table = config["method"].get("sharing", {})
    leaves_client = bool(getattr(sharing, "leaves_client", False))
    return any(flags) or (leaves_client and isinstance(table, Mapping) and table.get("samples_per_mean") == 1)
