"""A server that lies to a site: questions about models, mean outputs, scores, and messages that it sends twice."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_helpers import (
    ALL,
    LINEAR,
    NOISE,
    SECURE,
    TOLD,
    Nodes,
    experiment,
    federate,
    one_round,
    refusals,
    weights_of,
)
from flower_sites import OwnSite, sent, site_files, sites_of
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from helpers import slow_after_first

from fedblend.core.errors import FedblendError
from fedblend.core.files import read_lines
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment, as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import client as at_client
from fedblend.flower.audit import AuditLog
from fedblend.flower.ledger import SampleSet
from fedblend.flower.messages import pack, to_record, unpack
from fedblend.flower.secure_aggregation import masks

DEEP = {"name": "mlp", "hidden": [8]}


def asking(site: OwnSite, **changes: Any) -> Experiment:
    method = {"name": "aggenhance-secure", "server_step": {"epochs": 1, "steps": 1, "step_size": 0.5}}
    return site.experiment(**{"method": method, "model": LINEAR, "scale": {"name": "unit"}, **changes})


BEGIN = {"begin": torch.full((10, 1, 16, 16), 0.5)}
POINTS = {"points": torch.full((3, 10, 1, 16, 16), 0.5)}


def test_a_site_answers_each_question_once_for_each_model_that_it_sent(tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = asking(site)
    assert "no longer has its upload" in site.ask(asked, BEGIN)
    site.trained(asked)
    other = site.at_once()
    for question, answer in ((BEGIN, "points"), (POINTS, "scores")):
        assert set(site.ask(asked, question)) == {answer}
        # The same question again, or one with other numbers, also to another process of the site.
        for again in (site, other):
            changed = {name: 0.9 * tensor for name, tensor in question.items()}
            assert f"it has given its answers (['{next(iter(question))}']) of round 1" in again.ask(asked, changed)
    assert [line["part"] for line in site.log() if line["kind"] == "answers" and "part" in line] == [
        "['begin']",
        "['points']",
    ]


def test_a_site_answers_the_questions_of_the_server_step_only(tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = asking(site)
    site.trained(asked)
    votes, classes = "votes on 3 points of each class at most", "asks for the points of its classes"
    for question, why in (
        ({"points": torch.zeros(4, 10, 1, 16, 16)}, votes),
        ({"points": torch.zeros(1_000, 10, 1, 16, 16)}, votes),
        ({"begin": torch.zeros(11, 1, 16, 16)}, classes),
        ({**BEGIN, **POINTS}, classes),
        ({"begins": torch.zeros(10, 1, 16, 16)}, classes),
        ({"begin": torch.full((10, 1, 16, 16), 1.5)}, "has points in [0, 1] only"),
        ({"points": torch.full((3, 10, 1, 16, 16), torch.nan)}, "has points in [0, 1] only"),
        ({}, classes),
    ):
        assert why in site.ask(asked, question), question.keys()
    assert all("refused" in line for line in site.log("answers"))


def test_a_site_file_bounds_answers_and_scores_over_all_runs(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, max_answers=3, max_scores=2)
    asked = asking(site, holdout=0.3)
    answers, scores = [], []
    for run_id in (1, 2, 3):
        site.connect(run_id).trained(asked)
        answers += [site.ask(asked, BEGIN), site.ask(asked, POINTS)]
        scores.append(site.scored(asked))
    assert [isinstance(answer, dict) for answer in answers] == [True, True, True, False, False, False]
    assert "this site has sent 3 answers in all runs, and sends no more (max_answers in its file)" in answers[3]
    assert ["right" in score for score in scores] == [True, True, False]
    assert "this site has sent 2 scores in all runs, and sends no more (max_scores in its file)" in scores[2]["fault"]


def test_a_site_file_without_bounds_of_answers_and_scores_has_them_from_its_rounds(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, rounds=2).connect()
    asked = asking(site, holdout=0.3)
    scores = [site.scored(asked) for _ in range(9)]
    assert ["right" in score for score in scores] == [True] * 8 + [False]
    told = "and sends no more (max_scores in its file); default: 4 times its rounds, 500 at most"
    assert scores[8]["fault"] == f"this site has sent 8 scores in all runs, {told}"
    site.trained(asked)
    assert isinstance(site.ask(asked, BEGIN), dict)
    # Three more answers of other runs.
    for number in (7, 8, 9):
        sent(AuditLog(str(tmp_path / "audit.jsonl")), f"other/{number}", 0, 0, "answers", BEGIN, False)
    told = "and sends no more (max_answers in its file); default: 2 times its rounds"
    assert site.ask(asked, POINTS) == f"this site has sent 4 answers in all runs, {told}"


@pytest.mark.parametrize("rounds", slow_after_first([1, 2]))
def test_a_run_with_both_kinds_of_scores_needs_no_more_than_the_default(rounds: int, tmp_path: Path) -> None:
    asked = experiment(rounds=rounds, holdout=0.2, validation={"clients": 0.2}, train={"cohort": 4, "lr": 0.1})
    finished = federate(Nodes(site_files(tmp_path, 4, rounds=rounds)), asked, tmp_path / "run")
    assert not any("refused" in line for line in finished.directory.metrics())
    scores = [line for line in read_lines(tmp_path / "audit-0.jsonl") if line["kind"] == "scores"]
    assert len(scores) == 2 * (rounds + 1)


def test_answers_tell_of_the_model_of_a_linear_model_all(tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = asking(site)
    _, upload = site.trained(asked)
    answer = site.ask(asked, BEGIN)["points"]
    (weight,) = (tensor.double() for tensor in upload.values() if tensor.dim() == 2)
    # Each point moved by -0.5 times the gradient of its class's loss: W^T (p - e_c), from one point with chances p.
    moved = ((BEGIN["begin"] - answer) / 0.5).flatten(1).double()
    differences = moved - moved[:1]
    torch.testing.assert_close(differences, weight[:1] - weight, rtol=0, atol=1e-5)


def test_mean_outputs_of_few_samples_are_zeros(tmp_path: Path) -> None:
    for min_mean, rows in ((8, 10), (9, 0)):
        site = OwnSite(tmp_path / str(rows), min_mean=min_mean)
        told, tensors = site.trained(site.experiment(method="fd", train=ALL))
        assert ((tensors["outputs"].sum(1) > 0).sum(), set(told)) == (rows, {"samples"})
        assert [(one["kind"], one.get("begun", False)) for one in site.log()] == [("outputs", True), ("outputs", False)]


def test_mean_outputs_of_samples_that_the_server_draws_do_not_leave(tmp_path: Path) -> None:
    # The batches of 40 and of 41 differ in one sample, and of a model that one step hardly moves so do their sums.
    site = OwnSite(tmp_path, min_mean=2)
    for batch_size in (1, 40, 41):
        train = {"cohort": 4, "steps": 1, "batch_size": batch_size, "lr": 1e-30}
        told, tensors = site.trained(site.experiment(method="fd", train=train))
        assert ("mean outputs of many draws tell of each sample" in told["fault"], tensors) == (True, {}), batch_size


KINDS = {"outputs": "fd", "prototypes": "fedproto"}
DECAYS = {"schedule_in_round": {"name": "exponential", "gamma": 1e-30}}


STEPS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 1, "batch_size": 80}, "train.steps: steps draw samples by the server's seed"),
    ({"batch_size": 40, **DECAYS}, "train.schedule_in_round: 'exponential': where rates differ within a round"),
    ({"batch_size": 1}, "train.batch_size: 1: of 80 samples a step would be of 1, and"),
    ({"batch_size": 19}, "train.batch_size: 19: of 80 samples a step would be of 4, and"),
    ({"batch_size": 61}, "train.batch_size: 61: of 80 samples a step would be of 19, and"),
    ({"batch_size": 10}, "train.batch_size: 10: of 80 samples a step would be of 10, and"),
    ({"batch_size": 79}, "train.batch_size: 79: of 80 samples a step would be of 1, and"),
    ({"batch_size": 10, "accumulate": 7}, "train.batch_size: 10: of 80 samples a step would be of 10, and"),
    ({"batch_size": 10, "accumulate": 7, "last_batch": "merge"}, "of 80 samples a step would be of 10, and"),
    ({"batch_size": 30, "last_batch": "drop"}, "train.last_batch: 'drop' leaves other samples out in each epoch"),
    ({"batch_size": 79, "last_batch": "merge"}, ""),
    ({"batch_size": 20, "last_batch": "drop"}, ""),
    ({"batch_size": 20}, ""),
    ({"batch_size": 30}, ""),
    ({"batch_size": 100}, ""),
    ({"batch_size": 5, "accumulate": 4}, ""),
]


@pytest.mark.parametrize("kind", slow_after_first(KINDS))
def test_means_by_label_do_not_tell_of_the_few_samples_of_a_step(kind: str, tmp_path: Path) -> None:
    # With the first step alone, on one sample of the server's choice, prototypes are a function of its pixels.
    site = OwnSite(tmp_path, min_mean=20, allow=list(KINDS))
    for run_id, (train, why) in enumerate(STEPS):
        epochs = {} if "steps" in train else {"epochs": 1}
        train = {"cohort": 4, "lr": 0.1, **epochs, **train}
        asked = site.experiment(method=KINDS[kind], policy={"min_mean": 20}, train=train)
        told, tensors = site.trained(asked, run_id)
        assert (why in told.get("fault", ""), set(tensors)) == (True, set() if why else {kind}), (train, told)
        # A site is asked first whether it takes part.
        assert ("fault" in site.reply("query.hello", asked)[0]) == bool(why), train


@pytest.mark.parametrize("kind", KINDS)
def test_means_by_label_of_two_sets_do_not_tell_of_a_few(kind: str, tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_mean=3, allow=[*KINDS])

    def left(run_id: int, holdout: float = 0.25, of: str = kind, **changes: Any) -> Any:
        about = {"holdout": holdout, "policy": {"min_mean": 3}, "train": ALL, **changes}
        told, tensors = site.trained(site.experiment(method=KINDS[of], **about), run_id)
        return tensors or told["fault"]

    assert set(left(1)) == {kind}
    # One sample less of one label; then some of each. A server may choose a model whose embedding is its outputs.
    for run_id, holdout in enumerate((0.2625, 0.3, 0.0), 5):
        assert f"{kind}: they are of other samples than earlier ones" in left(run_id, holdout)
    for other in set(KINDS) - {kind}:
        assert f"{other}: they are of other samples than earlier ones" in left(9, 0.2625, other)
    # A further experiment of the same samples, also of another process, seed, and number of epochs.
    assert set(left(3, seed=7, rounds=3)) == {kind}
    # Where the site itself has one sample more, the means of before and of now would differ by that.
    site.hold(81)
    site.write()
    assert "the difference would tell of" in left(4, 0.0)
    lines = site.left()
    assert len({line["samples"] for line in lines if "samples" in line}) == 1 < len(lines)


def labelled(site: OwnSite) -> OwnSite:
    """Give a site samples of two labels at random."""
    site.label_both(np.random.default_rng(5).integers(0, 2, 120), classes=2)
    return site


def test_refusals_do_not_tell_labels_as_often_as_a_server_asks(tmp_path: Path) -> None:
    # Of how many samples two sets differ by label told 40 labels in 40 requests, none of which counted.
    site = labelled(OwnSite(tmp_path, min_mean=20, rounds=3))
    asked = [
        site.experiment(method="fd", train=ALL | {"batch_size": 80}, holdout=one / 80, policy={"min_mean": 20})
        for one in range(5)
    ]
    assert site.trained(asked[0])[1]
    faults = [site.trained(one, run_id)[0]["fault"] for run_id, one in enumerate(asked[1:], 2)]
    assert ["fewer than 20 samples" in fault for fault in faults[:2]] == [True, True]
    told = "this site has trained in 3 rounds, and takes part in no more (rounds in its site file; default: 1000)"
    assert faults[2:] == [told] * 2


def test_a_sharing_that_is_refused_for_its_samples_counts(tmp_path: Path) -> None:
    # How many samples are left over in groups of a label tells how many the label has.
    site = labelled(OwnSite(tmp_path, min_mean=20, sharings=2))
    train = ALL | {"batch_size": 80}
    assert site.trained(site.experiment(method="fd", train=train, policy={"min_mean": 20}))[1]
    faults = [
        site.shared(site.experiment({"samples_per_mean": size, "split": "class"}), run_id=run_id)
        for run_id, size in enumerate((21, 22, 22, 23, 24))
    ]
    assert [FEW in fault for fault in faults] == [True, True, True, False, False]
    assert all("this site has shared 2 payloads of its samples" in fault for fault in faults[3:])


SHARINGS: dict[str, Any] = {
    "one mean": {"samples_per_mean": "all"},
    "means": {"samples_per_mean": 20},
    "means within a class": {"samples_per_mean": "all", "split": "class"},
    "masked means": {"name": "secure-means"},
}
FEW = "they are of other samples than earlier ones: the difference would tell of"


class Means(OwnSite):
    """A site, and a server that requests means of any kind, each in a run of its own."""

    runs = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, allow=["means", "statistics", "masked", "keys", *KINDS], min_mean=3, sharings=9)

    def left_for(self, kind: str, holdout: float) -> str:
        """Why means do not leave; empty where they do."""
        self.runs += 1
        self.connect(self.runs)
        about: Any = {"holdout": holdout, "policy": {"min_mean": 3}, "train": ALL}
        if kind in KINDS:
            fields, _ = self.trained(self.experiment(method=KINDS[kind], **about))
        elif kind == "statistics":
            asked = self.experiment(method={"name": "ccvr", "sharing": {"min_samples": 1}}, **about, rounds=1)
            fields, _ = self.reply("query.share", asked, tensors=weights_of(asked))
        else:
            asked = self.experiment(SHARINGS[kind], **about)
            sealed = ready(self, asked, "means") if kind == "masked means" else {}
            fields, _ = self.reply("query.share", asked, tensors=sealed)
        return str(fields.get("fault", ""))


PAIRS = [("one mean", "prototypes"), ("outputs", "one mean"), ("one mean", "means"), ("means within a class", "means")]
PAIRS += [("statistics", "prototypes"), ("prototypes", "statistics"), ("statistics", "means within a class")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_means_of_any_two_kinds_do_not_tell_of_a_few(first: str, second: str, tmp_path: Path) -> None:
    site = Means(tmp_path)
    # Of 80 samples 20 are held out, then 21 or 22, and then 20 again.
    assert site.left_for(first, 0.25) == ""
    assert [FEW in site.left_for(second, holdout) for holdout in (0.2625, 0.275)] == [True, True]
    assert site.left_for(second, 0.25) == ""
    assert len({line["samples"] for line in site.log() if line.get("samples")}) in (1, 2)


def test_only_means_by_label_tell_of_each_label(tmp_path: Path) -> None:
    for number, (first, second, refused) in enumerate(
        [
            ("statistics", "prototypes", True),
            ("means within a class", "statistics", True),
            ("one mean", "prototypes", False),
            ("means within a class", "one mean", False),
        ]
    ):
        site = Means(tmp_path / str(number))
        assert site.left_for(first, 0.0) == ""
        # The site withdraws three samples, each of another label.
        site.x = site.x[3:]
        site.label(np.arange(3, 120) % 10, 77)
        site.write()
        assert (f"{FEW} fewer than 3 samples" in site.left_for(second, 0.0)) == refused, (first, second)


def test_masked_means_and_prototypes_do_not_tell_of_a_few(tmp_path: Path) -> None:
    for first, second in (("masked means", "prototypes"), ("prototypes", "masked means")):
        site = Means(tmp_path / first)
        assert site.left_for(first, 0.25) == ""
        faults = [site.left_for(second, holdout) for holdout in (0.2625, 0.25)]
        # Of what is not sent to a masked sum the server is told nothing; the site's log has the reason.
        refused = [line["refused"] for line in site.log() if "refused" in line]
        assert ([bool(fault) for fault in faults], [FEW in why for why in refused]) == ([True, False], [True])
        assert faults[0] in (refused[0], WITHHELD)


def test_means_of_all_samples_and_of_labels_with_enough_do_not_tell_of_the_others(tmp_path: Path) -> None:
    # Of label 9 the site has one sample: it is in the mean of all, and in no prototype.
    site = Means(tmp_path)
    y = np.append(np.arange(119) % 9, 9)
    y[[0, 119]] = y[[119, 0]]
    site.label(y)
    site.write()
    assert site.left_for("one mean", 0.0) == ""
    for kind in (*KINDS, "statistics", "means within a class"):
        assert f"{FEW} fewer than 3 samples" in site.left_for(kind, 0.0)


def test_three_sets_may_tell_of_one_sample_where_no_two_do() -> None:
    def means_of(*samples: int) -> SampleSet:
        return SampleSet(np.array([[sample] * 16 for sample in samples], np.uint8), np.full(len(samples), -1))

    sets = [means_of(*range(7)), means_of(0, 1, 2), means_of(3, 4, 5)]
    assert [one.few_differing(other, 3) for one, other in itertools.combinations(sets, 2)] == [0, 0, 0]
    assert means_of(*range(6)).few_differing(sets[0], 3) == 1


QUERIES = [("fd", "each"), ("fedproto", "each"), ("mixfld", "server")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "evaluated"), QUERIES)
def test_rounds_and_experiments_of_the_same_samples_send_means_by_label(
    method: str, evaluated: str, tmp_path: Path
) -> None:
    allow = ["outputs", "prototypes", "seeds", "scores"]
    sites = [OwnSite(tmp_path / str(i), min_mean=2, allow=allow) for i in (0, 1, 2)]
    configs = [site.config | {"partition-id": i} for i, site in enumerate(sites)]
    changes = {"partition": {"name": "iid", "clients": 3}, "holdout": 0.2, "evaluate_model": evaluated, "rounds": 3}
    train = {"cohort": 3, "epochs": 2, "batch_size": 16, "lr": 0.1}
    asked = sites[0].experiment(method=method, train=train, **changes)
    for run_id in (1, 2):
        made = federate(Nodes(configs, run_id), asked, tmp_path / f"run-{run_id}", min_sites=3)
        assert (made.state.round, [refusals(made, n) for n in (1, 2, 3)]) == (3, [{}] * 3)
    assert not any("refused" in line for site in sites for line in site.log())


def test_samples_of_an_earlier_payload_that_cannot_be_read_stop_later_ones(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_mean=3)
    asked = site.experiment(method="fd", train=ALL)
    assert site.trained(asked)[1]
    other = site.experiment(method="fd", train=ALL, holdout=0.5)
    (kept,) = (tmp_path / "audit.shared").glob("*.samples")
    content = kept.read_bytes()
    for damaged in (content[:-1], content[:-17] + bytes(17), None):
        kept.write_bytes(damaged) if damaged is not None else kept.unlink()
        told, tensors = site.trained(other, 2)
        assert "restore" in told["fault"]
        assert tensors == {}


def test_mean_outputs_of_two_batch_sizes_reveal_the_outputs_of_one_sample(tmp_path: Path) -> None:
    # What a server can still do: a rate so large that outputs after the first step are 0 or 1, which vanish modulo 1.
    site = OwnSite(tmp_path, min_mean=8)
    start, rows = {}, {}
    for run_id, batch_size in enumerate((40, 41), 1):
        train = {"cohort": 4, "epochs": 1, "batch_size": batch_size, "lr": 1e6}
        asked = site.experiment(method="fd", train=train, model=LINEAR)
        start = make_setup(asked).weights()
        rows[batch_size] = 8 * site.trained(asked, run_id)[1]["outputs"].double()
    weight, bias = (next(t for t in start.values() if t.dim() == dims) for dims in (2, 1))
    samples = make_setup(asked).scale(torch.from_numpy(site.x[:80])).flatten(1)
    outputs = (samples @ weight.T + bias).softmax(1)
    differences = (rows[41] - rows[40]) % 1
    label = int((differences - differences.round()).abs().sum(1).argmax())
    found = (outputs - differences[label]).abs().amax(1)
    assert (float(found.min()) < 1e-4, int(found.argmin()) % 10) == (True, label)
    assert float(found.sort().values[1]) > 1e-3


def test_two_sets_of_held_out_samples_do_not_tell_of_a_few(site: OwnSite) -> None:

    def score(holdout: float, seed: int = 0) -> Any:
        asked = site.experiment(method="fedavg", holdout=holdout, seed=seed, model=LINEAR)
        weights = {name: 0 * tensor for name, tensor in make_setup(asked).weights().items()}
        # Of every sample this model says class 3: the number of right ones depends on which samples are held out.
        next(tensor for tensor in weights.values() if tensor.dim() == 1)[3] = 1.0
        return site.scored(asked, weights)

    first = score(0.3)
    assert first["samples"] == 24
    assert [score(0.3, seed) for seed in range(1, 4)] == [first] * 3
    for holdout in (0.29, 0.3125, 0.5):
        assert "the difference would tell of" in score(holdout)["fault"]
    # 24 and 44 samples differ in as many as a score may cover.
    site.write(min_mean=16)
    assert score(0.5)["samples"] == 40
    assert "it holds out 24 samples, and 40 earlier" not in str(score(0.3))


def test_a_site_has_one_set_for_validation(site: OwnSite) -> None:
    for share, told in ((0.25, ""), (0.5, "holds out 0 samples and keeps 40 for validation, and 0 and 20 earlier")):
        asked = site.experiment(method="fedavg", validation={"clients": share}, model=LINEAR)
        assert told in site.scored(asked, split="validation").get("fault", "")


def test_scores_before_and_after_a_label_is_corrected_do_not_tell_of_its_sample(site: OwnSite) -> None:
    y = np.arange(120) % 10
    asked = site.experiment(method="fedavg", holdout=0.5, model=LINEAR)

    def score(labels: np.ndarray) -> Any:
        site.label(labels)
        site.write()
        return site.scored(asked)

    first = score(y)
    assert first["samples"] == 40
    changed = [score(np.where(np.arange(120) == row, (y + 1) % 10, y)) for row in range(12)]
    # A sample that is not held out changes no score.
    faults = [told["fault"] for told in changed if "fault" in told]
    assert [told for told in changed if "fault" not in told] == [first] * (12 - len(faults))
    assert 0 < len(faults) < 12
    assert all("the difference would tell of fewer than 20 samples (min_mean in its file)" in one for one in faults)
    # With all labels changed the sets have no sample in common.
    assert score((y + 1) % 10)["samples"] == 40


@pytest.mark.parametrize("kind", ["train", "query.share", "evaluate", "query.ask", "query.keys"])
def test_a_round_that_is_none_is_refused_and_does_not_damage_the_audit_log(kind: str, tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = asking(site, holdout=0.3)
    for round in (-1, True, 0.0, float("nan"), "0", "\u0663", None, 10**30, [0], 2**31):
        fields, tensors = site.reply(kind, asked, round, tensors=weights_of(asked))
        assert "a request that is none: round: " in fields["fault"]
        assert (tensors, AuditLog(str(tmp_path / "audit.jsonl")).lines()) == ({}, [])


def test_texts_of_a_server_do_not_damage_the_audit_log(tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = site.experiment(method="fedavg")
    for changes in (
        {"name": "\ud800\x1b[31m", "model": {"name": "module", "path": "\ud800\x1b:x"}},
        {"name": "a" * 100_000, "model": {"name": "module", "path": "os:system\n" + "x" * 5000}},
        {"name": "\u202ex\u2028y"},
    ):
        told = [site.reply(kind, asked, experiment=as_table(asked) | changes)[0] for kind in ("train", "query.hello")]
        assert "fault" in told[0]
        assert all(len(fields.get("fault", "")) < 500 for fields in told)
    lines = AuditLog(str(tmp_path / "audit.jsonl")).lines()
    assert all(len(line["run"]) < 400 and line["run"].isprintable() for line in lines)
    assert all(len(line["refused"]) < 500 and line["refused"].isprintable() for line in lines if "refused" in line)
    # Code is refused at the first query, too.
    assert ["is not trusted" in line["refused"] for line in lines if line["kind"] == "hello"] == [True] * 2


def test_a_site_trains_in_the_rounds_of_the_experiment(tmp_path: Path) -> None:
    site = OwnSite(tmp_path).connect()
    asked = site.experiment(method="fedavg", rounds=2)
    told = "this experiment's clients do not train in round 3 of 2"
    assert site.trained(asked, round=2)[0]["fault"] == told
    assert "samples" in site.trained(asked, round=1)[0]


def test_a_changed_experiment_gets_no_second_payload_of_a_round(tmp_path: Path) -> None:
    # Its app keeps nothing here: another process of the site answers.
    site = OwnSite(tmp_path, rounds=1)
    assert site.trained(site.experiment(method="fd"))[1]
    told, tensors = site.trained(site.experiment(method="fedavg"))
    assert "this site has trained in 1 rounds" in told["fault"]
    site.write(rounds=5)
    for changes in ({"method": "fedavg"}, {"method": "fd"}, {"method": "fd", "name": "other"}):
        told, tensors = site.trained(site.experiment(**changes))
        assert ("of round 1 in this run, and gives them once" in told["fault"], tensors) == (True, {})


ALONE = {**TOLD, "begins": "own"}
"""What a client is told that goes on from a model of its own."""


def test_a_training_of_which_nothing_leaves_counts_and_is_in_the_audit_log(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, rounds=2)
    silent = site.experiment(method={"name": "custom", "upload": "silent", "stateful_clients": True}, train=ALL)
    told = []
    for run_id, round in ((1, 0), (1, 0), (1, 1), (1, 2), (2, 0)):
        site.connect(run_id)
        told.append(site.reply("train", silent, round, run=f"{run_id:032x}", **ALONE))
    assert [fields for fields, _ in (told[0], told[2])] == [{"samples": 80}] * 2
    assert not any(tensors for _, tensors in told)
    assert "of round 1 in this run, and gives them once" in told[1][0]["fault"]
    assert ["has trained in 2 rounds" in fields["fault"] for fields, _ in told[3:]] == [True, True]
    counted = [(line["round"], line["trained"], line["begun"]) for line in site.log() if "refused" not in line]
    assert counted == [(0, True, True), (1, True, True)]
    # Of the run whose training was refused the site keeps nothing.
    assert len(list((tmp_path / "audit.state").iterdir())) == 1


@pytest.mark.parametrize(
    "changes",
    [{"method": {"name": "fedavg", "aggregator": "secure-mean"}}, {"method": "fedavg", "protection": NOISE}],
    ids=["masks", "protection"],
)
def test_a_model_that_begins_at_a_site_is_neither_trained_for_a_masked_sum_nor_protected(
    changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = OwnSite(tmp_path, allow=["masked", "keys", "weights"]).connect()
    monkeypatch.setattr(LoopEngine, "train", lambda *given: pytest.fail("it trained"))
    fields, _ = site.reply("train", site.experiment(**changes, evaluate_model="device"), **ALONE, total=10**6)
    assert "it did not receive the round's model" in fields["fault"]
    assert [line["refused"] for line in site.log()] == [fields["fault"]]
    assert not (tmp_path / "audit.state").exists()


def test_a_masked_sum_takes_no_method_whose_clients_keep_what_their_models_depend_on(tmp_path: Path) -> None:
    # A server has other sites keep a state of its choice first, with which they send what it can compute.
    site = OwnSite(tmp_path, allow=["masked", "keys", "means"])
    for method, train, refused in (
        ({"name": "fedper"}, {}, True),
        ({"name": "fedbn"}, {}, True),
        ({"name": "moon"}, {}, True),
        ({"name": "fedavg"}, {"momentum": 0.9, "optimizer_state": "keep"}, True),
        ({"name": "naivemix", "sharing": "local-means"}, {}, True),
        # Personal models do not change what is sent.
        ({"name": "ditto"}, {}, False),
        ({"name": "pfedme"}, {}, False),
        ({"name": "fedavg"}, {"momentum": 0.9}, False),
        ({"name": "naivemix"}, {}, False),
    ):
        asked = site.experiment(method=method | {"aggregator": "secure-mean"}, train=ALL | train, model=DEEP)
        fields, tensors = site.trained(asked)
        kept = "method.aggregator: 'secure-mean' with a method whose clients keep something"
        assert (kept if refused else "the masks of round 1 are not at this stage") in fields["fault"], method
        assert not tensors


def test_a_site_takes_part_in_each_stage_of_a_masked_sum_once(tmp_path: Path) -> None:
    grid = sites_of(tmp_path, allow=["masked", "keys"])
    kept: list[tuple[Message, Context]] = []
    answer = grid.app

    def listen(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.hello" and context.node_config["partition-id"] == 0:
            kept.append((copy.deepcopy(message), copy.deepcopy(context)))
        return answer(message, context)

    grid.app = listen  # type: ignore[assignment]
    federate(grid, one_round(SECURE), tmp_path / "run")
    kinds = ["query.keys", "query.shares", "train", "query.unmask"]
    assert [message.metadata.message_type for message, _ in kept] == kinds
    # Another process of the site, which has the memory of before, gets each message again. With both answers to
    # query.unmask the server would have both secrets of a site.
    for message, context in kept:
        told, tensors = unpack(answer(message, context).content)
        assert ("of round 1 in this run, and gives them once" in told["fault"], tensors) == (True, {})


WITHHELD = (
    "it sends nothing to this masked sum: a number is beyond its range, or its app failed; the site's logs state "
    "which; valid: a larger range (coarser steps)"
)


def ready(site: OwnSite, asked: Experiment, quantity: str) -> dict[str, torch.Tensor]:
    """Let the site share its secrets among itself and three keys of the server; what others sealed for it."""
    keys = site.reply("query.keys", asked, quantity=quantity)[1]
    table = {f"0/{name}": key for name, key in keys.items()}
    for peer in (1, 2, 3):
        table |= {f"{peer}/{name}": masks.bytes_to_tensor(masks.new_key_pair()[1]) for name in ("mask", "box")}
    assert "commit" in site.reply("query.shares", asked, tensors=table, quantity=quantity, threshold=3)[1]
    return {f"sealed/{peer}": torch.zeros(1, dtype=torch.uint8) for peer in (1, 2, 3)}


def test_whether_a_model_is_within_range_is_told_once_in_a_round_and_no_more_than_that(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["masked", "keys"]).connect()
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "range": 0.01}}

    def told(rate: float, sealed: dict[str, torch.Tensor], by: OwnSite = site) -> str:
        asked = by.experiment(method=method, train={**ALL, "lr": rate})
        fields, tensors = by.reply("train", asked, tensors=weights_of(asked) | sealed, total=10**6)
        assert not tensors
        return fields["fault"]

    # A small rate keeps each number within range, a large one does not.
    (before,) = {told(rate, {}) for rate in (1e-6, 1e3)}
    assert "the masks of round 1 are not at this stage" in before
    sealed = ready(site, site.experiment(method=method), "models")
    other = site.at_once()
    assert told(1e3, sealed) == WITHHELD
    for again in (site, other):
        assert {"gives them once" in told(rate, sealed, again) for rate in (1e-6, 1e3)} == {True}
    begun, refused, *_ = site.log("masked")
    assert (begun["begun"], begun["trained"]) == (True, True)
    assert "changed by more than 0.01 in one round" in refused["refused"]
    # It counts as one of the rounds of all runs.
    site.write(rounds=1)
    site.connect(2)
    assert "has trained in 1 rounds" in told(1e-6, ready(site, site.experiment(method=method), "models"))


def test_whether_a_mean_is_within_range_is_told_once_of_all_sharings_and_no_more_than_that(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["masked", "keys"]).connect()

    def told(range: float, sealed: dict[str, torch.Tensor]) -> str:
        return site.shared(within(range), tensors=sealed)

    def within(range: float) -> Experiment:
        return site.experiment({"name": "secure-means", "range": range})

    (before,) = {told(range, {}) for range in (0.1, 100.0)}
    assert "the masks of round 1 are not at this stage" in before
    sealed = ready(site, within(0.1), "means")
    assert told(0.1, sealed) == WITHHELD
    assert "gives them once" in told(100.0, sealed)
    site.connect(2)
    assert "has shared 1 payload of its samples in all runs" in told(100.0, ready(site, within(0.1), "means"))


@pytest.mark.slow
def test_data_to_mix_with_that_one_site_lacks_leave_its_model_not_alone_in_the_sum(tmp_path: Path) -> None:
    # With lambda = 1 a model is made of the server's data to mix with alone: the server can compute it. A site without
    # such data would train on its own samples, and its model would be the sum without the others'.
    answer = at_client.app

    def leave_out(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            fields, tensors = unpack(message.content)
            message.content = pack({**fields, "pool": None}, to_record(tensors))
        return answer(message, context)

    asked = one_round({"name": "fedmix", "objective": {"lambda": 1.0}, "aggregator": "secure-mean"})
    start, largest = make_setup(asked).weights(), []
    for name, app in (("honest", answer), ("liar", leave_out)):
        grid = sites_of(tmp_path / name)
        grid.app = app  # type: ignore[assignment]
        state = federate(grid, asked, tmp_path / name / "run").state
        largest.append(max(float((state.weights[name] - tensor).abs().max()) for name, tensor in start.items()))
    assert largest[0] < 1 < 8 < largest[1]


@pytest.mark.slow
def test_where_each_sum_is_of_all_sites_no_two_sums_differ_by_one(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4, allow=["masked", "keys"], min_sum=4)

    def begin(fewest: int, run_id: int, down: set[int]) -> Any:
        grid = Nodes(configs, run_id).without(*down)
        method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "fewest": fewest}}
        return federate(grid, one_round(method), tmp_path / str(run_id))

    assert begin(4, 1, set()).state.round == 1
    for fewest, run_id, down in ((3, 2, set()), (4, 3, {3})):
        with pytest.raises(FedblendError):
            begin(fewest, run_id, down)


def test_work_that_fails_on_some_samples_counts(tmp_path: Path) -> None:
    """A server chooses the model: whether it fails may tell of a sample."""

    def fails(*_: Any) -> Any:
        raise IndexError("an id beyond the vocabulary")

    for kind, (_, what, _, form) in (("query.ask", at_client.ANSWERED[2]), ("evaluate", at_client.ANSWERED[3])):
        site = OwnSite(tmp_path / kind, max_scores=1, max_answers=1).connect()
        asked, app = asking(site, holdout=0.3), ClientApp()
        site.trained(asked)
        register = app.evaluate() if kind == "evaluate" else app.query("ask")
        register(functools.partial(at_client.answered, what=what, do=fails, form=form))
        site.run.app = app
        told = [site.reply(kind, asked)[0]["fault"] for _ in range(2)]
        assert told[0] == "its app failed; the log of its SuperNode states why"
        assert "in all runs, and sends no more" in told[1]
