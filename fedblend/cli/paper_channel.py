"""``fedblend paper channel``: print a channel's closed forms for the payloads of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.trees import bytes_of
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.channels import Link, Wireless
from fedblend.runs import api

OUTPUT_BITS = 32  # Bits of one number of the mean outputs (b_out)
COLUMNS = ("link", "payload", "bits", "mean\nSNR", "success", "bits\na slot", "slots\nneeded", "mean\nms", "outage")


def payloads(setup: Setup, seeds: Sequence[int]) -> dict[str, dict[str, int]]:
    """Bits of each payload, by direction and name (Mix2FLD, sections II-C and III-A).

    A model has the bits of its tensors (32 a weight), mean outputs have 32 x classes^2, a seed sample has the bits of
    its stored form (8 a pixel). ``seeds`` are the numbers N_S of seed samples that are sent with the first outputs.
    """
    model = 8 * bytes_of(setup.model.state_dict())
    both = {"model": model}
    if setup.task.kind == "classification":
        both["outputs"] = OUTPUT_BITS * setup.task.outputs**2
    up = dict(both)
    if setup.task.kind == "classification" and setup.data.kind not in ("text", "tokens"):
        x = setup.data.train.x
        up["1 seed"] = 8 * x[0].numel() * x.element_size()
        up |= {f"outputs, {n} seed{'s' if n > 1 else ''}": both["outputs"] + n * up["1 seed"] for n in seeds}
    return {"up": up, "down": both}


def show_channel(file: Path, samples: Sequence[int], changes: Sequence[Change] = ()) -> None:
    """Print the closed forms of the channel of a file's first experiment. Raises :class:`FedblendError`."""
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    channel = experiment.channel
    if not isinstance(channel, Wireless):
        raise FedblendError(f"channel.name: '{channel.name}' has no slots; valid: wireless (--set channel=wireless)")
    sent = payloads(make_setup(experiment), samples)
    transmitting = channel.devices or experiment.train.cohort
    console = Console()
    for distance in sorted({channel.nearest or channel.distance, channel.distance}):
        links = {direction: channel.link(direction, transmitting, distance) for direction in sent}
        limit = links["up"].limit
        console.print(
            f"{transmitting} devices share the uplink, at {distance:g} m; up to {limit} slots of "
            f"{channel.slot * 1000:g} ms each way"
        )
        console.print(_table(links, sent))


def _table(links: dict[str, Link], sent: dict[str, dict[str, int]]) -> Table:
    # Narrow enough for 80 columns: in a narrower terminal Rich would cut numbers off, and so print wrong ones.
    rows = table(COLUMNS[:2], COLUMNS[2:], no_wrap=True, collapse_padding=True)
    for direction, link in links.items():
        for payload, bits in sent[direction].items():
            rows.add_row(
                direction,
                payload,
                f"{bits:,}",
                f"{link.snr:,.4g}",
                f"{link.success:.4f}",
                f"{link.bits_per_slot:,.0f}",
                f"{int(link.needed(bits)):,}",
                f"{1000 * link.mean_seconds(bits):,.4g}",
                f"{link.outage(bits):.3g}",
            )
    return rows
