"""The commands of ``fedblend``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli.federation_app import federation_app, site_app

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
Runs = Annotated[list[Path], typer.Argument(help="Run directories, or folders of studies.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Set a field: --set train.lr=0.05 (repeatable).")]


@app.command(epilog="Example: fedblend run examples/quickstart.toml --set rounds=20 --seeds 0,1,2")
def run(
    file: File,
    set_: Set = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, such as 0,1,2; replaces the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest runs of this name.")] = False,
    engine: Annotated[str | None, typer.Option(help="How clients run: auto, loop or stacked.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes that share each round's clients.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a processor).")] = None,
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
) -> None:
    """Go on with runs that were stopped, killed, or failed."""
    from fedblend.cli import running

    if not running.served():
        running.resume_runs(run, jobs, ranks)


@app.command(epilog="Example: fedblend report runs/quickstart --out comparison.html")
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write; the picture goes beside it.")] = Path("report.html"),
) -> None:
    """Write one HTML page (and a PNG) that compares runs; the page works offline."""
    from fedblend.cli import running

    running.write_report(runs, out)


@app.command(epilog="Example: fedblend compare runs/quickstart")
def compare(runs: Runs) -> None:
    """Compare runs in a table in the terminal."""
    from fedblend.cli import running

    running.show_table(runs)


@app.command("list", epilog="Example: fedblend list methods")
def list_(
    what: Annotated[
        str, typer.Argument(help="methods, parts, datasets, models, partitions, or a name: its options are then told.")
    ],
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


@app.command(epilog="Example: fedblend boundaries runs/toy --out toy.png")
def boundaries(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("boundaries.png"),
) -> None:
    """Draw where runs' models divide a plane, for data of two features, and print their accuracies."""
    from fedblend.cli import probing

    probing.show_boundaries(runs, out)


@data_app.command("show", epilog="Example: fedblend data show examples/quickstart.toml --out split.png")
def data_show(
    file: File,
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("split.png"),
) -> None:
    """Draw a file's split, classes by clients, and print its non-IID measures."""
    from fedblend.cli import running, showing

    showing.show_data(file, [running.parse_change(text) for text in set_ or []], out)


@app.command(epilog="Example: fedblend channel examples/quickstart.toml --set channel=wireless")
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


@privacy_app.command("samples", epilog="Example: fedblend privacy samples examples/quickstart.toml --out pictures")
def privacy_samples(
    file: File,
    set_: Set = None,
    lambdas: Annotated[str, typer.Option(help="Mixing ratios, with commas.")] = "0.01,0.1,0.2,0.3,0.4,0.49",
    samples: Annotated[int, typer.Option(min=1, help="Samples that each device mixes (N_S).")] = 100,
    devices: Annotated[int, typer.Option(min=2, help="Devices whose samples are mixed.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 10,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
) -> None:
    """Measure how far mixed and inversely mixed samples lie from raw ones (Mix2FLD, Tables II and III)."""
    from fedblend.cli import privacy, running

    changes = [running.parse_change(text) for text in set_ or []]
    privacy.show_samples(file, changes, privacy.parse_lambdas(lambdas), samples, devices, repeats, out)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Federated learning with blended data: run, compare and report experiments."""
    if show:
        from fedblend import __version__

        typer.echo(f"fedblend {__version__}")
        raise typer.Exit
