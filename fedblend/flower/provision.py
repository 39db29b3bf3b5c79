"""What each party of a federation needs, made of one file: certificates, site files, units, and the list of keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from fedblend.core.errors import FedblendError, by_reason, listed
from fedblend.core.files import write_atomically
from fedblend.core.registry import Count, FilePath
from fedblend.experiment.config import Experiment
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower import credentials
from fedblend.flower.secure_aggregation.masks import public_key
from fedblend.flower.site import Policy, site_text
from fedblend.flower.sites import PEERS

AUTHORITY_DAYS = 3650  # Days for which an authority's certificate is valid
STATE = "/var/lib/fedblend"  # The folder of all files that a site writes


class Federation(BaseModel):
    """The file of a federation's coordinator."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    server: Annotated[str, Field(pattern=r"^.+:\d+$")]
    """The SuperLink's address and port, as sites reach it."""
    sites: dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]]
    """The name of each site by its number, from 0; a number stays with its site."""
    names: tuple[str, ...] = ()
    """Further host names and addresses of the server in its certificate."""
    days: Count = 365
    """Days for which the server's certificate is valid."""
    experiment: FilePath | None = None
    """An experiment, whose data dictionary goes into the site files."""
    policy: Policy = Policy()
    """What the new site files allow."""

    @pydantic.field_validator("sites")
    @classmethod
    def _check_sites(cls, sites: dict[str, str]) -> dict[str, str]:
        if sorted(map(int, sites)) != list(range(len(sites))):
            raise ValueError(f"numbers {listed(list(sites))}; valid: 0 to {len(sites) - 1}, each once")
        if len({*sites.values()}) < len(sites):
            raise ValueError("two sites have one name; valid: a name for each")
        return sites


def provision(federation: Federation, out: Path, experiment: Experiment | None, renew: bool) -> list[str]:
    """Write, or bring up to date, the folders ``authority``, ``server`` and ``sites/NAME``; return what is new.

    Site files that are there stay. Public keys are read from ``keys/NAME.pub``.
    """
    server, new = out / "server", []
    for folder in (out, out / "authority"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for folder in (server, out / "keys"):
        folder.mkdir(exist_ok=True)
    new += _certificates(federation, out / "authority", server, renew)
    peers = {number: line for number, name in federation.sites.items() if (line := _line(out, name))}
    by_key = by_reason((federation.sites[number], line.split()[1]) for number, line in peers.items())
    if twice := next((owners for owners in by_key.values() if len(owners) > 1), None):
        raise FedblendError(f"{out / 'keys'}: {listed(twice)} have the same key; valid: each its own")
    write_atomically(server / PEERS, write_toml(peers))
    ca = (server / "ca.crt").read_text(encoding="utf-8")
    names = {"name": "", "server": federation.server, "port": federation.server.rpartition(":")[2]}
    _fill(server, "fedblend-superlink.service", names)
    link = {"address": federation.server, "root-certificates": "/etc/fedblend/ca.crt"}
    config = {"superlink": {"default": "federation", "federation": link}}
    write_atomically(server / "config.toml", write_toml(config))
    for number, name in federation.sites.items():
        folder = out / "sites" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "ca.crt", ca)
        write_atomically(folder / PEERS, write_toml(peers))
        for file in ("fedblend-site.service", "README.md"):
            _fill(folder, file, names | {"name": name})
        if not (folder / "site.toml").exists():
            new.append(f"site {number}: {folder}, for {name}")
            place = {"name": name, "client": int(number), "server": federation.server, "ca": "ca.crt"}
            write_atomically(folder / "site.toml", _site_file(federation, place, experiment))
    return new


def _certificates(federation: Federation, authority: Path, server: Path, renew: bool) -> list[str]:
    """Make the certificates that are missing, expire soon, or are for other names; return what was made."""
    host = federation.server.rpartition(":")[0].strip("[]")
    wanted, made = list(dict.fromkeys([host, *federation.names, *credentials.LOCAL])), []
    key = authority / "ca.key"
    if not (authority / "ca.crt").exists():
        if not key.exists():
            credentials.keep_key(key, credentials.new_key())
        credentials.make_authority(authority, credentials.load_key(key), AUTHORITY_DAYS)
        made.append(f"authority: {authority}; keep ca.key offline, with a copy")
    if (server / "server.crt").exists() and not key.exists():
        return []  # The coordinator keeps the key elsewhere.
    if credentials.days_left(credentials.load_certificate(authority / "ca.crt")) < federation.days:
        credentials.make_authority(authority, credentials.load_key(key), AUTHORITY_DAYS)
        made.append("authority: renewed with the same key; sites replace ca.crt before the old one expires")
    ca = (authority / "ca.crt").read_bytes()
    if (server / "server.crt").exists():
        found = credentials.load_certificate(server / "server.crt")
        renew |= credentials.days_left(found) < credentials.WARNING_DAYS
        renew |= credentials.names_of_server(found) != wanted
    credentials.write_new(server / "ca.crt", ca)
    if renew or not (server / "server.crt").exists():
        credentials.make_server(server, credentials.load_key(key), wanted, federation.days)
        made.append(f"server: a certificate for {listed(wanted)}, valid for {federation.days} days")
    return made


def _line(out: Path, name: str) -> str:
    """Return the public key that a site sent, with its name; empty before it has."""
    path = out / "keys" / f"{name}.pub"
    if not path.exists():
        return ""
    words = path.read_text(encoding="utf-8", errors="replace").split()
    if public_key(" ".join(words[:2])) is None:
        raise FedblendError(f"{path}: is no public key; valid: the line that fedblend site enroll prints at {name}")
    if words[2:] != [name]:
        raise FedblendError(f"{path}: is the key of {' '.join(words[2:]) or 'no name'}, not of {name}")
    return " ".join(words)


def _fill(folder: Path, file: str, names: Mapping[str, str]) -> None:
    text = files("fedblend.flower").joinpath("templates", file).read_text(encoding="utf-8")
    write_atomically(folder / file, Template(text).safe_substitute(names))


def _site_file(federation: Federation, place: Mapping[str, Any], experiment: Experiment | None) -> str:
    """A new site file; with a data dictionary its table has all but the path of the samples and other names."""
    table: dict[str, Any] = {}
    if experiment is not None and getattr(experiment.data, "columns", None) is not None:
        own = ("name", "path", "rename", "categories", "client", "split", "features", "test_share")
        given = experiment.model_dump()["data"]
        table = {name: value for name, value in given.items() if value is not None and name not in own}
        table |= {"rename": {}, "categories": {}}
    return site_text(
        Path("/etc/fedblend/site.toml"),
        Path("/srv/data/table.csv") if table else None,
        **federation.policy.model_dump(),
        table=table,
        key=f"{STATE}/{place['name']}.key",
        audit=f"{STATE}/audit.jsonl",
        federation=place,
    )
