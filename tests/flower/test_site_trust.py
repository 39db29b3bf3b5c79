"""A site runs only code, and reads only files, that are fedblend's own or named in its site file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import Nodes, experiment, order
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.core.files import read_lines
from fedblend.core.setup import Setup
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.toml_tables import write_toml
from fedblend.flower import blended_loss
from fedblend.flower.app.blending import blend_mod
from fedblend.flower.messages import APP_FIELDS
from fedblend.flower.site import (
    Site,
    describe_setup,
    files_of,
    read_site,
    reply_text,
    setup_at_site,
    trust_of,
)

TRACE = """
from pathlib import Path
from torch import nn
from fedblend import part
from fedblend.core.objective import Plain

Path(__file__).with_suffix(".ran").touch()

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

@part("objective", "{name}-loss")
class Loss(Plain):
    pass
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module that anyone may import, and that leaves a file when it is: its name is new in each test."""
    name = f"foreign_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TRACE.replace("{name}", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def ran(name: str, folder: Path) -> bool:
    return (folder / f"{name}.ran").exists() or name in sys.modules


def asked_of_a_site(folder: Path, site: dict[str, Any] | None, changes: dict[str, Any]) -> str:
    """What a site answers a server whose experiment is changed: the fault, or nothing."""
    asked, config = experiment(), {"partition-id": 0}
    if site is not None:
        # A site file is read once in a process.
        path = folder / f"site-{len(list(folder.glob('site-*')))}.toml"
        path.write_text(write_toml({"audit": "audit.jsonl", **site}))
        config["site"] = str(path)
    message = order("train", asked, experiment=as_table(asked) | changes)
    return str(Nodes([config]).reply(message)[0].get("fault", ""))


@pytest.mark.parametrize("site", [None, {}, {"allow": []}, {"trusted": ["os:popen", "os.path:system"]}])
def test_a_server_that_names_os_system_as_the_model_runs_nothing(
    site: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    model = {"name": "module", "path": "os:system", "arguments": {"command": f"touch {mark}"}}
    fault = asked_of_a_site(tmp_path, site, {"model": model})
    assert fault == (
        "model.path: 'os:system' is not code of fedblend's own and is not trusted; the site's file must name it in "
        "trusted"
    )
    assert not mark.exists()
    if site is not None:
        (line,) = read_lines(tmp_path / "audit.jsonl")
        assert "'os:system'" in line["refused"]


def test_a_trusted_path_that_is_no_module_class_is_not_called(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    model = {"name": "module", "path": "os:system", "arguments": {"command": f"touch {mark}"}}
    fault = asked_of_a_site(tmp_path, {"trusted": ["os:system"]}, {"model": model})
    assert "'os:system' is a builtin_function_or_method; it must be a subclass of torch's nn.Module" in fault
    assert not mark.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "module", "path": "{}:Net"}},
        {"model": {"name": "{}:Net"}},
        {"data": {"name": "{}:Data"}},
        {"data": {"name": "digits", "features": {"model": "{}:Net"}}},
        {"scale": {"name": "{}:Scale"}},
        {"partition": {"name": "{}:Partition"}},
        {"channel": {"name": "{}:Channel"}},
        {"protection": {"name": "{}:Protection"}},
        {"adversary": {"name": "{}:Adversary"}},
        {"callbacks": [{"name": "{}:Callback"}]},
        *({"method": {kind: {"name": "{}:Loss"}}} for kind in ("sharing", "objective", "personal", "upload")),
        *({"method": {kind: {"name": "{}:Loss"}}} for kind in ("aggregator", "server_step")),
        {"method": {"terms": [{"name": "{}:Loss"}]}},
    ],
    ids=lambda changes: "-".join([*changes, *(changes.get("method", ()))]),
)
def test_no_field_of_an_experiment_makes_a_site_import_code(
    changes: dict[str, Any], foreign: str, tmp_path: Path
) -> None:
    named = json.loads(json.dumps(changes).replace("{}", foreign))
    fault = asked_of_a_site(tmp_path, {}, named)
    assert f"'{foreign}:" in fault
    assert "is not trusted; the site's file must name it in trusted" in fault
    assert not ran(foreign, tmp_path)


def test_a_site_that_trusts_a_name_trusts_no_other_of_the_same_module(foreign: str, tmp_path: Path) -> None:
    trusted = {"trusted": [f"{foreign}:Net"]}
    model = {"model": {"name": "module", "path": f"{foreign}:Net"}}
    assert "trusted" not in asked_of_a_site(tmp_path, trusted, model)
    assert ran(foreign, tmp_path)
    # The import has declared another part under a name without a path.
    for name in (f"{foreign}:Loss", f"{foreign}-loss"):
        fault = asked_of_a_site(tmp_path, trusted, {**model, "method": {"objective": name}})
        assert f"'{foreign}:Loss' is not code of fedblend's own and is not trusted" in fault
    with trust_of(Site(trusted=(f"{foreign}:Net", f"{foreign}:Loss"))):
        experiment({"objective": f"{foreign}-loss"})


@pytest.mark.parametrize("field", ["objective", "terms"])
def test_a_users_own_app_imports_no_code_that_the_server_names(field: str, foreign: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"pool": None, "objective": "plain", "terms": [], "own": [0, 0], "round": 0, "seed": 0}
    fields[field] = {"name": f"{foreign}:Loss"} if field == "objective" else [{"name": f"{foreign}:Loss"}]
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    context.state[APP_FIELDS] = ConfigRecord({APP_FIELDS: json.dumps(fields)})
    inputs: Any = None
    with pytest.raises(FedblendError, match=f"'{foreign}:Loss' is not code of fedblend's own and is not trusted"):
        blended_loss(context, nn.Linear(2, 2), inputs)
    assert not ran(foreign, tmp_path)


def test_a_server_chooses_no_file_of_a_site(tmp_path: Path) -> None:
    path = tmp_path / "patients.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.random((40, 8, 8), np.float32), y=np.arange(40) % 10)
    changes = {"data": {"name": "npz", "path": str(path)}}
    for site in (None, {}, {"trusted": [str(tmp_path)]}):
        fault = asked_of_a_site(tmp_path, site, changes)
        assert fault == (
            "data.path: a server chooses no file of a site; the site's file must give data, or name the file in trusted"
        )
    assert "chooses no file" not in asked_of_a_site(tmp_path, {"trusted": [str(path)]}, changes)


def test_the_files_of_every_loader_are_known() -> None:
    options = {
        (name, option)
        for name, cls in registry.known("dataset").items()
        for option in registry.fields_of(cls)
        if option in ("path", "folder", "dataset")
    }
    assert len(options) > 8
    for name, option in options:
        required = {"target": "y"} if name == "table" else {}
        made = registry.build("dataset", {"name": name, option: "/srv", **required})
        assert files_of(made) == {option: "/srv"}, name
        features = registry.build("dataset", {"name": "features", "of": made, "model": "efficientnet-lite0"})
        assert files_of(features) == {f"of.{option}": "/srv"}, name


def test_a_server_chooses_no_data_set_of_the_hub_for_a_site(tmp_path: Path) -> None:
    changes = {"data": {"name": "hub", "dataset": "somebody/anything"}}
    assert "data.dataset: a server chooses no file of a site" in asked_of_a_site(tmp_path, {}, changes)
    own = {"data": {"name": "toy"}}
    features = {"data": {"name": "digits", "features": {"model": "timm:resnet18"}}}
    assert "data.features.model: 'timm:resnet18' is not code of" in asked_of_a_site(tmp_path, own, features)


def test_what_a_site_says_of_an_error_has_no_paths_and_no_labels_of_its_samples(tmp_path: Path, caplog: Any) -> None:
    home = tmp_path / "ward 7"
    home.mkdir()
    rng = np.random.default_rng(0)
    np.savez(home / "own.npz", x=rng.random((40, 8, 8), np.float32), y=np.array(["hiv", "none"])[np.arange(40) % 2])
    fault = asked_of_a_site(tmp_path, {"data": {"name": "npz", "path": str(home / "own.npz")}}, {})
    assert "differs from the federation's; the site's log states how" in fault
    assert "hiv" not in fault
    missing = asked_of_a_site(tmp_path, {"data": {"name": "npz", "path": str(home / "no.npz")}}, {})
    assert missing == "data: this site's samples cannot be loaded; the site's log states why"
    unreadable = Nodes([{"partition-id": 0, "site": str(home / "no.toml")}])
    assert unreadable.reply(order("train", experiment()))[0]["fault"].startswith("(a path)")
    context = Context(1, 1, {"site": str(home / "no.toml")}, RecordDict(), {})
    with pytest.raises(FedblendError, match=r"^\(a path\)") as caught:
        blend_mod(Message(RecordDict(), 1, "train"), context, lambda message, _: message)
    assert "ward" not in str(caught.value)
    assert "ward 7" in caplog.text  # the site's own log has the path
    for text in (f"{home}: is damaged", f"cannot read '{home}'", f"open {home} first", "data: ~/ward 7, x"):
        assert "ward" not in reply_text(FedblendError(text)), text
    assert reply_text(FedblendError("a/b: 3 of 4")) == "a/b: 3 of 4"
    told = reply_text(FedblendError("no\x1b[31m\n" + 9999 * "x"))
    assert (told.isprintable(), len(told) < 1000) == (True, True)
    told = reply_text(ValueError("secret"))
    assert told == "its app failed; the log of its SuperNode states why"
    assert "secret" in caplog.text


def at_site(folder: Path, trusted: list[str], own: dict[str, Any], asked: Experiment) -> Setup:
    """The setup that a site with samples of its own makes for an experiment."""
    told, path = describe_setup(make_setup(asked)), folder / "site.toml"
    path.write_text(write_toml({"trusted": trusted, "data": own}))
    site = read_site(path)
    with trust_of(site):
        return setup_at_site(site, asked, 0, told)


def test_a_site_computes_features_of_its_own_samples_with_a_backbone_that_it_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import torch\nfrom torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, seed=0):\n"
    text += "        super().__init__(nn.Flatten(), nn.Linear(64, 5, bias=False))\n"
    text += "        self[1].weight.data = torch.linspace(-1, 1 + seed, 320).sin().reshape(5, 64)\n"
    (tmp_path / "backbone_of_site.py").write_text(text)
    rng = np.random.default_rng(0)
    for name in ("own", "server"):
        x = rng.integers(0, 256, (40, 8, 8), np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(40) % 10, classes=np.arange(10))

    def data(name: str, **options: Any) -> dict[str, Any]:
        features = {"model": "backbone_of_site:Net", "scale": "unit", **options}
        return {"name": "npz", "path": str(tmp_path / f"{name}.npz"), "features": features}

    asked = experiment(data=data("server"))
    for trusted, own, fault in (
        (["backbone_of_site:Net"], data("own"), ""),
        ([], data("own"), "this site's samples cannot be loaded"),
        (["backbone_of_site:Net"], data("own", arguments={"seed": 1}), "this site's features differs from the federa"),
        (["backbone_of_site:Net"], data("own", scale="symmetric"), "this site's features differs from the federation"),
        (["backbone_of_site:Net"], {k: v for k, v in data("own").items() if k != "features"}, "this site's kind diff"),
    ):
        if fault:
            with pytest.raises(FedblendError, match=fault):
                at_site(tmp_path, trusted, own, asked)
            continue
        setup = at_site(tmp_path, trusted, own, asked)
        net = sys.modules["backbone_of_site"].Net()
        with np.load(tmp_path / "own.npz") as raw, torch.no_grad():
            # The test half is drawn by the file's name, so that rows are compared in any order.
            expected = net(torch.from_numpy(raw["x"]).float() / 255)
            held = torch.cat([setup.data.train.x, setup.data.test.x])
        assert (expected[:, None] - held).norm(dim=2).amin(1).max() < 1e-4
    assert "'backbone_of_site:Net' is not code of fedblend's own and is not trusted" in caplog.text


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        ({}, ""),
        ({"length": 8}, "this site's table differs"),
        ({"tokenizer": "letters_of_site:capitals"}, "this site's t"),
    ],
)
def test_a_site_makes_the_servers_tokens_of_its_own_texts(
    own: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "letters_of_site", raising=False)
    text = "import torch\ndef letters(texts, length):\n    return [[*map(ord, t)][:length] for t in texts]\n"
    text += "def capitals(texts, length):\n    return letters([t.upper() for t in texts], length)\n"
    text += "class Net(torch.nn.Module):\n    def forward(self, x):\n"
    text += "        return (x[:, 0] * x[:, 1]).sum(1, True) / 1e3\n"
    (tmp_path / "letters_of_site.py").write_text(text)
    for name in ("own", "server"):
        rows = "".join(f"{name} {i},{'ab'[i % 2]}\n" for i in range(20))
        (tmp_path / f"{name}.csv").write_text(f"text,kind\n{rows}")

    def data(name: str, **options: Any) -> dict[str, Any]:
        table = {"name": "table", "path": str(tmp_path / f"{name}.csv"), "text": "text", "target": "kind", "length": 9}
        table |= {"tokenizer": "letters_of_site:letters", "features": {"model": "letters_of_site:Net"}}
        return {**table, **options}

    asked = experiment(data=data("server"), partition={"name": "iid", "clients": 4})
    trusted = [f"letters_of_site:{name}" for name in ("letters", "capitals", "Net")]
    if fault:
        with pytest.raises(FedblendError, match=fault):
            at_site(tmp_path, trusted, data("own", **own), asked)
        return
    made = at_site(tmp_path, trusted, data("own", **own), asked).data
    sums = sorted(sum(map(ord, f"own {i}")) / 1e3 for i in range(20))
    assert sorted(torch.cat([made.train.x, made.test.x]).flatten().tolist()) == pytest.approx(sums)
