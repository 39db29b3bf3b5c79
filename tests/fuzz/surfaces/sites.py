"""Files of a site: the site file, its audit log, its keys and its peers' keys."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np

from surfaces.base import TINY, Case, call, changed_lines, changed_toml, command, spoil_path, write_npz


def site_files(rng: Random, folder: Path, real: Path) -> Case:
    """A changed site file or audit log, read by ``site audit``, by ``site check`` or as a node reads it."""
    from fedblend.flower.audit import AuditLog
    from fedblend.flower.site import KINDS, read_site, site_text

    write_npz(folder / "tiny.npz")
    path, log = folder / "site.toml", folder / "audit.jsonl"
    text = site_text(path, folder / "tiny.npz" if rng.random() < 0.5 else None, KINDS)
    for name in ("max_seeds", "rounds", "min_noise"):
        text = text.replace(f"# {name}", name)
    text = text.replace("trusted = []", 'trusted = ["nets:Net", "/srv/data"]')
    line = {"time": "2026-01-01T00:00:00Z", "run": "a/1", "round": 0, "client": 0, "kind": "weights", "bytes": 24}
    line |= {"tensors": {"w": ["float32", 2, 3]}, "sha256": "0" * 64, "trained": True}
    refusal = {**{key: line[key] for key in ("time", "run", "round", "client", "kind")}, "refused": "no"}
    raw = "".join(json.dumps(one) + "\n" for one in (line, refusal, {**line, "round": 1})).encode()
    path.write_text(text)
    log.write_bytes(raw)
    kind = rng.randrange(5)
    if kind <= 2:
        path.write_bytes((changed_toml if kind <= 1 else mutations.of_bytes)(rng, text.encode()))
    else:
        log.write_bytes((changed_lines if rng.random() < 0.7 else mutations.of_bytes)(rng, raw))
        if rng.random() < 0.1:
            spoil_path(rng, log)
    if rng.random() < 0.6:
        words = ("check",) if rng.random() < 0.3 else ("audit", "--last", 2) if rng.random() < 0.4 else ("audit",)
        return command(folder, "site", *words)

    def read() -> None:
        site = read_site(path)
        record = AuditLog(site.audit)
        record.rounds_trained()
        record.has_sent("a/1", 0, 0, "weights", True)
        if site.data is not None:
            site.data.load()

    return call("read a site file and its audit log", read)


# Keys --------------------------------------------------------------------------------------------------------

SITES = 3
"""Sites of the sum whose keys are changed; site 0 reads them."""

KEY_FILES = ("site-0.key", "peers.toml", "audit.shared/key", "audit.shared/*.safetensors", "ca.crt", "site.toml")
"""The files that are changed: keys, the list of trusted keys, what the site shared, credentials of a trial."""


def write_keys(folder: Path) -> None:
    """Write a site file with the keys of three sites, the credentials of a trial, and what the site has shared."""
    from fedblend.experiment.toml_tables import write_toml
    from fedblend.flower.credentials import make_credentials
    from fedblend.flower.site import read_site

    make_credentials(folder, SITES)
    keys = {str(site): (folder / f"site-{site}.pub").read_text().strip() for site in range(SITES)}
    (folder / "peers.toml").write_text(write_toml(keys))
    site = {"key": "site-0.key", "peers": "peers.toml", "allow": ["masked", "keys", "means"], "min_sum": SITES}
    (folder / "site.toml").write_text(write_toml(site))
    _share(read_site(folder / "site.toml"))


def _share(site: Any) -> None:
    """Share means of a site's samples, as its ledger allows."""
    from fedblend.core.registry import build
    from fedblend.flower.ledger import ledger_of

    task, _ = _task()
    ledger = ledger_of(site)
    data = task.engine.local(0, task.size, np.random.default_rng(0), 2)
    ledger.payload(
        build("sharing", {"name": "means", "samples_per_mean": 3}),
        data,
        {},
        lambda tags, groups: None,
        lambda sharing: None,
    )


@functools.cache
def _task() -> tuple[Any, dict[str, Any]]:
    """Site 0 in the first round of a masked sum, and the fields of a request."""
    from flwr.app import Context, RecordDict

    from fedblend.engines.loop_engine import LoopEngine
    from fedblend.experiment.config import resolve
    from fedblend.experiment.make_setup import make_setup
    from fedblend.flower.client_task import ClientTask, Memory
    from fedblend.flower.site import Site

    method = {"name": "fedavg", "aggregator": "secure-mean"}
    asked = resolve({**TINY, "data": "toy", "partition": "natural", "method": method, "train": {"cohort": SITES}})
    memory = Memory(Context(1, 1, {}, RecordDict(), {}))
    fields = {"experiment": {}, "setup": {}, "quantity": "models", "threshold": SITES}
    return ClientTask(LoopEngine(make_setup(asked)), Site(), 0, 0, memory), fields


def _take_part(folder: Path, site: Any) -> None:
    """Make a site's keys and shares of a masked sum with two others, whose keys are signed."""
    from fedblend.flower.secure_aggregation import masks
    from fedblend.flower.secure_aggregation.masking_site import make_keys, make_shares

    task, fields = _task()
    task = replace(task, site=site)
    keys = {f"0/{name}": key for name, key in make_keys(task, fields, {})[1].items()}
    context = masks.sum_digest(fields, 0)
    for other in range(1, SITES):
        public = {name: masks.new_key_pair()[1] for name in ("mask", "box")}
        text = masks.keys_text(other, "models", context, public)
        public["sign"] = masks.sign(str(folder / f"site-{other}.key"), text)
        keys |= {f"{other}/{name}": masks.bytes_to_tensor(key) for name, key in public.items()}
    make_shares(task, fields, keys)


def key_files(rng: Random, folder: Path, real: Path) -> Case:
    """A changed key, list of keys, secret or credential, used as a site or a trial uses it."""
    from fedblend.flower.credentials import make_credentials
    from fedblend.flower.site import read_site

    shutil.copytree(real / "keys", folder, dirs_exist_ok=True)
    file = rng.choice(KEY_FILES)
    path = next(folder.glob(file))
    kind = rng.randrange(6)
    if kind == 0:
        spoil_path(rng, path if rng.random() < 0.7 else path.parent if path.parent != folder else path)
    elif kind == 1:
        path.chmod(rng.choice((0, 0o111, 0o444, 0o644, 0o660)))
    elif path.suffix == ".toml" and kind <= 4:
        path.write_bytes(changed_toml(rng, path.read_bytes()))
    elif kind == 2:
        # Another key in its place: of another site, a public one, one of another kind.
        other = rng.choice(("site-1.key", "site-1.pub", "server.key", "ca.crt", "audit.shared/key"))
        path.write_bytes((folder / other).read_bytes())
    else:
        path.write_bytes(mutations.of_bytes(rng, path.read_bytes()))
    uses: dict[str, Callable[[], Any]] = {
        "take part in a masked sum": lambda: _take_part(folder, read_site(folder / "site.toml")),
        "share again": lambda: _share(read_site(folder / "site.toml")),
        "begin a trial": lambda: make_credentials(folder, SITES),
    }
    fitting = 1 if "shared" in file else 2 if file == "ca.crt" else 0
    words = [*uses][fitting] if rng.random() < 0.8 else rng.choice([*uses])
    return call(f"{words} with a changed {file}", uses[words])
