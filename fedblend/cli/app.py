"""The commands of ``fedblend``: their arguments, options and help; each imports the module that does it when it runs.

A text begins with the command's line in the list of commands, up to a colon or semicolon.
"""

from __future__ import annotations

import importlib
import inspect
import re
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


SHAPE: dict[str, Any] = {"cls": _Group, "no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(name="fedblend", add_completion=False, pretty_exceptions_enable=False, **SHAPE)


def _group(text: str, name: str) -> typer.Typer:
    made = typer.Typer(help=text, **SHAPE)
    app.add_typer(made, name=name)
    return made


data = _group("Show data sets and how they are split.", "data")
privacy = _group("Measure how much shared samples reveal, and plan noise.", "privacy")
paper = _group("Answer a question of one of the papers.", "paper")
federation = _group("Run experiments between real sites, over Flower.", "federation")
site = _group("Manage a site's file, and show its record of what left it.", "site")

# How commands and options are declared --------------------------------------------------------------------------

_Declared = Callable[[str], inspect.Parameter]
"""An option or argument, as a parameter of the name that its command gives it."""


def _function(path: str) -> Callable[..., Any]:
    """Import ``module:function`` of fedblend.cli."""
    module, _, function = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"fedblend.cli.{module}"), function)
    return found


def _parsed(parser: str, *more: str) -> Callable[[Any], Any]:
    """A callback that parses an option's value, if it is given, by a function of :mod:`fedblend.cli.arguments`."""
    return lambda value: None if value is None else _function(f"arguments:{parser}")(value, *more)


def _declared(of: Any, shown: Callable[[str], Any], default: Any) -> _Declared:
    """A parameter of a type; it must be given if its default is ``...``, and may be left out if it is ``None``."""

    def declare(name: str) -> inspect.Parameter:
        annotation: Any = Annotated[of if default is not None else of | None, shown(name)]
        given = inspect.Parameter.empty if default is ... else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=annotation)

    return declare


def _option(of: Any, text: str, default: Any = None, name: str = "", **more: Any) -> _Declared:
    """An option, by default with the name of its parameter. One of the type ``bool`` has no value."""

    def shown(parameter: str) -> Any:
        return typer.Option(name or f"--{parameter.replace('_', '-')}", help=text, **more)

    return _declared(of, shown, False if of is bool else default)


def _argument(of: Any, text: str, default: Any = ..., **more: Any) -> _Declared:
    return _declared(of, lambda _: typer.Argument(help=text, **more), default)


def _command(group: typer.Typer, does: str, example: str, old: typer.Typer | None = None) -> Callable[..., None]:
    """Declare the command of an example, which calls ``does``, ``module:function`` in fedblend.cli.

    Call the result with the command's text and its options. In the group ``old`` the command has its old place, too,
    and is hidden there.
    """
    name = example.split()[0 if group is app else 1]

    def declare(text: str, /, **options: _Declared) -> None:
        def call(**given: Any) -> None:
            _function(does)(**{option: value for option, value in given.items() if value is not None})

        call.__signature__ = inspect.Signature([make(one) for one, make in options.items()])  # type: ignore[attr-defined]
        summary = re.split("[:;\n]", text)[0].rstrip(".") + "."
        for place in filter(None, (group, old)):
            texts = {"help": text, "short_help": summary, "epilog": f"Example: fedblend {example}"}
            place.command(name, hidden=place is old, **texts)(call)  # type: ignore[arg-type]

    return declare


# Options of several commands ------------------------------------------------------------------------------------

SET = "Set a field: --set train.lr=0.05 (repeatable); none removes an optional field."
FILE = _argument(Path, "An experiment file (TOML).")
RUNS = _argument(list[Path], "Run directories, or folders: all runs below them.")
RUN = _argument(Path, "A run directory, or the folder of a study with one run.", metavar="RUN")
CHANGES = _option(list[str], SET, name="--set", metavar="FIELD=VALUE", callback=_parsed("parse_changes"))
DATA = _option(
    Path,
    "Folder that holds data sets, instead of $FEDBLEND_DATA.",
    callback=_parsed("set_data_folder"),
    expose_value=False,
)
SEEDS = _option(
    str, "Seeds to run, such as 0,1,2, in place of those of the file or item.", callback=_parsed("parse_seeds")
)
RANKS = _option(int, "Processes that share each round's clients.", min=1)
JOBS = _option(int, "Runs at once (default: one a processor).", min=1)
BEST = _option(bool, "The best model that the callback keep-best kept, not the last.")
TRUST = _option(bool, "Import and run code that the runs name (own parts, models).")
BASELINE = _option(str, "The method that others are compared with over the same seeds (default: fedavg, or the first).")
ONE_RUN = _option(str, "Folder name of one run, where the file has several.")
MIN_SITES = _option(int, "Sites without which no exchange begins (0: all).", 0, min=0)
DEADLINE = _option(float, "Seconds in which sites must answer (default: 600).", min=1)
SITE_FILE = _argument(Path, "A site file.", Path("site.toml"))


# Run and compare ------------------------------------------------------------------------------------------------

_command(app, "run:run_file", "run examples/quickstart.toml --set rounds=20 --seeds 0,1,2")(
    "Run the experiments of a file: show progress, print a table, write a report.",
    file=FILE,
    changes=CHANGES,
    seeds=SEEDS,
    resume=_option(bool, "Resume the newest runs of this name."),
    engine=_option(str, "How clients run: auto, loop or stacked."),
    ranks=RANKS,
    out=_option(Path, "Folder for the runs (default: runs/NAME)."),
    jobs=JOBS,
    data=DATA,
)

_command(app, "tune:tune_file", "tune my.toml && fedblend run runs/tune-my/best.toml")(
    """Search for the best values of fields, on validation samples: for each method with the same budget.

    The file says what to search, in the tables [tune] and [tune.fields], and keeps samples for validation. The command
    prints each method's best trial, and writes a file that runs all methods with their best values, a table of all
    trials, and a figure of what mattered. Ctrl-C keeps finished trials: go on with --resume.
    """,
    file=FILE,
    changes=CHANGES,
    resume=_option(bool, "Go on with the newest search of this name."),
    out=_option(Path, "Folder for the trials (default: runs/tune-NAME)."),
    data=DATA,
)

_command(app, "advise:advise", "advise my.toml --megabytes 20 --leaves means")(
    """Find out which blend helps on your data, at what cost, and write a file to run.

    The command tunes FedAvg and the blends that the data permit, each with the same budget, on validation samples. It
    runs each with its best values and at least three seeds, and measures what leaks. It prints a table and an answer,
    draws accuracy against leakage and bytes, and writes a file that runs the advised method. Ctrl-C keeps what was
    computed: go on with --resume.
    """,
    file=FILE,
    methods=_option(str, "Methods to try beside fedavg, such as server-means,fedprox."),
    megabytes=_option(float, "Most megabytes that a client sends and receives in the whole run.", min=0),
    least=_option(float, "Least accuracy from 0 to 1 (largest loss in regression)."),
    leaves=_option(
        list[str], "What may leave clients beside the model: means, outputs, seeds, ... or none (repeatable)."
    ),
    changes=_option(list[str], SET, name="--set", metavar="FIELD=VALUE"),
    resume=_option(bool, "Go on with the newest advice on this file, and its options."),
    out=_option(Path, "Folder for all runs (default: runs/advise-NAME)."),
    jobs=JOBS,
    data=DATA,
)

_command(app, "run:resume_runs", "resume runs/quickstart")(
    "Resume runs that were stopped, killed, or failed.",
    run=_argument(Path, "A run directory, or the folder of a study."),
    ranks=RANKS,
    jobs=JOBS,
    data=DATA,
)

_command(app, "compare:write_report", "report runs/quickstart --out comparison.html")(
    "Write one HTML page (and a PNG) that compares runs; the page works offline.",
    runs=RUNS,
    out=_option(Path, "The page to write; the PNG has the same name, ending in .png.", Path("report.html")),
    baseline=BASELINE,
    export=_option(Path, "A folder for figures as SVG, PDF and CSV, and tables as CSV and LaTeX (default: none)."),
    trust=TRUST,
)

_command(app, "compare:show_table", "compare runs/quickstart")(
    "Compare runs in a table in the terminal.",
    runs=RUNS,
    sites=_option(bool, "Accuracy at each of the data's own clients."),
    baseline=BASELINE,
)

_command(app, "compare:inspect", "inspect runs/quickstart")("Show runs' status, costs and configuration.", runs=RUNS)

_command(app, "predict:show_predictions", "predict runs/quickstart/fedavg-seed0 digits.npz --out predictions.csv")(
    """Predict for pictures, an .npz file or a CSV with a run's model.

    A class and its probability are predicted, labels, or numbers. Samples are given as the run's data set has them:
    pixels from 0 to 255 with the same colours, features in the same units and order. Pictures of another size are
    resized.
    """,
    run=RUN,
    files=_argument(list[Path], "Pictures, folders of pictures, .npz files (x), or CSV files."),
    out=_option(Path, "A CSV file for all predictions (default: none)."),
    best=BEST,
    trust=TRUST,
    site=_option(Path, "A site file: its rename and categories hold for tables (default: none)."),
)

_command(app, "predict:export_model", "export runs/quickstart/fedavg-seed0 --out model.pt2")(
    """Write a run's model for use without fedblend.

    Beside it lies a JSON file with the scale of its inputs and the names of its classes. Programs take samples as
    stored, scale them, and return probabilities (in regression, numbers). They need no fedblend:
    torch.export.load("model.pt2").module() in PyTorch, or any runtime of ONNX.
    """,
    run=RUN,
    out=_option(
        Path, "The file: .safetensors (weights), .pt2 (program for PyTorch) or .onnx.", Path("model.safetensors")
    ),
    best=BEST,
    trust=TRUST,
)


# Experiment files -----------------------------------------------------------------------------------------------

_command(app, "list:show_list", "list methods")(
    "List methods, parts, data sets, or the options of one name (fedmix, objective, train).",
    word=_argument(
        str, "methods, parts, datasets, models, partitions, or a name whose options to show.", None, metavar="[WHAT]"
    ),
)

_command(app, "new:print_file", "new fedmix digits --split dirichlet --alpha 0.1 --clients 100 > my.toml")(
    "Print a commented experiment file that runs unchanged.",
    method=_argument(str, "A method, as in: fedblend list methods."),
    dataset=_argument(str, "A data set, as in: fedblend list datasets."),
    split=_option(str, "A partition, as in: fedblend list partitions (default: the data set's usual)."),
    alpha=_option(float, "Concentration of a Dirichlet split: the smaller, the farther from IID."),
    clients=_option(int, "Number of clients.", min=1),
)

_command(data, "data_show:show_split", "data show examples/quickstart.toml --out split.png")(
    "Draw a file's split, and print its non-IID measures.",
    file=FILE,
    changes=CHANGES,
    out=_option(Path, "The picture to write.", Path("split.png")),
)

_command(paper, "paper:show_channel", "paper channel examples/mix2fld.toml", old=app)(
    "Show how a wireless channel delivers each payload (Mix2FLD): slots needed, success, outage.",
    file=FILE,
    changes=CHANGES,
    samples=_option(
        str,
        "Seed samples that a device sends first, such as 10,50.",
        "10,50",
        callback=_parsed("parse_counts", "--samples"),
    ),
)


# Analyse runs ---------------------------------------------------------------------------------------------------

_command(paper, "paper:show_points", "paper points runs/digits/aggenhance-seed0 --replay --out points", old=app)(
    """Measure a run's class interior points (AggEnhance).

    Measures, by the round that made the points: their alignment with the gradient on clients' data, their distance to
    the training samples in an autoencoder's features, and the accuracy of a new model trained on them alone.
    """,
    run=_argument(Path, "A run of aggenhance, or the folder of a study with one run."),
    epochs=_option(int, "Epochs of a new model (default: 100).", min=1),
    lr=_option(float, "Its learning rate (default: the method's)."),
    batch_size=_option(int, "Its points a batch (default: the method's).", min=1),
    vae_epochs=_option(int, "Epochs of the autoencoder; 0 leaves distances out.", 10, min=0),
    replay=_option(bool, "Repeat the run, for the alignment in every round."),
    out=_option(Path, "Folder for tables (CSV) and figures (PNG)."),
    trust=TRUST,
)

_command(paper, "paper:show_boundaries", "paper boundaries runs/toy --out toy.png", old=app)(
    "Draw the decision boundaries of runs' models (AggEnhance), for data of two features; print their accuracies.",
    runs=RUNS,
    out=_option(Path, "The picture to write.", Path("boundaries.png")),
    trust=TRUST,
)

_command(app, "attack:show_attack", "attack runs/quickstart/fedavg-seed0 --round 0 --client 3 --images 4 --steps 5")(
    """Rebuild a client's images from what it sent in a round; measure how close they are.

    The client's update is recomputed as in the run: objective, terms, protection, settings of training. For a round
    before the last, the rounds up to it are recomputed first. Ctrl-C ends the attack with the best images so far.
    """,
    run=RUN,
    round=_option(int, "Rounds made before; 0 is the untrained model.", ..., min=0),
    client=_option(int, "The client that is attacked.", ..., min=0),
    attack=_option(str, "invgrad, dlg or idlg.", "invgrad"),
    images=_option(int, "Train on this many of its samples (default: all).", min=1),
    steps=_option(int, "Steps on these images (default: the run's epochs).", min=1),
    iterations=_option(int, "Iterations (default: 2500; dlg, idlg: 300).", min=1),
    restarts=_option(int, "Starting points; the best result is kept.", 1, min=1),
    labels=_option(str, "true: the attacker has the labels; inferred: it infers them.", "true"),
    attacker=_option(
        str,
        "What the attacker has. guesses: the objective, with random numbers of its own; plain: cross-entropy alone; "
        "knows: the objective and its random numbers.",
        "guesses",
    ),
    out=_option(Path, "Folder for images and numbers (default: in the run's, where fedblend leaks reads them)."),
)

_command(paper, "paper:show_switches", "paper switches runs/augmix/fed-augmix-seed0 --out switches", old=app)(
    """Show when loss scaling switched lambda (Fed-AugMix): how many batches of each round used the large one.

    The run's log lacks this, so the reference engine recomputes the rounds. The table has a row for each of some
    rounds, the file one for each client of each round. Ctrl-C ends it with the rounds computed so far.
    """,
    run=_argument(Path, "A run of fed-augmix, or the folder of a study with one run."),
    out=_option(Path, "Folder for the log (CSV) and the figure (PNG)."),
    trust=TRUST,
)

_command(app, "leaks:show_leaks", "leaks runs/quickstart --out leaks")(
    """Show what left the clients, and what was rebuilt from it: a leak report card.

    For weights: what attacks rebuilt (fedblend attack). For means and mixed-up seeds: how near they are to raw
    samples. The figure shows privacy against accuracy.
    """,
    runs=RUNS,
    out=_option(Path, "Folder for the table (CSV, JSON) and the figure (PNG)."),
    trust=TRUST,
)

_command(privacy, "privacy:show_epsilon", "privacy epsilon examples/private.toml --target 4")(
    "Show the (epsilon, delta) of a file's runs after all of their rounds, before any is made.",
    file=FILE,
    changes=CHANGES,
    target=_option(float, "An epsilon: print the least noise that reaches it."),
    over_flower=_option(bool, "Real sites, which know who takes part.", name="--flower"),
)

_command(privacy, "privacy:show_samples", "privacy samples examples/mix2fld.toml --out pictures")(
    "Measure how much mixed and inversely mixed samples reveal of raw ones (Mix2FLD, Tables II and III).",
    file=FILE,
    changes=CHANGES,
    lambdas=_option(
        str, "Mixing ratios, with commas (default: those of the paper's tables).", callback=_parsed("parse_lambdas")
    ),
    samples=_option(int, "Samples that each device mixes (N_S).", 100, min=1),
    devices=_option(int, "Devices whose samples are mixed.", 2, min=2),
    repeats=_option(int, "Draws that are averaged.", 10, min=1),
    coordinated=_option(bool, "Devices mix labels that match."),
    out=_option(Path, "A folder for pictures of the samples."),
)

_command(paper, "privacy:show_xor", "paper xor xormixfl.toml --blended 1,2,3 --mds --out pictures", old=privacy)(
    "Measure how much XOR-encoded and mixed-up samples reveal of raw ones (XorMixFL, Table 3).",
    file=FILE,
    changes=CHANGES,
    blended=_option(
        str, "Values of p, with commas; replace the method's own.", callback=_parsed("parse_counts", "--blended")
    ),
    repeats=_option(int, "Draws that are averaged.", 1, min=1),
    mds=_option(bool, "Distances after scaling to two dimensions, as in Table 3."),
    out=_option(Path, "A folder for pictures of the samples."),
    json=_option(Path, "A file for the measurements."),
)

_command(app, "reproduce:reproduce", "reproduce fedmix/table-1 --scale laptop --only fedavg --only fedmix")(
    """Reproduce a table or figure of a paper: ours, the paper's, the difference, and a verdict a claim.

    Finished runs are kept; the same command resumes an item that was stopped.
    """,
    item=_argument(str, "PAPER/ITEM, such as fedmix/table-1; with --list a paper.", None),
    list_=_option(bool, "List every item, its data, times and results.", name="--list"),
    only=_option(list[str], "Only these rows or columns (repeatable, or A;B)."),
    scale=_option(str, "paper, laptop (half an hour) or smoke (a minute).", "paper"),
    seeds=SEEDS,
    out=_option(Path, "Folder for runs and results.", Path("reproductions")),
    jobs=JOBS,
    device=_option(str, "Where tensors are computed, such as cuda."),
)


# Real federations -----------------------------------------------------------------------------------------------

_command(federation, "federation:try_file", "federation up examples/quickstart.toml --run fedmix-seed0 --sites 3")(
    "Try a federation on this machine: SuperLink and SuperNodes on loopback, with TLS and authenticated nodes.",
    file=FILE,
    sites=_option(int, "Sites, each of them one client.", 3, min=1),
    changes=CHANGES,
    run=ONE_RUN,
    min_sites=MIN_SITES,
    deadline=DEADLINE,
    site_file=_option(list[Path], "The file of a site, in order of sites (repeatable; default: new files)."),
    out=_option(Path, "Folder of the trial (default: runs/NAME-federation)."),
)

_command(federation, "federation:write_app", "federation app my.toml --out app --folder /var/lib/fedblend/run")(
    "Write an experiment as a Flower app, which `flwr run APP SUPERLINK` starts; a second start resumes the run.",
    file=FILE,
    out=_option(Path, "The folder to write the Flower app into.", ...),
    folder=_option(Path, "The run directory, on the SuperLink's machine.", ...),
    changes=CHANGES,
    run=ONE_RUN,
    min_sites=MIN_SITES,
    deadline=DEADLINE,
    credentials=_option(Path, "The server's folder of provision: sites must have their own keys and numbers."),
)

_command(federation, "provision:provision", "federation provision sites.toml --out federation")(
    """Make what each party of a federation needs: certificates, a folder for each site, the list of keys.

    Again, it adds new sites and their keys, and renews certificates that expire within 30 days.
    """,
    file=_argument(Path, "The coordinator's file: the server's address, the sites' names."),
    out=_option(Path, "Folder for what each party needs.", Path("federation")),
    renew=_option(bool, "Make a new certificate of the server."),
)

_command(federation, "provision:watch", "federation watch /var/lib/fedblend/runs --credentials /etc/fedblend")(
    "Serve numbers of the newest run and of the server's certificates for Prometheus, until Ctrl-C.",
    runs=_argument(Path, "The folder of the server's runs."),
    credentials=_option(Path, "The server's folder of provision, with the certificates.", ...),
    metrics_port=_option(int, "Port of 127.0.0.1 for Prometheus.", 9464),
)

_command(site, "provision:enroll", "site enroll site.toml")(
    "Make this site's private key, which stays here: print the public key for the coordinator.",
    path=SITE_FILE,
    rotate=_option(bool, "Make a new key beside the old one."),
)

_command(site, "provision:start", "site start site.toml")(
    "Start this site's SuperNode, as a service does: with exit code 3 it has to be started again.",
    path=SITE_FILE,
    port=_option(int, "Port of 127.0.0.1 for the SuperNode's own processes.", 9094),
    metrics_port=_option(int, "Serve numbers for Prometheus on this port of 127.0.0.1."),
)

_command(site, "federation:init_site", "site init site.toml --data samples.npz --min-mean 20")(
    "Write a commented site file: where data are, what may leave, and how much of it.",
    path=_argument(Path, "The site file to write.", Path("site.toml")),
    data=_option(Path, "This site's samples: .npz, or a table (.csv, .parquet)."),
    target=_option(list[str], "A table's column to predict (repeatable)."),
    missing=_option(str, "A table's empty cells: refuse, mean or drop."),
    features=_option(list[str], "A table's column of features (repeatable; default: all others)."),
    min_mean=_option(int, "Fewest samples that a shared mean may cover.", 2, min=1),
)

_command(site, "federation:check_site", "site check site.toml")(
    "Load a site's samples and keys, and show them beside what its file allows; nothing is sent.",
    path=SITE_FILE,
    experiment=_option(Path, "An experiment file: its digest (for `agreed`), and all that this site refuses of it."),
    run=_option(str, "The experiment's run, among several."),
)

_command(site, "federation:show_audit", "site audit site.toml")(
    "Show everything that left this site, and what it refused.",
    path=SITE_FILE,
    last=_option(int, "Print only the last lines, this many.", min=1),
    since=_option(str, "Print only lines since this date (UTC), such as 2026-01-31."),
    run=_option(str, "Print only lines of this run, or of this experiment's runs."),
    json=_option(bool, "Print a line of JSON for each line of the log."),
    verify=_option(bool, "Check that the log is as the site wrote it."),
    accept=_option(bool, "Go on with a log that is not as the site wrote it."),
)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Federated learning with blended data: run, compare and report experiments."""
    if show:
        from fedblend import __version__

        typer.echo(f"fedblend {__version__}")
        raise typer.Exit
