"""Ids of tokens: kept as they are in every engine, and refused by parts that compute with samples as numbers."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, succeeded
from datasets_helpers import load, refused
from federation_helpers import stacked_gives_the_loops_state
from helpers import each, engine_of, experiment, federation, numbers, run, setup, slow_except, tokens

import fedblend
from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import build, known
from fedblend.experiment import presets
from fedblend.runs.directory import RunDirectory
from fedblend.runs.predictor import Predictor

WORDS = {"name": "module", "path": "helpers:Words"}
MASKED = {"name": "module", "path": "helpers:MaskedWords"}
STAGED = {"name": "module", "path": "helpers:StagedWords"}

REFUSED = {
    "localmix", "global-mixup", "naivemix", "fedmix", "fedmix-checked", "fedmix-published", "virtual-means",
    "virtual-seeds", "virtual-xor", "vhl", "statmix", "fed-augmix", "noise-mix", "local-means", "flea",
    "naivemix+fed-augmix", "fedmix+fed-augmix", "aggenhance", "aggenhance-secure", "server-means", "server-matched",
    "feddm",
    "prior-samples", "mixfld", "mix2fld", "xormixfl", "mixfl",
}  # fmt: skip
"""The presets that mix, average or make samples, or take distances between them."""

OTHER_MODEL = {"fedbn", "fedfa"}
"""Those that need normalisation layers, or maps of images."""


def undeclared(data: Dataset) -> Dataset:
    """The same as features: what a loader makes of whole numbers."""
    train, test = (replace(half, x=half.x.float()) for half in (data.train, data.test))
    return replace(data, kind="features", train=train, test=test)


@each("dtype", [np.uint8, np.int32, np.uint64])
def test_ids_are_kept_as_int64_with_and_without_a_mask(tmp_path: Path, dtype: Any) -> None:
    ids = np.arange(60).reshape(10, 6).astype(dtype)
    both = np.stack([ids, ids % 2], 1)
    for x in (ids, both):
        np.savez(tmp_path / "ids.npz", x=x, y=np.arange(10) % 2, split=[0] * 8 + [1] * 2)
        data = load("npz", path=tmp_path / "ids.npz", kind="tokens")
        assert (data.kind, data.train.x.dtype) == ("tokens", torch.int64)
        assert np.array_equal(torch.cat([data.train.x, data.test.x]).numpy(), x)


@each(
    "x",
    [
        np.ones((10, 6)),
        np.full((10, 6), -1),
        np.full((10, 6), 2**64 - 1, np.uint64),
        np.ones((10, 3, 6), np.int64),
        np.full((10, 2, 6), 2),
        np.ones(10, np.int64),
    ],
)
def test_what_is_no_ids_is_refused(tmp_path: Path, x: np.ndarray) -> None:
    np.savez(tmp_path / "ids.npz", x=x, y=np.arange(10) % 2)
    told = r"'x' is .*; valid for data.kind = \"tokens\": whole numbers from 0"
    refused(told, "npz", path=tmp_path / "ids.npz", kind="tokens")


def test_whole_numbers_in_rows_are_refused_with_the_kind_to_declare(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", x=np.ones((10, 2, 6), np.int64), y=np.arange(10) % 2)
    refused(r"\[n, 2, T\], with data.kind = \"tokens\"", "npz", path=tmp_path / "ids.npz")


def test_no_scale_changes_ids() -> None:
    data = tokens()
    for name in known("scale"):
        scale = build("scale", name).fit(data)
        assert scale.describe() == {"name": "tokens"}
        assert scale(data.train.x) is data.train.x
    for number in (scale.to_unit, scale.from_unit, scale.diameter, lambda _: scale.ends()):
        with pytest.raises(FedblendError, match="ids of tokens"):
            number(torch.zeros(1, 5))


@each("half", ["train", "test"])
def test_an_id_that_the_model_has_not_is_refused_before_the_first_round(half: str) -> None:
    data = tokens()
    x = getattr(data, half).x.clone()
    x[7, 3] = 12
    data = replace(data, **{half: replace(getattr(data, half), x=x)})
    with pytest.raises(FedblendError, match=r"index out of range in self; a model needs an embedding for each id"):
        setup(data, model=WORDS)
    setup(data, model={**WORDS, "arguments": {"vocabulary": 13}})


def test_whole_numbers_that_a_model_converts_are_named_with_the_remedy() -> None:
    data = undeclared(tokens())
    # Standardised numbers from -1.5 or so; half of them padding moves the smallest to above -1.
    with pytest.raises(FedblendError, match=r"index out of range .* on the scale 'standard'.*kind = \"tokens\""):
        setup(data, model=WORDS)
    x = data.train.x * (torch.arange(5) % 2 == 0) * (torch.arange(40)[:, None] % 3 == 0)
    padded = replace(data, train=replace(data.train, x=x))
    with pytest.warns(UserWarning, match=r"converts its inputs to whole numbers.*'standard'.*kind = \"tokens\""):
        setup(padded, model=WORDS)
    # A model that converts only some columns of a table.
    with pytest.warns(UserWarning, match="converts its inputs to whole numbers"):
        setup(data, model={"name": "module", "path": "helpers:CategoryAndNumbers"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup(padded, model=WORDS, scale="none")
        setup(padded, model={"name": "mlp", "hidden": [4]})
        setup(numbers(), model={"name": "mlp", "hidden": [4]})
        setup(tokens(), model=WORDS)


@each("method", ["naivemix", "fedmix", "localmix", "vhl", "aggenhance", "virtual-means"])
def test_whole_numbers_that_a_model_converts_are_not_mixed(method: str) -> None:
    with pytest.raises(FedblendError, match="ids of tokens"):
        setup(undeclared(tokens()), model=WORDS, scale="none", method=method)


def test_the_kind_changes_nothing_for_a_model_that_converts_whole_numbers_as_they_are() -> None:
    ended = []
    for data in (tokens(), undeclared(tokens())):
        ended.append(run(federation(data, model=WORDS, scale="none"), 2)[0].weights)
    assert all(torch.equal(ended[1][name], tensor) for name, tensor in ended[0].items())


ALL = [name for name in presets.presets() if not name.startswith("fedprox+")]


@pytest.mark.parametrize("method", slow_except([name for name in ALL if name != "fld"], ALL))
def test_each_method_trains_on_tokens_or_refuses_them(method: str) -> None:
    changes: dict[str, Any] = {"model": STAGED, "holdout": 0.2, "unsafe": True, "method": method}
    if method in REFUSED:
        with pytest.raises(FedblendError, match=r"^method\.\w+: '[\w-]+' mixes.* as ids of tokens; valid: methods"):
            setup(tokens(), **changes)
    elif method in OTHER_MODEL:
        with pytest.raises(FedblendError, match=r"normalisation layers|maps of images"):
            run(federation(tokens(), **changes), 1)
    else:
        records = run(federation(tokens(120), **changes), 1)[1]
        assert records[0]["loss"] > 0


def test_the_distances_of_flea_are_its_only_use_of_ids() -> None:
    flea = {"name": "flea", "objective": {"decorrelation": 0.0}}
    assert run(federation(tokens(), model=STAGED, method=flea), 1)[1][0]["loss"] > 0


def test_statistics_of_features_are_those_of_the_ids_that_were_read() -> None:
    """CCVR's features are of the last layer: the mean of a class is that of the model's own hidden states."""
    made = setup(tokens(120), model=STAGED, method="ccvr")
    engine = engine_of(made)
    ((_, payload),) = list(engine.share(0, made.weights(), [1], made.sizes(0)))
    x, y = made.samples(1, int(made.sizes(0)[1]))
    hidden = made.model.eval()(x, 0, 2)
    for label, mean in zip(payload["y"].tolist(), payload["mean"], strict=True):
        torch.testing.assert_close(mean, hidden[y == label].mean(0).detach(), rtol=1e-5, atol=1e-6)


def test_augmentation_of_pictures_is_refused() -> None:
    with pytest.raises(FedblendError, match=r"train.augment: .* needs pictures, but 'tokens' holds tokens"):
        setup(tokens(), model=WORDS, train={"augment": ["horizontal-flip"]})


@pytest.mark.parametrize(("model", "mask"), [(WORDS, False), (MASKED, True)])
def test_stacked_clients_train_as_in_the_loop(model: dict[str, Any], mask: bool) -> None:
    stacked_gives_the_loops_state(setup(tokens(mask=mask), model=model), rounds=2, stack=2)


def in_file(folder: Path) -> tuple[Any, np.ndarray]:
    """Tokens with a mask, as a data set of PyTorch gives them; and the array."""
    data = tokens(mask=True)
    x = data.train.x.numpy()
    pairs = [(torch.from_numpy(ids), int(label)) for ids, label in zip(x, data.train.y, strict=True)]
    return fedblend.from_torch(pairs, folder / "ids.npz", kind="tokens"), x


@pytest.mark.slow
def test_a_run_on_tokens_predicts_and_is_exported(tmp_path: Path) -> None:
    part, x = in_file(tmp_path)
    assert np.array_equal(np.load(tmp_path / "ids.npz")["x"], x)
    done = fedblend.run(experiment(data=part, model=MASKED, ranks=1), tmp_path / "run")
    predictor = Predictor.of_run(RunDirectory(done.path), trust=True)
    wanted = done.model.eval()(torch.from_numpy(x)).softmax(1).detach().numpy()
    assert np.array_equal(predictor.predict_proba(x), wanted)
    assert predictor.description["type"] == "int64"
    assert "... and 20 more" in succeeded(here("predict", "--trust", done.path, tmp_path / "ids.npz")).out
    shown = here("data", "show", done.path / "config.toml", "--out", tmp_path / "split.png")
    assert re.search(r"largest id of a token +11\b", succeeded(shown).out)
    predictor.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    np.testing.assert_allclose(program(torch.from_numpy(x)).detach().numpy(), wanted, rtol=1e-5)
    for wrong, said in ((x.astype(float), "float64"), (x[:, 0], "shape"), (x * 40, "no such token")):
        with pytest.raises(FedblendError, match=said):
            predictor.predict(wrong)


@pytest.mark.slow
def test_processes_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    asked = experiment(data=in_file(tmp_path)[0], model=MASKED, ranks=1)
    whole = fedblend.run(asked, tmp_path / "whole")
    fedblend.run(asked.model_copy(update={"rounds": 1}), tmp_path / "again")
    for other in (
        fedblend.run(asked, tmp_path / "again", resume=True),
        fedblend.run(asked.model_copy(update={"ranks": 2}), tmp_path / "ranks"),
    ):
        weights = other.model.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in whole.model.state_dict().items())
