"""Protections, adversaries, and what differential privacy may be claimed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, succeeded, write
from federation_helpers import BATCH_NORM
from helpers import each, examples, experiment, federation, iid, images, local, run, same, same_state, setup
from hypothesis import given
from hypothesis import strategies as st

from fedblend.analysis.privacy.statements import Release, epsilon, statements
from fedblend.core.context import Task
from fedblend.core.dataset import Dataset
from fedblend.core.engine import TrainTask
from fedblend.core.engine import protected as protected_upload
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism, ReleaseContext
from fedblend.core.record import RoundRecord
from fedblend.core.trees import bytes_of
from fedblend.data.scale import Scaler
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.privacy_facts import noise_facts
from fedblend.methods.adversaries import NaNs, NoiseSender, SignFlip
from fedblend.methods.protections import ClipAndNoise, Prune
from fedblend.methods.sharing.means import SharedMeans

START = {"w": torch.zeros(3, 4), "b": torch.zeros(4), "seen": torch.tensor(0)}
UPLOAD = {"w": torch.arange(12.0).view(3, 4) - 5, "b": torch.tensor([0.5, -0.25, 20.0, 0.0]), "seen": torch.tensor(7)}


def protected(part: Any, upload: Any = UPLOAD, start: Any = START, lr: float = 0.1, seed: int = 0) -> Any:
    return part.protect(upload, start, lr, np.random.default_rng(seed))


def length(upload: dict[str, torch.Tensor], order: float = 2) -> float:
    return float(torch.linalg.vector_norm(torch.cat([upload["w"].flatten(), upload["b"]]).double(), order))


def test_pruning_keeps_the_largest_entries_of_all_tensors_together() -> None:
    sent = protected(Prune(keep=0.25))  # 4 of 16: 20, 6, and of sizes 5 (-5, 5) both
    assert sent["b"].tolist() == [0.0, 0.0, 20.0, 0.0]
    assert sorted(sent["w"][sent["w"] != 0].tolist()) == [-5.0, 5.0, 6.0]
    assert sent["seen"] == 7


def test_pruned_entries_are_those_of_the_rounds_weights_and_kept_ones_the_clients_own_to_the_last_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(1000, generator=draw)}
    upload = {"w": start["w"] + 0.01 * torch.randn(1000, generator=draw)}

    sent = protected(Prune(keep=0.1), upload, start)["w"]

    kept = sent != start["w"]
    assert int(kept.sum()) == 100
    assert torch.equal(sent[kept], upload["w"][kept])
    assert (upload["w"] - start["w"]).abs()[kept].min() >= (upload["w"] - start["w"]).abs()[~kept].max()


def test_pruned_uploads_are_counted_as_they_travel() -> None:
    sent = protected(Prune(keep=0.25))
    assert Prune(keep=0.25).sent_bytes(sent, START) == 4 * (4 + 4) + 8
    # With most entries kept, their places would cost more than the rest of them.
    assert Prune(keep=1).sent_bytes(UPLOAD, START) == bytes_of(UPLOAD)
    state, (record, *_) = run(federation(protection={"name": "prune", "keep": 0.1}, train={"cohort": 2}), 1)
    assert record["bytes_up"]["weights"] < 2 * 0.21 * bytes_of(state.weights)


@pytest.mark.parametrize("part", [Prune(keep=1), ClipAndNoise(), ClipAndNoise(distribution="laplace", scale=0)])
def test_without_noise_protection_is_the_identity(part: Any) -> None:
    sent = protected(part)
    assert all(sent[name] is UPLOAD[name] for name in UPLOAD)
    assert same(part.release(UPLOAD, START, ReleaseContext(4, 3, 0.1, np.random.default_rng(0))), UPLOAD)


def test_a_run_that_is_not_clipped_and_not_noisy_is_bit_identical() -> None:
    plain, _ = run(federation(), 2)
    wide, _ = run(federation(protection={"name": "noise"}), 2)
    assert same_state(plain, wide)


@pytest.mark.parametrize(("distribution", "order"), [("gaussian", 2), ("laplace", 1)])
def test_an_update_is_scaled_down_to_the_norm_and_a_shorter_one_stays(distribution: Any, order: int) -> None:
    sent = protected(ClipAndNoise(distribution=distribution, clip=3.0))

    assert length(sent, order) == pytest.approx(3.0, rel=1e-5)
    assert length(sent, order) <= 3.0
    factor = 3.0 / length(UPLOAD, order)
    torch.testing.assert_close(sent["w"], factor * UPLOAD["w"])
    assert sent["seen"] == 0, "a whole number can have no noise, so that it does not leave"
    torch.testing.assert_close(protected(ClipAndNoise(clip=1e3))["w"], UPLOAD["w"])


def test_clips_of_gradients_are_in_units_of_update_over_learning_rate() -> None:
    assert length(protected(ClipAndNoise(clip=30.0, on="gradients"), lr=0.1)) == pytest.approx(3.0, rel=1e-5)


def test_what_is_not_finite_counts_as_no_update() -> None:
    broken = {**UPLOAD, "b": torch.tensor([0.0, math.nan, math.inf, 1.0])}
    sent = protected(ClipAndNoise(clip=1.0), broken)
    assert sent["w"].eq(0).all()
    assert sent["b"].eq(0).all()


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.sampled_from(["gaussian", "laplace"]))
@examples(30)
def test_two_clients_are_never_further_apart_than_twice_the_clip(seed: int, clip: float, distribution: Any) -> None:
    draw = torch.Generator().manual_seed(seed)
    part = ClipAndNoise(clip=clip, distribution=distribution)
    a, b = ({"w": 10 * torch.randn(50, generator=draw).double()} for _ in range(2))
    start = {"w": torch.zeros(50).double()}
    one, other = (protected(part, upload, start)["w"] for upload in (a, b))

    order = 2 if distribution == "gaussian" else 1
    assert torch.linalg.vector_norm(one - other, order) <= 2 * clip


@pytest.mark.parametrize(("distribution", "deviation"), [("gaussian", 0.5), ("laplace", 0.5 * math.sqrt(2))])
def test_noise_is_of_the_size_asked_for_on_every_number_and_no_counter(distribution: Any, deviation: float) -> None:
    zeros = {"w": torch.zeros(200, 200), "seen": torch.tensor(3)}
    sent = protected(ClipAndNoise(distribution=distribution, scale=0.5), zeros, zeros)

    assert float(sent["w"].std()) == pytest.approx(deviation, rel=0.02)
    assert abs(float(sent["w"].mean())) < 0.01
    assert float(sent["w"].abs().mean()) == pytest.approx(0.5 if distribution == "laplace" else 0.5 * 0.7979, rel=0.02)
    assert sent["seen"] == 3
    scaled = protected(ClipAndNoise(distribution=distribution, scale=0.5, on="gradients"), zeros, zeros, lr=0.01)
    torch.testing.assert_close(scaled["w"], 0.01 * sent["w"], rtol=0, atol=0.01 * 0.5 * 2**-9)
    by_clip = protected(ClipAndNoise(distribution=distribution, multiplier=0.25, clip=2.0), zeros, zeros)
    torch.testing.assert_close(by_clip["w"], sent["w"])


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_the_last_digits_of_noise_do_not_tell_whether_a_number_moved(distribution: Any, side: Any) -> None:
    # A float sum has fewer digits than small noise alone: those told of an update under noise of ten clips.
    start = {"w": torch.zeros(100_000)}
    part = ClipAndNoise(distribution=distribution, clip=1.0, multiplier=10.0, side=side)
    context = ReleaseContext(1, 1, 0.1, np.random.default_rng(0))
    for moved in (0.0, 0.003):
        upload = {"w": torch.full((100_000,), moved)}
        sent = protected(part, upload, start) if side == "client" else part.release(upload, start, context)
        assert not (sent["w"] / 2.0**-6).frac().any()
        assert len(sent["w"].unique()) > 2_000


@pytest.mark.parametrize("clip", [1.0, None])
def test_noise_is_on_all_that_a_client_sends_of_batch_norm(clip: float | None) -> None:
    with pytest.warns(UserWarning, match=r"^protection: batch norm's running statistics \(norm.running_var, and"):
        made = setup(model=BATCH_NORM, protection={"name": "noise", "scale": 0.5, "clip": clip})
    task = TrainTask(0, made.weights(), None, made.sizes(0))
    noise = []
    for trained in LoopEngine(made).train(task, [0, 1]):
        sent, _ = protected_upload(made, task, trained)
        assert all((sent[name] != trained.weights[name]).all() for name in sent)
        assert sent["norm.num_batches_tracked"] == 0
        noise.append(sent["last.bias"] - trained.weights["last.bias"])
    assert clip or not torch.allclose(*noise, atol=1e-3), "each client has noise of its own"


def test_batch_norms_that_stay_at_the_clients_need_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    setup(model=BATCH_NORM, method="fedbn", protection={"name": "noise", "scale": 0.5})
    assert not recwarn.list


def test_noise_that_float32_would_round_away_is_refused() -> None:
    part = ClipAndNoise(clip=1.0, multiplier=1.0, on="gradients")
    with pytest.raises(FedblendError, match=r"noise of 1e-40 on weights is too small for float32"):
        protected(part, lr=1e-40)
    server = ClipAndNoise(clip=1e-29, multiplier=1.0, side="server")
    with pytest.raises(FedblendError, match=r"noise of 1e-31 on weights is too small for float32"):
        server.release(UPLOAD, START, ReleaseContext(100, 100, 0.1, np.random.default_rng(0)))
    # A round of learning rate 0 moves nothing.
    assert same(protected(part, lr=0.0), START)
    assert protected(ClipAndNoise(clip=1e-29, multiplier=1.0))["w"].any()


def test_the_server_divides_noise_on_the_sum_by_the_clients_that_were_drawn() -> None:
    part = ClipAndNoise(clip=1.0, multiplier=2.0, side="server")
    start = {"w": torch.zeros(300, 300)}
    mean = {"w": torch.full((300, 300), 0.5)}

    context = ReleaseContext(cohort=10, arrived=8, lr=0.1, rng=np.random.default_rng(0))
    released = part.release(mean, start, context)["w"]

    # Eight updates of .5 make a sum of 4, over ten: .4; noise of 2 on the sum is .2 on that.
    assert float(released.mean()) == pytest.approx(0.4, abs=0.005)
    assert float(released.std()) == pytest.approx(0.2, rel=0.02)
    # A client's upload is only clipped.
    assert length(protected(part)) == pytest.approx(1.0, rel=1e-5)


def test_adversaries_are_a_share_of_the_clients_and_the_same_in_all_rounds() -> None:
    made = setup(adversary={"name": "nan", "share": 0.3}, **iid(10))
    _, records = run(made, 3)

    bad = np.flatnonzero(made.adversaries).tolist()
    assert len(bad) == 3
    for record in records:
        assert [one["client"] for one in record["refused"]] == bad
        assert record["uploads"] == 7


def test_what_adversaries_send() -> None:
    rng = np.random.default_rng(0)
    start = {"w": torch.ones(100, 100), "seen": torch.tensor(1)}
    upload = {"w": torch.full((100, 100), 1.5), "seen": torch.tensor(2)}

    assert SignFlip(factor=10).corrupt(upload, start, rng)["w"].eq(1 - 10 * 0.5).all()
    assert NaNs().corrupt(upload, start, rng)["w"].isnan().all()
    noise = NoiseSender(scale=0.5).corrupt(upload, start, rng)["w"] - 1
    assert float(noise.std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(noise.mean())) < 0.03


def test_laplace_epsilon_is_at_most_the_sum_and_exact_without_delta() -> None:
    pytest.importorskip("dp_accounting")
    assert epsilon([Release("laplace", 2.0, 1)], 1e-12) == pytest.approx(0.5, rel=1e-3)
    assert epsilon([Release("laplace", 20.0, 100)], 1e-5) < 100 / 20


@pytest.mark.slow
def test_sampling_helps_gaussian_noise_and_is_not_claimed_to_help_laplace_noise() -> None:
    pytest.importorskip("dp_accounting")
    alone, drawn = (epsilon([Release("gaussian", 2.0, 10, s)], 1e-5) for s in (None, (100, 10)))
    assert drawn < alone / 3
    alone, drawn = (epsilon([Release("laplace", 20.0, 10, s)], 1e-5) for s in (None, (100, 10)))
    assert drawn == alone
    # All take part: nothing is gained.
    assert epsilon([Release("gaussian", 2.0, 10, (100, 100))], 1e-5) == epsilon([Release("gaussian", 2.0, 10)], 1e-5)


def test_releases_compose() -> None:
    pytest.importorskip("dp_accounting")
    both = epsilon([Release("gaussian", 4.0, 3), Release("gaussian", 8.0, 4)], 1e-5)
    # 3 / 16 + 4 / 64 = 1 / 4.
    assert both == pytest.approx(epsilon([Release("gaussian", 2.0, 1)], 1e-5), rel=1e-6)
    assert epsilon([Release("gaussian", 4.0, 0)], 1e-5) == 0.0


RECORDS = [RoundRecord(0), *(RoundRecord(r, cohort=[0, r]) for r in range(1, 4))]
NOISY = {"name": "noise", "clip": 1.0, "multiplier": 8.0}
AT_SERVER = {**NOISY, "side": "server"}
EQUAL = {"aggregator": {"name": "mean", "by": "clients"}}
NOISY_MEANS = {"name": "fedmix", "sharing": {"multiplier": 3.0}}


def claims(made: Experiment, records: Any = RECORDS) -> Any:
    pytest.importorskip("dp_accounting")
    return {s.what: s for s in statements(as_table(made), noise_facts(made), 10, records, secret_cohorts=True)}


def test_a_clients_own_noise_counts_the_rounds_that_the_most_frequent_client_took_part_in() -> None:
    weights = claims(experiment(protection=NOISY))["weights"]

    # Noise of 8 outweighs a distance of 2 fourfold; client 0 took part in all three rounds.
    assert weights.unit == "a client"
    assert weights.by_round[-1] == (3, epsilon([Release("gaussian", 4.0, 3)], 1e-5))
    assert [r for r, _ in weights.by_round] == [1, 2, 3]
    once = [RoundRecord(1, cohort=[0]), RoundRecord(2, cohort=[1])]
    assert claims(experiment(protection=NOISY), once)["weights"].epsilon == epsilon([Release("gaussian", 4.0, 1)], 1e-5)


@pytest.mark.slow
def test_noise_at_the_server_counts_every_round_and_gains_by_sampling() -> None:
    weights = claims(experiment(protection=AT_SERVER, method=EQUAL))["weights"]

    assert weights.epsilon == epsilon([Release("gaussian", 4.0, 3, (10, 2))], 1e-5)
    by_samples = claims(experiment(protection=AT_SERVER))["weights"]
    assert by_samples.epsilon is None
    assert "plain mean" in by_samples.reason


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_epsilon_is_of_an_honest_client_where_some_send_uploads_without_noise(share: float) -> None:
    adversary = {"name": "sign-flip", "share": share}
    made = experiment(protection=NOISY, adversary=adversary)
    weights = claims(made)["weights"]
    assert weights.unit == ("an honest client" if share else "a client")
    assert weights.epsilon == claims(experiment(protection=NOISY))["weights"].epsilon
    means = claims(experiment(protection=NOISY, adversary=adversary, method=NOISY_MEANS))
    assert [(s.what, s.unit) for s in means.values()] == [
        ("means", "a sample"),
        ("weights and means", "a sample of an honest client" if share else "a sample"),
    ]
    public = claims(experiment(protection=NOISY, adversary=adversary, method=NOISY_MEANS, delta=0.1))
    assert [(s.what, s.unit) for s in public.values()] == [(s.what, s.unit) for s in means.values()]


@each(
    ("settings", "reason"),
    [
        ({}, "leave the clients as they are"),
        ({"protection": {"name": "noise", "scale": 1.0}}, "protection.clip is not given"),
        ({"protection": {"name": "noise", "clip": 1.0}}, "adds no noise"),
        ({"protection": "prune"}, "depends on the data"),
        ({"protection": AT_SERVER, "method": {"aggregator": {"name": "secure-mean", "fewest": 2}}}, "plain mean"),
        ({"protection": AT_SERVER, "method": EQUAL, "adversary": "noise"}, "adversaries' updates are not clipped"),
        ({"protection": AT_SERVER, "method": {"name": "aggenhance", **EQUAL}}, "uses uploads before"),
        *(
            ({"protection": NOISY, "method": method, "unsafe": True}, reason)
            for method, reason in (
                ("fedmix", "means get no noise"),
                ("global-mixup", "'raw' shares without noise"),
                ("prior-samples", "uses raw samples"),
                (
                    {"sharing": {"name": "base-samples", "server": 3}, "server_step": "train-on-seeds"},
                    "trains on the samples of client 3 without noise",
                ),
                ({"name": "fedmix", "sharing": {"multiplier": 1.0, "split": "class"}}, "depend on labels"),
            )
        ),
    ],
)
def test_no_epsilon_without_ground_but_a_reason(settings: dict[str, Any], reason: str) -> None:
    *_, together = claims(experiment(**settings)).values()
    assert together.epsilon is None
    assert reason in together.reason


def test_robust_aggregators_and_points_cost_nothing_after_a_clients_own_noise() -> None:
    step = {"aggregator": "median", "server_step": "aggenhance"}
    assert claims(experiment(protection=NOISY, method=step))["weights"].epsilon is not None


def test_noisy_means_protect_a_sample_and_compose_with_the_weights() -> None:
    made = experiment(protection=NOISY, method={"name": "fedmix", "sharing": {"multiplier": 3.0}})
    records = [RoundRecord(0), RoundRecord(1, cohort=[0], shared={}), RoundRecord(2, cohort=[0])]
    found = claims(made, records)

    means, weights = Release("gaussian", 3.0 / math.sqrt(2), 1), Release("gaussian", 4.0, 2)
    assert list(found) == ["means", "weights and means"]
    assert {s.unit for s in found.values()} == {"a sample"}
    assert found["means"].epsilon == epsilon([means], 1e-5)
    assert found["weights and means"].epsilon == epsilon([weights, means], 1e-5)
    without = claims(experiment(method={"name": "fedmix", "sharing": {"multiplier": 3.0}}), records)
    assert without["means"].epsilon == found["means"].epsilon
    assert without["weights and means"].epsilon is None


def test_one_sample_moves_a_mean_by_at_most_what_the_noise_is_sized_for() -> None:
    """Black against white in every pixel and another label: the largest distance there is."""
    scaled = setup(images(side=4)).scale
    black, white = (torch.full((1, 1, 4, 4), v, dtype=torch.uint8) for v in (0, 255))
    apart = float((scaled(white) - scaled(black)).norm())
    assert scaled.diameter((1, 4, 4)) == pytest.approx(apart, rel=1e-6)


def means_of(data: Dataset, **options: Any) -> Any:
    """What a client that holds all data shares."""
    train = data.train
    return SharedMeans(**options).share(local(train.x, train.y, Task("classification", 3), setup(data).scale))


@pytest.mark.parametrize("samples", [2, 5])
def test_noise_on_means_is_in_proportion_to_what_one_sample_can_do(samples: int) -> None:
    data = images(n=4000, side=4)
    quiet, noisy = (means_of(data, samples_per_mean=samples, multiplier=m) for m in (0.0, 0.5))

    size = 0.5 * setup(data).scale.diameter((1, 4, 4)) / samples
    assert float((noisy["x"] - quiet["x"]).std()) == pytest.approx(size, rel=0.05)
    assert float((noisy["y"] - quiet["y"]).std()) == pytest.approx(0.5 * math.sqrt(2) / samples, rel=0.05)


def test_a_smaller_last_group_gets_more_noise() -> None:
    data = images(n=5, side=40)
    quiet, noisy = (means_of(data, samples_per_mean=4, multiplier=m) for m in (0.0, 1.0))
    four, one = (noisy["x"] - quiet["x"]).flatten(1).std(1).tolist()
    assert one / four == pytest.approx(4, rel=0.1)


def test_a_sample_beyond_the_scale_moves_a_private_mean_no_further_than_its_edge() -> None:
    box = Scaler("unit", False, *(torch.tensor([v, v]) for v in (1.0, 0.0, 1.0, 0.0)))
    y, task = torch.tensor([0, 1]), Task("classification", 2)
    wild = torch.tensor([[1e6, -1e6], [0.5, 0.5]])

    mean, plain = (SharedMeans(multiplier=m).share(local(wild, y, task, box)) or {} for m in (1e-12, 0.0))

    torch.testing.assert_close(mean["x"], torch.tensor([[0.75, 0.25]]))
    assert float(plain["x"].abs().max()) > 1e5


def test_mechanisms_say_what_they_are() -> None:
    assert ClipAndNoise(clip=2.0, multiplier=3.0).mechanism() == Mechanism("gaussian", 1.5, at_server=False)
    assert ClipAndNoise(clip=2.0, scale=1.0, side="server").mechanism() == Mechanism("gaussian", 0.25, at_server=True)
    assert SharedMeans(multiplier=2.0).mechanism() == Mechanism("gaussian", 2.0 / math.sqrt(2), at_server=False)


@pytest.mark.slow
def test_the_report_and_inspect_tell_what_was_earned_and_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    study = {
        "methods": [
            {"label": "noisy", **EQUAL},
            {"label": "weighed", "aggregator": {"name": "mean", "by": "samples"}},
            {"name": "naivemix", "label": "shared"},
        ],
        "protection": AT_SERVER,
        "rounds": 2,
    }
    file = write(Path("private.toml"), study)
    succeeded(here("run", file, "--out", "runs/private", "--jobs", 1))
    page = Path("runs/private/report.html").read_text()

    epsilons = re.findall(r"<td>weights</td><td>a client</td><td>\((\d+\.?\d*), 1e-05\)</td>", page)
    assert len(epsilons) == 1
    assert "Test accuracy by epsilon" in page
    assert "none: noise at the server is sized for a plain mean of uploads" in page
    assert "none: the model is trained on shared data, and means get no noise" in page
    told = succeeded(here("inspect", "runs/private/noisy-seed0")).out
    assert f"weights, for a client: ({epsilons[0]}, 1e-05)" in told
