"""What ``fedblend channel`` prints: a channel's closed forms for the payloads of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.upload import bytes_of
from fedblend.experiment.setup import make_setup
from fedblend.methods.channels.link import Link
from fedblend.methods.channels.wireless import Wireless
from fedblend.runs import api

OUTPUT_BITS = 32
"""Bits of a number of an output (b_out)."""

COLUMNS = ("way", "payload", "bits", "mean\nSNR", "success", "bits\na slot", "slots\nneeded", "mean\nms", "outage")


def parse_counts(text: str, option: str) -> list[int]:
    """``10,50`` as a list of whole numbers from 1. Raises :class:`FedblendError` for anything else."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise FedblendError(f"{option} {text!r} is not valid: write whole numbers from 1 with commas, such as 10,50")
    return counts


def payloads(setup: Setup, seeds: Sequence[int]) -> dict[str, dict[str, int]]:
    """Bits of what is sent, by direction and name (Mix2FLD, sections II-C and III-A).

    A model is as many bits as its tensors hold (32 a weight), outputs are 32 x classes^2, a seed sample is as stored
    (8 a pixel); ``seeds`` are the numbers N_S of seed samples that go up with the first outputs.
    """
    model = 8 * bytes_of(setup.model.state_dict())
    both = {"model": model}
    if setup.task.kind == "classification":
        both["outputs"] = OUTPUT_BITS * setup.task.outputs**2
    up = dict(both)
    if setup.task.kind == "classification" and setup.data.kind != "text":
        x = setup.data.train.x
        up["1 seed"] = 8 * x[0].numel() * x.element_size()
        up |= {f"outputs, {n} seed{'s' if n > 1 else ''}": both["outputs"] + n * up["1 seed"] for n in seeds}
    return {"up": up, "down": both}


def show_channel(file: Path, changes: Sequence[tuple[str, Any]], seeds: Sequence[int]) -> None:
    """Print the closed forms of a file's channel, for its first experiment.

    Raises :class:`FedblendError` for a channel that has none.
    """
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    channel = experiment.channel
    if not isinstance(channel, Wireless):
        raise FedblendError(
            f"channel.name: '{channel.name}' has no slots to tell of; valid: wireless, as with --set channel=wireless"
        )
    sent = payloads(make_setup(experiment), seeds)
    transmitting = channel.devices or experiment.train.cohort
    console = Console()
    places = sorted({channel.nearest or channel.distance, channel.distance})
    for distance in places:
        links = {way: channel.link(way, transmitting, distance) for way in sent}
        limit = links["up"].limit
        console.print(
            f"{transmitting} devices share the uplink, at {distance:g} m; up to {limit} slots of "
            f"{channel.slot * 1000:g} ms each way",
            highlight=False,
        )
        console.print(_table(links, sent))


def _table(links: dict[str, Link], sent: dict[str, dict[str, int]]) -> Table:
    # Narrow enough for 80 characters: Rich would cut numbers off, and half a number is a wrong one.
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in COLUMNS:
        text = column in ("way", "payload")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for way, link in links.items():
        for payload, bits in sent[way].items():
            table.add_row(
                way,
                payload,
                f"{bits:,}",
                f"{link.snr:,.4g}",
                f"{link.success:.4f}",
                f"{link.bits_per_slot:,.0f}",
                f"{int(link.needed(bits)):,}",
                f"{1000 * link.mean_seconds(bits):,.4g}",
                f"{link.outage(bits):.3g}",
            )
    return table
