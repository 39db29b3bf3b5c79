"""The commands of ``fedblend``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import typer.core

from fedblend.cli.federation_app import federation_app, site_app

# Help is plain text. With Rich at hand Typer 0.20, which Flower asks for, escapes brackets in it all the same, as
# "\[required]".
typer.core.HAS_RICH = False

app = typer.Typer(
    name="fedblend",
    help="Federated learning with blended data: run, compare and report experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at data sets and how they are split.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
privacy_app = typer.Typer(
    help="Measure what can be told from what is shared.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(privacy_app, name="privacy")
app.add_typer(federation_app, name="federation")
app.add_typer(site_app, name="site")

File = Annotated[Path, typer.Argument(help="An experiment file (TOML).")]
Runs = Annotated[list[Path], typer.Argument(help="Run directories, or folders: all runs below them.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set a field: --set train.lr=0.05 (repeatable); none takes an optional one out of the file."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder in which data sets are looked for, instead of $FEDBLEND_DATA.",
        callback=lambda folder: _set_data_folder(folder),
    ),
]


def _set_data_folder(folder: Path | None) -> Path | None:
    from fedblend.data.loaders.files import set_data_folder

    return set_data_folder(folder) if folder else None


@app.command(
    short_help="Run the experiments of a file, with a table and a report.",
    epilog="Example: fedblend run examples/quickstart.toml --set rounds=20 --seeds 0,1,2",
)
def run(
    file: File,
    set_: Set = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, such as 0,1,2; replaces the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest runs of this name.")] = False,
    engine: Annotated[str | None, typer.Option(help="How clients run: auto, loop or stacked.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes that share each round's clients.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a processor).")] = None,
    data: Data = None,
) -> None:
    """Run the experiments of a file: show progress, end with a table, write a report."""
    from fedblend.cli import running

    if running.served():
        return
    changes = [running.parse_change(text) for text in set_ or []]
    if engine is not None:
        changes.append(("engine", engine))
    if ranks is not None:
        changes.append(("ranks", ranks))
    running.run_file(file, changes, running.parse_seeds(seeds), resume, out, jobs)


@app.command(epilog="Example: fedblend resume runs/quickstart")
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory, or the folder of a study.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes that share each round's clients.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a processor).")] = None,
    data: Data = None,
) -> None:
    """Go on with runs that were stopped, killed, or failed."""
    from fedblend.cli import running

    if not running.served():
        running.resume_runs(run, jobs, ranks)


@app.command(
    short_help="Write one HTML page (and a PNG) that compares runs.",
    epilog="Example: fedblend report runs/quickstart --out comparison.html",
)
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write; the picture goes beside it.")] = Path("report.html"),
) -> None:
    """Write one HTML page (and a PNG) that compares runs; the page works offline."""
    from fedblend.cli import running

    running.write_report(runs, out)


@app.command(epilog="Example: fedblend compare runs/quickstart")
def compare(
    runs: Runs,
    sites: Annotated[bool, typer.Option("--sites", help="Accuracy at each of the data's own clients.")] = False,
) -> None:
    """Compare runs in a table in the terminal."""
    from fedblend.cli import running

    running.show_table(runs, sites)


@app.command(
    "list", short_help="List what there is, or the options of one name.", epilog="Example: fedblend list methods"
)
def list_(
    what: Annotated[
        str | None,
        typer.Argument(help="methods, parts, datasets, models, partitions, or a name: its options are then told."),
    ] = None,
) -> None:
    """List what an experiment can be made of, or the options of one name (fedmix, objective, train)."""
    from fedblend.cli import listing

    listing.show_list(what)


@app.command(epilog="Example: fedblend new fedmix mnist5k > my.toml && fedblend run my.toml")
def new(
    method: Annotated[str, typer.Argument(help="A method, as in: fedblend list methods.")],
    dataset: Annotated[str, typer.Argument(help="A data set, as in: fedblend list datasets.")],
) -> None:
    """Print a commented experiment file that runs as it is."""
    from fedblend.cli import showing

    typer.echo(showing.new_file(method, dataset), nl=False)


@app.command(epilog="Example: fedblend inspect runs/quickstart")
def inspect(runs: Runs) -> None:
    """Show runs' status, costs and configuration."""
    from fedblend.cli import showing

    showing.inspect(runs)


@app.command(epilog="Example: fedblend points runs/digits/aggenhance-seed0 --replay --out points")
def points(
    run: Annotated[Path, typer.Argument(help="A run of aggenhance, or the folder of a study with just one.")],
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of a new model (default: 100).")] = None,
    lr: Annotated[float | None, typer.Option(help="Its learning rate (default: the method's).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Its points a batch (default: the method's).")] = None,
    vae_epochs: Annotated[int, typer.Option(min=0, help="Epochs of the autoencoder; 0 leaves distances out.")] = 10,
    replay: Annotated[bool, typer.Option("--replay", help="Run again, for the alignment in every round.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for tables (CSV) and figures (PNG).")] = None,
) -> None:
    """Say what a run's class interior points are worth.

    By the round they were made in: how well they align with the gradient on clients' data, how far they are from
    the training samples in an autoencoder's features, and what a new model learns from them alone.
    """
    from fedblend.cli import probing

    probing.show_points(run, (epochs, lr, batch_size), vae_epochs, replay, out)


@app.command(
    short_help="Draw where runs' models divide a plane.", epilog="Example: fedblend boundaries runs/toy --out toy.png"
)
def boundaries(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("boundaries.png"),
) -> None:
    """Draw where runs' models divide a plane, for data of two features, and print their accuracies."""
    from fedblend.cli import probing

    probing.show_boundaries(runs, out)


@app.command(
    short_help="Reproduce a table or figure of a paper.",
    epilog="Example: fedblend reproduce fedmix/table-1 --scale laptop --only fedavg --only fedmix",
)
def reproduce(
    item: Annotated[str | None, typer.Argument(help="PAPER/ITEM, such as fedmix/table-1; with --list a paper.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every item, its data, and your results.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only these rows or columns (repeatable, or A;B).")] = None,
    scale: Annotated[str, typer.Option(help="paper, laptop (half an hour) or smoke (a minute).")] = "paper",
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, such as 0,1,2; replaces the item's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path("reproductions"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a processor).")] = None,
    device: Annotated[str | None, typer.Option(help="Where tensors are computed, such as cuda.")] = None,
) -> None:
    """Reproduce a table or figure of a paper: our numbers, the paper's, the differences, and a verdict for each claim.

    Finished runs are kept; after a stop, the same command resumes.
    """
    from fedblend.cli import reproducing, running
    from fedblend.core.errors import FedblendError

    if list_:
        reproducing.show_list(item, out)
    elif item is None:
        raise FedblendError("reproduce: name an item, such as fedmix/table-1; all of them: fedblend reproduce --list")
    else:
        reproducing.show_item(item, scale, only or [], running.parse_seeds(seeds), out, jobs, device)


@app.command(
    short_help="Rebuild a client's images from what it sent in a round.",
    epilog="Example: fedblend attack runs/quickstart/fedavg-seed0 --round 0 --client 3 --images 4 --steps 5",
)
def attack(
    run: Annotated[Path, typer.Argument(help="A run directory, or the folder of a study with one run.")],
    round: Annotated[int, typer.Option(min=0, help="Rounds made before; 0 is the untrained model.")],
    client: Annotated[int, typer.Option(min=0, help="The client that is attacked.")],
    attack: Annotated[str, typer.Option(help="invgrad, dlg or idlg.")] = "invgrad",
    images: Annotated[int | None, typer.Option(min=1, help="Train on so many of its samples (default: all).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps on these images (default: the run's epochs).")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Iterations (default: 2500; dlg, idlg: 300).")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Starting points; the best result is kept.")] = 1,
    labels: Annotated[str, typer.Option(help="true: the attacker knows them; inferred: it does not.")] = "true",
    attacker: Annotated[
        str,
        typer.Option(help="guesses: it draws the objective's random numbers itself; plain: cross-entropy; knows: all."),
    ] = "guesses",
    out: Annotated[Path | None, typer.Option(help="Folder for images and numbers (default: in the run's).")] = None,
) -> None:
    """Rebuild a client's images from what it sent in a round of a run, and measure how well that works.

    The update is made again as the run made it: objective, terms, protection, settings of training. Of rounds before
    the last the run is made again up to there. Ctrl-C ends the attack with the best images so far.
    """
    from fedblend.cli import attacking

    options = {"restarts": restarts} | ({} if iterations is None else {"iterations": iterations})
    attacking.show_attack(run, (round, client), attack, (images, steps, attacker, labels), options, out)


@app.command(
    short_help="Say when loss scaling switched lambda.",
    epilog="Example: fedblend switches runs/augmix/fed-augmix-seed0 --out switches",
)
def switches(
    run: Annotated[Path, typer.Argument(help="A run of fed-augmix, or the folder of a study with just one.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the log (CSV) and the figure (PNG).")] = None,
) -> None:
    """Say when loss scaling switched lambda: how many batches of each round took the large one.

    The run's log does not tell, so its rounds are made again by the reference engine. The table has a line for a round,
    the file one for each client of each round. Ctrl-C ends it with the rounds made so far.
    """
    from fedblend.cli import switching

    switching.show_switches(run, out)


@app.command(
    short_help="Say what left the clients, and what was rebuilt from it.",
    epilog="Example: fedblend leaks runs/quickstart --out leaks",
)
def leaks(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder for the table (CSV, JSON) and the figure (PNG).")] = None,
) -> None:
    """Say what left the clients of runs, and what was rebuilt from it: a leak report card.

    Of weights what attacks rebuilt (fedblend attack), of means and mixed-up seeds how near they are to raw samples.
    The figure shows privacy against accuracy.
    """
    from fedblend.cli import leaking

    leaking.show_leaks(runs, out)


@data_app.command(
    "show",
    short_help="Draw a file's split, and print its non-IID measures.",
    epilog="Example: fedblend data show examples/quickstart.toml --out split.png",
)
def data_show(
    file: File,
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("split.png"),
) -> None:
    """Draw a file's split, classes by clients, and print its non-IID measures."""
    from fedblend.cli import running, showing

    showing.show_data(file, [running.parse_change(text) for text in set_ or []], out)


@app.command(
    short_help="Tell what a wireless channel does to each payload.",
    epilog="Example: fedblend channel examples/quickstart.toml --set channel=wireless",
)
def channel(
    file: File,
    set_: Set = None,
    samples: Annotated[str, typer.Option(help="Seed samples that a device sends first, such as 10,50.")] = "10,50",
) -> None:
    """Tell what a file's wireless channel does to each payload: slots needed, success, outage."""
    from fedblend.cli import channel as channels
    from fedblend.cli import running

    changes = [running.parse_change(text) for text in set_ or []]
    channels.show_channel(file, changes, channels.parse_counts(samples, "--samples"))


@privacy_app.command(
    "samples",
    short_help="Measure what mixed samples tell of raw ones (Mix2FLD).",
    epilog="Example: fedblend privacy samples examples/quickstart.toml --out pictures",
)
def privacy_samples(
    file: File,
    set_: Set = None,
    lambdas: Annotated[str, typer.Option(help="Mixing ratios, with commas.")] = "0.01,0.1,0.2,0.3,0.4,0.49",
    samples: Annotated[int, typer.Option(min=1, help="Samples that each device mixes (N_S).")] = 100,
    devices: Annotated[int, typer.Option(min=2, help="Devices whose samples are mixed.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 10,
    coordinated: Annotated[bool, typer.Option("--coordinated", help="Devices mix labels that match.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
) -> None:
    """Measure how far mixed and inversely mixed samples lie from raw ones (Mix2FLD, Tables II and III)."""
    from fedblend.cli import privacy, running

    changes = [running.parse_change(text) for text in set_ or []]
    privacy.show_samples(file, changes, privacy.parse_lambdas(lambdas), samples, devices, repeats, out, coordinated)


@privacy_app.command(
    "xor",
    short_help="Measure what XOR-encoded samples tell of raw ones (XorMixFL).",
    epilog="Example: fedblend privacy xor xormixfl.toml --blended 1,2,3 --mds --out pictures",
)
def privacy_xor(
    file: File,
    set_: Set = None,
    blended: Annotated[str | None, typer.Option(help="Values of p, with commas; replace the method's own.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 1,
    mds: Annotated[
        bool, typer.Option("--mds", help="Distances after scaling to two dimensions, as in Table 3.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for what is measured.")] = None,
) -> None:
    """Measure what XOR-encoded and mixed-up samples tell of raw ones (XorMixFL, Table 3)."""
    from fedblend.cli import leaks, running
    from fedblend.cli.channel import parse_counts

    changes = [running.parse_change(text) for text in set_ or []]
    values = None if blended is None else parse_counts(blended, "--blended")
    leaks.show_xor(file, changes, values, repeats, mds, out, json)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Federated learning with blended data: run, compare and report experiments."""
    if show:
        from fedblend import __version__

        typer.echo(f"fedblend {__version__}")
        raise typer.Exit
