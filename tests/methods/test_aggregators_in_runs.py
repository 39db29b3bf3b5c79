"""Aggregators in a run: what a cohort cannot have is refused, and several ranks agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregators_helpers import GATHERING
from cli_helpers import CHECKPOINT, here, records, succeeded, write
from helpers import BatchNormNet, each, engine_of, federation, federation_of, run, same, setup, slow_after_first
from safetensors.torch import load_file

from fedblend.core.aggregator import Aggregator
from fedblend.core.callbacks import Callback
from fedblend.core.channel import Channel
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.registry import build
from fedblend.methods.aggregators.robust import IntervalMean

BATCH_NORM = {"name": "module", "path": "helpers:BatchNormNet"}


@each(
    ("spec", "cohort", "words"),
    [
        ({"name": "krum", "byzantine": 2}, 6, ("byzantine: 2 needs 7 uploads", "train.cohort is 6", "valid: 0 to 1")),
        ({"name": "krum"}, 2, ("byzantine: 1 needs 5", "train.cohort is 2", "valid: a train.cohort of 5 or more")),
        ({"name": "multi-krum", "byzantine": 4}, 10, ("byzantine: 4 needs 11", "valid: 0 to 3")),
        ({"name": "multi-krum", "kept": 10}, 10, ("kept: 10 of a train.cohort of 10", "valid: 1 to 9")),
        ({"name": "trimmed-mean", "share": 0.1}, 9, ("share: 0.1 of a train.cohort of 9", "valid: from 0.112 to")),
        ({"name": "trimmed-mean", "share": 0.4}, 2, ("share: 0.4", "valid: 0, or a train.cohort of 3 or more")),
    ],
)
def test_what_a_cohort_cannot_have_is_refused_at_the_start(spec: Any, cohort: int, words: tuple[str, ...]) -> None:
    with pytest.raises(FedblendError) as caught:
        federation(partition={"name": "iid", "clients": 10}, train={"cohort": cohort}, method={"aggregator": spec})
    for word in (f"method.aggregator.{words[0]}", *words[1:]):
        assert word in str(caught.value)


class Extras(Callback):
    """What the good uploads of a round had beside their models."""

    def on_updates(self, task: Any, result: Any) -> None:
        self.each = [result.each_extras[client] for client, _, _ in result.good]


FIVE = {"partition": {"name": "iid", "clients": 5}, "train": {"cohort": 5}}
LIAR = {"name": "sign-flip", "share": 0.2, "factor": 1e6}


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        ("median", lambda rows: np.median(rows, 0)),
        ({"name": "trimmed-mean", "share": 0.2}, lambda rows: np.sort(rows, 0)[1:4].mean(0)),
    ],
)
def test_a_robust_aggregator_also_takes_what_goes_beside_the_model(aggregator: Any, expected: Any) -> None:
    made, seen = setup(method={"name": "scaffold", "aggregator": aggregator}, adversary=LIAR, **FIVE), Extras()

    state, _ = run(RoundLoop(made, engine_of(made), [seen]), 1)

    (liar,) = np.flatnonzero(made.adversaries)
    for name, control in state.server_part("terms.0").items():
        rows = np.stack([extras[f"terms.0/{name}"].double().numpy() for extras in seen.each])
        honest = np.delete(rows, liar, 0)
        assert np.abs(rows[liar]).max() > 1e3 * np.abs(honest).max()
        # SCAFFOLD's control variate begins at 0; all five clients of the federation take part.
        np.testing.assert_allclose(control.double().numpy(), expected(rows), rtol=1e-6)
        assert np.abs(control.numpy()).max() <= np.abs(honest).max() * (1 + 1e-6)


@pytest.mark.parametrize("aggregator", ["krum", "multi-krum"])
def test_krum_takes_what_goes_beside_the_model_from_honest_clients(aggregator: str) -> None:
    made, seen = setup(method={"name": "scaffold", "aggregator": aggregator}, adversary=LIAR, **FIVE), Extras()

    state, _ = run(RoundLoop(made, engine_of(made), [seen]), 1)

    honest = [extras for extras, lies in zip(seen.each, made.adversaries, strict=True) if not lies]
    controls = state.server_part("terms.0")
    if aggregator == "krum":
        assert any(all(torch.equal(controls[n], e[f"terms.0/{n}"]) for n in controls) for e in honest)
    else:
        mean = {n: torch.stack([e[f"terms.0/{n}"] for e in honest]).double().mean(0) for n in controls}
        for name, control in controls.items():
            torch.testing.assert_close(control.double(), mean[name], rtol=1e-5, atol=1e-7)


def test_a_mean_sums_what_an_adversary_sends_beside_its_model() -> None:
    plain = {"name": "scaffold", "aggregator": {"name": "mean", "by": "clients"}}
    (honest, _), (lied, _) = (run(federation(method=plain, adversary=a, **FIVE), 1) for a in ("none", LIAR))

    one, other = (state.server_part("terms.0") for state in (honest, lied))
    assert all(other[name].abs().max() > 1e3 * one[name].abs().max() for name in one)


def test_a_client_that_sends_no_numbers_beside_its_model_is_refused() -> None:
    nan = {"name": "nan", "share": 0.2}
    state, (record,) = run(federation(method={"name": "scaffold", "aggregator": "median"}, adversary=nan, **FIVE), 1)
    assert len(record["refused"]) == 1
    assert all(torch.isfinite(control).all() for control in state.server_part("terms.0").values())


class ReturnsUploads(Aggregator):
    """An author's mistake: the uploads in place of one set of tensors."""

    name = "returns-uploads"

    def aggregate(self, uploads: Any) -> Any:
        return uploads[0]


class Forgets(ReturnsUploads):
    """Another mistake: a tensor is left out."""

    def aggregate(self, uploads: Any) -> Any:
        return dict(list(uploads[0][0].items())[1:])


class Rounds(ReturnsUploads):
    """Another: whole numbers, with which a run ended as done and a model of zeros."""

    def aggregate(self, uploads: Any) -> Any:
        return {name: tensor.long() for name, tensor in uploads[0][0].items()}


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        (ReturnsUploads(), "tuple, where a dict of tensors by name is valid"),
        (Forgets(), "missing ['"),
        (Rounds(), "has whole numbers (torch.int64), where torch.float32 is valid"),
    ],
)
def test_what_an_own_aggregator_returns_is_checked(aggregator: Aggregator, words: str) -> None:
    made = federation()
    method = made.method.model_copy(update={"aggregator": aggregator})
    experiment = made.setup.experiment.model_copy(update={"method": method})
    with pytest.raises(FedblendError, match="'returns-uploads' returned what is no model") as caught:
        run(federation_of(replace(made.setup, experiment=experiment)), 1)
    assert words in str(caught.value)


class Divides(ReturnsUploads):
    """A third: a division by zero."""

    def aggregate(self, uploads: Any) -> Any:
        return {name: tensor / 0 for name, tensor in uploads[0][0].items()}


def test_an_aggregate_that_is_no_number_ends_its_own_round_in_one_message() -> None:
    made = federation(rounds=1)
    method = made.method.model_copy(update={"aggregator": Divides()})
    experiment = made.setup.experiment.model_copy(update={"method": method})
    told = (
        "^round 1: the server's model: '.*' holds NaN or infinity after method.aggregator 'returns-uploads'; "
        "valid: smaller steps, or other parts of the method$"
    )
    with pytest.raises(FedblendError, match=told):
        run(federation_of(replace(made.setup, experiment=experiment)), 1)


def test_a_model_that_is_no_number_names_each_part_that_changed_it() -> None:
    made = federation(
        rounds=1,
        method={"aggregator": {"name": "mean", "by": "clients"}, "terms": [{"name": "feddyn", "alpha": 1e-300}]},
        protection={"name": "noise", "clip": 1.0, "multiplier": 1.0, "side": "server"},
    )
    told = (
        "^round 1: the server's model: '.*' holds NaN or infinity after method.aggregator 'mean' and protection "
        "'noise' and method.terms.0 'feddyn'; valid: smaller steps, or other parts of the method$"
    )
    with pytest.raises(FedblendError, match=told):
        run(made, 1)


class Masked(BatchNormNet):
    """A network whose state has a mask of attention, which is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


def test_infinity_that_no_round_makes_is_no_fault_of_a_round() -> None:
    model = {"name": "module", "path": f"{__name__}:Masked"}
    state, records = run(federation(model=model, rounds=2, method="fd"), 2)
    assert [record["uploads"] for record in records] == [2, 2]
    assert torch.equal(state.weights["mask"], Masked().mask)


def test_a_client_beyond_the_range_of_a_secure_mean_sends_nothing() -> None:
    attack = {"name": "sign-flip", "share": 0.25, "factor": 1e6}
    made = federation(
        partition={"name": "iid", "clients": 4},
        train={"cohort": 4},
        method={"aggregator": "secure-mean"},
        adversary=attack,
    )
    _, (record,) = run(made, 1)
    (refused,) = record["refused"]
    assert record["uploads"] == 3
    assert "changed by more than 16 in one round" in refused["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 2.0}},
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 9.0, "side": "server"}},
        {"adversary": {"name": "sign-flip", "share": 0.5, "factor": 10.0}},
    ],
    ids=["clients' noise", "the server's noise", "adversaries"],
)
def test_a_running_variance_never_falls_below_zero(changes: dict[str, Any]) -> None:
    made = federation(model=BATCH_NORM, partition={"name": "iid", "clients": 4}, train={"cohort": 4}, **changes)
    state, (record,) = run(made, 1)
    variance = state.weights["norm.running_var"]
    assert float(variance.min()) == 0.0  # some would be negative
    assert np.isfinite(record["loss"])


def test_a_cohort_that_is_just_large_enough() -> None:
    for spec, cohort in (
        ({"name": "krum", "byzantine": 2}, 7),
        ({"name": "krum", "byzantine": 0}, 3),
        ({"name": "multi-krum", "byzantine": 2, "kept": 5}, 7),
        ({"name": "trimmed-mean", "share": 0.112}, 9),
        ({"name": "trimmed-mean", "share": 0}, 1),
        ("median", 1),
        ("interval-mean", 1),
    ):
        made = federation(
            partition={"name": "iid", "clients": 10}, train={"cohort": cohort}, method={"aggregator": spec}
        )
        assert run(made, 1)[1][0]["uploads"] == cohort


@each(
    ("spec", "told"),
    [
        ({"name": "trimmed-mean", "share": 0.5}, "share: 0.5 is not valid: input should be less than 0.5"),
        ({"name": "krum", "byzantine": -1}, "byzantine: -1 is not valid"),
        ({"name": "multi-krum", "kept": 0}, "kept: 0 is not valid"),
        ({"name": "interval-mean", "low": 1.0, "high": -1.0}, "low: 1.0 is not below high: -1.0"),
        ({"name": "interval-mean", "low": float("nan")}, "low: nan is not below high"),
    ],
)
def test_options_out_of_range_are_told(spec: Any, told: str) -> None:
    with pytest.raises(FedblendError) as caught:
        build("aggregator", spec, "method.aggregator")
    assert told in str(caught.value)


class LosesThree(Channel):
    """A channel that loses three uploads of each round."""

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return (np.arange(len(sizes)) > 2) | (direction == "down")


def test_a_round_with_too_few_uploads_for_krum_is_told() -> None:
    made = setup(partition={"name": "iid", "clients": 10}, train={"cohort": 6}, method={"aggregator": "krum"})
    lossy = made.experiment.model_copy(update={"channel": LosesThree()})
    fed = federation_with(made, lossy)
    with pytest.raises(FedblendError, match=r"byzantine: 1 needs 5 uploads .* but valid uploads are 3; valid: 0 to 0"):
        run(fed, 1)


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
def test_uploads_that_are_refused_count_among_krums_byzantine_clients(name: str) -> None:
    def made(invalid: float) -> Any:
        adversary = {"name": "nan", "share": invalid}
        clients = {"partition": {"name": "iid", "clients": 10}, "train": {"cohort": 10}}
        return setup(**clients, adversary=adversary, method={"aggregator": {"name": name, "byzantine": 3}})

    _, records = run(federation_of(made(0.3)), 2)
    assert [(one["uploads"], len(one["refused"])) for one in records] == [(7, 3), (7, 3)]
    # What is refused beyond that leaves too few.
    with pytest.raises(FedblendError, match=r"0 needs 3 uploads .* but valid uploads are 2"):
        run(federation_of(made(0.8)), 1)


def test_a_trimmed_mean_leaves_out_as_many_uploads_where_some_do_not_arrive() -> None:
    def weights(aggregator: Any) -> Any:
        made = setup(partition={"name": "iid", "clients": 10}, train={"cohort": 6}, method={"aggregator": aggregator})
        state, _ = run(federation_with(made, made.experiment.model_copy(update={"channel": LosesThree()})), 1)
        return state.weights

    # One of six at each end: of the three that arrive the middle one is left.
    assert same(weights({"name": "trimmed-mean", "share": 0.2}), weights("median"))
    told = r"share: 0.4 of 6 clients leaves out 2 uploads at each end and needs 5, but valid uploads are 3; valid: a sm"
    with pytest.raises(FedblendError, match=told):
        weights({"name": "trimmed-mean", "share": 0.4})


def federation_with(made: Any, experiment: Any) -> RoundLoop:
    return federation_of(replace(made, experiment=experiment))


@pytest.mark.parametrize("aggregator", [*GATHERING, IntervalMean(low=-0.003, high=0.01)], ids=lambda a: a.name)
def test_a_round_is_the_aggregate_of_its_uploads(aggregator: Aggregator) -> None:
    made = setup(
        model=BATCH_NORM,
        partition={"name": "iid", "clients": 6},
        train={"cohort": 6},
        method={"aggregator": aggregator},
    )
    fed = federation_with(made, made.experiment)
    task = fed.engine.train
    seen: list[Any] = []
    fed.engine.train = lambda *given: (seen.append(one) or one for one in task(*given))  # type: ignore[method-assign]

    state, _ = run(fed, 1)

    uploads = [(one.weights, float(one.samples)) for one in seen]
    assert len(uploads) == 6
    assert same(state.weights, aggregator.finish(uploads, made.weights()))
    assert state.weights["norm.num_batches_tracked"].dtype == torch.int64
    assert list(state.weights) == list(BatchNormNet().state_dict())


ONE_OF_FOUR = {"partition": {"name": "iid", "clients": 4}, "train": {"cohort": 4}}


OVERFLOWING = [
    ("fedavg", ("--engine", "loop")),
    ("scaffold", ("--engine", "loop")),
    ("fedavg", ("--engine", "stacked")),
    ("scaffold", ("--ranks", 2)),
]


@pytest.mark.parametrize(("method", "options"), slow_after_first(OVERFLOWING))
def test_a_simulated_upload_that_overflows_is_left_out_as_one_of_nan_is(
    method: str, options: tuple[Any, ...], tmp_path: Path
) -> None:
    for name, adversary in (("huge", {"name": "sign-flip", "factor": 1e30}), ("nan", {"name": "nan"})):
        file = write(
            tmp_path / f"{name}.toml", {"method": method, "adversary": {**adversary, "share": 0.25}, **ONE_OF_FOUR}
        )
        succeeded(here("run", file, *options, "--out", tmp_path / name))

    huge, nan = (next((tmp_path / name).glob("*-seed0")) for name in ("huge", "nan"))
    assert same(load_file(huge / CHECKPOINT), load_file(nan / CHECKPOINT))
    lines = [[json.loads(line) for line in records(folder)] for folder in (huge, nan)]
    who = [[[one["client"] for one in line.get("refused", ())] for line in of] for of in lines]
    assert who[0] == who[1]
    assert len(who[0][-1]) == 1


def test_simulated_clients_that_all_diverge_count_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup(**ONE_OF_FOUR)
    large = made.experiment.train.model_copy(update={"lr": 1e12})
    fed = federation_with(made, made.experiment.model_copy(update={"train": large}))
    trained: list[Any] = []
    collect = fed.engine.collect
    monkeypatch.setattr(fed.engine, "collect", lambda *given: trained.append(given) or collect(*given))
    with pytest.raises(
        FedblendError, match=r"0 good uploads of 4.*clients 0, 1, 2, 3: .*NaN or infinity \(a learning rate"
    ):
        run(fed, 20)
    assert len(trained) < 40
