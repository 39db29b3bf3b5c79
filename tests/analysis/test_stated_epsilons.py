"""What a stated epsilon rests on: how far apart two clients' updates are, who knows the cohort, and the arithmetic."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, refused, succeeded, write
from helpers import each, examples, experiment, images, run, setup
from hypothesis import given
from hypothesis import strategies as st

from fedblend.analysis.privacy import statements as accounting
from fedblend.analysis.privacy.noise_plan import least_noise, planned
from fedblend.analysis.privacy.statements import GRID, SCOPE, Release, delta_of_gaussian, epsilon, statements
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.protection import ReleaseContext
from fedblend.core.record import RoundRecord
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.privacy_facts import clients_keep, noise_facts, privacy_facts
from fedblend.methods.aggregators.mean import Sums, WeightedMean
from fedblend.methods.protections import ClipAndNoise
from fedblend.report.guarantees import run_statements
from fedblend.runs.directory import FACTS, RunDirectory
from fedblend.runs.groups import Outcome

NOISY = {"name": "noise", "clip": 1.0, "multiplier": 8.0}
PLAIN = {"aggregator": {"name": "mean", "by": "clients"}}


@given(
    st.integers(0, 2**31),
    st.floats(1e-5, 1e3),
    st.sampled_from(["gaussian", "laplace"]),
    st.floats(1e-3, 1e4),
    st.floats(1e-6, 1e3),
)
@examples(60)
def test_an_update_is_within_the_clip_as_it_is_sent(
    seed: int, clip: float, distribution: Any, size: float, step: float
) -> None:
    """Weights far larger than their update lose its last bits, outwards as often as inwards."""
    draw = torch.Generator().manual_seed(seed)
    start = {"w": size * torch.randn(5000, generator=draw), "b": torch.randn(3, generator=draw)}
    upload = {name: t + step * torch.randn(t.shape, generator=draw) for name, t in start.items()}

    sent = ClipAndNoise(clip=clip, distribution=distribution).protect(upload, start, 0.1, np.random.default_rng(0))

    apart = torch.cat([sent[name].double() - start[name].double() for name in start])
    assert {t.dtype for t in sent.values()} == {torch.float32}
    assert float(torch.linalg.vector_norm(apart, 2 if distribution == "gaussian" else 1)) <= clip


def test_two_clients_move_the_sum_under_the_servers_noise_by_no_more_than_twice_the_clip() -> None:
    """Half of the clients are one float above the others: one client more decides to which of the two a mean rounds."""
    numbers, clients, clip = 80_000, 100, 0.01
    start = {"w": torch.ones(numbers)}
    above = {"w": torch.nextafter(start["w"], torch.tensor(2.0))}
    part = ClipAndNoise(distribution="laplace", clip=clip, multiplier=1.0, side="server")
    low, high = (part.protect(one, start, 0.1, np.random.default_rng()) for one in (start, above))
    assert torch.equal(high["w"], above["w"])  # within the clip

    def released(number_above: int, exact: bool) -> torch.Tensor:
        uploads = [high] * number_above + [low] * (clients - number_above)
        sums = WeightedMean(by="clients").partial((upload, 1.0) for upload in uploads)
        mean = (sums.unrounded() if exact else sums).mean()
        return part.release(mean, start, ReleaseContext(clients, clients, 0.1, np.random.default_rng(1)))["w"].double()

    def apart(exact: bool) -> float:
        return float(clients * (released(51, exact) - released(50, exact)).abs().sum())

    assert apart(exact=True) <= 2 * clip
    assert apart(exact=False) > 50 * clip


@pytest.mark.parametrize("engine", [LoopEngine, StackedEngine])
@pytest.mark.parametrize("side", ["server", "client"])
def test_the_server_gets_the_mean_as_it_was_summed_and_rounds_what_it_made_of_it(
    engine: Any, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one process or of several: in float64, and only what is released is float32."""
    seen: dict[str, Any] = {}
    partial, release = WeightedMean.partial, ClipAndNoise.release

    def summing(self: WeightedMean, uploads: Iterable[Any]) -> Sums:
        seen["uploads"] = list(uploads)
        return partial(self, seen["uploads"])

    def releasing(self: ClipAndNoise, weights: Any, start: Any, round: ReleaseContext) -> dict[str, torch.Tensor]:
        seen["mean"] = weights
        seen["released"] = release(self, weights, start, round)
        return seen["released"]

    monkeypatch.setattr(WeightedMean, "partial", summing)
    monkeypatch.setattr(ClipAndNoise, "release", releasing)
    made = setup(images(), protection={**NOISY, "side": side}, method=PLAIN, train={"cohort": 3})
    state, _ = run(RoundLoop(made, engine(made)), 1)

    for name, stored in state.weights.items():
        total = sum(upload[name].double() for upload, _ in seen["uploads"])
        assert torch.equal(seen["mean"][name], total / 3)
        assert stored.dtype == torch.float32
        assert torch.equal(stored, seen["released"][name].float())


def test_sums_of_several_machines_stay_unrounded_and_counters_whole() -> None:
    parts = [Sums(), Sums()]
    for k, part in enumerate(parts):
        part.add({"w": torch.tensor([0.1, 0.3]), "n": torch.tensor(3 + k)}, 1.0)
    both = Sums(2.0, {n: parts[0].tensors[n] + parts[1].tensors[n] for n in ("w", "n")}, parts[0].kinds)

    mean = both.unrounded().mean()

    assert mean["w"].dtype == torch.float64
    assert torch.equal(mean["w"], torch.tensor([0.1, 0.3]).double())
    assert torch.equal(mean["n"], torch.tensor(4))
    assert both.mean()["w"].dtype == torch.float32


def records(rounds: int) -> list[RoundRecord]:
    """Rounds of client 0 and of one more; all share before the first."""
    first = RoundRecord(1, cohort=[0, 1], shared={})
    return [RoundRecord(0), first, *(RoundRecord(r, cohort=[0, r]) for r in range(2, rounds + 1))]


def test_weights_alone_claim_nothing_where_other_clients_train_on_noisy_means() -> None:
    def together(multiplier: float) -> float:
        made = experiment(protection=NOISY, method={"name": "naivemix", "sharing": {"multiplier": multiplier}})
        means, both = statements(as_table(made), noise_facts(made), 10, records(3), secret_cohorts=True)
        assert (means.what, both.what) == ("means", "weights and means")
        return both.epsilon

    assert together(0.001) > 1e5
    assert together(2.0) < 10


def outcome(made: Experiment, engine: str) -> Outcome:
    facts = {"clients": {"holding": 10}, "engine": {"engine": engine}, "privacy": privacy_facts(made)}
    return Outcome(Path("run"), as_table(made), records(4), {"state": "done"}, facts)


UNBOUNDED = "protection.clip is not given, so that the influence of one client is not bounded"
MASKED = {"aggregator": {"name": "secure-mean", "fewest": 2}}
EXACT = "the server receives exact sums of uploads, to which no noise is added"
NO_PROTECTION = "uploads leave the clients as they are"
NO_MULTIPLIER = "means get no noise in proportion to their sensitivity (method.sharing.multiplier)"


@each(
    ("settings", "reasons"),
    [
        ({"protection": {"name": "noise", "scale": 0.1}}, [UNBOUNDED]),
        ({"protection": {"name": "noise", "clip": 1.0}}, ["protection adds no noise"]),
        ({"protection": "prune"}, ["pruning adds no noise, and which entries it keeps depends on the data"]),
        ({"method": MASKED}, [EXACT]),
        ({"method": MASKED, "protection": {"name": "noise", "scale": 0.1}}, [UNBOUNDED]),
        ({"method": {"name": "fedmix", "sharing": {"noise": 0.1}}}, [NO_MULTIPLIER, NO_PROTECTION]),
        ({"method": {"name": "fedmix", "sharing": "secure-means"}}, [NO_MULTIPLIER, NO_PROTECTION]),
        ({"method": "fedmix"}, []),
        ({}, []),
    ],
)
def test_a_run_with_any_protection_has_an_epsilon_or_the_reason_for_none(settings: Any, reasons: list[str]) -> None:
    stated = run_statements(outcome(experiment(**settings), "loop"))

    assert [(one.epsilon, one.reason) for one in stated] == [(None, reason) for reason in reasons]


@each("method", ["feddyn", "moon", "fedper", "fedrep", "fedbn"])
def test_clients_of_these_methods_keep_something_and_can_have_noise(method: str) -> None:
    made = experiment(protection={**NOISY, "side": "server"}, method={"name": method, **PLAIN})

    assert clients_keep(made)
    assert isinstance(noise_facts(made)["weights"], dict)


@pytest.mark.parametrize("method", ["fedavg", {"name": "naivemix", "sharing": {"multiplier": 2.0}}])
def test_runs_of_version_0_1_have_no_fact_on_noise_and_the_same_statements(method: Any) -> None:
    pytest.importorskip("dp_accounting")
    recorded = outcome(experiment(protection=NOISY, method=method), "stacked")
    old = replace(recorded, facts={name: fact for name, fact in recorded.facts.items() if name != "privacy"})

    assert run_statements(old) == run_statements(recorded) != []
    assert run_statements(replace(old, config=as_table(experiment()))) == []


@pytest.mark.parametrize(
    "facts",
    [
        [],
        {"noise": {}},
        {"raw_samples": False, "noise": {"means": "no noise"}},
        {"raw_samples": False, "noise": {"weights": {"distribution": "uniform", "multiplier": 1.0, "at_server": True}}},
        {"raw_samples": False, "noise": {"weights": {"distribution": "laplace", "multiplier": 0, "at_server": True}}},
    ],
)
def test_damaged_facts_on_privacy_end_in_one_message(facts: Any, tmp_path: Path) -> None:
    (tmp_path / FACTS).write_text(json.dumps({"privacy": facts}), encoding="utf-8")

    with pytest.raises(FedblendError, match=r"facts\.json: privacy"):
        RunDirectory(tmp_path).facts()


def test_a_configuration_without_delta_ends_in_one_message() -> None:
    recorded = outcome(experiment(protection=NOISY), "stacked")
    config = {name: value for name, value in recorded.config.items() if name != "delta"}

    with pytest.raises(FedblendError, match=r"config\.toml: 'delta' is missing"):
        run_statements(replace(recorded, config=config))


@pytest.mark.slow
def test_a_real_federations_cohorts_are_no_secret_and_gain_nothing() -> None:
    pytest.importorskip("dp_accounting")
    made = experiment(protection={**NOISY, "side": "server"}, method=PLAIN)

    (simulated,), (real,) = (run_statements(outcome(made, engine)) for engine in ("stacked", "flower"))

    assert simulated.epsilon == epsilon([Release("gaussian", 4.0, 4, (10, 2))], 1e-5)
    # Client 0 took part in all four rounds, and everybody knows it.
    assert real.epsilon == epsilon([Release("gaussian", 4.0, 4)], 1e-5)
    assert real.epsilon > simulated.epsilon


@pytest.mark.parametrize(
    ("changes", "gains"),
    [
        ({"method": {**PLAIN, "personal": "ditto"}}, True),
        ({"method": {**PLAIN, "terms": ["feddyn"]}}, False),
        ({"method": {**PLAIN, "terms": ["moon"]}}, False),
        ({"method": {**PLAIN, "personal": "fedper"}}, False),
        ({"train": {"momentum": 0.9, "optimizer_state": "keep"}}, False),
    ],
)
def test_secret_cohorts_gain_nothing_where_uploads_depend_on_what_clients_keep(
    changes: dict[str, Any], gains: bool
) -> None:
    """Such an upload also depends on earlier cohorts: not on data and released models alone."""
    pytest.importorskip("dp_accounting")
    made = experiment(**{"protection": {**NOISY, "side": "server"}, "method": PLAIN, **changes})

    (stated,) = run_statements(outcome(made, "stacked"))

    assert stated.epsilon == epsilon([Release("gaussian", 4.0, 4, (10, 2) if gains else None)], 1e-5)


@pytest.mark.parametrize(("delta", "stated"), [(0.1, False), (0.5, False), (0.09, True)])
def test_no_epsilon_is_stated_at_a_delta_of_one_over_clients(delta: float, stated: bool) -> None:
    noisy = experiment(protection=NOISY, method=PLAIN, delta=delta)
    (made,) = statements(as_table(noisy), noise_facts(noisy), 10, records(3), secret_cohorts=False)
    assert (made.epsilon is not None) == stated
    assert stated or f"delta: {delta:g} is not below 1 / 10 clients" in made.reason
    noisy_means = experiment(protection=NOISY, method={"name": "naivemix", "sharing": {"multiplier": 2.0}}, delta=0.001)
    for samples, reason in ((999, ""), (1000, "delta: 0.001 is not below 1 / 1000 samples")):
        for one in statements(as_table(noisy_means), noise_facts(noisy_means), 10, records(3), True, samples):
            assert one.reason.startswith(reason)
            assert bool(one.reason) == bool(reason)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
@pytest.mark.parametrize("multiplier", [1e-3, 0.1, 0.2, 1.0, 7.0, 100.0])
def test_gaussian_epsilon_is_exact_and_needs_no_library(
    multiplier: float, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_library", None)
    found = epsilon([Release("gaussian", multiplier, 1)], delta)

    # A hair of rounding in delta where epsilon is half a million.
    assert delta_of_gaussian(found, 1 / multiplier) <= delta
    assert delta_of_gaussian(found * (1 - 1e-9), 1 / multiplier) > delta
    assert epsilon([Release("gaussian", 2 * multiplier, 4)], delta) == found


def test_gaussian_epsilon_is_that_of_the_privacy_loss_distribution() -> None:
    dp = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    reference = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    reference.compose(dp.GaussianDpEvent(2.0))

    assert epsilon([Release("gaussian", 2.0, 1)], 1e-5) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_noise_of_any_size_has_an_epsilon() -> None:
    assert epsilon([Release("gaussian", 1e12, 1)], 1e-5) == 0.0
    assert epsilon([Release("gaussian", 1e-200, 1)], 1e-5) == math.inf
    # No grid holds e^1000: what is left is the sum.
    assert epsilon([Release("laplace", 1e-3, 1000)], 1e-5) == pytest.approx(1e6, rel=1e-12)


def test_a_grid_has_a_bounded_number_of_points_and_never_says_more_than_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    steps: list[float] = []

    class Spy(pld.PLDAccountant):  # type: ignore[misc, name-defined]
        def __init__(self, relation: Any, step: float = 1e-4) -> None:
            steps.append(step)
            super().__init__(relation, step)

    monkeypatch.setattr(pld, "PLDAccountant", Spy)
    accounting._on_a_grid.cache_clear()
    alone, many = ([Release("laplace", b, n)] for b, n in ((2.0, 1), (0.05, 90)))

    assert epsilon(alone, 1e-5) <= 0.5
    assert epsilon(many, 1e-5) <= 1800
    assert steps == [1e-4, pytest.approx(1800 / GRID)]
    accounting._on_a_grid.cache_clear()


def test_sampling_never_costs() -> None:
    """The Renyi bound is the larger one where there is little noise."""
    pytest.importorskip("dp_accounting")
    whole = epsilon([Release("gaussian", 0.25, 40)], 1e-3)

    assert epsilon([Release("gaussian", 0.25, 40, (400, 100))], 1e-3) == whole
    assert epsilon([Release("gaussian", 2.0, 40, (400, 100))], 1e-3) < epsilon([Release("gaussian", 2.0, 40)], 1e-3)


def test_erfcx_is_that_of_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    values = np.concatenate([[0.0], np.logspace(-12, 8, 2001), np.linspace(0, 10, 1001)])
    found = [accounting._erfcx(float(x)) for x in values]
    np.testing.assert_allclose(found, special.erfcx(values), rtol=5e-15)


def test_what_a_guarantee_does_not_cover_names_scores_on_clients_samples_and_what_they_decide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    for words in ("hold out", "validation", "best", "end"):
        assert words in SCOPE.partition("does not cover")[2]
        assert words in page.partition("**Scores on clients' samples are not covered.**")[2].partition("\n- ")[0]


AT_SERVER = {"protection": {**NOISY, "side": "server"}, "method": PLAIN}
NOISY_MEANS = {"name": "naivemix", "sharing": {"multiplier": 2.0}}


@pytest.mark.parametrize(
    "changes",
    [
        {"protection": NOISY},
        AT_SERVER,
        {"method": NOISY_MEANS},
        {"method": {**NOISY_MEANS, **PLAIN}, "protection": NOISY},
        {"method": "fedmix", "protection": NOISY},
    ],
)
@pytest.mark.parametrize("secret", [True, False])
def test_what_is_planned_is_what_the_run_states(changes: dict[str, Any], secret: bool) -> None:
    pytest.importorskip("dp_accounting")
    made = setup(images(), rounds=3, **changes)

    _, records = run(made, 3)

    rounds = [RoundRecord(**{k: r[k] for k in ("round", "cohort", "shared", "loss") if k in r}) for r in records]
    clients, samples = len(made.population), int(made.population.sizes.sum())
    config, noise = as_table(made.experiment), noise_facts(made.experiment)
    stated = statements(config, noise, clients, rounds, secret, samples)
    assert planned(made, secret) == [replace(one, by_round=one.by_round[-1:]) for one in stated]


@pytest.mark.parametrize("target", [0.05, 3.0, 800.0])
def test_the_least_noise_reaches_a_target_and_less_does_not(target: float) -> None:
    made = setup(images(), rounds=5, train={"cohort": 4}, protection={"name": "noise", "clip": 1.0})

    values, statement = least_noise(made, target)

    multiplier = values["protection.multiplier"]
    # All four clients take part in each of five rounds; an update changes by at most twice its norm.
    of = [epsilon([Release("gaussian", m / 2, 5)], 1e-5) for m in (multiplier, 0.99 * multiplier)]
    assert statement.epsilon == of[0] <= target < of[1]


def test_a_run_without_rounds_has_no_noise_to_plan() -> None:
    made = setup(images(), rounds=0, protection=NOISY)

    with pytest.raises(FedblendError, match="no noise gives an epsilon: no round is made"):
        least_noise(made, 3.0)


def test_noise_on_uploads_and_means_keeps_its_ratio() -> None:
    made = setup(images(), rounds=2, method={**NOISY_MEANS, **PLAIN}, protection={**NOISY, "multiplier": 1.0})

    values, statement = least_noise(made, 2.0)

    assert values["method.sharing.multiplier"] == pytest.approx(2 * values["protection.multiplier"], rel=0.01)
    assert (statement.what, statement.epsilon) == ("weights and means", pytest.approx(2.0, rel=0.02))


def test_the_command_plans_noise_and_says_why_there_is_none(tmp_path: Path) -> None:
    file = write(tmp_path / "plan.toml", {"methods": ["fedavg", "naivemix"], "delta": 1e-5, "seeds": [0, 1]})

    said = " ".join(succeeded(here("privacy", "epsilon", file, "--target", "3")).out.split())

    assert "fedavg, weights: uploads leave the clients as they are" in said
    assert "fedavg: no noise gives an epsilon: uploads leave the clients as they are" in said
    assert re.search(r"naivemix: epsilon 2\.9\d* \(of the means\) with method\.sharing\.multiplier = \d", said)
    refused(here("privacy", "epsilon", file, "--target", "-3"), "--target: -3 is no epsilon to reach", "above 0")
    refused(
        here("privacy", "epsilon", file, "--set", "channel=wireless"), "method.sharing: 'means': payloads may be lost"
    )
