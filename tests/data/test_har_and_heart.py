"""People's activities (UCI HAR) and heart disease at four hospitals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets_helpers import change, load, real, refused
from helpers import each

from fedblend.data.loaders import har, heart


def walk(windows: int, rng: np.random.Generator) -> np.ndarray:
    """A recording: windows that overlap by half, [windows, 9, 128]."""
    signal = rng.standard_normal((9, 64 * (windows + 1))).round(4)
    return np.stack([signal[:, 64 * i : 64 * i + 128] for i in range(windows)])


@pytest.fixture
def motions():
    """Two people, two activities, four recordings of each, of 1 to 4 windows; in a random order."""
    rng = np.random.default_rng(0)
    made = [(walk(1 + k, rng), y, who) for who in (3, 8) for y in (0, 5) for k in range(4)]
    x = np.concatenate([one for one, _, _ in made])
    of = np.repeat(np.arange(len(made)), [len(one) for one, _, _ in made])
    order = rng.permutation(len(x))
    y, who = (np.array([made[i][k] for i in of])[order] for k in (1, 2))
    split = np.where(rng.random(len(x)) < 0.3, "test", "train")
    return x[order], y, who, split, of[order]


@each("seed", range(5))
def test_har_recordings_are_connected_components(seed):
    """Windows of few different halves make chains and cycles of any shape."""
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(seed)
    n, kinds = 300, 320
    ends = rng.integers(kinds, size=(n, 2))
    x = np.repeat(ends[:, None].astype(np.float64), 9, axis=1).repeat(64, axis=2)
    links = sparse.coo_array((np.ones(n), (ends[:, 0], ends[:, 1])), shape=(kinds, kinds))
    component = sparse.csgraph.connected_components(links, directed=False)[1][ends[:, 0]]
    firsts = list(dict.fromkeys(component.tolist()))

    found = har.recordings(x)

    assert found.tolist() == [firsts.index(c) for c in component.tolist()]
    assert len(firsts) > 1


def test_har_recordings_in_any_order(motions):
    x, _, _, _, of = motions
    found = har.recordings(x)
    assert len(np.unique(found)) == 16
    # The same partition into sets: each found number goes with one true number.
    assert len(np.unique(np.stack([found, of], 1), axis=0)) == 16
    first = np.unique(found, return_index=True)[1]
    assert np.array_equal(first, np.sort(first))


def test_har_archive_never_tests_on_a_recording_of_training(tmp_path, motions):
    x, y, who, split, of = motions
    np.savez(tmp_path / "h.npz", x=x.astype(np.float32), y=y, client=who, split=split)
    data = load("har", path=tmp_path / "h.npz")
    assert (data.kind, data.train.x.shape[1:], data.client_names) == ("features", (9, 128), ("person 3", "person 8"))
    halves = [
        {of[i] for i in range(len(x)) if (torch.from_numpy(x[i]).float() == half.x).flatten(1).all(1).any()}
        for half in (data.train, data.test)
    ]
    assert not halves[0] & halves[1]
    assert len(halves[1]) == 4  # one of four recordings of each person and activity
    own = load("har", path=tmp_path / "h.npz", split="file")
    assert own.test.y.tolist() == y[split == "test"].tolist()
    alone = load("har", path=tmp_path / "h.npz", person=8)
    assert set(alone.train.client.tolist()) == set(alone.test.client.tolist()) == {1}
    assert torch.equal(alone.test.x, data.test.x[torch.from_numpy(data.test.client == 1)])
    refused(r"data.person: 4 is not in .*; valid: \[3, 8\]", "har", path=tmp_path / "h.npz", person=4)


def publish(folder: Path, motions: tuple, features: bool = True) -> None:
    """The publisher's folder: two halves, a file a channel, labels from 1."""
    x, y, who, split, _ = motions
    for half in ("train", "test"):
        rows = split == half
        (folder / half / "Inertial Signals").mkdir(parents=True, exist_ok=True)
        for channel, name in enumerate(har.SIGNALS):
            text = "\n".join("  " + " ".join(f"{v: .7e}" for v in window[channel]) for window in x[rows])
            (folder / half / "Inertial Signals" / f"{name}_{half}.txt").write_text(text + "\n")
        (folder / half / f"y_{half}.txt").write_text("".join(f"{label + 1}\n" for label in y[rows]))
        (folder / half / f"subject_{half}.txt").write_text("".join(f"{one}\n" for one in who[rows]))
        if features:
            np.savetxt(folder / half / f"X_{half}.txt", np.tile(y[rows][:, None], (1, 561)))


def test_har_of_the_publisher(tmp_path, motions):
    publish(tmp_path, motions)
    x, y, who, split, _ = motions
    data = load("har", path=tmp_path, split="file")
    assert torch.equal(data.train.x, torch.from_numpy(x[split == "train"].astype(np.float32)))
    assert data.test.y.tolist() == y[split == "test"].tolist()
    assert data.train.client.tolist() == (who[split == "train"] == 8).astype(int).tolist()
    features = load("har", path=tmp_path, inputs="features")
    assert features.train.x.shape[1:] == (561,)
    assert torch.equal(features.train.x[:, 7].long(), features.train.y)
    assert torch.equal(load("har", path=tmp_path).test.y, features.test.y)
    assert len(data.facts["files"]) == 24


@each(
    ("file", "damage", "message"),
    [
        ("train/y_train.txt", lambda raw: b"7" + raw[1:], "y_train.txt: has the label 7.0; valid: 1 to 6"),
        ("train/y_train.txt", lambda raw: raw[2:], "windows, but .*y_train.txt has"),
        ("test/subject_test.txt", lambda raw: raw[:-2] + b"x\n", "must hold only numbers"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: raw[:-30], "is truncated or another file"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: b"", "must hold only numbers"),
        ("test/Inertial Signals/total_acc_y_test.txt", lambda raw: b"\xff" + raw, "is no plain text"),
        ("test/X_test.txt", lambda raw: raw[raw.index(b"\n") + 1 :], "X_test.txt: has .* windows, but .* labels"),
    ],
)
def test_har_damaged(tmp_path, motions, file, damage, message):
    publish(tmp_path, motions)
    change(tmp_path / file, damage)
    refused(message, "har", path=tmp_path)


def test_har_without_features(tmp_path, motions):
    publish(tmp_path, motions, features=False)
    refused('holds no features .* valid: inputs = "windows"$', "har", path=tmp_path, inputs="features")


@each(
    ("changes", "message"),
    [
        ({"x": np.zeros((4, 6, 128))}, r"'x' is float64 of shape \[4, 6, 128\]; valid: floats \[4, 9, 128\]"),
        ({"y": np.array([1, 2, 3, 6])}, "has the label 6; valid: 0 to 5"),
        ({"client": np.zeros(4)}, "'client' is float64"),
        ({"split": np.array(["train", "test", "train", "valid"])}, "'split' must hold only 'train' and 'test'"),
        ({"x": np.full((4, 9, 128), np.nan)}, "NaN or infinity"),
    ],
)
def test_har_archive_damaged(tmp_path, changes, message):
    good = {"x": np.random.default_rng(0).random((4, 9, 128)), "y": np.zeros(4, int), "client": np.ones(4, int),
            "split": np.array(["train", "test"] * 2)}  # fmt: skip
    np.savez(tmp_path / "h.npz", **{**good, **changes})
    refused(message, "har", path=tmp_path / "h.npz")


@pytest.mark.slow
def test_real_har():
    data = load("har", path=real("uci-har.npz"))
    assert len(data.train) + len(data.test) == 10_299
    assert (len(data.client_names), len(np.unique(data.test.client))) == (30, 30)
    # Walking .. laying, as the publisher counts them; gravity is on the x axis of total acceleration.
    assert torch.bincount(torch.cat([data.train.y, data.test.y])).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert float(data.train.x[:, 6].mean()) > 0.7 > float(data.train.x[:, :6].mean((0, 2)).abs().max()) * 10
    halves = [{half.tobytes() for x in s.x.numpy() for half in (x[:, :64], x[:, 64:])} for s in (data.train, data.test)]
    assert not halves[0] & halves[1], "no half of a window is in training and in test"


SICK = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,2"
WELL = "41,0,2,?,0,?,0,172,0,1.4,1,?,?,0"


@pytest.fixture
def hospitals(tmp_path):
    for i, name in enumerate(heart.HOSPITALS):
        lines = [SICK.replace("63.0", f"{60 + i}") if k % 2 else WELL for k in range(8)]
        (tmp_path / f"processed.{name}.data").write_text("\n".join([*lines, str(SICK)]) + "\n")
    return tmp_path


def test_heart_features_by_hand(hospitals):
    data = load("heart", folder=hospitals)
    names = data.facts["features"]
    assert (data.client_names, len(names), data.train.x.shape[1]) == (heart.HOSPITALS, 38, 38)
    assert np.bincount(data.train.client).tolist() == [7] * 4  # 4 well and 5 sick patients: one of each is test
    well = dict(zip(names, data.train.x[data.train.y == 0][0].tolist(), strict=True))
    sick = dict(zip(names, data.train.x[data.train.y == 1][0].tolist(), strict=True))
    assert (well["age"], well["sex = 0"], well["sex = 1"], well["cp = 2"], well["restecg = 0"]) == (41, 1, 0, 1, 1)
    assert (well["fbs = 0"], well["fbs = 1"], well["fbs missing"]) == (0, 0, 1)
    # Missing, or 0 for cholesterol: the mean of those that have it, and a mark.
    assert (well["trestbps"], well["trestbps missing"], well["chol"], well["chol missing"]) == (145, 1, 233, 1)
    assert (sick["chol"], sick["chol missing"], sick["thal = 6"], sick["thal missing"]) == (233, 0, 1, 0)
    assert well["oldpeak"] == pytest.approx(1.4)


def test_heart_means_are_of_training_patients_only():
    values = np.full((3, 13), np.nan)
    values[:, 3] = [100, 140, np.nan]
    x, names = heart.features(values, np.array([True, False, True]))
    assert x[:, names.index("trestbps")].tolist() == [100, 140, 100]
    assert x[:, names.index("age")].tolist() == [0, 0, 0]  # nobody has it


def test_one_hospital_has_the_same_test_patients(hospitals):
    data, va = load("heart", folder=hospitals), load("heart", folder=hospitals, hospital="va")
    assert torch.equal(va.test.x, data.test.x[torch.from_numpy(data.test.client == 3)])
    assert set(va.train.client.tolist()) == {3}


@each(
    ("damage", "message"),
    [
        (lambda raw: raw[:-9], "va.data: line 9 is truncated, or a line of another file: 12 values; expected 14"),
        (lambda raw: raw.replace(b"63", b"163"), "line 2: age is '163'; valid: 1 to 120"),
        (lambda raw: raw.replace(b"41,0,", b"41,2,", 1), r"line 1: sex is '2'; valid: 0, 1, or \? where missing"),
        (lambda raw: raw.replace(b"172", b"fast", 1), "line 1: thalach is 'fast'"),
        (lambda raw: raw.replace(b"172", b"nan", 1), "line 1: thalach is 'nan'"),
        (lambda raw: raw.replace(b"?,0\n", b"?,?\n", 1), r"line 1: num is '\?'; valid: 0, 1, 2, 3, 4$"),
        (lambda raw: b"", "holds no patients"),
        (lambda raw: b"\xfe" + raw, "is no plain text"),
        (lambda raw: raw.replace(b"63", b"62", 4), "processed.va.data: is the same file as processed.switzerland.data"),
    ],
)
def test_heart_damaged(hospitals, damage, message):
    path = hospitals / "processed.va.data"
    sound = path.read_bytes()
    change(path, damage)
    refused(message, "heart", folder=hospitals)
    path.write_bytes(sound)


def test_real_heart():
    data = load("heart", folder=real("heart-disease"))
    both = np.concatenate([data.train.client, data.test.client])
    assert np.bincount(both).tolist() == [303, 294, 123, 200]
    sick = torch.cat([data.train.y, data.test.y]).numpy() == 1
    assert np.bincount(both[sick]).tolist() == [139, 106, 115, 149]
    x, names = torch.cat([data.train.x, data.test.x]).numpy(), data.facts["features"]
    unmeasured = x[:, names.index("chol missing")] == 1
    assert np.bincount(both[unmeasured], minlength=4).tolist() == [0, 23, 123, 56]
