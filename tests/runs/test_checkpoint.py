"""Checkpoints that are damaged, made to do harm, or another run's end in one message."""

import json
import math

import pytest
import torch
from cli_helpers import CHECKPOINT, here, lines_of, refused, status, succeeded, write
from safetensors.torch import load_file, save_file

from fedblend.core.errors import FedblendError
from fedblend.core.state import to_tensors
from fedblend.runs import checkpoint

SCALARS = {"version": 2, "round": 3, "shared_round": 2, "clients": 3}
TENSORS = {
    "weights/w": torch.ones(2),
    "client/1/weights/w": torch.zeros(2),
    "entries/x": torch.ones(2, 4),
    "owner": torch.tensor([0, 2]),
    "holders": torch.tensor([0b101_00000], dtype=torch.uint8),
    "shared_sizes": torch.tensor([4, 0, 5]),
}


def made(folder, scalars=SCALARS, **changes):
    """A folder with a checkpoint of any scalars, and of some tensors in place of the usual ones."""
    tensors = {name: tensor for name, tensor in {**TENSORS, **changes}.items() if tensor is not None}
    checkpoint.write_table(folder / CHECKPOINT, scalars, tensors)
    return folder


def told_of(folder):
    """The message, of one line, with which a folder's checkpoint is refused."""
    with pytest.raises(FedblendError) as caught:
        checkpoint.read(folder)
    told = str(caught.value)
    assert told.startswith(f"{folder / CHECKPOINT}: is not a checkpoint of fedblend or is damaged: ")
    assert told.endswith("begin again in another folder")
    assert "\n" not in told
    return told


def test_a_sound_one_is_read(tmp_path):
    state = checkpoint.read(made(tmp_path))
    assert (state.round, state.shared_round, state.has_pool.tolist()) == (3, 2, [True, False, True])
    assert checkpoint.round_of(tmp_path) == 3


def test_tensors_lie_in_memory_as_those_of_a_run_do(tmp_path):
    # Matrix products of tensors at other places in memory have other last bits: a resumed run would differ.
    state = checkpoint.read(made(tmp_path, **{"weights/odd": torch.ones(3), "weights/one": torch.ones(1)}))
    kept = [*state.weights.values(), *state.entries.tensors.values(), *to_tensors(state.client_states).values()]
    assert all(tensor.data_ptr() % 64 == torch.empty(1).data_ptr() % 64 for tensor in kept)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("[]", "is a list, not a table"),
        ('"round"', "is a str, not a table"),
        ("[" * 100_000, "recursion"),
        ('{"round":' * 100_000, "recursion"),
        ("{", "double quotes"),
        (json.dumps(SCALARS | {"sha256": "0"}), "does not have the checksum that it was written with"),
    ],
)
def test_a_header_of_another_form(tmp_path, header, words):
    save_file(TENSORS, tmp_path / CHECKPOINT, {"state": header})
    assert words in told_of(tmp_path)


@pytest.mark.parametrize(
    ("scalars", "words"),
    [
        (SCALARS | {"round": "x"}, "round: 'x' in its header is not an integer of at least 0"),
        (SCALARS | {"round": "1\n" * 500}, r"round: '1\n1\n"),
        (SCALARS | {"round": 1.5}, "round: 1.5"),
        (SCALARS | {"round": True}, "round: True"),
        (SCALARS | {"round": None}, "round: None"),
        (SCALARS | {"round": -1}, "round: -1 in its header is not an integer of at least 0"),
        (SCALARS | {"round": math.inf}, "round: inf"),
        (SCALARS | {"shared_round": -2}, "shared_round: -2 in its header is not an integer of at least -1"),
        (SCALARS | {"version": 1}, "version: 1 in its header is not an integer of at least 2"),
        ({"round": 3, "shared_round": 2, "clients": 3}, "'version'"),  # of version 0.1
        (SCALARS | {"clients": "3"}, "clients: '3'"),
    ],
)
def test_scalars_of_another_form(tmp_path, scalars, words):
    assert words in told_of(made(tmp_path, scalars))
    assert checkpoint.round_of(tmp_path) is None


@pytest.mark.parametrize(
    ("scalars", "changes", "words"),
    [
        ({}, {"holders": torch.ones(3)}, "'holders' is torch.float32 of shape [3], not torch.uint8 [n]"),
        ({}, {"holders": torch.zeros(1, 1, dtype=torch.uint8)}, "'holders' is torch.uint8 of shape [1, 1]"),
        ({}, {"holders": None}, "'holders'"),
        ({"clients": 0}, {}, "'holders' has 1 bytes for 0 clients"),
        ({"clients": 9}, {}, "'holders' has 1 bytes for 9 clients"),
        ({"clients": 10**30}, {}, "'holders' has 1 bytes for"),
        ({"clients": 4}, {}, "'shared_sizes' has 3 numbers for 4 clients"),
        ({}, {"shared_sizes": torch.ones(3)}, "'shared_sizes' is torch.float32"),
        ({}, {"owner": torch.ones(2, dtype=torch.bfloat16)}, "'owner' is torch.bfloat16"),
        ({}, {"owner": torch.tensor([0, 1, 2])}, "'entries' has not the 3 rows of 'owner'"),
        ({}, {"entries/x": torch.tensor(1.0)}, "'entries' has not the 2 rows of 'owner'"),
        ({}, {"owner": torch.tensor([0, 3])}, "client 3 is not valid; valid: 0 to 2"),
        ({}, {"owner": torch.tensor([-1, 2])}, "client -1 is not valid; valid: 0 to 2"),
        ({}, {"client/3/weights/w": torch.ones(2)}, "client 3 is not valid; valid: 0 to 2"),
        ({}, {"client/one/weights/w": torch.ones(2)}, "'one'"),
        ({"ended_by": ["target"]}, {}, "ended_by: ['target'] in its header is no text"),
    ],
)
def test_tensors_that_do_not_go_together(tmp_path, scalars, changes, words):
    assert words in told_of(made(tmp_path, SCALARS | scalars, **changes))


@pytest.mark.parametrize(
    ("model", "clients", "own", "words"),
    [
        ({"v": torch.ones(2)}, 3, 2, "is of another model than the run's ('v' differs)"),
        ({"w": torch.ones(3)}, 3, 2, "('w' differs)"),
        ({"w": torch.ones(2, dtype=torch.float64)}, 3, 2, "('w' differs)"),
        ({}, 3, 2, "('w' differs)"),
        ({"w": torch.ones(2)}, 4, 2, "is of 3 clients, but the run has 4"),
        ({"w": torch.ones(2)}, 3, 3, "is of another model than the run's ('w' differs)"),  # a client's own weights
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, model, clients, own, words):
    state = checkpoint.read(made(tmp_path, **{"client/1/weights/w": torch.zeros(own)}))
    with pytest.raises(FedblendError) as caught:
        checkpoint.match_model(state, model, clients, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / CHECKPOINT}: ")
    assert words in str(caught.value)


def test_all_weights_come_back_in_the_models_order(tmp_path):
    two = {f"{where}/{name}": torch.ones(2) for where in ("weights", "client/1/weights") for name in ("a", "w")}
    state = checkpoint.read(made(tmp_path, **two, **{"client/1/outputs/outputs": torch.ones(1)}))
    fitted = checkpoint.match_model(state, {"w": torch.zeros(2), "a": torch.zeros(2)}, 3, tmp_path)
    assert list(fitted.weights) == ["w", "a"]
    assert list(fitted.client_states[1].model) == ["w", "a"]


@pytest.fixture
def run(tmp_path):
    """A run of two rounds."""
    succeeded(here("run", write(tmp_path / "tiny.toml"), "--out", tmp_path / "out"))
    return tmp_path / "out" / "fedavg-seed0"


@pytest.mark.slow
def test_a_run_does_not_go_on_from_anothers_checkpoint(run, tmp_path):
    file = write(tmp_path / "other.toml", {"model": {"name": "mlp", "hidden": [9]}})
    succeeded(here("run", file, "--out", tmp_path / "other"))
    (run / CHECKPOINT).write_bytes((tmp_path / "other" / "fedavg-seed0" / CHECKPOINT).read_bytes())
    lines = lines_of(run)
    refused(here("resume", run), f"{run / CHECKPOINT}: is of another model than the run's")
    assert (lines_of(run), status(run)["state"]) == (lines, "done")


def test_a_run_of_version_0_1_is_told_what_reads_it(run):
    path = run / CHECKPOINT
    save_file(load_file(path), path, {"state": json.dumps({"round": 2, "shared_round": -1, "clients": 4})})
    assert checkpoint.round_of(run) is None
    for words in (("resume", run), ("report", run), ("predict", run, run), ("leaks", run)):
        told = refused(here(*words), f"{path}: has no checksum", "read the run with fedblend 0.2")
        assert "damaged" not in told.err


@pytest.mark.slow
def test_a_checkpoint_of_more_rounds_than_can_be_counted(run):
    scalars = {**SCALARS, "round": 10**18, "shared_round": -1, "clients": 4}
    checkpoint.write_table(run / CHECKPOINT, scalars, load_file(run / CHECKPOINT))
    refused(here("resume", run), "metrics.jsonl: rounds are missing below the checkpoint's, 1000000000000000000")


def written(folder):
    """A folder with a checkpoint as fedblend writes it."""
    state = checkpoint.read(made(folder))
    checkpoint.write(folder, state)
    return folder / CHECKPOINT


def test_every_changed_bit_of_the_tensors_and_a_changed_round_are_found(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    assert checkpoint.read(tmp_path) is not None
    first = 8 + int.from_bytes(whole[:8], "little")
    for place in range(first, len(whole)):
        for bit in (0, 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            assert "damaged" in told_of(tmp_path)
    assert whole.count(b'\\"round\\": 3') == 1
    path.write_bytes(whole.replace(b'\\"round\\": 3', b'\\"round\\": 2'))
    assert "does not have the checksum that it was written with" in told_of(tmp_path)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.uint8])
def test_tensors_of_any_type_have_a_checksum(kind, tmp_path):
    tensors = {"weights/w": torch.ones(2, 3).to(kind), "weights/none": torch.zeros(0, 4).to(kind)}
    state = checkpoint.read(made(tmp_path, **tensors, **{"client/1/weights/w": None}))
    checkpoint.write(tmp_path, state)
    again = checkpoint.read(tmp_path)
    assert torch.equal(again.weights["w"], state.weights["w"])


def test_equal_states_have_equal_files(tmp_path):
    assert len({written(tmp_path).read_bytes() for _ in range(16)}) == 1
