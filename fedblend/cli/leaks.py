"""What ``fedblend privacy xor`` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedblend.analysis.privacy.xor import SharedSeeds, XorPrivacy, make_seeds, measure_seeds
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import dump
from fedblend.data.partitions import prepare
from fedblend.experiment.config import Experiment
from fedblend.experiment.study import slugify
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import api
from fedblend.runs.files import write_json


def show_xor(
    file: Path,
    changes: Sequence[tuple[str, Any]],
    blended: Sequence[int] | None,
    repeats: int,
    mds: bool,
    out: Path | None,
    json: Path | None = None,
) -> None:
    """Print the sample privacy of each method of a file that shares seeds of target labels, with its first seed.

    ``blended`` are values of p that replace the method's own. ``out`` is a folder for pictures, ``json`` a file for
    what is measured.
    """
    experiments = _of_first_seed(list(api.expand_file(file, changes, None).experiments.values()))
    loaded: dict[str, Dataset] = {}
    rows: list[tuple[str, int, XorPrivacy]] = []
    shown: dict[str, SharedSeeds] = {}
    for experiment in experiments:
        which = str(dump(experiment.data))
        data = loaded[which] = loaded.get(which) or experiment.data.load()
        population = prepare(experiment.partition, data, experiment.seed, experiment.fraction, experiment.holdout)
        name = experiment.method.label or experiment.method.name
        for p in blended or [experiment.method.sharing.p]:
            sharing = replace(experiment.method.sharing, p=p)
            drawn = [make_seeds(data, population, sharing, experiment.seed, repeat) for repeat in range(repeats)]
            rows.append((name, p, measure_seeds(drawn, mds, experiment.seed)))
            if out is not None:
                shown[f"{name}, p = {p}"] = drawn[0]
                _draw(out, f"{name}, p = {p}", drawn[0], data)
    from fedblend.analysis.privacy.figures import draw_seed_comparison

    console = Console()
    console.print(
        "Distances between stored pixels (0 to 255) of what the server trains on and the nearest raw sample that it\n"
        f"was made of: mean ± deviation; means over {repeats} draws. Sent known, made known: the devices' raw sample\n"
        "nearest to what is sent, or trained on, is one that it was made of. Clear: pixels that are sent as they are,\n"
        "of all and of the target's ink. Bits: the target's bits that are right when a seed is decoded with a usual\n"
        "dummy, and when they are guessed without the seed.",
        highlight=False,
    )
    console.print(_table(rows, mds))
    if out is not None:
        if len(shown) > 1:
            draw_seed_comparison(
                shown, out / "side-by-side.png", ", ".join(dict.fromkeys(d.name for d in loaded.values()))
            )
        console.print(f"Pictures: {out}", highlight=False, soft_wrap=True)
    if json is not None:
        _keep(json, rows, repeats)


def _keep(path: Path, rows: Sequence[tuple[str, int, XorPrivacy]], repeats: int) -> None:
    """Write the measures as JSON: ``repeats``, and ``rows`` of the method, p and the fields of :class:`XorPrivacy`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"--json {path}: cannot be written ({error}); name a file") from None
    told = [{"method": name, "p": p, **asdict(row)} for name, p, row in rows]
    write_json(path, {"repeats": repeats, "rows": told})


def _of_first_seed(experiments: list[Experiment]) -> list[Experiment]:
    able = [e for e in experiments if isinstance(e.method.sharing, XorSeeds | MixedTargetSeeds)]
    if not able:
        raise FedblendError(
            f"method.sharing: '{experiments[0].method.sharing.name}' shares no seeds of target labels; valid: "
            "xor-seeds or mixed-target-seeds"
        )
    return [e for e in able if e.seed == able[0].seed]


def _table(rows: Sequence[tuple[str, int, XorPrivacy]], mds: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    heads = ["p", "distance", *(["MDS"] if mds else []), "sent known", "made known", "clear", "of ink"]
    for head in [*heads, "bits", "guessed"]:
        table.add_column(head, justify="right", no_wrap=head in ("distance", "MDS"))
    for name, p, row in rows:
        spread = [row.distance, *([row.mds] if row.mds else [])]
        shares = [row.sent_recognised, row.made_recognised, row.clear, row.clear_ink, row.bits, row.blind]
        table.add_row(
            name,
            str(p),
            *(f"{mean:.0f} ± {deviation:.0f}" for mean, deviation in spread),
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    return table


def _draw(out: Path, title: str, one: SharedSeeds, data: Dataset) -> None:
    from fedblend.analysis.privacy.figures import draw_seeds

    try:
        out.mkdir(parents=True, exist_ok=True)
        draw_seeds(one, out / f"{slugify(title)}.png", f"{data.name}: {title}")
    except OSError as error:
        raise FedblendError(f"--out {out}: cannot be written ({error}); name a folder") from None
