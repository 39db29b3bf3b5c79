"""Tests of all data sets in their publishers' formats."""

from __future__ import annotations

import re
import tomllib

from cli_helpers import here, succeeded
from cli_helpers import refused as refused_by_cli
from datasets_helpers import cifar, refused
from helpers import each

from fedblend.cli.new import new_file
from fedblend.experiment.config import resolve
from fedblend.experiment.index import index

OURS = ("cifar10", "cifar100", "emnist", "femnist", "fer2013", "har", "heart", "leaf-shakespeare", "voc2007")
DOWNLOADED = {"hub", "mnist", "fashion-mnist"}


@each("name", OURS)
def test_without_data_the_message_names_files_address_and_place(name, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDBLEND_DATA", raising=False)
    message = refused(r"\$FEDBLEND_DATA is not set", name)
    asked = r"get them from (http.+) and put them into (.+)/ under the folder that \$FEDBLEND_DATA names"
    address, folder = re.search(asked, message).groups()
    text = new_file("fedavg", name)
    assert f"# {name}: get it before you run, fedblend does not download it: {address}\n" in text
    assert f"# Put its files into $FEDBLEND_DATA/{folder}\n" in text
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path))
    assert str(tmp_path) in refused("they are not in", name)


@each("name", OURS)
def test_a_folder_without_the_files(name, tmp_path):
    option = "path" if name in ("femnist", "har") else "folder"
    assert str(tmp_path) in refused("holds no", name, **{option: tmp_path})
    refused(rf"data.{option}: there is no", name, **{option: tmp_path / "nowhere"})


@each("name", OURS)
@each("method", ["fedavg", "fedprox+fedmix"])
def test_new_files(name, method):
    experiment = resolve(tomllib.loads(new_file(method, name)))
    assert (experiment.data.name, experiment.method.name) == (name, method)


def test_a_folder_of_data_sets_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBLEND_DATA", str(tmp_path / "elsewhere"))  # is set anew by the command, and back after it
    cifar(tmp_path / "sets" / "cifar10")
    file = tmp_path / "some.toml"
    file.write_text('rounds = 0\ndata = "cifar10"\npartition = {name = "iid", clients = 2}\ntrain.cohort = 2\n')
    succeeded(here("run", file, "--data", "sets", "--out", "out"))
    refused_by_cli(here("run", file, "--data", "nowhere", "--out", "out2"), "--data nowhere: there is no such folder")


def test_a_new_file_says_which_data_sets_are_downloaded_or_need_an_extra():
    said = {name: new_file("fedavg", name) for name in index().parts["dataset"]}
    said = {
        name: text.partition(f"# {name}: ")[2].split("\n")[0] for name, text in said.items() if f"# {name}: " in text
    }
    assert {name for name, text in said.items() if text.startswith("the first run downloads it")} == DOWNLOADED
    assert {name for name, text in said.items() if "needs the extra" in text} == {
        "features",
        "hub",
        "mnist5k",
        "shakespeare",
    }
    # All others are part of fedblend, or the user's own.
    assert said.keys() == {*OURS, *DOWNLOADED, "features", "mnist5k", "shakespeare"}
