"""Features of a frozen backbone: what they are, when they are computed anew, and what uses them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedblend import Experiment, run
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.cli.leaks import OF_FEATURES, show_leaks
from fedblend.cli.predict import read_samples
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.data.backbones import Encoder
from fedblend.data.loaders import features as module
from fedblend.experiment.changes import change_field
from fedblend.experiment.config import as_table, check_keys, resolve
from fedblend.runs.directory import RunDirectory, foreign_code
from fedblend.runs.predictor import Predictor

SIDE, TRAIN, TEST = 6, 50, 13

BACKBONE = """
import torch
from torch import nn

class Backbone(nn.Sequential):
    def __init__(self, weights=None, width=4):
        super().__init__(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.5), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        if weights:
            self.load_state_dict(torch.load(weights, weights_only=True))

class Logits(nn.Module):
    def forward(self, x):
        return {"logits": x}

class Ids(nn.Module):
    def forward(self, x):
        return x.long()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the modules and samples of this test."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("pooch.os_cache", lambda name: folder / name)
    monkeypatch.setattr(module, "ROWS", 16)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("backbones_of_test", None)
    (tmp_path / "backbones_of_test.py").write_text(BACKBONE)
    write_samples(np.arange(TRAIN + TEST))
    return folder / "fedblend" / "features"


def write_samples(order: np.ndarray) -> None:
    x = np.random.default_rng(0).integers(0, 256, (TRAIN + TEST, 3, SIDE, SIDE), np.uint8)[order]
    halves = {"x_train": x[:TRAIN], "x_test": x[TRAIN:], "y_train": np.arange(TRAIN) % 2, "y_test": np.arange(TEST) % 2}
    np.savez("own.npz", **halves, client_train=np.arange(TRAIN) % 5, client_test=np.arange(TEST) % 5)


def data(**options: Any) -> Any:
    spec = {"name": "npz", "path": "own.npz", "features": {"model": "backbones_of_test:Backbone", **options}}
    return module.features_of(spec)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns how many samples went through a backbone since its last call, without the first probe."""
    batches: list[int] = []
    forward = Encoder.forward

    def counted(self: Encoder, stored: Tensor) -> Tensor:
        batches.append(len(stored))
        return forward(self, stored)

    monkeypatch.setattr(Encoder, "forward", counted)

    def since() -> int:
        number = sum(batches[1:])
        batches.clear()
        return number

    return since


def weights(seed: int) -> str:
    from backbones_of_test import Backbone  # type: ignore[import-not-found]

    net, generator = Backbone(), torch.Generator().manual_seed(seed)
    state = {name: torch.rand(t.shape, generator=generator).to(t.dtype) for name, t in net.state_dict().items()}
    torch.save(state, "weights.pt")
    return "weights.pt"


def test_features_are_the_backbones_in_evaluation_mode_on_the_stated_scale() -> None:
    raw = registry.build("dataset", {"name": "npz", "path": "own.npz"}).load()
    made = data(arguments={"weights": weights(0)}, batch=7, size=9).load()
    net = sys.modules["backbones_of_test"].Backbone("weights.pt").eval()
    for half, of in ((made.train, raw.train), (made.test, raw.test)):
        unit = of.x.numpy() / 255.0
        mean, deviation = (np.array(c).reshape(3, 1, 1) for c in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        scaled = torch.from_numpy((unit - mean) / deviation).float()
        expected = net(nn.functional.interpolate(scaled, (9, 9), mode="bilinear")).flatten(1)
        torch.testing.assert_close(half.x, expected, rtol=1e-5, atol=1e-5)
        assert half.x.shape[1] == 16
        assert torch.equal(half.y, of.y)
        assert np.array_equal(half.client, of.client)
    assert (made.kind, made.classes, made.client_names) == ("features", raw.classes, raw.client_names)
    assert made.facts["files"] == raw.facts["files"]


def test_other_samples_reach_the_backbone_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "backbones_of_test.py").write_text(BACKBONE.replace("x.long()", "2.0 * x"))
    np.savez("own.npz", x=np.arange(20, dtype=np.float32).reshape(10, 2), y=np.arange(10) % 2)
    raw = registry.build("dataset", {"name": "npz", "path": "own.npz"}).load()
    assert torch.equal(data(model="backbones_of_test:Ids").load().train.x, 2 * raw.train.x)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "weights": lambda _: {"arguments": {"weights": weights(1)}},
    "order": lambda _: write_samples(np.r_[1, 0, 2 : TRAIN + TEST]) or {},  # type: ignore[func-returns-value]
    "scale": lambda _: {"scale": "symmetric"},
    "size": lambda _: {"size": 8},
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9") or {},  # type: ignore[func-returns-value]
    "fedblend": lambda patch: patch.setattr(module, "__version__", "9.9") or {},  # type: ignore[func-returns-value]
    "code": lambda _: (Path("backbones_of_test.py").write_text(BACKBONE + "# changed") and {}) or {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_features_anew(
    change: str, computed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"arguments": {"weights": weights(0)}}
    first = data(**arguments).load()
    assert computed() == TRAIN + TEST
    again = data(**arguments).load()
    assert computed() == 0
    assert torch.equal(again.train.x, first.train.x)
    assert torch.equal(again.test.x, first.test.x)
    options = CHANGES[change](monkeypatch)
    changed = data(**{**arguments, **options}).load()
    assert computed() == (TRAIN if change == "order" else TRAIN + TEST)  # the test half is the same
    assert torch.equal(changed.train.x, first.train.x) == (change in ("torch", "fedblend", "code"))


def test_an_interrupted_computation_goes_on_with_equal_bits(
    cache: Path, computed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = data(batch=5).load()
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    computed()
    with monkeypatch.context() as patch:
        steps, forward = iter(range(1000)), Encoder.forward

        def interrupted(self: Encoder, stored: Tensor) -> Tensor:
            if next(steps) == 10:
                raise KeyboardInterrupt
            return forward(self, stored)

        patch.setattr(Encoder, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data(batch=5).load()
    # Two files of 16 samples were complete.
    assert len(list(cache.rglob("*.safetensors"))) == 2
    computed()
    resumed = data(batch=5).load()
    assert computed() == TRAIN + TEST - 32
    assert torch.equal(resumed.train.x, whole.train.x)
    assert torch.equal(resumed.test.x, whole.test.x)
    next(cache.rglob("000001.safetensors")).write_bytes(b"damaged")
    computed()
    assert torch.equal(data(batch=5).load().train.x, whole.train.x)
    assert computed() == 16


SLOW = """
import sys, time, pooch, torch
from pathlib import Path
pooch.os_cache = lambda name: Path("cache") / name
from fedblend.data.backbones import Encoder
from fedblend.data.loaders import features as module
module.ROWS, forward, computed = 16, Encoder.forward, 0

def slow(self, stored):
    global computed
    computed += len(stored)
    time.sleep(0.05)
    return forward(self, stored)

Encoder.forward = slow
spec = {"name": "npz", "path": "own.npz", "features": {"model": "backbones_of_test:Backbone", "batch": 4}}
made = module.features_of(spec).load()
print(computed - 1, module.digest_of({"x": made.train.x, "t": made.test.x}))
"""


@pytest.mark.slow
def test_killed_and_concurrent_processes_compute_each_file_once(cache: Path, tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, cwd=tmp_path)

    expected = data(batch=4).load()
    digest = module.digest_of({"x": expected.train.x, "t": expected.test.x})
    for path in cache.rglob("*.safetensors"):
        path.unlink()
    killed = start()
    while not list(cache.rglob("*.safetensors")):
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    left = sum(len(module.load_file(path)["features"]) for path in cache.rglob("*.safetensors"))
    assert left < TRAIN + TEST
    ends = [other.communicate()[0].split() for other in [start(), start()]]
    assert sum(int(number) for number, _ in ends) == TRAIN + TEST - left
    assert {found for _, found in ends} == {digest}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet18"}, r"data.features.model: 'resnet18' is not valid: unknown backbone; valid: efficientnet"),
        ({"model": "efficientnet-lite"}, r"did you mean 'efficientnet-lite0'"),
        ({"model": "backbones_of_test:No"}, r"data.features.model: cannot import 'backbones_of_test:No'"),
        ({"model": "os:system"}, r"data.features.model: 'os:system' is a builtin"),
        ({"model": "backbones_of_test:Logits"}, r"Logits cannot take samples of shape \[3, 6, 6\]: 'dict' object"),
        ({"model": "backbones_of_test:Ids"}, r"its outputs are torch.int64; valid: floats"),
        ({"model": "timm:resnet18"}, r"data.features.model: 'timm:resnet18' needs the package timm, which is not inst"),
        ({"model": "torchvision:resnet18"}, r"needs the package torchvision"),
        ({"arguments": {"depth": 2}}, r"data.features.arguments: {'depth': 2} do not fit backbones_of_test:Backbone"),
        ({"batch": 0}, r"data.features.batch: 0 is not valid: input should be greater than or equal to 1"),
        ({"scale": "standard"}, r"data.features.scale: 'standard' is not valid: input should be 'imagenet', 'unit'"),
        ({"sise": 9}, r"data.features.sise: unknown key for the dataset 'features' \(did you mean 'size'"),
        ({"max_gb": 1e-6}, r"data.features.max_gb: 1e-06: 16 features of 63 samples are 4.03e-06 GB; valid: at least"),
        ({"device": "gpu"}, r"Backbone cannot take samples"),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_bad_fields(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedblendError, match=message):
        data(**options).load()


LIBRARIES = {
    "timm": """
def create_model(name, pretrained=False, num_classes=1000, width=4):
    if name != "resnet18":
        raise RuntimeError(f"Unknown model ({name})")
    assert pretrained and num_classes == 0
    from backbones_of_test import Backbone
    return Backbone("weights.pt", width)
""",
    "torchvision": """
class models:
    def get_model(name, weights=None):
        if name != "resnet18":
            raise ValueError(f"Unknown model {name}")
        {"DEFAULT": 1, "V1": 1}[weights]
        from torch import nn
        from backbones_of_test import Backbone
        net = nn.Sequential(Backbone("weights.pt"))
        net.add_module("fc", nn.LazyLinear(1000))
        return net
""",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_networks_of_timm_and_torchvision_lose_their_classifiers(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins that take what the packages' functions take."""
    wanted = data(arguments={"weights": weights(0)}).load()
    (tmp_path / f"{library}.py").write_text(LIBRARIES[library])
    monkeypatch.delitem(sys.modules, library, raising=False)
    made = data(model=f"{library}:resnet18").load()
    monkeypatch.delitem(sys.modules, library)
    torch.testing.assert_close(made.train.x, wanted.train.x.reshape(made.train.x.shape))
    arguments: dict[str, Any] = {"timm": {"width": 4}, "torchvision": {"weights": "V1"}}
    wrong: dict[str, Any] = {"timm": {"pretrained_cfg": "no"}, "torchvision": {"weights": "no"}}
    assert torch.equal(data(model=f"{library}:resnet18", arguments=arguments[library]).load().test.x, made.test.x)
    for changes, told in (
        ({"model": f"{library}:resnet"}, f"data.features.model: {library} has no 'resnet' to load: Unknown model"),
        ({"model": f"{library}:resnet18", "arguments": {"depth": 2}}, f"{library} has no 'resnet18' to load: .*depth"),
        ({"model": f"{library}:resnet18", "arguments": wrong[library]}, f"{library} has no 'resnet18' to load"),
    ):
        with pytest.raises(FedblendError, match=told):
            data(**changes).load()


def test_bad_forms() -> None:
    with pytest.raises(FedblendError, match=r"data.features: 'x' is not valid; write a table, such as { model ="):
        module.features_of({"name": "digits", "features": "x"})
    with pytest.raises(FedblendError, match=r"data.features.model: is missing"):
        module.features_of({"name": "digits", "features": {"name": "efficientnet-lite0"}})
    rows = {"name": "heart", "features": {"model": "backbones_of_test:Backbone", "scale": "unit"}}
    with pytest.raises(FedblendError, match=r"features.scale: 'unit' is for pictures, but 'rows' holds features"):
        module.features_of(rows).encoder({"name": "rows", "kind": "features"})


def experiment(**changes: Any) -> Experiment:
    features = {"model": "backbones_of_test:Backbone", "arguments": {"weights": weights(0)}}
    fields: dict[str, Any] = {
        "data": {"name": "npz", "path": "own.npz", "features": features},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": []},
        "rounds": 2,
        "method": "fedavg",
    }
    return Experiment(**{**fields, **changes})


def test_an_experiment_file_gives_features_with_its_data_set() -> None:
    given = {"name": "npz", "path": "own.npz", "features": {"model": "efficientnet-lite0"}}
    table: dict[str, Any] = {"data": given, "partition": "iid"}
    check_keys(table)
    change_field(table, "data.features.size", 64)
    made = resolve(table)
    assert (made.data.size, made.data.of.path) == (64, str(Path("own.npz").absolute()))
    assert resolve(as_table(made)) == made
    change_field(table, "data.name", "digits")
    assert table["data"] == {"name": "digits", "features": {"model": "efficientnet-lite0", "size": 64}}
    assert foreign_code(as_table(experiment())) == ["backbones_of_test:Backbone"]


@pytest.mark.slow
def test_backbone_and_head_predict_and_are_exported_as_one(tmp_path: Path, capsys: Any) -> None:
    result = run(experiment(), out=tmp_path / "run")
    raw = registry.build("dataset", {"name": "npz", "path": "own.npz"}).load()
    made = experiment().data.load()
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(registry.UntrustedCode, match=r"data.features.model: .* is not code"):
        Predictor.of_run(directory)
    predictor = Predictor.of_run(directory, trust=True)
    scale = predictor.module
    head = result.model(made.test.x * scale.factor + scale.offset).softmax(1).detach()
    torch.testing.assert_close(torch.from_numpy(predictor.predict_proba(raw.test.x)), head)
    assert (predictor.description["kind"], predictor.description["shape"]) == ("image", [3, SIDE, SIDE])
    np.savez("new.npz", x=raw.test.x.numpy())
    assert np.array_equal(read_samples(Path("new.npz"), predictor)[1], raw.test.x.numpy())
    program = torch.export.load(predictor.export(tmp_path / "net.pt2")[0]).module()
    torch.testing.assert_close(program(raw.test.x), head)
    show_leaks([tmp_path / "run"], trust=True)
    assert OF_FEATURES[:60] in " ".join(capsys.readouterr().out.split())
    with pytest.raises(FedblendError, match="attacks rebuild images with classes, not the features of a frozen backb"):
        RoundSnapshot.load(directory, 1)
    torch.save({n: t + 1 for n, t in torch.load("weights.pt", weights_only=True).items()}, "weights.pt")
    with pytest.raises(FedblendError, match="the weights or inputs of backbones_of_test:Backbone are not those of the"):
        Predictor.of_run(directory, trust=True)
