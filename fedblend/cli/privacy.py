"""``fedblend privacy epsilon`` and ``samples``, and ``paper xor``: what noise gives, and what samples reveal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.privacy.mixup_privacy import LAMBDAS, Mixtures, MixupPrivacy, make_mixtures, measure_mixtures
from fedblend.analysis.privacy.noise_plan import least_noise, planned
from fedblend.analysis.privacy.sample_figures import draw_mixtures, draw_seed_comparison, draw_seeds
from fedblend.analysis.privacy.xor_privacy import SharedSeeds, XorPrivacy, make_seeds, measure_seeds
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, table
from fedblend.cli.progress import steps_shown
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.files import make_folder_of, write_json
from fedblend.core.setup import Setup
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup, split
from fedblend.experiment.parts import dump
from fedblend.experiment.study import slugify
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds
from fedblend.report.guarantees import strength, weakest
from fedblend.runs import api

SCOPE = (
    "Epsilon is that of one whole run, all rounds made; runs on the same data (seeds, grids, repetitions) add up. "
    "Above 10 it protects nothing."
)


def show_epsilon(
    file: Path, changes: Sequence[Change] = (), target: float | None = None, over_flower: bool = False
) -> None:
    """Print the guarantees of each method of a file, the weakest over its seeds, and the least noise for ``target``."""
    if target is not None and not 0 < target < math.inf:
        raise FedblendError(f"--target: {target:g} is no epsilon to reach; valid: a number above 0, such as 3")
    by_label: dict[str, list[Setup]] = {}
    for name, experiment in api.expand_file(file, changes, None).experiments.items():
        by_label.setdefault(name.removesuffix(f"-seed{experiment.seed}"), []).append(make_setup(experiment))
    made = table([], [], collapse_padding=True)
    for column in ("run", "payloads", "protected", "epsilon", "delta", "protection"):
        made.add_column(column, justify="right" if column in ("epsilon", "delta") else "left", overflow="fold")
    lines = []
    with steps_shown() as steps:
        for number, (label, setups) in enumerate(by_label.items()):
            steps("methods", number, len(by_label))
            over_seeds = [planned(setup, not over_flower) for setup in setups]
            for statements in zip(*over_seeds, strict=True):
                found = weakest(label, statements)
                word = "none" if found.epsilon is None else strength(found.epsilon)
                made.add_row(label, found.what, found.unit, found.short, f"{found.delta:g}", word)
                if found.reason:
                    lines.append(f"{label}, {found.what}: {found.reason}")
            if target is not None:
                lines.append(f"{label}: {_needed(setups, target, over_flower)}")
    console = Console()
    console.print(made)
    for line in [*lines, SCOPE]:
        console.print(line)


def _needed(setups: Sequence[Setup], target: float, over_flower: bool) -> str:
    try:
        needed = [least_noise(setup, target, not over_flower) for setup in setups]
    except FedblendError as error:
        return str(error)
    values, statement = max(needed, key=lambda one: [*one[0].values()])
    fields = ", ".join(f"{field} = {value:g}" for field, value in values.items())
    return f"epsilon {statement.epsilon:.4g} (of the {statement.what}) with {fields}"


# Mixup and inverse Mixup ----------------------------------------------------------------------------------------


def show_samples(
    file: Path,
    samples: int,
    devices: int,
    repeats: int,
    changes: Sequence[Change] = (),
    lambdas: Sequence[float] = LAMBDAS,
    out: Path | None = None,
    coordinated: bool = False,
) -> None:
    """Print the sample privacy of Mixup and Mix2up by lambda, on data and split of a file's first experiment."""
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    data = experiment.data.load()
    population = split(experiment, data)
    seed = experiment.seed
    draws = [make_mixtures(data, population, seed, repeat, devices, samples, coordinated) for repeat in range(repeats)]
    rows = measure_mixtures(draws, lambdas)
    if out is not None:
        _draw(out, draws[0], data, lambdas)
    console = Console()
    console.print(
        f"{data.name}: {samples} samples, {devices} devices; natural logarithms of Euclidean distances between stored "
        f"values, means over {repeats} draws; recognised: the nearest raw sample of all is one of those mixed"
    )
    console.print(_mixtures_table(rows))
    repeated = sum(mixtures.pairs.repeated for mixtures in draws)
    if repeated:
        console.print(
            f"Of {samples * repeats} inversely mixed-up samples {repeated} repeat a pair: too few mixtures match "
            "(with --coordinated all match)."
        )
    if out is not None:
        console.tell(f"Pictures: {out}")


def _mixtures_table(rows: Sequence[MixupPrivacy]) -> Table:
    measures = [f"{method}: {name}" for method in ("Mixup", "Mix2up") for name in ("smallest", "mean", "recognised")]
    made = table([], ["lambda", *measures])
    for row in rows:
        mixup = (row.mixup_smallest, row.mixup_mean, row.mixup_recognised)
        mix2up = (row.mix2up_smallest, row.mix2up_mean, row.mix2up_recognised)
        cells = (f"{number:{form}}" for number, form in zip((*mixup, *mix2up), (".3f", ".3f", ".0%") * 2, strict=True))
        made.add_row(f"{row.lam:g}", *cells)
    return made


def _draw(out: Path, mixtures: Mixtures, data: Dataset, lambdas: Sequence[float]) -> None:
    if data.kind != "image":
        raise FedblendError(f"--out {out}: '{data.name}' holds {data.kind}, not pictures to draw; leave out --out")
    make_folder(out)
    for lam in lambdas:
        title = f"{data.name}: Mixup and inverse Mixup at lambda = {lam:g}"
        draw_mixtures(mixtures, data.classes, lam, out / f"lambda-{lam:g}.png", title)


# Seeds of target labels -----------------------------------------------------------------------------------------


def show_xor(
    file: Path,
    repeats: int,
    mds: bool = False,
    changes: Sequence[Change] = (),
    blended: Sequence[int] = (),
    out: Path | None = None,
    json: Path | None = None,
) -> None:
    """Print the sample privacy of each method of a file that shares seeds of target labels, with its first seed."""
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
    console.print(_seeds_table(rows, mds))
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
    sharing_seeds = [e for e in experiments if isinstance(e.method.sharing, XorSeeds | MixedTargetSeeds)]
    if not sharing_seeds:
        raise FedblendError(
            f"method.sharing: '{experiments[0].method.sharing.name}' shares no seeds of target labels; valid: "
            "xor-seeds or mixed-target-seeds"
        )
    return [e for e in sharing_seeds if e.seed == sharing_seeds[0].seed]


def _seeds_table(rows: Sequence[tuple[str, int, XorPrivacy]], mds: bool) -> Table:
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
