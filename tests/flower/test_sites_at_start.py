"""Which sites take part when a run begins, and what the server says of the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import here, refused, succeeded
from flower_helpers import ALL, Nodes, experiment, federate, fields_only, nodes, order
from flower_sites import SAMPLES, OwnSite, site_files, write_peers
from helpers import tokens
from test_lying_server import NUMBERS

from fedblend.core.errors import FedblendError
from fedblend.experiment.config import as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower import client as at_site
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import VERSION
from fedblend.flower.server import SiteNames, log, names_of, peers_of, run
from fedblend.flower.site import describe_setup, read_site, setup_at_site, trust_of
from fedblend.flower.sites import Sites
from fedblend.runs.groups import read


def test_a_run_does_not_wait_for_sites_that_take_no_part(site: OwnSite, caplog: Any) -> None:
    OwnSite(site.folder / "other")
    (site.folder / "other" / "own.npz").write_bytes(b"")
    good, bad = (str(folder / "site.toml") for folder in (site.folder, site.folder / "other"))
    configs = [{"partition-id": client, "site": good if client < 2 else bad} for client in range(4)]
    asked = site.experiment(method="fedavg", rounds=1)
    why = (
        r"min_sites: 3, but only 2 of 4 sites are connected and all others take no part; missing: 2, 3\. Reasons: "
        r"client 2, client 3: data: .* Correct this at these sites, restart their SuperNodes"
    )
    caplog.set_level("INFO", "flwr")
    with pytest.raises(FedblendError, match=why):
        federate(Nodes(configs), asked, site.folder / "run", 60, 3)
    assert (
        "failed at round 0 of 1 (min_sites: 3, but only 2 of 4" in succeeded(here("inspect", site.folder / "run")).out
    )
    assert federate(Nodes(configs), asked, site.folder / "run", 60).state.round == 1
    assert "fedblend: new nodes: 4; each has 60 seconds to reply" in caplog.text
    assert "fedblend: 2 of 4 sites are connected; the run begins" in caplog.text
    assert "the run waits" not in caplog.text


def test_a_run_waits_for_a_site_that_is_not_connected_and_for_one_that_restarts(site: OwnSite) -> None:
    own = {"partition-id": 3, "site": str(site.folder / "site.toml")}
    setup = describe_setup(make_setup(site.experiment(method="fedavg")))
    fields = {"experiment": as_table(site.experiment(method="fedavg")), "setup": setup}
    grid = Nodes([*({**own, "partition-id": client} for client in range(3)), {**own, "site": "nowhere"}])
    sites = Sites(grid, 4, 4, 2.0, fields)
    with pytest.raises(FedblendError, match="all others take no part; missing: 3"):
        sites.wait_until_connected()
    # While its SuperNode restarts, the site may still connect.
    grid.down = {3}
    with pytest.raises(FedblendError, match=r"after 2 seconds \(deadline\); missing: 3\. Reasons: client 3"):
        sites.wait_until_connected()
    node = grid.node(3)
    grid.contexts[node].node_config["site"] = own["site"]
    grid.down = set()
    sites.wait_until_connected()
    assert sites.nodes[3] == node


def test_sites_that_are_too_slow_are_given_more_time_by_a_longer_deadline(tmp_path: Path) -> None:
    grid = nodes(3).silent(2)
    slow = grid.node(2)
    with pytest.raises(FedblendError) as told:
        federate(grid, experiment(partition={"name": "iid", "clients": 3}), tmp_path, 0.2, 3)
    assert str(told.value) == (
        "min_sites: 3, but only 2 of 3 sites are connected after 0.2 seconds (deadline); missing: 2. Reasons: node "
        f"{slow}: no answer within 0.2 seconds (deadline). Start their SuperNodes, or give a longer --deadline, and "
        "continue with the same command"
    )


def write_table(path: Path, wards: str, classes: str = "ny", header: str = "age,ward,ill") -> Path:
    """A table with a column of numbers, a column of texts, and a target."""
    rows = [f"{20 + i},{wards[i % len(wards)]},{classes[i // 2 % len(classes)]}" for i in range(80)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_sites_with_tables_take_part_if_these_have_the_servers_encoding(tmp_path: Path, caplog: Any) -> None:
    data = {"name": "table", "path": str(write_table(tmp_path / "server.csv", "ab")), "target": "ill"}
    for client, wards in enumerate(("ab", "ba", "ac")):
        write_table(tmp_path / f"own-{client}.csv", wards)
    configs = site_files(tmp_path, 3, {c: {"data": {**data, "path": f"own-{c}.csv"}} for c in range(3)})
    asked = experiment("fedavg", data=data, partition={"name": "iid", "clients": 3}, fraction=1.0, rounds=1)
    finished = federate(Nodes(configs), asked, tmp_path / "run")
    assert finished.state.round == 1
    assert finished.directory.facts()["partition"]["samples"] == [64, 64, 0]
    assert "(client 2) takes no part: data: this site's table differs" in caplog.text
    assert "table differs from the federation's: categories: ward: place 2: 'c' here, 'b' there" in caplog.text


DICTIONARY = {"age": "years", "ward": ["a", "b"], "ill": ["n", "y"]}
"""The columns of the tables above."""


def test_tables_of_other_names_texts_and_classes_conform_by_a_data_dictionary(tmp_path: Path, caplog: Any) -> None:
    server = write_table(tmp_path / "server.csv", "ab")
    data = {"name": "table", "path": str(server), "target": "ill", "columns": DICTIONARY}
    # Another language, codes for texts, and one ward and one class only; the last has another unit.
    other = {"rename": {"Alter": "age", "Station": "ward"}, "categories": {"ward": {"1": "b"}, "ill": {"0": "y"}}}
    fields = [{}, other, {"columns": {**DICTIONARY, "age": "months"}}]
    tables = [("ab", "ny", "age,ward,ill"), ("1", "0", "Alter,Station,ill"), ("ab", "ny", "age,ward,ill")]
    for client, table in enumerate(tables):
        write_table(tmp_path / f"own-{client}.csv", *table)
    data_of = {c: {**data, "path": f"own-{c}.csv", **changes} for c, changes in enumerate(fields)}
    configs = site_files(tmp_path, 3, {c: {"data": own} for c, own in data_of.items()})
    asked = experiment("fedavg", data=data, partition={"name": "iid", "clients": 3}, fraction=1.0, rounds=1)
    held = read_site(tmp_path / "site-1.toml").data.load()
    assert held.train.x[0].tolist() == [20, 0, 1]
    assert (held.classes, held.train.y.unique().tolist()) == (("n", "y"), [1])

    finished = federate(Nodes(configs), asked, tmp_path / "run")

    assert finished.directory.facts()["partition"]["samples"] == [64, 64, 0]
    assert finished.directory.metrics()[1]["uploads"] == 2
    assert "table differs from the federation's: units: age: 'months' here, 'years' there" in caplog.text
    # Each site finds the same without the server.
    file = tmp_path / "experiment.toml"
    file.write_text(write_toml(as_table(asked)))
    assert "no fault found" in succeeded(here("site", "check", tmp_path / "site-1.toml", "--experiment", file)).out
    shown = here("site", "check", tmp_path / "site-2.toml", "--experiment", file)
    refused(shown, "this site does not take part in")
    assert "refused: data: units: age: 'months' here, 'years' there" in shown.out


IMAGES, LABELS = np.arange(40 * 64, dtype=np.uint8).reshape(40, 1, 8, 8), np.arange(40) % 4
OTHER_DATA = {
    "kind": ({"x": (IMAGES / 255).astype(np.float32), "y": LABELS}, "kind", "'features' here, 'image' there"),
    "table": ({"x": IMAGES.reshape(40, 64), "y": LABELS}, "kind", "'features' here, 'image' there"),
    "shape": ({"x": IMAGES[..., 1:], "y": LABELS}, "shape", "place 3: 7 here, 8 there"),
    "classes": ({"x": IMAGES, "y": np.arange(40) % 5}, "classes", "only here: '4'"),
}


@pytest.mark.parametrize("other", OTHER_DATA)
def test_a_site_with_data_of_another_experiment_takes_no_part_and_both_logs_state_it(
    other: str, tmp_path: Path, caplog: Any
) -> None:
    arrays, field, difference = OTHER_DATA[other]
    np.savez(tmp_path / "own.npz", x=IMAGES, y=LABELS)
    np.savez(tmp_path / "other.npz", **arrays)
    data = {"name": "npz", "path": str(tmp_path / "own.npz")}
    configs = site_files(
        tmp_path, 3, {2: {"data": {**data, "path": "other.npz"}, "min_mean": 2}}, data=data, min_mean=2
    )
    asked = experiment("fedmix", data=data, partition={"name": "iid", "clients": 3}, fraction=1.0, rounds=1)

    grid = Nodes(configs)
    finished = federate(grid, asked, tmp_path / "run")

    node = grid.node(2)
    assert f"fedblend: data: this site's {field} differs from the federation's: {difference}" in caplog.messages
    told = f"data: this site's {field} differs from the federation's; the site's log states how"
    assert f"fedblend: node {node} (client 2) takes no part: {told}" in caplog.messages
    assert finished.directory.facts()["partition"]["samples"] == [32, 32, 0]
    assert finished.directory.metrics()[1]["uploads"] == 2


def test_the_server_states_which_site_takes_no_part_but_none_of_its_paths(tmp_path: Path, caplog: Any) -> None:
    site, empty, other = (OwnSite(tmp_path / f"site {client}") for client in range(3))
    (empty.folder / "own.npz").write_bytes(b"")
    other.x = other.x[..., :8]
    other.hold(SAMPLES)
    configs = [one.config | {"partition-id": client} for client, one in enumerate((site, empty, other))]
    configs += [{"partition-id": 3, "site": str(tmp_path / "lost" / "site.toml")}, {"partition-id": "no number"}]
    grid = Nodes(configs)
    asked = site.experiment(method="fedavg", rounds=1)
    with pytest.raises(FedblendError) as raised:
        federate(grid, asked, tmp_path / "run")
    text = str(raised.value)
    assert "missing: 1, 2, 3. Reasons: client 1: data: this site's samples cannot be loaded; the site's log" in text
    assert "; client 2: data: this site's shape differs" in text
    assert "; client 3: " in text
    assert str(tmp_path) not in text
    assert "(client 1) takes no part: data: this site's samples cannot be loaded" in caplog.text
    assert f"node {grid.node('no number')} takes no part: partition-id" in caplog.text


def write_tokens(folder: Path, **data: Any) -> dict[str, Any]:
    """A site's own ids of tokens with their mask, and its site file; the experiment's fields for such data."""
    folder.mkdir(exist_ok=True)
    made = tokens(mask=True)
    halves = {"x_train": made.train.x, "y_train": made.train.y, "x_test": made.test.x, "y_test": made.test.y}
    np.savez(folder / "own.npz", **halves)
    own = {"name": "npz", "path": "own.npz", **data}
    (folder / "site.toml").write_text(write_toml({"data": own, "trusted": ["helpers:MaskedWords"]}))
    model = {"name": "module", "path": "helpers:MaskedWords"}
    server = {"name": "npz", "path": str(folder / "own.npz"), "kind": "tokens"}
    iid = {"name": "iid", "clients": 3}
    return {"data": server, "model": model, "partition": iid, "fraction": 1.0, "rounds": 1}


def test_sites_with_tokens_train_on_their_ids(tmp_path: Path) -> None:
    fields, *_ = [write_tokens(tmp_path / str(client), kind="tokens") for client in range(3)]
    configs = [{"partition-id": client, "site": str(tmp_path / str(client) / "site.toml")} for client in range(3)]
    asked = experiment(**fields)
    start = make_setup(asked).weights()

    finished = federate(Nodes(configs), asked, tmp_path / "run")

    ids = tokens(mask=True).train.x[:, 0].unique()
    moved = (finished.state.weights["embedding.weight"] != start["embedding.weight"]).any(1).nonzero()[:, 0]
    # The rows of ids that occur, without that of padding, whose mask is 0.
    assert moved.tolist() == [token for token in ids.tolist() if token]


def test_what_a_site_says_of_a_model_is_the_same_for_any_samples(tmp_path: Path) -> None:
    """The server chooses the model: whether it fails on the site's ids would tell these."""
    fields, told = write_tokens(tmp_path, kind="tokens"), []
    setup = describe_setup(make_setup(experiment(**fields)))
    for largest in (11, 500):
        with np.load(tmp_path / "own.npz") as file:
            arrays = dict(file)
        for half in ("x_train", "x_test"):
            arrays[half][0, 0, 0] = largest
        np.savez(tmp_path / "own.npz", **arrays)
        site = read_site(tmp_path / "site.toml")
        with trust_of(site):
            told.append(setup_at_site(site, experiment(**fields), 0, setup).task)
    assert told[0] == told[1]


def test_a_site_that_does_not_declare_its_tokens_takes_no_part(tmp_path: Path) -> None:
    fields = write_tokens(tmp_path / "server", kind="tokens")
    write_tokens(tmp_path / "site")
    site = str(tmp_path / "site" / "site.toml")
    with pytest.raises(FedblendError, match=r"takes no part|data: this site"):
        federate(Nodes([{"partition-id": 0, "site": site}]), experiment(**fields), tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "forged", "said"),
    [
        ("naivemix", {}, "'means' mixes, averages or makes samples as numbers"),
        ("fedavg", {"vocabulary": 12}, "the server's scale of inputs: it is not that of the site's text or tokens"),
        ("fedavg", {name: [[1.0]] for name in NUMBERS}, "the server's scale of inputs: it is not that"),
    ],
)
def test_a_site_does_not_compute_with_its_tokens_for_a_server_that_lies(
    tmp_path: Path, method: str, forged: dict[str, Any], said: str
) -> None:
    fields = write_tokens(tmp_path / "site", kind="tokens")
    told = describe_setup(make_setup(experiment(**fields)))
    if forged:
        told["scale"] = forged if len(forged) == 1 else {"name": "none", "inverted": False, **forged}
    grid = Nodes([{"partition-id": 0, "site": str(tmp_path / "site" / "site.toml")}])
    request = order("query.share", experiment(**fields, method=method), setup=told)
    assert said in grid.reply(request)[0]["fault"]


# Which site a node is -------------------------------------------------------------------------------------


NAMES = ("north", "south", "west")


def signing_sites(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Three sites with keys, of which the last claims to be client 1, and the folder with their public keys."""
    write_peers(folder, NAMES)
    configs = site_files(folder, 3, {client: {"key": f"{name}.key"} for client, name in enumerate(NAMES)})
    configs[2]["partition-id"] = 1
    return configs, str(folder)


def test_a_site_with_anothers_number_takes_no_part_and_logs_have_names(tmp_path: Path, caplog: Any) -> None:
    configs, credentials = signing_sites(tmp_path)
    caplog.set_level("INFO", "flwr")
    log.addFilter(names := SiteNames(names_of(peers_of(credentials))))
    try:
        asked = experiment(partition={"name": "iid", "clients": 3}, rounds=1)
        grid = Nodes(configs)
        finished = run(grid, asked, tmp_path / "run", FederationLimits(2, 0.4, credentials))
    finally:
        log.removeFilter(names)
    (wrong,) = (node for node, context in grid.contexts.items() if "site-2" in str(context.node_config["site"]))
    told = f"fedblend: node {wrong} (client 1 (south)) takes no part: its key is not that of client 1 (south) in peers"
    assert told in caplog.text
    assert "fedblend: client 2 (west): not connected" in caplog.text
    assert finished.directory.facts()["partition"]["sites"] == list(NAMES)
    missing = "client 2 (west) in 1 of 1 rounds (its site is not connected)"
    assert read(finished.directory).missing_uploads == missing


def test_a_site_that_cannot_read_its_key_is_named_with_its_own_fault(tmp_path: Path, caplog: Any) -> None:
    configs, credentials = signing_sites(tmp_path)
    configs[2]["partition-id"] = 2
    file = Path(configs[2]["site"])
    file.write_text("alow = []\n" + file.read_text())
    asked = experiment(partition={"name": "iid", "clients": 3}, rounds=1)
    run(Nodes(configs), asked, tmp_path / "run", FederationLimits(2, 0.4, credentials))
    assert re.search(r"\(client 2\) takes no part: it says, unsigned: .*alow", caplog.text)


def test_a_site_that_is_corrected_between_two_looks_at_the_nodes_takes_part(tmp_path: Path, caplog: Any) -> None:
    configs, credentials = signing_sites(tmp_path)
    grid = Nodes(configs)

    def correct() -> None:
        for context in grid.contexts.values():
            if "site-2" in str(context.node_config["site"]):
                context.node_config["partition-id"] = 2

    grid.after(1, None, correct)
    asked = experiment(partition={"name": "iid", "clients": 3}, train=ALL | {"cohort": 3}, rounds=8)
    finished = run(grid, asked, tmp_path / "run", FederationLimits(2, 0.4, credentials))
    uploads = [line.get("uploads") for line in finished.directory.metrics()]
    assert (uploads[1], uploads[-1]) == (2, 3)
    assert caplog.text.count("takes no part") == 1


@pytest.mark.slow
def test_tables_and_pages_name_the_sites_whose_uploads_are_missing(tmp_path: Path) -> None:
    from fedblend.report.page import page
    from fedblend.report.sections import dataset_sections

    asked = experiment(partition={"name": "iid", "clients": 3}, train=ALL | {"cohort": 3}, rounds=1)
    directory = federate(nodes(3).without(2), asked, tmp_path / "run").directory
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
        federate(nodes(1), asked, tmp_path / "run", min_sites=1)
    monkeypatch.undo()
    # A site of version 0.2 refuses the word, and states no version.
    old = nodes(1).lying("query.hello", {0}, fields_only(fault="version: unknown", version=None))
    with pytest.raises(FedblendError, match=r"its site has a version that does not state itself \(0.2 or older\)"):
        federate(old, asked, tmp_path / "run", min_sites=1)


def test_a_site_that_comes_after_the_beginning_is_told_so_and_the_server_too(site: OwnSite, caplog: Any) -> None:
    grid = site.grid().without(3)
    grid.after(1, None, grid.without)
    asked = site.experiment(method="fedavg", rounds=3)
    finished = federate(grid, asked, site.folder / "run")
    told = "the run began without this site, and goes on without it"
    assert f"fedblend: refused: {told}" in caplog.text
    assert f"(client 3) takes no part: {told}" in caplog.text
    assert [line.get("uploads") for line in finished.directory.metrics()] == [None, 3, 3, 3]
    assert VERSION.startswith("fedblend 0")
