"""What the measured growth of a round (growth.py) says of federations that nobody can try; for docs/scaling.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

POPULATION = 10**9
COHORTS = (10**4, 10**5, 10**6)
PARAMETERS = 10**6
"""What is computed for: clients, clients of a round, numbers of the model."""

LINK = 1.25e9
"""Bytes a second of one machine's network, each way; assumed: 10 Gbit/s."""

FAN_IN = 100
"""Uploads that one machine of an aggregation tree adds up."""

Row = Mapping[str, Any]

HEAD = ("varied", "value", "processor s a round", "MB beyond libraries", "bytes sent")
COMPUTED_HEAD = (
    *("clients of a round", "TB sent", "s through one server", "machines of the tree", "its levels"),
    *("s through the tree", "processor minutes to simulate"),
)


def growth() -> dict[str, Any]:
    """The committed measurements; empty where there are none."""
    path = RESULTS / "growth.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def measured_rows(found: Row) -> list[list[str]]:
    """One row a measurement."""
    return [
        [
            row["kind"] if row["kind"] != "model" else "parameters",
            f"{row['parameters'] if row['kind'] == 'model' else row['value']:,}",
            f"{row['round_s']:.3f}",
            f"{row['mb']:.0f}",
            f"{row['sent_bytes']:,}",
        ]
        for row in found["rows"]
    ]


def slope(rows: Sequence[Row], kind: str, x: str, y: str) -> float:
    """What one more of x costs in y, between the two largest values that were measured."""
    *_, a, b = (row for row in rows if row["kind"] == kind)
    return float((b[y] - a[y]) / (b[x] - a[x]))


def constants(found: Row) -> dict[str, float]:
    """What grows, for one more of each."""
    rows, base = found["rows"], found["base"]
    largest = max((row for row in rows if row["kind"] == "model"), key=lambda row: row["parameters"])
    return {
        "mb_per_client": slope(rows, "clients", "value", "mb"),
        "s_per_cohort_client": slope(rows, "cohort", "value", "round_s"),
        "s_per_parameter": slope(rows, "model", "parameters", "round_s") / base["cohort"],
        "bytes_per_parameter": largest["sent_bytes"] / base["cohort"] / largest["parameters"],
        "mb_per_parameter": slope(rows, "model", "parameters", "mb"),
    }


def told(found: Row) -> str:
    """The constants in words."""
    c = constants(found)
    return "\n".join(
        [
            f"- a client in the population: {1e6 * c['mb_per_client']:.0f} bytes of memory, and no time in a round;",
            f"- a client in the cohort: {1e3 * c['s_per_cohort_client']:.2f} ms of a processor, and no memory;",
            f"- a parameter of the model: {1e9 * c['s_per_parameter']:.1f} ns of a processor for each client of the "
            f"cohort (one step), {c['bytes_per_parameter']:.1f} bytes sent for each client, both ways together, and "
            f"{1e6 * c['mb_per_parameter']:.0f} bytes of memory.",
        ]
    )


def computed_rows(found: Row) -> list[list[str]]:
    """One row a cohort of the large federation."""
    c, made = constants(found), []
    for cohort in COHORTS:
        one_way = PARAMETERS * c["bytes_per_parameter"] / 2
        levels, machines, nodes = 0, 0, cohort
        while nodes > 1:
            nodes = math.ceil(nodes / FAN_IN)
            levels, machines = levels + 1, machines + nodes
        seconds = cohort * (c["s_per_cohort_client"] + PARAMETERS * c["s_per_parameter"])
        made.append(
            [
                f"{cohort:,}",
                f"{2 * one_way * cohort / 1e12:.2f}",
                f"{one_way * cohort / LINK:,.0f}",
                f"{machines:,}",
                f"{levels}",
                f"{levels * FAN_IN * one_way / LINK:.1f}",
                f"{seconds / 60:.1f}",
            ]
        )
    return made
