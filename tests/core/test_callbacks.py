"""Callbacks: what they are called with, and how they end a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import experiment, setup, slow_after_first

import fedblend
from fedblend.core.callbacks import Callback
from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.loop import RoundLoop
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup, cohort_of
from fedblend.core.state import RunState
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import read
from fedblend.runs.run_callbacks import EarlyStopping

TINY: dict[str, Any] = {"data": "toy", "partition": "natural", "model": {"name": "mlp", "hidden": []}, "rounds": 4}
TINY |= {"train": {"cohort": 2, "epochs": 1}, "engine": "loop", "ranks": 1, "checkpoint_every": 3}


class Diary(Callback):
    """Notes each call."""

    def __init__(self, stop_after: int = 99) -> None:
        self.calls: list[Any] = []
        self.stop_after = stop_after

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        self.calls.append(("run begins", state.round, len(setup.population)))

    def on_round_begin(self, state: RunState, cohort: np.ndarray) -> None:
        self.calls.append(("round begins", state.round, cohort.tolist()))

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        self.calls.append(("updates", task.round, [client for client, _, _ in result.good]))

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        self.calls.append(("round ends", state.round, record.cohort))
        return state.round >= self.stop_after

    def on_run_end(self, state: RunState) -> None:
        self.calls.append(("run ends", state.round))


def test_every_hook_is_called_in_order_with_the_rounds_own_cohort() -> None:
    made = setup(train={"cohort": 2}, rounds=2)
    diary = Diary()
    loop = RoundLoop(made, LoopEngine(made), [diary])

    state = loop.run(*loop.start())

    first, second = (cohort_of(made, round).tolist() for round in range(2))
    assert state.round == 2
    assert diary.calls == [
        ("run begins", 0, 4),
        *[("round begins", 0, first), ("updates", 0, first), ("round ends", 1, first)],
        *[("round begins", 1, second), ("updates", 1, second), ("round ends", 2, second)],
        ("run ends", 2),
    ]


def test_the_state_names_the_callbacks_that_ended_the_run_until_another_round_is_made() -> None:
    made = setup(train={"cohort": 2}, rounds=4)
    loop = RoundLoop(made, LoopEngine(made), [Diary(stop_after=2), Ends(), Diary()])
    ended = loop.run(*loop.start())
    assert (ended.round, ended.ended_by) == (2, "Diary, Ends")
    assert loop.round(ended)[0].ended_by == ""


def test_a_callback_ends_a_run_which_is_then_done_with_a_checkpoint_and_can_go_on(tmp_path: Path) -> None:
    made = experiment(**TINY)

    result = fedblend.run(made, tmp_path / "run", callbacks=[Diary(stop_after=2)])

    outcome = read(RunDirectory(tmp_path / "run"))
    assert result.metrics["round"].tolist() == [0, 1, 2]
    assert (outcome.state, outcome.status["reason"]) == ("done", "ended by Diary")
    whole = fedblend.run(made, tmp_path / "whole")
    again = fedblend.run(made, tmp_path / "run", resume=True)
    assert again.metrics["accuracy"].tolist() == whole.metrics["accuracy"].tolist()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"callbacks": ["csv"]}, "callbacks: 'csv' is no Callback object; valid: a list of these (the experiment's own "
         "field `callbacks` takes names)"),
        ({"callbacks": [Diary]}, "callbacks: Diary is a class; write Diary()"),
        ({"callbacks": "csv"}, "callbacks: 'csv' is not valid; give a list of Callback objects"),
        ({"callbacks": None}, "callbacks: None is not valid; give a list of Callback objects"),
        ({"on_round": 3}, "on_round: 3 is not valid; give a function of a round's record"),
    ],
)  # fmt: skip
def test_what_is_no_callback_is_refused_before_anything_is_made(
    tmp_path: Path, given: dict[str, Any], fault: str
) -> None:
    with pytest.raises(FedblendError) as error:
        fedblend.run(experiment(**TINY), tmp_path / "run", **given)
    assert str(error.value) == fault
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("true", [True, np.True_])
def test_on_round_ends_a_run_by_returning_true_and_by_nothing_else(tmp_path: Path, true: Any) -> None:
    made = experiment(**TINY)
    seen: list[int] = []

    def on_round(record: dict[str, Any]) -> Any:
        seen.append(record["round"])
        return true if record["round"] == 2 else len(seen)

    fedblend.run(made, tmp_path / "run", on_round=on_round)

    assert seen == [0, 1, 2]
    outcome = read(RunDirectory(tmp_path / "run"))
    assert (outcome.state, outcome.status["reason"]) == ("done", "ended by on_round")


@pytest.mark.parametrize("error", slow_after_first([KeyboardInterrupt(), Stopped("enough")]))
def test_a_run_that_its_callback_interrupts_is_stopped_and_can_go_on(error: BaseException, tmp_path: Path) -> None:
    made = experiment(**{**TINY, "checkpoint_every": 1})

    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise error

    with pytest.raises(Stopped, match=r"kept up to round 1\. Go on with: fedblend resume"):
        fedblend.run(made, tmp_path / "run", on_round=on_round)

    assert RunDirectory(tmp_path / "run").status() == {"state": "stopped", "round": 1, "reason": "interrupted"}
    whole = fedblend.run(made, tmp_path / "whole")
    again = fedblend.run(made, tmp_path / "run", resume=True)
    assert again.metrics["accuracy"].tolist() == whole.metrics["accuracy"].tolist()
    assert read(RunDirectory(tmp_path / "run")).state == "done"


def test_a_run_whose_callback_fails_is_failed_and_can_go_on(tmp_path: Path) -> None:
    made = experiment(**{**TINY, "checkpoint_every": 1})

    def on_round(record: dict[str, Any]) -> None:
        raise KeyError("accurracy")

    with pytest.raises(KeyError):
        fedblend.run(made, tmp_path / "run", on_round=on_round)

    assert RunDirectory(tmp_path / "run").status()["state"] == "failed"
    assert len(fedblend.run(made, tmp_path / "run", resume=True).metrics) == TINY["rounds"] + 1


def test_a_file_names_callbacks_by_name_and_by_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedblend import Callback, part\n\n\n"
        "@part('callback', 'after')\nclass After(Callback):\n    rounds: int = 1\n"
        "    def on_round_end(self, state, record):\n        return state.round >= self.rounds\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    stop = [{"name": "stop-at-accuracy", "accuracy": 1.0}, {"name": "mine:After", "rounds": 3}]
    result = fedblend.run(experiment(**TINY, callbacks=stop), tmp_path / "run")

    assert result.metrics["round"].max() == 3
    assert RunDirectory(tmp_path / "run").experiment().callbacks == result.experiment.callbacks
    with pytest.raises(FedblendError, match=r"callbacks\[0\].name: unknown callback 'stopp'"):
        experiment(**TINY, callbacks=["stopp"])


class Keeps(Callback):
    """Keeps each round's uploads, by client."""

    reads_uploads = True

    def __init__(self) -> None:
        self.rounds: list[dict[int, dict[str, torch.Tensor]]] = []

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        self.rounds.append(dict(result.uploads))


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
def test_a_callback_that_reads_uploads_has_those_that_the_server_averages(engine: Any) -> None:
    made = setup(train={"cohort": 3}, rounds=1, protection={"name": "noise", "scale": 0.1})
    keeps, others = Keeps(), Diary()
    loop = RoundLoop(made, engine(made), [keeps, others])

    state = loop.run(*loop.start())

    (sent,) = keeps.rounds
    cohort = cohort_of(made, 0)
    shares = made.sizes(0)[cohort] / made.sizes(0)[cohort].sum()
    assert list(sent) == cohort.tolist()
    for name, tensor in state.weights.items():
        mean = sum(share * sent[client][name].double() for client, share in zip(sent, shares, strict=True))
        torch.testing.assert_close(tensor, mean.float())


def test_without_such_a_callback_no_upload_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeps, "reads_uploads", False)
    made = setup(train={"cohort": 3}, rounds=1)
    keeps = Keeps()
    loop = RoundLoop(made, LoopEngine(made), [keeps])
    loop.run(*loop.start())
    assert keeps.rounds == [{}]


@pytest.mark.slow
def test_uploads_of_all_ranks_reach_a_callback(tmp_path: Path) -> None:
    kept = []
    for ranks in (1, 2):
        keeps = Keeps()
        fedblend.run(experiment(**{**TINY, "rounds": 1, "ranks": ranks}), tmp_path / str(ranks), callbacks=[keeps])
        kept.append(keeps.rounds)

    (one,), (two,) = kept
    assert list(one) == list(two)
    assert all(torch.equal(tensor, two[client][name]) for client in one for name, tensor in one[client].items())


def test_a_callback_cannot_read_uploads_that_the_aggregator_hides() -> None:
    made = setup(train={"cohort": 3}, method={"name": "fedavg", "aggregator": "secure-mean"})
    with pytest.raises(FedblendError, match=r"^callbacks: Keeps reads each client's upload, which 'secure-mean' in"):
        RoundLoop(made, LoopEngine(made), [Keeps()])


class Ends(Callback):
    """Ends the run after a round."""

    round: int = 2

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        return state.round >= self.round


@pytest.mark.parametrize("by", ["on_round", "callback"])
def test_the_last_round_is_evaluated_logged_and_kept_whatever_ends_the_run(by: str, tmp_path: Path) -> None:
    made = experiment(**{**TINY, "eval_every": 4, "validation": {"clients": 0.2}}, callbacks=["keep-best"])
    ends = {"on_round": lambda record: record["round"] == 2, "callback": [Ends()]}

    fedblend.run(made, tmp_path / "run", **{"callbacks" if by == "callback" else by: ends[by]})

    last = RunDirectory(tmp_path / "run").records()[-1]
    assert (last.round, last.evaluated) == (2, True)
    assert last.best_round is not None
    assert checkpoint.read_best(tmp_path / "run") is not None


def test_a_run_that_was_cut_between_its_target_and_its_status_makes_no_further_round(tmp_path: Path) -> None:
    made = experiment(**TINY, target=0.0, stop_at_target=True)
    fedblend.run(made, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    ended = [record.round for record in run.records()]
    run.set_status("running", ended[-1])

    fedblend.run(made, tmp_path / "run", resume=True)

    assert [record.round for record in run.records()] == ended == [0, 1]
    assert run.status()["reason"] == "ended by target"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_loss_that_is_no_number_is_not_the_best(mode: Any) -> None:
    stopping = EarlyStopping(monitor="loss", mode=mode, patience=2)
    improving = (math.nan, 3.0, 2.0, 1.0) if mode == "min" else (math.nan, 1.0, 2.0, 3.0)

    ends = [
        stopping.on_round_end(cast(RunState, None), RoundRecord(i + 1, loss=loss)) for i, loss in enumerate(improving)
    ]

    assert not any(ends)
    assert stopping.best() == (4, improving[-1])
