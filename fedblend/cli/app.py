"""The commands of ``fedblend``: their arguments, options and help; each imports the module that does it when it runs.

A docstring begins with the command's line in the list of commands, up to a colon or semicolon.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

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


def _function(path: str) -> Callable[..., Any]:
    """Import ``module:function`` of fedblend.cli."""
    module, _, function = path.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(f"fedblend.cli.{module}"), function))


def _parsed(parser: str, *more: str) -> Callable[[Any], Any]:
    """A callback that parses an option's value, if it is given, by a function of :mod:`fedblend.cli.arguments`."""
    return lambda value: None if value is None else _function(f"arguments:{parser}")(value, *more)


SET: dict[str, Any] = {
    "metavar": "FIELD=VALUE",
    "help": "Set a field: --set train.lr=0.05 (repeatable); none removes an optional field.",
}
File = Annotated[Path, typer.Argument(help="An experiment file (TOML).")]
Runs = Annotated[list[Path], typer.Argument(help="Run directories, or folders: all runs below them.")]
Set = Annotated[list[str] | None, typer.Option("--set", callback=_parsed("parse_changes"), **SET)]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds data sets, instead of $FEDBLEND_DATA.",
        callback=_parsed("set_data_folder"),
        expose_value=False,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        help="Seeds to run, such as 0,1,2, in place of those of the file or item.", callback=_parsed("parse_seeds")
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
MetricsPort = Annotated[int | None, typer.Option(help="Serve numbers for Prometheus on this port of 127.0.0.1.")]
SiteFile = Annotated[Path, typer.Argument(help="A site file.")]


Command = Callable[..., None]


def _command(
    group: typer.Typer, does: str, example: str, name: str | None = None, old: typer.Typer | None = None
) -> Callable[[Command], Command]:
    """Declare a command that calls ``does`` (``module:function`` in fedblend.cli), or without one its own body.

    In the group ``old`` it has its old place, too, and is hidden there.
    """

    def declare(command: Command) -> Command:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            do = _function(does) if does else command
            do(**{option: value for option, value in given.items() if value is not None})

        summary = re.split("[:;\n]", command.__doc__ or "")[0].rstrip(".") + "."
        for place in filter(None, (group, old)):
            texts = {"short_help": summary, "epilog": f"Example: fedblend {example}"}
            place.command(name, hidden=place is old, **texts)(call)  # type: ignore[arg-type]
        return call

    return declare


# Run and compare ------------------------------------------------------------------------------------------------


@_command(app, "run:run_file", "run examples/quickstart.toml --set rounds=20 --seeds 0,1,2")
def run(
    file: File,
    changes: Set = None,
    seeds: Seeds = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the newest runs of this name.")] = False,
    engine: Annotated[str | None, typer.Option(help="How clients run: auto, loop or stacked.")] = None,
    ranks: Ranks = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/NAME).")] = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Run the experiments of a file: show progress, print a table, write a report."""


@_command(app, "tune:tune_file", "tune my.toml && fedblend run runs/tune-my/best.toml")
def tune(
    file: File,
    changes: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest search of this name.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials (default: runs/tune-NAME).")] = None,
    data: Data = None,
) -> None:
    """Search for the best values of fields, on validation samples: for each method with the same budget.

    The file says what to search, in the tables [tune] and [tune.fields], and keeps samples for validation. The command
    prints each method's best trial, and writes a file that runs all methods with their best values, a table of all
    trials, and a figure of what mattered. Ctrl-C keeps finished trials: go on with --resume.
    """


@_command(app, "advise:advise", "advise my.toml --megabytes 20 --leaves means")
def advise(
    file: File,
    methods: Annotated[
        str | None, typer.Option(help="Methods to try beside fedavg, such as server-means,fedprox.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(min=0, help="Most megabytes that a client sends and receives in the whole run.")
    ] = None,
    least: Annotated[
        float | None, typer.Option(help="Least accuracy from 0 to 1 (largest loss in regression).")
    ] = None,
    leaves: Annotated[
        list[str] | None,
        typer.Option(help="What may leave clients beside the model: means, outputs, seeds, ... or none (repeatable)."),
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", **SET)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest advice on this file, and its options.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for all runs (default: runs/advise-NAME).")] = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Find out which blend helps on your data, at what cost, and write a file to run.

    The command tunes FedAvg and the blends that the data permit, each with the same budget, on validation samples. It
    runs each with its best values and at least three seeds, and measures what leaks. It prints a table and an answer,
    draws accuracy against leakage and bytes, and writes a file that runs the advised method. Ctrl-C keeps what was
    computed: go on with --resume.
    """


@_command(app, "run:resume_runs", "resume runs/quickstart")
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory, or the folder of a study.")],
    ranks: Ranks = None,
    jobs: Jobs = None,
    data: Data = None,
) -> None:
    """Resume runs that were stopped, killed, or failed."""


@_command(app, "compare:write_report", "report runs/quickstart --out comparison.html")
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


@_command(app, "compare:show_table", "compare runs/quickstart")
def compare(
    runs: Runs,
    sites: Annotated[bool, typer.Option("--sites", help="Accuracy at each of the data's own clients.")] = False,
    baseline: Baseline = None,
) -> None:
    """Compare runs in a table in the terminal."""


@_command(app, "compare:inspect", "inspect runs/quickstart")
def inspect(runs: Runs) -> None:
    """Show runs' status, costs and configuration."""


@_command(app, "predict:show_predictions", "predict runs/quickstart/fedavg-seed0 digits.npz --out predictions.csv")
def predict(
    run: RunArgument,
    files: Annotated[list[Path], typer.Argument(help="Pictures, folders of pictures, .npz files (x), or CSV files.")],
    out: Annotated[Path | None, typer.Option(help="A CSV file for all predictions (default: none).")] = None,
    best: Best = False,
    trust: Trust = False,
    site: Annotated[
        Path | None, typer.Option(help="A site file: its rename and categories hold for tables (default: none).")
    ] = None,
) -> None:
    """Predict for pictures, an .npz file or a CSV with a run's model.

    A class and its probability are predicted, labels, or numbers. Samples are given as the run's data set has them:
    pixels from 0 to 255 with the same colours, features in the same units and order. Pictures of another size are
    resized.
    """


@_command(app, "predict:export_model", "export runs/quickstart/fedavg-seed0 --out model.pt2")
def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Option(help="The file: .safetensors (weights), .pt2 (program for PyTorch) or .onnx.")
    ] = Path("model.safetensors"),
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Write a run's model for use without fedblend.

    Beside it lies a JSON file with the scale of its inputs and the names of its classes. Programs take samples as
    stored, scale them, and return probabilities (in regression, numbers). They need no fedblend:
    torch.export.load("model.pt2").module() in PyTorch, or any runtime of ONNX.
    """


# Experiment files -----------------------------------------------------------------------------------------------


@_command(app, "list:show_list", "list methods", name="list")
def list_(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]", help="methods, parts, datasets, models, partitions, or a name whose options to show."
        ),
    ] = None,
) -> None:
    """List methods, parts, data sets, or the options of one name (fedmix, objective, train)."""


@_command(app, "new:print_file", "new fedmix digits --split dirichlet --alpha 0.1 --clients 100 > my.toml")
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


@_command(data_app, "data_show:show_split", "data show examples/quickstart.toml --out split.png", name="show")
def data_show(
    file: File,
    changes: Set = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("split.png"),
) -> None:
    """Draw a file's split, and print its non-IID measures."""


@_command(paper_app, "paper_channel:show_channel", "paper channel examples/mix2fld.toml", old=app)
def channel(
    file: File,
    changes: Set = None,
    samples: Annotated[
        str,
        typer.Option(
            help="Seed samples that a device sends first, such as 10,50.", callback=_parsed("parse_counts", "--samples")
        ),
    ] = "10,50",
) -> None:
    """Show how a wireless channel delivers each payload (Mix2FLD): slots needed, success, outage."""


# Analyse runs ---------------------------------------------------------------------------------------------------


@_command(
    paper_app, "paper_points:show_points", "paper points runs/digits/aggenhance-seed0 --replay --out points", old=app
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
    """Measure a run's class interior points (AggEnhance).

    Measures, by the round that made the points: their alignment with the gradient on clients' data, their distance to
    the training samples in an autoencoder's features, and the accuracy of a new model trained on them alone.
    """


@_command(paper_app, "paper_points:show_boundaries", "paper boundaries runs/toy --out toy.png", old=app)
def boundaries(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("boundaries.png"),
    trust: Trust = False,
) -> None:
    """Draw the decision boundaries of runs' models (AggEnhance), for data of two features; print their accuracies."""


@_command(app, "attack:show_attack", "attack runs/quickstart/fedavg-seed0 --round 0 --client 3 --images 4 --steps 5")
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
    """Rebuild a client's images from what it sent in a round; measure how close they are.

    The client's update is recomputed as in the run: objective, terms, protection, settings of training. For a round
    before the last, the rounds up to it are recomputed first. Ctrl-C ends the attack with the best images so far.
    """


@_command(paper_app, "switches:show_switches", "paper switches runs/augmix/fed-augmix-seed0 --out switches", old=app)
def switches(
    run: Annotated[Path, typer.Argument(help="A run of fed-augmix, or the folder of a study with one run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the log (CSV) and the figure (PNG).")] = None,
    trust: Trust = False,
) -> None:
    """Show when loss scaling switched lambda (Fed-AugMix): how many batches of each round used the large one.

    The run's log lacks this, so the reference engine recomputes the rounds. The table has a row for each of some
    rounds, the file one for each client of each round. Ctrl-C ends it with the rounds computed so far.
    """


@_command(app, "leaks:show_leaks", "leaks runs/quickstart --out leaks")
def leaks(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder for the table (CSV, JSON) and the figure (PNG).")] = None,
    trust: Trust = False,
) -> None:
    """Show what left the clients, and what was rebuilt from it: a leak report card.

    For weights: what attacks rebuilt (fedblend attack). For means and mixed-up seeds: how near they are to raw
    samples. The figure shows privacy against accuracy.
    """


@_command(
    privacy_app, "privacy_epsilon:show_epsilon", "privacy epsilon examples/private.toml --target 4", name="epsilon"
)
def privacy_epsilon(
    file: File,
    changes: Set = None,
    target: Annotated[float | None, typer.Option(help="An epsilon: print the least noise that reaches it.")] = None,
    over_flower: Annotated[bool, typer.Option("--flower", help="Real sites, which know who takes part.")] = False,
) -> None:
    """Show the (epsilon, delta) of a file's runs after all of their rounds, before any is made."""


@_command(
    privacy_app, "privacy_samples:show_samples", "privacy samples examples/mix2fld.toml --out pictures", name="samples"
)
def privacy_samples(
    file: File,
    changes: Set = None,
    lambdas: Annotated[
        str | None,
        typer.Option(
            help="Mixing ratios, with commas (default: those of the paper's tables).", callback=_parsed("parse_lambdas")
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples that each device mixes (N_S).")] = 100,
    devices: Annotated[int, typer.Option(min=2, help="Devices whose samples are mixed.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 10,
    coordinated: Annotated[bool, typer.Option("--coordinated", help="Devices mix labels that match.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
) -> None:
    """Measure how much mixed and inversely mixed samples reveal of raw ones (Mix2FLD, Tables II and III)."""


@_command(
    paper_app,
    "privacy_xor:show_xor",
    "paper xor xormixfl.toml --blended 1,2,3 --mds --out pictures",
    name="xor",
    old=privacy_app,
)
def privacy_xor(
    file: File,
    changes: Set = None,
    blended: Annotated[
        str | None,
        typer.Option(
            help="Values of p, with commas; replace the method's own.", callback=_parsed("parse_counts", "--blended")
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Draws that are averaged.")] = 1,
    mds: Annotated[
        bool, typer.Option("--mds", help="Distances after scaling to two dimensions, as in Table 3.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures of the samples.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for the measurements.")] = None,
) -> None:
    """Measure how much XOR-encoded and mixed-up samples reveal of raw ones (XorMixFL, Table 3)."""


@_command(app, "reproduce:reproduce", "reproduce fedmix/table-1 --scale laptop --only fedavg --only fedmix")
def reproduce(
    item: Annotated[str | None, typer.Argument(help="PAPER/ITEM, such as fedmix/table-1; with --list a paper.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every item, its data, times and results.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only these rows or columns (repeatable, or A;B).")] = None,
    scale: Annotated[str, typer.Option(help="paper, laptop (half an hour) or smoke (a minute).")] = "paper",
    seeds: Seeds = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")] = Path("reproductions"),
    jobs: Jobs = None,
    device: Annotated[str | None, typer.Option(help="Where tensors are computed, such as cuda.")] = None,
) -> None:
    """Reproduce a table or figure of a paper: ours, the paper's, the difference, and a verdict a claim.

    Finished runs are kept; the same command resumes an item that was stopped.
    """


# Real federations -----------------------------------------------------------------------------------------------


@_command(federation_app, "", "federation up examples/quickstart.toml --run fedmix-seed0 --sites 3")
def up(
    file: File,
    sites: Annotated[int, typer.Option(min=1, help="Sites, each of them one client.")] = 3,
    changes: Set = None,
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

    experiment = one_experiment(file, run, changes)
    run_trial(for_sites(experiment, sites), sites, site_file or [], min_sites, deadline, out)


@_command(federation_app, "", "federation app my.toml --out app --folder /var/lib/fedblend/run", name="app")
def app_(
    file: File,
    out: Annotated[Path, typer.Option(help="The folder to write the Flower app into.")],
    folder: Annotated[Path, typer.Option(help="The run directory, on the SuperLink's machine.")],
    changes: Set = None,
    run: RunName = None,
    min_sites: MinSites = 0,
    deadline: Deadline = None,
    credentials: Annotated[
        Path | None, typer.Option(help="The server's folder of provision: sites must have their own keys and numbers.")
    ] = None,
) -> None:
    """Write an experiment as a Flower app, which `flwr run APP SUPERLINK` starts; a second start resumes the run."""
    from fedblend.cli.federation import one_experiment, write_app_folder

    write_app_folder(one_experiment(file, run, changes), out, folder, min_sites, deadline, credentials)


@_command(federation_app, "provision:provision", "federation provision sites.toml --out federation")
def provision(
    file: Annotated[Path, typer.Argument(help="The coordinator's file: the server's address, the sites' names.")],
    out: Annotated[Path, typer.Option(help="Folder for what each party needs.")] = Path("federation"),
    renew: Annotated[bool, typer.Option("--renew", help="Make a new certificate of the server.")] = False,
) -> None:
    """Make what each party of a federation needs: certificates, a folder for each site, the list of keys.

    Again, it adds new sites and their keys, and renews certificates that expire within 30 days.
    """


@_command(federation_app, "provision:watch", "federation watch /var/lib/fedblend/runs --credentials /etc/fedblend")
def watch(
    runs: Annotated[Path, typer.Argument(help="The folder of the server's runs.")],
    credentials: Annotated[Path, typer.Option(help="The server's folder of provision, with the certificates.")],
    metrics_port: Annotated[int, typer.Option(help="Port of 127.0.0.1 for Prometheus.")] = 9464,
) -> None:
    """Serve numbers of the newest run and of the server's certificates for Prometheus, until Ctrl-C."""


@_command(site_app, "provision:enroll", "site enroll site.toml")
def enroll(
    path: SiteFile = Path("site.toml"),
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new key beside the old one.")] = False,
) -> None:
    """Make this site's private key, which stays here: print the public key for the coordinator."""


@_command(site_app, "", "site start site.toml")
def start(
    path: SiteFile = Path("site.toml"),
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1 for the SuperNode's own processes.")] = 9094,
    metrics_port: MetricsPort = None,
) -> None:
    """Start this site's SuperNode, as a service does: with exit code 3 it has to be started again."""
    import fedblend.flower  # noqa: F401  (raises where Flower is missing)
    from fedblend.flower.supervise import start_site

    raise typer.Exit(start_site(path, port, metrics_port))


@_command(site_app, "", "site init site.toml --data samples.npz --min-mean 20")
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


@_command(site_app, "", "site check site.toml")
def check(
    path: SiteFile = Path("site.toml"),
    experiment: Annotated[
        Path | None,
        typer.Option(help="An experiment file: its digest (for `agreed`), and all that this site refuses of it."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The experiment's run, among several.")] = None,
) -> None:
    """Load a site's samples and keys, and show them beside what its file allows; nothing is sent."""
    from fedblend.cli.federation import check_site

    check_site(path, experiment, run)


@_command(site_app, "", "site audit site.toml")
def audit(
    path: SiteFile = Path("site.toml"),
    last: Annotated[int | None, typer.Option(min=1, help="Print only the last lines, this many.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Print only lines since this date (UTC), such as 2026-01-31.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Print only lines of this run, or of this experiment's runs.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each line of the log.")] = False,
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
        show_audit(path, last, since, run, json)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Federated learning with blended data: run, compare and report experiments."""
    if show:
        from fedblend import __version__

        typer.echo(f"fedblend {__version__}")
        raise typer.Exit
