"""Which site a node is: its number and key, its version, and whether it came in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import here, succeeded
from flower_helpers import ALL, Nodes, experiment, federate, fields_only, nodes
from flower_sites import OwnSite
from flwr.app import Message

from fedblend.core.errors import FedblendError
from fedblend.flower import client as at_site
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.credentials import make_site_key
from fedblend.flower.messages import VERSION, unpack
from fedblend.flower.server import SiteNames, log, names_of, peers_of, run
from fedblend.flower.sites import PEERS
from fedblend.runs.groups import read

pytestmark = pytest.mark.usefixtures("no_waits")

NAMES = ("north", "south", "west")


def signing_sites(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Three sites with keys, and the folder with their public keys and names."""
    lines, configs = [], []
    for client, name in enumerate(NAMES):
        make_site_key(folder / name)
        lines.append(f'{client} = "{(folder / name).with_suffix(".pub").read_text().strip()} {name}"\n')
        site = folder / f"{name}.toml"
        site.write_text(f'key = "{name}.key"\naudit = "{name}.jsonl"\n')
        configs.append({"partition-id": client, "site": str(site)})
    (folder / PEERS).write_text("".join(lines))
    return configs, str(folder)


def test_a_site_with_anothers_number_takes_no_part_and_logs_have_names(tmp_path: Path, caplog: Any) -> None:
    configs, credentials = signing_sites(tmp_path)
    configs[2]["partition-id"] = 1
    caplog.set_level("INFO", "flwr")
    log.addFilter(names := SiteNames(names_of(peers_of(credentials))))
    try:
        asked = experiment(partition={"name": "iid", "clients": 3}, rounds=1)
        grid = Nodes(configs)
        finished = run(grid, asked, tmp_path / "run", FederationLimits(2, 0.4, credentials))
    finally:
        log.removeFilter(names)
    (wrong,) = (node for node, context in grid.contexts.items() if "west" in str(context.node_config["site"]))
    told = f"fedblend: node {wrong} (client 1 (south)) takes no part: its key is not that of client 1 (south) in peers"
    assert told in caplog.text
    assert "fedblend: client 2 (west): not connected" in caplog.text
    assert finished.directory.facts()["partition"]["sites"] == list(NAMES)
    missing = "client 2 (west) in 1 of 1 rounds (its site is not connected)"
    assert read(finished.directory).missing_uploads == missing


def test_a_site_that_is_corrected_between_two_looks_at_the_nodes_takes_part(tmp_path: Path, caplog: Any) -> None:
    configs, credentials = signing_sites(tmp_path)
    configs[2]["partition-id"] = 1
    grid = Nodes(configs)

    def corrected(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and unpack(message.content)[0]["round"] == 1:
            for context in grid.contexts.values():
                if "west" in str(context.node_config["site"]):
                    context.node_config["partition-id"] = 2
        return reply

    grid.spoil = corrected
    asked = experiment(partition={"name": "iid", "clients": 3}, train=ALL | {"cohort": 3}, rounds=8)
    finished = run(grid, asked, tmp_path / "run", FederationLimits(2, 0.4, credentials))
    uploads = [line.get("uploads") for line in finished.directory.metrics()]
    assert (uploads[1], uploads[-1]) == (2, 3)
    assert caplog.text.count("takes no part") == 1


@pytest.mark.slow
def test_tables_and_pages_name_the_sites_whose_uploads_are_missing(tmp_path: Path) -> None:
    from fedblend.report.page import page
    from fedblend.report.sections import dataset_sections

    grid = nodes(3)
    grid.down = {2}
    asked = experiment(partition={"name": "iid", "clients": 3}, train=ALL | {"cohort": 3}, rounds=1)
    directory = federate(grid, asked, tmp_path / "run").directory
    missing = "client 2 in 1 of 1 rounds (its site is not connected)"
    for command in ("inspect", "compare"):
        assert missing in " ".join(succeeded(here(command, directory.path)).out.split())
    assert missing in page(dataset_sections([directory]))


def test_sites_and_server_of_two_versions_tell_so_in_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    asked = experiment(partition={"name": "iid", "clients": 1}, rounds=1)
    monkeypatch.setattr(at_site, "VERSION", "fedblend 9.9")
    with pytest.raises(
        FedblendError, match=r"its site has .fedblend 9\.9., and the server fedblend .*; valid: the same"
    ):
        run(Nodes([{"partition-id": 0}]), asked, tmp_path / "run", FederationLimits(1, 0.4))
    monkeypatch.undo()
    # A site of version 0.2 refuses the word, and states no version.
    old = Nodes([{"partition-id": 0}]).lying("query.hello", {0}, fields_only(fault="version: unknown", version=None))
    with pytest.raises(FedblendError, match=r"its site has a version that does not state itself \(0.2 or older\)"):
        run(old, asked, tmp_path / "run", FederationLimits(1, 0.4))


def test_a_site_that_comes_after_the_beginning_is_told_so_and_the_server_too(tmp_path: Path, caplog: Any) -> None:
    site = OwnSite(tmp_path)
    config = {"partition-id": 0, "site": str(tmp_path / "site.toml")}
    grid = Nodes({**config, "partition-id": client} for client in range(4))
    grid.down = {3}

    def arrives(client: int, message: Message, reply: Message) -> Message:
        fields = unpack(message.content)[0]
        if message.metadata.message_type == "train" and fields["round"] == 1:
            grid.down = set()
        return reply

    grid.spoil = arrives
    asked = site.experiment(method="fedavg", rounds=3)
    finished = federate(grid, asked, tmp_path / "run")
    told = "the run began without this site, and goes on without it"
    assert f"fedblend: refused: {told}" in caplog.text
    assert f"(client 3) takes no part: {told}" in caplog.text
    assert [line.get("uploads") for line in finished.directory.metrics()] == [None, 3, 3, 3]
    assert VERSION.startswith("fedblend 0")
