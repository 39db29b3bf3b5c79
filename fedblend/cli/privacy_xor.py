"""``fedblend paper xor``: print and draw the sample privacy of seeds of target labels (XorMixFL, MixFL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.privacy.sample_figures import draw_seed_comparison, draw_seeds
from fedblend.analysis.privacy.xor_privacy import SharedSeeds, XorPrivacy, make_seeds, measure_seeds
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.files import make_folder_of, write_json
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import split
from fedblend.experiment.parts import dump
from fedblend.experiment.study import slugify
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.runs import api


def show_xor(
    file: Path,
    repeats: int,
    mds: bool = False,
    changes: Sequence[Change] = (),
    blended: Sequence[int] = (),
    out: Path | None = None,
    json: Path | None = None,
) -> None:
    """Print the sample privacy of each method of a file that shares seeds of target labels, with its first seed.

    ``blended`` are values of p (samples blended into one) that replace the method's own. The numbers are means over
    ``repeats`` draws; ``mds`` adds distances after multidimensional scaling. ``out`` is a folder for pictures, ``json``
    a file for the measurements. Raises :class:`FedblendError` if no method of the file shares such seeds.
    """
    experiments = _of_first_seed(list(api.expand_file(file, changes, None).experiments.values()))
    loaded: dict[str, Dataset] = {}
    rows: list[tuple[str, int, XorPrivacy]] = []
    first_draws: dict[str, SharedSeeds] = {}
    for experiment in experiments:
        which = str(dump(experiment.data))
        data = loaded[which] = loaded.get(which) or experiment.data.load()
        population = split(experiment, data)
        name = experiment.method.label or experiment.method.name
        for p in blended or [experiment.method.sharing.p]:
            sharing = replace(experiment.method.sharing, p=p)
            draws = [make_seeds(data, population, sharing, experiment.seed, repeat) for repeat in range(repeats)]
            rows.append((name, p, measure_seeds(draws, mds, experiment.seed)))
            if out is not None:
                title = f"{name}, p = {p}"
                first_draws[title] = draws[0]
                make_folder(out)
                draw_seeds(draws[0], out / f"{slugify(title)}.png", f"{data.name}: {title}")
    console = Console()
    console.print(
        "Distance: between the stored pixels (0 to 255) of a sample that the server trains on and the nearest of the\n"
        f"raw samples that it was made of; mean ± deviation, means over {repeats} draws. Sent known, made known: the\n"
        "devices' raw sample nearest to a sent seed, or to a sample that the server made, is one of those that it was\n"
        "made of. Clear, of ink: pixels that are sent unchanged, of all and of the target's ink. Bits: the target's\n"
        "bits that are right when a seed is decoded with a usual dummy. Guessed: the same without the seed."
    )
    console.print(_table(rows, mds))
    if out is not None:
        if len(first_draws) > 1:
            names = ", ".join(dict.fromkeys(data.name for data in loaded.values()))
            draw_seed_comparison(first_draws, out / "side-by-side.png", names)
        console.tell(f"Pictures: {out}")
    if json is not None:
        make_folder_of(json)
        tables = [{"method": name, "p": p, **asdict(row)} for name, p, row in rows]
        write_json(json, {"repeats": repeats, "rows": tables})


def _of_first_seed(experiments: list[Experiment]) -> list[Experiment]:
    """The experiments that share seeds of target labels, with the first one's seed."""
    sharing_seeds = [e for e in experiments if isinstance(e.method.sharing, XorSeeds | MixedTargetSeeds)]
    if not sharing_seeds:
        raise FedblendError(
            f"method.sharing: '{experiments[0].method.sharing.name}' shares no seeds of target labels; valid: "
            "xor-seeds or mixed-target-seeds"
        )
    return [e for e in sharing_seeds if e.seed == sharing_seeds[0].seed]


def _table(rows: Sequence[tuple[str, int, XorPrivacy]], mds: bool) -> Table:
    headings = ["distance", *(["MDS"] if mds else [])]
    made = table(["method"], ["p", *headings, "sent known", "made known", "clear", "of ink", "bits", "guessed"])
    for name, p, row in rows:
        distances = [row.distance, *([row.mds] if row.mds else [])]
        shares = [row.sent_recognised, row.made_recognised, row.clear, row.clear_ink, row.bits, row.blind]
        made.add_row(
            name,
            str(p),
            *(f"{mean:.0f} ± {deviation:.0f}" for mean, deviation in distances),
            *("" if share is None else f"{share:.1%}" for share in shares),
        )
    return made
