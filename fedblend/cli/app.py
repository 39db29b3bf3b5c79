"""The commands of ``fedblend``: their arguments, options and help. Each command imports its module when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fedblend.core.errors import did_you_mean

# Help is plain text. With Rich installed, Typer 0.20 (the newest that Flower allows) escapes brackets in plain help
# too, as "\[required]".
typer.core.HAS_RICH = False


class _Group(typer.core.TyperGroup):
    """A group that suggests commands. Some versions of Typer and Click do so, too, each in words of its own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], self.commands)}.")
        return super().resolve_command(ctx, args)


def _group(text: str, **more: Any) -> typer.Typer:
    return typer.Typer(cls=_Group, help=text, no_args_is_help=True, rich_markup_mode=None, **more)


app = _group(
    "Federated learning with blended data: run, compare and report experiments.",
    name="fedblend",
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = _group("Show data sets and how they are split.")
privacy_app = _group("Measure how much shared samples reveal, and plan noise.")
paper_app = _group("Answer a question of one of the papers.")
federation_app = _group("Run experiments between real sites, over Flower.")
site_app = _group("Manage a site's file, and show its record of what left it.")
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(paper_app, name="paper")
app.add_typer(federation_app, name="federation")
app.add_typer(site_app, name="site")

File = Annotated[Path, typer.Argument(help="An experiment file (TOML).")]
Runs = Annotated[list[Path], typer.Argument(help="Run directories, or folders: all runs below them.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field: --set train.lr=0.05 (repeatable); none removes an optional field.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder that holds data sets, instead of $FEDBLEND_DATA.",
        callback=lambda folder: _set_data_folder(folder),
    ),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="Processes that share each round's clients.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a processor).")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or the folder of a study with one run.")
]
Best = Annotated[bool, typer.Option("--best", help="The best model that the callback keep-best kept, not the last.")]
RunName = Annotated[str | None, typer.Option("--run", help="Folder name of one run, where the file has several.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import and run code that the runs name (own parts, models).")]
MinSites = Annotated[int, typer.Option(min=0, help="Sites without which no exchange begins (0: all).")]
Baseline = Annotated[
    str | None,
    typer.Option(help="The method that others are compared with over the same seeds (default: fedavg, or the first)."),
]
Deadline = Annotated[float | None, typer.Option(min=1, help="Seconds in which sites must answer (default: 600).")]


Command = Callable[..., None]


def _of_paper(name: str, old: typer.Typer, **texts: str) -> Callable[[Command], Command]:
    """Declare a command of the group ``paper``; its old place, in a group or at the top, works too, and is hidden."""

    def declare(command: Command) -> Command:
        old.command(name, hidden=True, **texts)(command)  # type: ignore[arg-type]
        return paper_app.command(name, **texts)(command)  # type: ignore[arg-type]

    return declare


def _set_data_folder(folder: Path | None) -> Path | None:
    from fedblend.data.loaders.files import set_data_folder

    return set_data_folder(folder) if folder else None


# Run and compare ------------------------------------------------------------------------------------------------


@app.command(
    short_help="Run the experiments of a file, with a table and a report.",
    epilog="Example: fedblend run examples/quickstart.toml --set rounds=20 --seeds 0,1,2",
)
def run(
    file: File,
    set_: Set = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, such as 0,1,2; replaces the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the newest runs of this name.")] = False,
    engine: Annotated[str | None, typer.Option(help="How clients run: auto, loop or stacked.")] = None,
    ranks: Ranks = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/NAME).")] = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Run the experiments of a file: show progress, print a table, write a report."""
    from fedblend.cli.arguments import parse_changes, parse_seeds
    from fedblend.cli.run import run_file, serve_other_rank

    if serve_other_rank():
        return
    changes = parse_changes(set_)
    if engine is not None:
        changes.append(("engine", engine))
    if ranks is not None:
        changes.append(("ranks", ranks))
    run_file(file, changes, parse_seeds(seeds), resume, out, jobs)


@app.command(
    short_help="Search for the best values of fields, on validation samples.",
    epilog="Example: fedblend tune my.toml && fedblend run runs/tune-my/best.toml",
)
def tune(
    file: File,
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest search of this name.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials (default: runs/tune-NAME).")] = None,
    data: Data = None,
) -> None:
    """Search for the best values of a file's fields, for each of its methods with the same budget.

    The file says what to search, in the tables [tune] and [tune.fields], and keeps samples for validation. The command
    prints each method's best trial, and writes a file that runs all methods with their best values, a table of all
    trials, and a figure of what mattered. Ctrl-C keeps finished trials: go on with --resume.
    """
    from fedblend.cli.arguments import parse_changes
    from fedblend.cli.tune import tune_file

    tune_file(file, parse_changes(set_), resume, out)


@app.command(
    short_help="Find out which blend helps on your data, at what cost, and write a file to run.",
    epilog="Example: fedblend advise my.toml --megabytes 20 --leaves means",
)
def advise(
    file: File,
    methods: Annotated[
        str | None, typer.Option(help="Methods to try beside fedavg, such as server-means,fedprox.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(min=0, help="Most megabytes that a client sends and receives in the whole run.")
    ] = None,
    score: Annotated[
        float | None, typer.Option("--least", help="Least accuracy from 0 to 1 (largest loss in regression).")
    ] = None,
    leaves: Annotated[
        list[str] | None,
        typer.Option(help="What may leave clients beside the model: means, outputs, seeds, ... or none (repeatable)."),
    ] = None,
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest advice on this file, and its options.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs (default: runs/advise-NAME).")] = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Find out which blend helps on the data, model and split of a file, and what it gives away.

    The command tunes FedAvg and the blends that the data permit, each with the same budget, on validation samples. It
    runs each with its best values and at least three seeds, and measures what leaks. It prints a table and an answer,
    draws accuracy against leakage and bytes, and writes a file that runs the advised method. Ctrl-C keeps what was
    computed: go on with --resume.
    """
    from fedblend.cli.advise import advise

    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    options = {"methods": names, "set": set_, "megabytes": megabytes, "least": score, "leaves": leaves}
    advise(file, options, resume, out, jobs)


@app.command(epilog="Example: fedblend resume runs/quickstart")
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory, or the folder of a study.")],
    ranks: Ranks = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Resume runs that were stopped, killed, or failed."""
    from fedblend.cli.run import resume_runs, serve_other_rank

    if not serve_other_rank():
        resume_runs(run, jobs, ranks)


@app.command(
    short_help="Write one HTML page (and a PNG) that compares runs.",
    epilog="Example: fedblend report runs/quickstart --out comparison.html",
)
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write; the PNG has the same name, ending in .png.")] = Path(
        "report.html"
    ),
    baseline: Baseline = None,
    export: Annotated[
        Path | None,
        typer.Option(help="A folder for figures as SVG, PDF and CSV, and tables as CSV and LaTeX (default: none)."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write one HTML page (and a PNG) that compares runs; the page works offline."""
    from fedblend.cli.compare import write_report

    write_report(runs, out, trust, baseline, export)


@app.command(epilog="Example: fedblend compare runs/quickstart")
def compare(
    runs: Runs,
    sites: Annotated[bool, typer.Option("--sites", help="Accuracy at each of the data's own clients.")] = False,
    baseline: Baseline = None,
) -> None:
    """Compare runs in a table in the terminal."""
    from fedblend.cli.compare import show_table

    show_table(runs, sites, baseline)


@app.command(epilog="Example: fedblend inspect runs/quickstart")
def inspect(runs: Runs) -> None:
    """Show runs' status, costs and configuration."""
    from fedblend.cli.compare import inspect

    inspect(runs)


@app.command(
    short_help="Predict for pictures, an .npz file or a CSV with a run's model.",
    epilog="Example: fedblend predict runs/quickstart/fedavg-seed0 digits.npz --out predictions.csv",
)
def predict(
    run: RunArgument,
    files: Annotated[list[Path], typer.Argument(help="Pictures, folders of pictures, .npz files (x), or CSV files.")],
    out: Annotated[Path | None, typer.Option(help="A CSV file for all predictions (default: none).")] = None,
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Predict for samples with a run's final model: a class and its probability, labels, or numbers.

    Samples are given as the run's data set has them: pixels from 0 to 255 with the same colours, features in the same
    units and order. Pictures of another size are resized.
    """
    from fedblend.cli.predict import show_predictions

    show_predictions(run, files, out, best, trust)


@app.command(
    short_help="Write a run's model for use without fedblend.",
    epilog="Example: fedblend export runs/quickstart/fedavg-seed0 --out model.pt2",
)
def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Option(help="The file: .safetensors (weights), .pt2 (program for PyTorch) or .onnx.")
    ] = Path("model.safetensors"),
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Write a run's final model, and beside it a JSON file with the scale of its inputs and the names of its classes.

    Programs take samples as stored, scale them, and return probabilities (in regression, numbers). They need no
    fedblend: torch.export.load("model.pt2").module() in PyTorch, or any runtime of ONNX.
    """
    from fedblend.cli.predict import export_model

    export_model(run, out, best, trust)


# Experiment files -----------------------------------------------------------------------------------------------


@app.command(
    "list",
    short_help="List methods, parts, data sets, or the options of one name.",
    epilog="Example: fedblend list methods",
)
def list_(
    what: Annotated[
        str | None,
        typer.Argument(help="methods, parts, datasets, models, partitions, or a name whose options to show."),
    ] = None,
) -> None:
    """List the parts of an experiment, or the options of one name (fedmix, objective, train)."""
    from fedblend.cli.list import show_list

    show_list(what)


@app.command(epilog="Example: fedblend new fedmix digits --split dirichlet --alpha 0.1 --clients 100 > my.toml")
def new(
    method: Annotated[str, typer.Argument(help="A method, as in: fedblend list methods.")],
    dataset: Annotated[str, typer.Argument(help="A data set, as in: fedblend list datasets.")],
    split: Annotated[
        str | None, typer.Option(help="A partition, as in: fedblend list partitions (default: the data set's usual).")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Concentration of a Dirichlet split: the smaller, the farther from IID.")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.")] = None,
) -> None:
    """Print a commented experiment file that runs unchanged."""
    from fedblend.cli.new import new_file

    options = {key: value for key, value in (("clients", clients), ("alpha", alpha)) if value is not None}
    typer.echo(new_file(method, dataset, split, options), nl=False)


@data_app.command(
    "show",
    short_help="Draw a file's split, and print its non-IID measures.",
    epilog="Example: fedblend data show examples/quickstart.toml --out split.png",
)
def data_show(
    file: File, set_: Set = None, out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("split.png")
) -> None:
    """Draw a file's split, classes by clients, and print its non-IID measures."""
    from fedblend.cli.arguments import parse_changes
    from fedblend.cli.data_show import show_split

    show_split(file, parse_changes(set_), out)


@_of_paper(
    "channel",
    app,
    short_help="Show how a wireless channel delivers each payload (Mix2FLD).",
    epilog="Example: fedblend paper channel examples/mix2fld.toml",
)
def channel(
    file: File,
    set_: Set = None,
    samples: Annotated[str, typer.Option(help="Seed samples that a device sends first, such as 10,50.")] = "10,50",
) -> None:
    """Show how a file's wireless channel delivers each payload: slots needed, success, outage."""
    from fedblend.cli.arguments import parse_changes, parse_counts
    from fedblend.cli.channel import show_channel

    show_channel(file, parse_changes(set_), parse_counts(samples, "--samples"))


# Analyse runs ---------------------------------------------------------------------------------------------------


@_of_paper(
    "points",
    app,
    short_help="Measure a run's class interior points (AggEnhance).",
    epilog="Example: fedblend paper points runs/digits/aggenhance-seed0 --replay --out points",
)
def points(
    run: Annotated[Path, typer.Argument(help="A run of aggenhance, or the folder of a study with one run.")],
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of a new model (default: 100).")] = None,
    lr: Annotated[float | None, typer.Option(help="Its learning rate (default: the method's).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Its points a batch (default: the method's).")] = None,
    vae_epochs: Annotated[int, typer.Option(min=0, help="Epochs of the autoencoder; 0 leaves distances out.")] = 10,
    replay: Annotated[bool, typer.Option("--replay", help="Repeat the run, for the alignment in every round.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for tables (CSV) and figures (PNG).")] = None,
    trust: Trust = False,
) -> None:
    """Measure a run's class interior points.

    Measures, by the round that made the points: their alignment with the gradient on clients' data, their distance to
    the training samples in an autoencoder's features, and the accuracy of a new model trained on them alone.
    """
    from fedblend.cli.points import show_points

    show_points(run, (epochs, lr, batch_size), vae_epochs, replay, out, trust)


@_of_paper(
    "boundaries",
    app,
    short_help="Draw the decision boundaries of runs' models (AggEnhance).",
    epilog="Example: fedblend paper boundaries runs/toy --out toy.png",
)
def boundaries(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("boundaries.png"),
    trust: Trust = False,
) -> None:
    """Draw the decision boundaries of runs' models, for data of two features, and print their accuracies."""
    from fedblend.cli.points import show_boundaries

    show_boundaries(runs, out, trust)


@app.command(
    short_help="Rebuild a client's images from what it sent in a round.",
    epilog="Example: fedblend attack runs/quickstart/fedavg-seed0 --round 0 --client 3 --images 4 --steps 5",
)
def attack(
    run: RunArgument,
    round: Annotated[int, typer.Option(min=0, help="Rounds made before; 0 is the untrained model.")],
    client: Annotated[int, typer.Option(min=0, help="The client that is attacked.")],
    attack: Annotated[str, typer.Option(help="invgrad, dlg or idlg.")] = "invgrad",
    images: Annotated[int | None, typer.Option(min=1, help="Train on this many of its samples (default: all).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps on these images (default: the run's epochs).")] = None,
    iterations: Annotated[int | None, typer.Option(min=1, help="Iterations (default: 2500; dlg, idlg: 300).")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Starting points; the best result is kept.")] = 1,
    labels: Annotated[str, typer.Option(help="true: the attacker has the labels; inferred: it infers them.")] = "true",
    attacker: Annotated[
        str,
        typer.Option(
            help="What the attacker has. guesses: the objective, with random numbers of its own; plain: cross-entropy "
            "alone; knows: the objective and its random numbers."
        ),
    ] = "guesses",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for images and numbers (default: in the run's, where fedblend leaks reads them)."),
    ] = None,
) -> None:
    """Rebuild a client's images from what it sent in a round of a run, and measure how close they are.

    The client's update is recomputed as in the run: objective, terms, protection, settings of training. For a round
    before the last, the rounds up to it are recomputed first. Ctrl-C ends the attack with the best images so far.
    """
    from fedblend.cli.attack import show_attack

    options = {"restarts": restarts} | ({} if iterations is None else {"iterations": iterations})
    show_attack(run, (round, client), attack, (images, steps, attacker, labels), options, out)


@_of_paper(
    "switches",
    app,
    short_help="Show when loss scaling switched lambda (Fed-AugMix).",
    epilog="Example: fedblend paper switches runs/augmix/fed-augmix-seed0 --out switches",
)
def switches(
    run: Annotated[Path, typer.Argument(help="A run of fed-augmix, or the folder of a study with one run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the log (CSV) and the figure (PNG).")] = None,
    trust: Trust = False,
) -> None:
    """Show when loss scaling switched lambda: how many batches of each round used the large one.

    The run's log lacks this, so the reference engine recomputes the rounds. The table has a row for each of some
    rounds, the file one for each client of each round. Ctrl-C ends it with the rounds computed so far.
    """
    from fedblend.cli import switches

    switches.show_switches(run, out, trust)


@app.command(
    short_help="Show what left the clients, and what was rebuilt from it.",
    epilog="Example: fedblend leaks runs/quickstart --out leaks",
)
def leaks(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder for the table (CSV, JSON) and the figure (PNG).")] = None,
    trust: Trust = False,
) -> None:
    """Show what left the clients of runs, and what was rebuilt from it: a leak report card.

    For weights: what attacks rebuilt (fedblend attack). For means and mixed-up seeds: how near they are to raw
    samples. The figure shows privacy against accuracy.
    """
    from fedblend.cli.leaks import show_leaks

    show_leaks(runs, out, trust)


@privacy_app.command(
    "epsilon",
    short_help="Show the epsilon of a file's runs before they are made.",
    epilog="Example: fedblend privacy epsilon examples/private.toml --target 4",
)
def privacy_epsilon(
    file: File,
    set_: Set = None,
    target: Annotated[float | None, typer.Option(help="An epsilon: print the least noise that reaches it.")] = None,
    over_flower: Annotated[bool, typer.Option("--flower", help="Real sites, which know who takes part.")] = False,
) -> None:
    """Show the (epsilon, delta) of a file's runs after all of their rounds, before any is made."""
    from fedblend.cli.arguments import parse_changes
    from fedblend.cli.privacy_epsilon import show_epsilon

    show_epsilon(file, parse_changes(set_), target, over_flower)


@privacy_app.command(
    "samples",
    short_help="Measure how much mixed samples reveal of raw ones (Mix2FLD).",
    epilog="Example: fedblend privacy samples examples/mix2fld.toml --out pictures",
)
def privacy_samples(
    file: File,
    set_: Set = None,
    lambdas: Annotated[
        str | None, typer.Option(help="Mixing ratios, with commas (default: those of the paper's tables).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples that each device mixes (N_S).")] = 100,
    devices: Annotated[int, typer.Option(min=2, help="Devices whose samples are mixed.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 10,
    coordinated: Annotated[bool, typer.Option("--coordinated", help="Devices mix labels that match.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
) -> None:
    """Measure the distance of mixed and inversely mixed samples from raw ones (Mix2FLD, Tables II and III)."""
    from fedblend.cli.arguments import parse_changes, parse_lambdas
    from fedblend.cli.privacy_samples import show_samples

    ratios = None if lambdas is None else parse_lambdas(lambdas)
    show_samples(file, parse_changes(set_), ratios, samples, devices, repeats, out, coordinated)


@_of_paper(
    "xor",
    privacy_app,
    short_help="Measure how much XOR-encoded samples reveal of raw ones (XorMixFL).",
    epilog="Example: fedblend paper xor xormixfl.toml --blended 1,2,3 --mds --out pictures",
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
    json: Annotated[Path | None, typer.Option(help="A file for the measurements.")] = None,
) -> None:
    """Measure how much XOR-encoded and mixed-up samples reveal of raw ones (XorMixFL, Table 3)."""
    from fedblend.cli.arguments import parse_changes, parse_counts
    from fedblend.cli.privacy_xor import show_xor

    values = None if blended is None else parse_counts(blended, "--blended")
    show_xor(file, parse_changes(set_), values, repeats, mds, out, json)


@app.command(
    short_help="Reproduce a table or figure of a paper.",
    epilog="Example: fedblend reproduce fedmix/table-1 --scale laptop --only fedavg --only fedmix",
)
def reproduce(
    item: Annotated[str | None, typer.Argument(help="PAPER/ITEM, such as fedmix/table-1; with --list a paper.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every item, its data, times and results.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only these rows or columns (repeatable, or A;B).")] = None,
    scale: Annotated[str, typer.Option(help="paper, laptop (half an hour) or smoke (a minute).")] = "paper",
    seeds: Annotated[str | None, typer.Option(help="Seeds to run, such as 0,1,2; replaces the item's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path("reproductions"),
    jobs: Jobs = None,
    device: Annotated[str | None, typer.Option(help="Where tensors are computed, such as cuda.")] = None,
) -> None:
    """Reproduce a table or figure of a paper: ours, the paper's, the difference, and a verdict a claim.

    Finished runs are kept; the same command resumes an item that was stopped.
    """
    from fedblend.cli import reproduce
    from fedblend.cli.arguments import parse_seeds
    from fedblend.core.errors import FedblendError

    if list_:
        reproduce.show_list(item, out)
    elif item is None:
        raise FedblendError("reproduce: name an item, such as fedmix/table-1; all of them: fedblend reproduce --list")
    else:
        reproduce.show_item(item, scale, only or [], parse_seeds(seeds), out, jobs, device)


# Real federations -----------------------------------------------------------------------------------------------


@federation_app.command(
    short_help="Try a federation on this machine.",
    epilog="Example: fedblend federation up examples/quickstart.toml --run fedmix-seed0 --sites 3",
)
def up(
    file: File,
    sites: Annotated[int, typer.Option(min=1, help="Sites, each of them one client.")] = 3,
    set_: Set = None,
    run: RunName = None,
    min_sites: MinSites = 0,
    deadline: Deadline = None,
    site_file: Annotated[
        list[Path] | None, typer.Option(help="The file of a site, in order of sites (repeatable; default: new files).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the trial (default: runs/NAME-federation).")] = None,
) -> None:
    """Try a federation on this machine: SuperLink and SuperNodes on loopback, with TLS and authenticated nodes."""
    from fedblend.cli.federation import for_sites, one_experiment, run_trial

    experiment = one_experiment(file, set_, run)
    run_trial(for_sites(experiment, sites), sites, site_file or [], min_sites, deadline, out)


@federation_app.command(
    "app", epilog="Example: fedblend federation app my.toml --out app --folder /var/lib/fedblend/run"
)
def app_(
    file: File,
    out: Annotated[Path, typer.Option(help="The folder to write the Flower app into.")],
    folder: Annotated[Path, typer.Option(help="The run directory, on the SuperLink's machine.")],
    set_: Set = None,
    run: RunName = None,
    min_sites: MinSites = 0,
    deadline: Deadline = None,
) -> None:
    """Write the Flower app of an experiment, for: flwr run APP SUPERLINK. Starting it again resumes the run."""
    from fedblend.cli.federation import one_experiment, write_app_folder

    write_app_folder(one_experiment(file, set_, run), out, folder, min_sites, deadline)


@site_app.command(
    short_help="Write a commented site file.",
    epilog="Example: fedblend site init site.toml --data samples.npz --min-mean 20",
)
def init(
    path: Annotated[Path, typer.Argument(help="The site file to write.")] = Path("site.toml"),
    data: Annotated[Path | None, typer.Option(help="This site's samples: .npz, or a table (.csv, .parquet).")] = None,
    target: Annotated[list[str] | None, typer.Option(help="A table's column to predict (repeatable).")] = None,
    missing: Annotated[str | None, typer.Option(help="A table's empty cells: refuse, mean or drop.")] = None,
    features: Annotated[
        list[str] | None, typer.Option(help="A table's column of features (repeatable; default: all others).")
    ] = None,
    min_mean: Annotated[int, typer.Option(min=1, help="Fewest samples that a shared mean may cover.")] = 2,
) -> None:
    """Write a commented site file: where data are, what may leave, and how much of it."""
    from fedblend.cli.federation import init_site

    chosen = {"target": target[0] if target and len(target) == 1 else target, "missing": missing, "features": features}
    init_site(path, data, min_mean, {option: value for option, value in chosen.items() if value})


@site_app.command(
    short_help="Load a site's samples and keys; nothing is sent.", epilog="Example: fedblend site check site.toml"
)
def check(
    path: Annotated[Path, typer.Argument(help="A site file.")] = Path("site.toml"),
    experiment: Annotated[Path | None, typer.Option(help="An experiment file: print its digest, for `agreed`.")] = None,
    run: Annotated[str | None, typer.Option(help="The experiment's run, among several.")] = None,
) -> None:
    """Load a site's samples and keys, and show them beside what its file allows. Nothing is sent."""
    from fedblend.cli.federation import check_site, one_experiment

    check_site(path, None if experiment is None else one_experiment(experiment, None, run))


@site_app.command(epilog="Example: fedblend site audit site.toml")
def audit(
    path: Annotated[Path, typer.Argument(help="A site file.")] = Path("site.toml"),
    last: Annotated[int | None, typer.Option(min=1, help="Print only the last lines, this many.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check that the log is as the site wrote it.")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Go on with a log that is not as the site wrote it.")
    ] = False,
) -> None:
    """Show everything that left this site, and what it refused."""
    from fedblend.cli.federation import show_audit, verify_audit

    if verify or accept:
        verify_audit(path, accept)
    else:
        show_audit(path, last)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Federated learning with blended data: run, compare and report experiments."""
    if show:
        from fedblend import __version__

        typer.echo(f"fedblend {__version__}")
        raise typer.Exit
