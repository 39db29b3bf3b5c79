"""Runs that version 0.1 made are read and resumed."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fedblend.core.errors import FedblendError
from fedblend.core.state import ClientState
from fedblend.experiment.config import as_table, resolve
from fedblend.runs import checkpoint

OLD = {
    "data": "toy",
    "partition": "natural",
    "train": {"cohort": 3},
    "judge": "each",
    "stop_change": 0.01,
    "method": {"name": "fd", "keep_weights": True},
}


def test_fields_of_version_0_1_are_read_with_a_warning_each():
    with pytest.warns(FutureWarning) as warned:
        made = resolve(OLD)

    assert (made.evaluate_model, made.convergence_tol, made.method.stateful_clients) == ("each", 0.01, True)
    assert [str(one.message).split(":")[0] for one in warned] == ["judge", "stop_change", "method.keep_weights"]
    assert resolve(as_table(made)) == made
    with pytest.raises(FedblendError, match="judge: is the old name of evaluate_model, and both are given"):
        resolve({**OLD, "evaluate_model": "each"})


def test_a_checkpoint_of_version_0_1_is_read_into_todays_state(tmp_path):
    one = torch.ones(1)
    tensors = {
        "weights/w": one,
        "server/points": 2 * one,
        "said/outputs": 3 * one,
        "own/1/weights/w": 4 * one,
        "own/1/said/outputs": 5 * one,
        "owner": torch.zeros(0, dtype=torch.int64),
        "holders": torch.tensor([0b10100000], dtype=torch.uint8),
    }
    header = {"round": 7, "shared_round": -1, "clients": 3}
    save_file(tensors, tmp_path / checkpoint.NAME, {"state": json.dumps(header)})

    state = checkpoint.read(tmp_path)

    assert (state.round, state.has_pool.tolist()) == (7, [True, False, True])
    assert state.server_part("server_step") == {"points": 2 * one}
    assert state.global_outputs == {"outputs": 3 * one}
    assert state.client_states == {1: ClientState(model={"w": 4 * one}, outputs={"outputs": 5 * one})}
