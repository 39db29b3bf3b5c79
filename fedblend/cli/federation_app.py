"""The commands of a real federation: its server's side and a site's side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

federation_app = typer.Typer(
    help="Run experiments between real sites, over Flower.", no_args_is_help=True, rich_markup_mode=None
)
site_app = typer.Typer(
    help="A site's own file and its record of what left it.", no_args_is_help=True, rich_markup_mode=None
)

File = Annotated[Path, typer.Argument(help="An experiment file (TOML).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Set a field: --set train.lr=0.05 (repeatable).")]
Run = Annotated[str | None, typer.Option("--run", help="Which run of a file with several: its folder's name.")]
MinSites = Annotated[int, typer.Option(min=0, help="Sites without which no exchange begins (0: all).")]
Deadline = Annotated[float | None, typer.Option(help="Seconds in which sites must answer (default: 600).")]


@federation_app.command(
    short_help="Try a federation on this machine.",
    epilog="Example: fedblend federation up examples/quickstart.toml --run fedmix-seed0 --sites 3",
)
def up(
    file: File,
    sites: Annotated[int, typer.Option(min=1, help="Sites, each of them one client.")] = 3,
    set_: Set = None,
    run: Run = None,
    min_sites: MinSites = 0,
    deadline: Deadline = None,
    site_file: Annotated[
        list[Path] | None, typer.Option(help="The file of a site, in order of sites (repeatable); else made anew.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the trial (default: runs/NAME-federation).")] = None,
) -> None:
    """Try a federation on this machine: SuperLink and SuperNodes on loopback, with TLS and authenticated nodes."""
    from fedblend.cli import federating

    experiment = federating.one_experiment(file, set_ or [], run)
    federating.up(federating.for_sites(experiment, sites), sites, site_file or [], min_sites, deadline, out)


@federation_app.command(
    "app", epilog="Example: fedblend federation app my.toml --out app --folder /var/lib/fedblend/run"
)
def app_(
    file: File,
    out: Annotated[Path, typer.Option(help="The folder to write the Flower app into.")],
    folder: Annotated[Path, typer.Option(help="The run directory, on the SuperLink's machine.")],
    set_: Set = None,
    run: Run = None,
    min_sites: MinSites = 0,
    deadline: Deadline = None,
) -> None:
    """Write the Flower app of an experiment, for: flwr run APP SUPERLINK. Running it again goes on with the run."""
    from fedblend.cli import federating

    federating.write(federating.one_experiment(file, set_ or [], run), out, folder, min_sites, deadline)


@site_app.command(
    short_help="Write a commented site file.",
    epilog="Example: fedblend site init site.toml --data samples.npz --min-mean 20",
)
def init(
    path: Annotated[Path, typer.Argument(help="The site file to write.")] = Path("site.toml"),
    data: Annotated[Path | None, typer.Option(help="This site's samples (.npz).")] = None,
    min_mean: Annotated[int, typer.Option(min=1, help="Fewest samples that a shared mean may cover.")] = 2,
) -> None:
    """Write a commented site file: where data are, what may leave, and how much of it."""
    from fedblend.cli import federating

    federating.init_site(path, data, min_mean)


@site_app.command(epilog="Example: fedblend site audit site.toml")
def audit(
    path: Annotated[Path, typer.Argument(help="A site file.")] = Path("site.toml"),
    last: Annotated[int | None, typer.Option(min=1, help="Only so many of the last lines.")] = None,
) -> None:
    """Show everything that left this site, and what it refused."""
    from fedblend.cli import federating

    federating.show_audit(path, last)
