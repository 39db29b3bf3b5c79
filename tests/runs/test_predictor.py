"""A run's model for use: predictions from Python and the command line, and programs without fedblend."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import TINY, finish, here, refused, start_process
from PIL import Image
from safetensors.torch import load_file
from script_helpers import ROOT

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.runs.api import run
from fedblend.runs.directory import RunDirectory
from fedblend.runs.predictor import Predictor

SCALED = """
import sys, numpy, torch
program = torch.export.load(sys.argv[1]).module()
x = torch.from_numpy(numpy.load(sys.argv[2])["x"])
numpy.save(sys.argv[3], program(x).detach().numpy())
assert not any(name.startswith("fedblend") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on digits whose accuracy is far from chance."""
    table = {**TINY, "rounds": 4, "train": {**TINY["train"], "cohort": 4, "batch_size": 10, "epochs": 2}}
    return run(resolve(table), tmp_path_factory.mktemp("predictor") / "run")


@pytest.fixture(scope="module")
def data(finished):
    return finished.experiment.data.load()


def test_predictions_are_those_of_the_evaluated_model(finished, data):
    x, labels = data.test.x, np.array(data.classes)[data.test.y]
    assert (finished.predict(x) == labels).mean() == pytest.approx(finished.metrics["accuracy"].iloc[-1], abs=1e-12)
    probabilities = finished.predictor.predict_proba(x)
    inputs = data.test.x.float() * finished.predictor.module.factor + finished.predictor.module.offset
    assert torch.equal(torch.from_numpy(probabilities), finished.model(inputs).softmax(1).detach())
    # A number array in another layout: one channel may be left out.
    assert np.array_equal(finished.predictor.predict_proba(x[:, 0].numpy()), probabilities)


def test_a_run_on_disk_predicts_the_same_without_its_data(finished, data, monkeypatch):
    monkeypatch.setattr(type(finished.experiment.data), "load", lambda self: pytest.fail("reads the data"))
    again = Predictor.of_run(RunDirectory(finished.path))
    assert np.array_equal(again.predict_proba(data.test.x), finished.predictor.predict_proba(data.test.x))
    assert again.description == finished.predictor.description


def test_regression_and_text_are_predicted_too(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    np.savez(tmp_path / "plane.npz", x=x, y=np.stack([x.sum(1), x[:, 0]], 1))
    table = {**TINY, "data": {"name": "npz", "path": str(tmp_path / "plane.npz")}}
    done = run(resolve(table), tmp_path / "run")
    assert done.predict(x).shape == (60, 2)
    assert done.predictor.classes == ()
    assert np.array_equal(Predictor.of_run(RunDirectory(done.path)).predict(x), done.predict(x))

    codes = torch.arange(60).reshape(12, 5) % 7
    half = Samples(codes, codes[:, 0])
    words = Dataset("words", "text", half, half, tuple("abcdefg"), vocabulary=7)
    experiment = resolve({**TINY, "model": {"name": "lstm", "hidden": 4, "embedding": 3}})
    setup = make_setup(experiment, words)
    predictor = Predictor.of_setup(setup, setup.weights(), 0)
    expected = setup.model(setup.scale(words.test.x)).softmax(1).detach()
    assert torch.equal(torch.from_numpy(predictor.predict_proba(words.test.x)), expected)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (
            np.zeros((2, 1, 8, 9), np.uint8),
            "samples: uint8 of shape [2, 1, 8, 9]; valid: uint8 of shape ['n', 1, 8, 8]",
        ),
        (np.zeros((2, 1, 8, 8), np.float32), "samples: float32; valid: pixels as uint8, 0 to 255"),
        (np.array(["a"]), "samples: <U1 of shape [1]"),
    ],
)
def test_samples_of_another_form_are_refused(finished, samples, said):
    with pytest.raises(FedblendError) as error:
        finished.predict(samples)
    assert said in str(error.value)


def test_weights_are_exported_with_the_scale_and_the_classes(finished, data, tmp_path):
    model, description = finished.predictor.export(tmp_path / "new" / "model.safetensors")
    about = json.loads(description.read_text())
    weights = load_file(model)
    x = data.test.x.numpy() * np.array(about["scale"]["factor"]) + np.array(about["scale"]["offset"])
    # Two layers, in the order of their names.
    bias, matrix, last_bias, last_matrix = (weights[name].numpy() for name in sorted(weights))
    outputs = np.maximum(x.reshape(len(x), -1) @ matrix.T + bias, 0) @ last_matrix.T + last_bias
    assert np.array_equal(np.array(about["classes"])[outputs.argmax(1)], finished.predict(data.test.x))


def test_a_tensor_that_requires_a_gradient_is_predicted(tmp_path):
    x = torch.rand(20, 2)
    np.savez(tmp_path / "two.npz", x=x.numpy(), y=(x.sum(1) > 1).to(torch.int64).numpy())
    done = run(TINY | {"data": {"name": "npz", "path": tmp_path / "two.npz"}}, tmp_path / "run")
    assert done.predict(x.clone().requires_grad_()).tolist() == done.predict(x).tolist()


def test_the_export_that_the_notebook_names_runs(finished, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "notebooks" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    (call,) = re.findall(r"`(run\.predictor\.export\(.+?\))`", "".join(cells[-1]["source"]))
    assert eval(call, {"run": finished}) == [Path("model.pt2"), Path("model.json")]
    assert Path("model.pt2").stat().st_size


@pytest.mark.slow
def test_a_program_runs_where_fedblend_is_not(finished, data, tmp_path):
    program, _ = finished.predictor.export(tmp_path / "model.pt2")
    np.savez(tmp_path / "x.npz", x=data.test.x.numpy())
    words = ["-I", "-c", SCALED, program, tmp_path / "x.npz", tmp_path / "out.npy"]
    done = finish(start_process([sys.executable, *map(str, words)]))
    assert done.code == 0, done.err
    expected = finished.predictor.predict_proba(data.test.x)
    # One product of matrices of 64 and of 8 numbers, in another order at most.
    assert np.abs(np.load(tmp_path / "out.npy") - expected).max() <= 64 * np.finfo(np.float32).eps


@pytest.mark.slow
def test_a_program_of_onnx_runs(finished, data, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra 'onnx' is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    program, _ = finished.predictor.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(program)
    expected = finished.predictor.predict_proba(data.test.x)
    (outputs,) = session.run(None, {"stored": data.test.x.numpy()})
    assert np.abs(outputs - expected).max() <= 64 * np.finfo(np.float32).eps
    assert json.loads(session.get_modelmeta().custom_metadata_map["fedblend"]) == finished.predictor.description


@pytest.mark.parametrize("method", ["fd", {"name": "fedper"}, {"upload": "silent", "stateful_clients": True}])
def test_the_result_of_a_run_without_one_model_has_its_numbers_alone(method, tmp_path):
    result = run({**TINY, "method": method, "rounds": 1, "holdout": 0.2}, tmp_path / "run")
    assert result.metrics["round"].tolist() == [0, 1]
    told = f"{tmp_path / 'run'}: its clients keep models or layers of their own, so that there is no one model"
    for read in (lambda: result.model, lambda: result.predictor, lambda: result.predict(np.zeros((1, 1, 8, 8)))):
        with pytest.raises(FedblendError, match=f"^{told}$"):
            read()
    refused(here("export", tmp_path / "run", "--out", tmp_path / "m.safetensors"), told)


def test_pictures_archives_and_folders_are_predicted(finished, data, tmp_path):
    x = data.test.x[:30].numpy()
    np.savez(tmp_path / "x.npz", x=x)
    (tmp_path / "pictures").mkdir()
    for number, picture in enumerate(x[:3]):
        Image.fromarray(picture[0]).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "pictures" / "._0.png").write_bytes(b"notes of macOS")
    done = here(
        "predict", finished.path, tmp_path / "x.npz", tmp_path / "pictures", "--out", tmp_path / "new" / "out.csv"
    )
    assert done.code == 0, done.err
    assert "... and 13 more" in done.out
    lines = [line.split(",") for line in (tmp_path / "new" / "out.csv").read_text().splitlines()]
    assert lines[0][:4] == ["sample", "class", "probability", "p(0)"]
    classes = [line[1] for line in lines[1:]]
    assert classes == [*finished.predict(x), *finished.predict(x[:3])]
    assert lines[31][0].endswith("0.png")


def test_a_table_of_features_is_predicted(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez(tmp_path / "two.npz", x=x, y=np.where(x[:, 0] > 0, "right", "left"))
    table = {**TINY, "data": {"name": "npz", "path": str(tmp_path / "two.npz")}}
    done = run(resolve(table), tmp_path / "run")
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", header="a,b", comments="", fmt="%.9g")
    told = here("predict", tmp_path / "run", tmp_path / "x.csv", "--out", tmp_path / "out.csv")
    assert told.code == 0, told.err
    assert [line.split(",")[1] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]] == [*done.predict(x)]
    (tmp_path / "counted.csv").write_text("0,1\n0.25,1\n")
    assert here("predict", tmp_path / "run", tmp_path / "counted.csv").code == 0
    np.savez(tmp_path / "gap.npz", x=np.array([[1, np.nan], [0, 1]]))
    for name, text, said in (
        ("wrong.csv", "a\n1\n", "has 1 columns (0 of text); valid: 2 columns of numbers"),
        ("bare.csv", "0.5,1.5\n0.25,1\n", "the header holds numbers (0.5, 1.5); valid: a first line with names"),
        ("text.csv", "a,b\n1,x\n", "has 2 columns (1 of text)"),
        ("header.csv", "a,b\n", "header.csv: holds no rows; there is nothing to predict"),
        ("gap.npz", None, "samples: 1 of 2 hold NaN or infinity; all numbers must be finite"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        refused(here("predict", tmp_path / "run", tmp_path / name), said)


def test_messages_of_predict_and_export(finished, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    for command, path, words, said in (
        ("predict", finished.path, [tmp_path / "none.png"], "there is no such file; valid: pictures"),
        ("predict", finished.path, [finished.path], "holds no pictures"),
        ("predict", finished.path, [tmp_path / "bad.png"], "is damaged or no image"),
        ("predict", finished.path, [tmp_path, "--out", "/proc/none/p.csv"], "/proc/none/p.csv: cannot be written"),
        ("export", finished.path, ["--out", tmp_path / "model.pkl"], "'.pkl' is not a format of models"),
        ("export", finished.path, ["--out", "/proc/none/model.safetensors"], "cannot be written"),
        ("export", tmp_path, [], "holds no run "),
    ):
        refused(here(command, path, *words), said)
