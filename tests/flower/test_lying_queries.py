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
from helpers import slow_after_first

from fedblend.experiment.setup import make_setup

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import Nodes, fields_of
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from test_flower import experiment, site_files
from test_flower_faults import QUICK
from test_lying_server import ALL, NOISE, OwnSite

from fedblend.core.errors import FedblendError
from fedblend.core.trees import add_prefix
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import Experiment, as_table
from fedblend.flower import client as at_client
from fedblend.flower import site as at_site
from fedblend.flower.app.client import add_sharing, blend_mod
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.audit import AuditLog
from fedblend.flower.messages import SHARE_QUERY, attach, pack, to_record, unpack
from fedblend.flower.sample_sets import SampleSet
from fedblend.flower.secure_aggregation import masks
from fedblend.flower.server import run
from fedblend.flower.site import describe_setup
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import read_lines

pytestmark = pytest.mark.usefixtures("no_waits")

LINEAR = {"name": "mlp", "hidden": []}
DEEP = {"name": "mlp", "hidden": [8]}


class KeptSite(OwnSite):
    """A site whose app keeps its memory from message to message, as in one run of a SuperNode."""

    def connect(self, run_id: int = 1) -> None:
        self.grid = Nodes([{"partition-id": 0, "site": str(self.folder / "site.toml")}], run_id)

    def reply(self, kind: str, asked: Experiment, round: Any = 0, run_id: int = 1, tensors: Any = None, **fields: Any):
        told = {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked)), "client": 0}
        message = Message(
            pack(fields_of(kind, {**told, "round": round, **fields}), to_record(tensors or {})), 1000, kind
        )
        (reply,) = self.grid.send_and_receive([message])
        return unpack(reply.content)

    def ask(self, asked: Experiment, question: dict[str, torch.Tensor]) -> Any:
        """The tensors of an answer, or why there is none."""
        fields, tensors = self.reply("query.ask", asked, tensors=question)
        return tensors or fields["fault"]

    def at_once(self) -> KeptSite:
        """A second process of the site, with the memory of now."""
        other = copy.copy(self)
        other.connect(self.grid.contexts[1000].run_id)
        other.grid.contexts[1000].state = copy.deepcopy(self.grid.contexts[1000].state)
        return other


def asking(site: OwnSite, **changes: Any) -> Experiment:
    method = {"name": "aggenhance-secure", "server_step": {"epochs": 1, "steps": 1, "step_size": 0.5}}
    return site.experiment(**{"method": method, "model": LINEAR, "scale": {"name": "unit"}, **changes})


BEGIN = {"begin": torch.full((10, 1, 16, 16), 0.5)}
POINTS = {"points": torch.full((3, 10, 1, 16, 16), 0.5)}


# Answers ---------------------------------------------------------------------------------------------------------


def test_a_site_answers_each_question_once_for_each_model_that_it_sent(tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
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


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"points": torch.zeros(4, 10, 1, 16, 16)}, "votes on 3 points of each class at most"),
        ({"points": torch.zeros(1_000, 10, 1, 16, 16)}, "votes on 3 points of each class at most"),
        ({"begin": torch.zeros(11, 1, 16, 16)}, "asks for the points of its classes"),
        ({**BEGIN, **POINTS}, "asks for the points of its classes"),
        ({"begins": torch.zeros(10, 1, 16, 16)}, "asks for the points of its classes"),
        ({"begin": torch.full((10, 1, 16, 16), 1.5)}, "has points in [0, 1] only"),
        ({"points": torch.full((3, 10, 1, 16, 16), torch.nan)}, "has points in [0, 1] only"),
        ({}, "asks for the points of its classes"),
    ],
)
def test_a_site_answers_the_questions_of_the_server_step_only(question: Any, why: str, tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    asked = asking(site)
    site.trained(asked)
    assert why in site.ask(asked, question)
    assert [line for line in site.log() if line["kind"] == "answers" and "refused" not in line] == []


def test_a_site_file_bounds_answers_and_scores_over_all_runs(tmp_path: Path) -> None:
    site = KeptSite(tmp_path, max_answers=3, max_scores=2)
    asked = asking(site, holdout=0.3)
    weights = add_prefix("weights/", make_setup(asked).weights())
    answers, scores = [], []
    for run_id in (1, 2, 3):
        site.connect(run_id)
        site.trained(asked)
        answers += [site.ask(asked, BEGIN), site.ask(asked, POINTS)]
        scores.append(site.reply("evaluate", asked, tensors=weights, own=None, split="holdout")[0])
    assert [isinstance(answer, dict) for answer in answers] == [True, True, True, False, False, False]
    assert "this site has sent 3 answers in all runs, and sends no more (max_answers in its file)" in answers[3]
    assert ["right" in score for score in scores] == [True, True, False]
    assert "this site has sent 2 scores in all runs, and sends no more (max_scores in its file)" in scores[2]["fault"]


def test_a_site_file_without_bounds_of_answers_and_scores_has_them_from_its_rounds(tmp_path: Path) -> None:
    site = KeptSite(tmp_path, rounds=2)
    asked = asking(site, holdout=0.3)
    weights = add_prefix("weights/", make_setup(asked).weights())
    site.connect()
    scores = [site.reply("evaluate", asked, tensors=weights, own=None, split="holdout")[0] for _ in range(9)]
    assert ["right" in score for score in scores] == [True] * 8 + [False]
    assert scores[8]["fault"] == (
        "this site has sent 8 scores in all runs, and sends no more (max_scores in its file); default: "
        "4 times its rounds, 500 at most"
    )
    site.trained(asked)
    assert isinstance(site.ask(asked, BEGIN), dict)
    # Three more answers of other runs.
    for number in (7, 8, 9):
        AuditLog(str(tmp_path / "audit.jsonl")).record_sent(f"other/{number}", 0, 0, "answers", BEGIN, False)
    assert site.ask(asked, POINTS) == (
        "this site has sent 4 answers in all runs, and sends no more (max_answers in its file); default: "
        "2 times its rounds"
    )


@pytest.mark.parametrize("rounds", slow_after_first([1, 2]))
def test_a_run_with_both_kinds_of_scores_needs_no_more_than_the_default(rounds: int, tmp_path: Path) -> None:
    asked = experiment(rounds=rounds, holdout=0.2, validation={"clients": 0.2}, train={"cohort": 4, "lr": 0.1})
    finished = run(Nodes(site_files(tmp_path, 4, rounds=rounds)), asked, tmp_path / "run", FederationLimits(deadline=5))
    assert not any("refused" in line for line in finished.directory.metrics())
    scores = [line for line in read_lines(tmp_path / "audit-0.jsonl") if line["kind"] == "scores"]
    assert len(scores) == 2 * (rounds + 1)


def test_answers_tell_of_the_model_of_a_linear_model_all(tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    asked = asking(site)
    _, upload = site.trained(asked)
    answer = site.ask(asked, BEGIN)["points"]
    (weight,) = (tensor.double() for tensor in upload.values() if tensor.dim() == 2)
    # Each point moved by -0.5 times the gradient of its class's loss: W^T (p - e_c), from one point with chances p.
    moved = ((BEGIN["begin"] - answer) / 0.5).flatten(1).double()
    differences = moved - moved[:1]
    torch.testing.assert_close(differences, weight[:1] - weight, rtol=0, atol=1e-5)


# Mean outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("min_mean", "rows"), [(8, 10), (9, 0)])
def test_mean_outputs_of_few_samples_are_zeros(min_mean: int, rows: int, tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_mean=min_mean)
    told, tensors = site.trained(site.experiment(method="fd", train=ALL | {"epochs": 1}))
    assert (tensors["outputs"].sum(1) > 0).sum() == rows
    assert set(told) == {"samples"}
    assert [(line["kind"], line.get("begun", False)) for line in site.log()] == [("outputs", True), ("outputs", False)]


@pytest.mark.parametrize("batch_size", [1, 40, 41])
def test_mean_outputs_of_samples_that_the_server_draws_do_not_leave(batch_size: int, tmp_path: Path) -> None:
    # The batches of 40 and of 41 differ in one sample, and of a model that one step hardly moves so do their sums.
    site = OwnSite(tmp_path, min_mean=2)
    train = {"cohort": 4, "steps": 1, "batch_size": batch_size, "lr": 1e-30}
    told, tensors = site.trained(site.experiment(method="fd", train=train))
    assert "mean outputs of many draws tell of each sample" in told["fault"]
    assert tensors == {}


KINDS = {"outputs": "fd", "prototypes": "fedproto"}
DECAYS = {"schedule_in_round": {"name": "exponential", "gamma": 1e-30}}


@pytest.mark.parametrize("kind", slow_after_first(KINDS))
@pytest.mark.parametrize(
    ("train", "why"),
    [
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
        ({"batch_size": 79, "last_batch": "merge"}, None),
        ({"batch_size": 20, "last_batch": "drop"}, None),
        ({"batch_size": 20}, None),
        ({"batch_size": 30}, None),
        ({"batch_size": 100}, None),
        ({"batch_size": 5, "accumulate": 4}, None),
    ],
)
def test_means_by_label_do_not_tell_of_the_few_samples_of_a_step(
    kind: str, train: Any, why: str | None, tmp_path: Path
) -> None:
    # With the first step alone, on one sample of the server's choice, prototypes are a function of its pixels.
    site = OwnSite(tmp_path, min_mean=20, allow=list(KINDS))
    epochs = {} if "steps" in train else {"epochs": 1}
    train = {"cohort": 4, "lr": 0.1, **epochs, **train}
    asked = site.experiment(method=KINDS[kind], policy={"min_mean": 20}, train=train)
    told, tensors = site.trained(asked)
    if why is None:
        assert (told, set(tensors)) == ({"samples": 80}, {kind})
    else:
        assert why in told["fault"]
        assert not tensors
    # A site is asked first whether it takes part.
    fields, _ = site.reply("query.hello", asked)
    assert ("fault" in fields) == (why is not None)


def test_models_leave_also_after_steps_of_few_samples(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_mean=20)
    asked = site.experiment(method="fedavg", train={"cohort": 4, "lr": 0.1, "batch_size": 1, "epochs": 1, **DECAYS})
    assert site.trained(asked)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_means_by_label_of_two_sets_do_not_tell_of_a_few(kind: str, tmp_path: Path) -> None:
    site = OwnSite(tmp_path, min_mean=3, allow=[*KINDS])

    def left(run_id: int, holdout: float = 0.25, **changes: Any) -> Any:
        policy = {"min_mean": 3}
        asked = site.experiment(method=KINDS[kind], holdout=holdout, policy=policy, train=ALL, **changes)
        told, tensors = site.trained(asked, run_id)
        return tensors or told["fault"]

    assert set(left(1)) == {kind}
    # One sample less of one label; then some of each.
    for run_id, holdout in enumerate((0.2625, 0.3, 0.0), 5):
        assert f"{kind}: they are of other samples than earlier ones" in left(run_id, holdout)
    # A further experiment of the same samples, also of another process, seed, and number of epochs.
    assert set(left(3, seed=7, rounds=3)) == {kind}
    # Where the site itself has one sample more, the means of before and of now would differ by that.
    site.hold(81)
    site.write()
    assert "the difference would tell of" in left(4, 0.0)
    lines = [line for line in site.log() if "refused" not in line]
    assert len({line["samples"] for line in lines if "samples" in line}) == 1 < len(lines)


def test_outputs_and_prototypes_are_of_one_set(tmp_path: Path) -> None:
    # A server may choose a model whose embedding of a sample is its outputs.
    site = OwnSite(tmp_path, min_mean=3, allow=[*KINDS])
    policy = {"min_mean": 3}
    assert site.trained(site.experiment(method="fd", policy=policy, train=ALL))[1]
    asked = site.experiment(method="fedproto", policy=policy, train=ALL, holdout=0.0125)
    assert "prototypes: they are of other samples than earlier ones" in site.trained(asked, 2)[0]["fault"]


def labelled(site: OwnSite) -> np.ndarray:
    """Give a site samples of two labels at random; return these."""
    y = np.random.default_rng(5).integers(0, 2, 120)
    split, x = np.repeat([0, 1], [80, 40]), site.x[:120]
    for file in ("own.npz", "server.npz"):
        np.savez(site.folder / file, x=x, y=y, split=split, classes=np.arange(2))
    site.write()
    return y[:80]


def test_refusals_do_not_tell_labels_as_often_as_a_server_asks(tmp_path: Path) -> None:
    # Of how many samples two sets differ by label told 40 labels in 40 requests, none of which counted.
    site = OwnSite(tmp_path, min_mean=20, rounds=3)
    labelled(site)
    asked = [
        site.experiment(method="fd", train=ALL | {"batch_size": 80}, holdout=one / 80, policy={"min_mean": 20})
        for one in range(5)
    ]
    assert site.trained(asked[0])[1]
    faults = [site.trained(one, run_id)[0]["fault"] for run_id, one in enumerate(asked[1:], 2)]
    assert ["fewer than 20 samples" in fault for fault in faults] == [True, True, False, False]
    # The same round of the same run tells once.
    assert (
        faults[2]
        == faults[3]
        == ("this site has trained in 3 rounds, and takes part in no more (rounds in its site file; default: 1000)")
    )


def test_a_sharing_that_is_refused_for_its_samples_counts(tmp_path: Path) -> None:
    # How many samples are left over in groups of a label tells how many the label has.
    site = OwnSite(tmp_path, min_mean=20, sharings=2)
    labelled(site)
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


class Means(KeptSite):
    """A site, and a server that requests means of any kind, each in a run of its own."""

    def __init__(self, folder: Path, min_mean: int = 3) -> None:
        allow = ["means", "statistics", "masked", "keys", *KINDS]
        super().__init__(folder, allow=allow, min_mean=min_mean, sharings=9)
        self.runs = 0

    def left(self, kind: str, holdout: float, **changes: Any) -> str:
        """Why means do not leave; empty where they do."""
        self.runs += 1
        self.connect(self.runs)
        about: Any = {"holdout": holdout, "policy": {"min_mean": self.fields["min_mean"]}, "train": ALL, **changes}
        if kind in KINDS:
            fields, _ = self.trained(self.experiment(method=KINDS[kind], **about), self.runs)
        elif kind == "statistics":
            asked = self.experiment(method={"name": "ccvr", "sharing": {"min_samples": 1}}, **about, rounds=1)
            fields, _ = self.reply("query.share", asked, tensors=add_prefix("weights/", make_setup(asked).weights()))
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
    assert site.left(first, 0.25) == ""
    assert [FEW in site.left(second, holdout) for holdout in (0.2625, 0.275)] == [True, True]
    assert site.left(second, 0.25) == ""
    assert len({line["samples"] for line in site.log() if line.get("samples")}) in (1, 2)


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("statistics", "prototypes", True),
        ("means within a class", "statistics", True),
        ("one mean", "prototypes", False),
        ("means within a class", "one mean", False),
    ],
)
def test_only_means_by_label_tell_of_each_label(first: str, second: str, refused: bool, tmp_path: Path) -> None:
    site = Means(tmp_path)
    assert site.left(first, 0.0) == ""
    # The site withdraws three samples, each of another label.
    y = np.arange(120) % 10
    np.savez(tmp_path / "own.npz", x=site.x[3:120], y=y[3:], split=np.repeat([0, 1], [77, 40]), classes=np.arange(10))
    site.write()
    assert (f"{FEW} fewer than 3 samples" in site.left(second, 0.0)) == refused


def test_masked_means_and_prototypes_do_not_tell_of_a_few(tmp_path: Path) -> None:
    for first, second in (("masked means", "prototypes"), ("prototypes", "masked means")):
        site = Means(tmp_path / first)
        assert site.left(first, 0.25) == ""
        faults = [site.left(second, holdout) for holdout in (0.2625, 0.25)]
        # Of what is not sent to a masked sum the server is told nothing; the site's log has the reason.
        refused = [line["refused"] for line in site.log() if "refused" in line]
        assert ([bool(fault) for fault in faults], [FEW in why for why in refused]) == ([True, False], [True])
        assert faults[0] in (refused[0], WITHHELD)


def test_means_of_all_samples_and_of_labels_with_enough_do_not_tell_of_the_others(tmp_path: Path) -> None:
    # Of label 9 the site has one sample: it is in the mean of all, and in no prototype.
    site = Means(tmp_path)
    y = np.append(np.arange(119) % 9, 9)
    y[[0, 119]] = y[[119, 0]]
    np.savez(tmp_path / "own.npz", x=site.x[:120], y=y, split=np.repeat([0, 1], [80, 40]), classes=np.arange(10))
    site.write()
    assert site.left("one mean", 0.0) == ""
    for kind in (*KINDS, "statistics", "means within a class"):
        assert f"{FEW} fewer than 3 samples" in site.left(kind, 0.0)


def test_three_sets_may_tell_of_one_sample_where_no_two_do() -> None:
    def means_of(*samples: int) -> SampleSet:
        return SampleSet(np.array([[sample] * 16 for sample in samples], np.uint8), np.full(len(samples), -1))

    sets = [means_of(*range(7)), means_of(0, 1, 2), means_of(3, 4, 5)]
    assert [one.few_differing(other, 3) for one, other in itertools.combinations(sets, 2)] == [0, 0, 0]
    assert means_of(*range(6)).few_differing(sets[0], 3) == 1


QUERIES = [("fd", "each"), ("fedproto", "each"), pytest.param("mixfld", "server", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "evaluated"), QUERIES)
def test_rounds_and_experiments_of_the_same_samples_send_means_by_label(
    method: str, evaluated: str, tmp_path: Path
) -> None:
    sites = [
        OwnSite(tmp_path / str(i), min_mean=2, allow=["outputs", "prototypes", "seeds", "scores"]) for i in (0, 1, 2)
    ]
    configs = [{"partition-id": i, "site": str(site.folder / "site.toml")} for i, site in enumerate(sites)]
    train = {"cohort": 3, "epochs": 2, "batch_size": 16, "lr": 0.1}
    changes = {"partition": {"name": "iid", "clients": 3}, "holdout": 0.2, "evaluate_model": evaluated, "rounds": 3}
    asked = sites[0].experiment(method=method, train=train, **changes)
    for run_id in (1, 2):
        result = run(Nodes(configs, run_id), asked, tmp_path / f"run-{run_id}", FederationLimits(3, 5))
        assert result.state.round == 3
        assert all(not record.refused for record in RunDirectory(tmp_path / f"run-{run_id}").records())
    refused = [line for site in sites for line in site.log() if "refused" in line]
    assert refused == []


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


# Scores ----------------------------------------------------------------------------------------------------------


def test_two_sets_of_held_out_samples_do_not_tell_of_a_few(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)

    def score(holdout: float, seed: int = 0) -> Any:
        asked = site.experiment(method="fedavg", holdout=holdout, seed=seed, model=LINEAR)
        weights = {name: 0 * tensor for name, tensor in make_setup(asked).weights().items()}
        # Of every sample this model says class 3: the number of right ones depends on which samples are held out.
        next(tensor for tensor in weights.values() if tensor.dim() == 1)[3] = 1.0
        told = {"own": None, "split": "holdout"}
        return site.reply("evaluate", asked, run_id=seed, tensors=add_prefix("weights/", weights), **told)[0]

    first = score(0.3)
    assert first["samples"] == 24
    assert [score(0.3, seed) for seed in range(1, 4)] == [first] * 3
    for holdout in (0.29, 0.3125, 0.5):
        assert "the difference would tell of" in score(holdout)["fault"]
    # 24 and 44 samples differ in as many as a score may cover.
    site.write(min_mean=16)
    assert score(0.5)["samples"] == 40
    assert "it holds out 24 samples, and 40 earlier" not in str(score(0.3))


def test_scores_before_and_after_a_label_is_corrected_do_not_tell_of_its_sample(tmp_path: Path) -> None:
    site = OwnSite(tmp_path)
    y = np.arange(120) % 10

    def score(labels: np.ndarray) -> Any:
        split = np.repeat([0, 1], [80, 40])
        np.savez(tmp_path / "own.npz", x=site.x[:120], y=labels, split=split, classes=np.arange(10))
        site.write()
        asked = site.experiment(method="fedavg", holdout=0.5, model=LINEAR)
        weights = add_prefix("weights/", make_setup(asked).weights())
        return site.reply("evaluate", asked, tensors=weights, own=None, split="holdout")[0]

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


# Messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "query.share", "evaluate", "query.ask", "query.keys"])
def test_a_round_that_is_none_is_refused_and_does_not_damage_the_audit_log(kind: str, tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    asked = asking(site, holdout=0.3)
    told = {
        "begins": "round",
        "mark": None,
        "state": None,
        "pool": None,
        "keep": "0-0",
        "own": None,
        "split": "holdout",
    }
    weights = add_prefix("weights/", make_setup(asked).weights())
    for round in (-1, True, 0.0, float("nan"), "0", "\u0663", None, 10**30, [0], 2**31):
        fields, tensors = site.reply(kind, asked, round, tensors=weights, **told)
        assert "a request that is none: round: " in fields["fault"]
        assert (tensors, AuditLog(str(tmp_path / "audit.jsonl")).lines()) == ({}, [])


def test_texts_of_a_server_do_not_damage_the_audit_log(tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    table = as_table(site.experiment(method="fedavg"))
    setup = describe_setup(make_setup(site.experiment(method="fedavg")))
    for changes in (
        {"name": "\ud800\x1b[31m", "model": {"name": "module", "path": "\ud800\x1b:x"}},
        {"name": "a" * 100_000, "model": {"name": "module", "path": "os:system"}},
        {"name": "\u202ex\u2028y"},
    ):
        fields = {"experiment": table | changes, "setup": setup, "client": 0, "round": 0, "begins": "round"}
        content = pack({**fields, "mark": None, "state": None, "pool": None})
        (reply,) = site.grid.send_and_receive([Message(content, 1000, "train")])
        assert "fault" in unpack(reply.content)[0]
    lines = AuditLog(str(tmp_path / "audit.jsonl")).lines()
    assert all(len(line["run"]) < 400 and line["run"].isprintable() for line in lines)
    assert all(line.get("refused", "").isprintable() for line in lines)


@pytest.mark.parametrize("clients", [0, True, 4.0, 10**7 + 1, 10**12, "4", None])
def test_a_number_of_clients_that_is_none_is_refused(clients: Any, tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    asked = site.experiment(method="fedavg")
    fields = {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked)) | {"clients": clients}}
    (reply,) = site.grid.send_and_receive([Message(pack(fields), 1000, "query.hello")])
    assert "a request that is none: setup.clients: " in unpack(reply.content)[0]["fault"]


def test_a_site_trains_in_the_rounds_of_the_experiment(tmp_path: Path) -> None:
    site = KeptSite(tmp_path)
    site.connect()
    asked = site.experiment(method="fedavg", rounds=2)
    told = {"begins": "round", "mark": None, "state": None, "pool": None, "keep": "0-0"}
    weights = add_prefix("weights/", make_setup(asked).weights())
    fields, _ = site.reply("train", asked, 2, tensors=weights, **told)
    assert fields["fault"] == "this experiment's clients do not train in round 3 of 2"
    assert "samples" in site.reply("train", asked, 1, tensors=weights, **told)[0]


def test_a_changed_experiment_gets_no_second_payload_of_a_round(tmp_path: Path) -> None:
    # Its app keeps nothing here: another process of the site answers.
    site = OwnSite(tmp_path, rounds=1)
    assert site.trained(site.experiment(method="fd"))[1]
    told, tensors = site.trained(site.experiment(method="fedavg"))
    assert "this site has trained in 1 rounds" in told["fault"]
    site.write(rounds=5)
    told, tensors = site.trained(site.experiment(method="fedavg"))
    assert "of round 1 in this run, and gives them once" in told["fault"]
    assert not tensors


ALONE = {"begins": "own", "mark": None, "state": None, "pool": None, "keep": "0-0"}
"""What a client is told that goes on from a model of its own."""


def test_a_training_of_which_nothing_leaves_counts_and_is_in_the_audit_log(tmp_path: Path) -> None:
    site = KeptSite(tmp_path, rounds=2)
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
    site = KeptSite(tmp_path, allow=["masked", "keys", "weights"])
    site.connect()
    monkeypatch.setattr(LoopEngine, "train", lambda *given: pytest.fail("it trained"))
    fields, _ = site.reply("train", site.experiment(**changes, evaluate_model="device"), **ALONE, total=10**6)
    assert "it did not receive the round's model" in fields["fault"]
    assert [line["refused"] for line in site.log()] == [fields["fault"]]
    assert not (tmp_path / "audit.state").exists()


# Masked sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "train", "refused"),
    [
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
    ],
    ids=lambda value: value.get("sharing", value.get("name")) if isinstance(value, dict) and "name" in value else None,
)
def test_a_masked_sum_takes_no_method_whose_clients_keep_what_their_models_depend_on(
    method: Any, train: Any, refused: bool, tmp_path: Path
) -> None:
    # A server has other sites keep a state of its choice first, with which they send what it can compute.
    site = OwnSite(tmp_path, allow=["masked", "keys", "means"])
    asked = site.experiment(method=method | {"aggregator": "secure-mean"}, train=ALL | train, model=DEEP)
    fields, tensors = site.trained(asked)
    assert not tensors
    assert ("method.aggregator: 'secure-mean' with a method whose clients keep something" in fields["fault"]) == refused
    assert refused or "the masks of round 1 are not at this stage" in fields["fault"]


def test_a_site_takes_part_in_each_stage_of_a_masked_sum_once(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4, allow=["masked", "keys"])
    grid = Nodes(configs)
    kept: list[tuple[Message, Context]] = []
    answer = grid.app

    def listen(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.hello" and context.node_config["partition-id"] == 0:
            kept.append((copy.deepcopy(message), copy.deepcopy(context)))
        return answer(message, context)

    grid.app = listen  # type: ignore[assignment]
    asked = experiment({"name": "fedavg", "aggregator": "secure-mean"}, train=ALL, rounds=1)
    run(grid, asked, tmp_path / "run", QUICK)
    kinds = ["query.keys", "query.shares", "train", "query.unmask"]
    assert [message.metadata.message_type for message, _ in kept] == kinds
    # Another process of the site, which has the memory of before, gets each message again. With both answers to
    # query.unmask the server would have both secrets of a site.
    for message, context in kept:
        told, tensors = unpack(answer(message, context).content)
        assert "of round 1 in this run, and gives them once" in told["fault"]
        assert not tensors


WITHHELD = (
    "it sends nothing to this masked sum: a number is beyond its range, or its app failed; the site's logs state "
    "which; valid: a larger range (coarser steps)"
)


def ready(site: KeptSite, asked: Experiment, quantity: str) -> dict[str, torch.Tensor]:
    """Let the site share its secrets among itself and three keys of the server; what others sealed for it."""
    keys = site.reply("query.keys", asked, quantity=quantity)[1]
    table = {f"0/{name}": key for name, key in keys.items()}
    for peer in (1, 2, 3):
        table |= {f"{peer}/{name}": masks.bytes_to_tensor(masks.new_key_pair()[1]) for name in ("mask", "box")}
    assert "commit" in site.reply("query.shares", asked, tensors=table, quantity=quantity, threshold=3)[1]
    return {f"sealed/{peer}": torch.zeros(1, dtype=torch.uint8) for peer in (1, 2, 3)}


def test_whether_a_model_is_within_range_is_told_once_in_a_round_and_no_more_than_that(tmp_path: Path) -> None:
    site = KeptSite(tmp_path, allow=["masked", "keys"])
    site.connect()
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "range": 0.01}}

    def told(rate: float, sealed: dict[str, torch.Tensor], by: KeptSite = site) -> str:
        asked = site.experiment(method=method, train={**ALL, "lr": rate})
        weights = add_prefix("weights/", make_setup(asked).weights())
        fields = {"begins": "round", "mark": None, "state": None, "pool": None, "keep": "0-0", "total": 10**6}
        fields, tensors = by.reply("train", asked, tensors=weights | sealed, **fields)
        assert not tensors
        return fields["fault"]

    # A small rate keeps each number within range, a large one does not.
    before = {told(rate, {}) for rate in (1e-6, 1e3)}
    assert len(before) == 1
    assert "the masks of round 1 are not at this stage" in before.pop()
    sealed = ready(site, site.experiment(method=method), "models")
    other = site.at_once()
    assert told(1e3, sealed) == WITHHELD
    for again in (site, other):
        assert {"gives them once" in told(rate, sealed, again) for rate in (1e-6, 1e3)} == {True}
    lines = [line for line in site.log() if line["kind"] == "masked"]
    assert [(line.get("begun", False), line.get("trained", False)) for line in lines[:2]] == [
        (True, True),
        (False, False),
    ]
    assert "changed by more than 0.01 in one round" in lines[1]["refused"]
    # It counts as one of the rounds of all runs.
    site.write(rounds=1)
    site.connect(2)
    assert "has trained in 1 rounds" in told(1e-6, ready(site, site.experiment(method=method), "models"))


def test_whether_a_mean_is_within_range_is_told_once_of_all_sharings_and_no_more_than_that(tmp_path: Path) -> None:
    site = KeptSite(tmp_path, allow=["masked", "keys"])
    site.connect()

    def told(range: float, sealed: dict[str, torch.Tensor]) -> str:
        fields, tensors = site.reply("query.share", beyond(range), tensors=sealed)
        assert not tensors
        return fields["fault"]

    def beyond(range: float) -> Experiment:
        return site.experiment({"name": "secure-means", "range": range})

    before = {told(range, {}) for range in (0.1, 100.0)}
    assert len(before) == 1
    assert "the masks of round 1 are not at this stage" in before.pop()
    sealed = ready(site, beyond(0.1), "means")
    assert told(0.1, sealed) == WITHHELD
    assert "gives them once" in told(100.0, sealed)
    site.connect(2)
    assert "has shared 1 payload of its samples in all runs" in told(100.0, ready(site, beyond(0.1), "means"))


@pytest.mark.slow
def test_data_to_mix_with_that_one_site_lacks_leave_its_model_not_alone_in_the_sum(tmp_path: Path) -> None:
    # With lambda = 1 a model is made of the server's data to mix with alone: the server can compute it. A site without
    # such data would train on its own samples, and its model would be the sum without the others'.
    grid = Nodes(site_files(tmp_path, 4))
    answer = grid.app

    def leave_out(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            fields, tensors = unpack(message.content)
            message.content = pack({**fields, "pool": None}, to_record(tensors))
        return answer(message, context)

    method = {"name": "fedmix", "objective": {"lambda": 1.0}, "aggregator": "secure-mean"}
    asked = experiment(method, train=ALL, rounds=1)
    start, honest = make_setup(asked).weights(), run(Nodes(site_files(tmp_path, 4)), asked, tmp_path / "a", QUICK)
    grid.app = leave_out  # type: ignore[assignment]
    (tmp_path / "b").mkdir()
    grid.contexts = Nodes(site_files(tmp_path / "b", 4), run_id=2).contexts
    liar = run(grid, asked, tmp_path / "c", QUICK)

    def largest(state: Any) -> float:
        return max(float((state.weights[name] - tensor).abs().max()) for name, tensor in start.items())

    assert largest(honest.state) < 1 < 8 < largest(liar.state)


@pytest.mark.slow
def test_where_each_sum_is_of_all_sites_no_two_sums_differ_by_one(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4, allow=["masked", "keys"], min_sum=4)

    def begin(fewest: int, run_id: int, down: set[int]) -> Any:
        method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "fewest": fewest}}
        grid = Nodes(configs, run_id)
        grid.down = down
        return run(grid, experiment(method, train=ALL, rounds=1), tmp_path / str(run_id), QUICK)

    assert begin(4, 1, set()).state.round == 1
    for fewest, run_id, down in ((3, 2, set()), (4, 3, {3})):
        with pytest.raises(FedblendError):
            begin(fewest, run_id, down)


# Apps of your own ------------------------------------------------------------------------------------------------


def test_a_site_with_a_file_trains_on_no_message_that_leaves_its_policy_out(tmp_path: Path) -> None:
    app = ClientApp(mods=[blend_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": to_record({"w": torch.ones(2)})}), reply_to=message)

    (tmp_path / "site.toml").write_text('allow = []\naudit = "audit.jsonl"\n')
    for config, refused in (({}, False), ({"site": str(tmp_path / "site.toml")}, True)):
        grid = Nodes([{"partition-id": 0, **config}], app=app)
        content = RecordDict({"arrays": to_record({"w": torch.zeros(2)})})
        (reply,) = grid.send_and_receive([Message(content, 1000, "train")])
        assert reply.has_error() == refused
    assert "trains on requests of a fedblend.flower.Strategy only" in reply.error.reason


def test_an_app_of_your_own_tells_the_server_no_path_of_the_site(tmp_path: Path) -> None:
    app = ClientApp(mods=[blend_mod])
    inputs = Inputs(shape=(2,), outputs=2)
    add_sharing(app, inputs, lambda context: (torch.zeros(4, 2), torch.arange(4) % 2))
    path = tmp_path / "site.toml"
    path.write_text('audit = "audit.jsonl"\n')
    grid = Nodes([{"partition-id": 0, "site": str(path)}], app=app)
    fields = {"sharing": {"name": "means", "samples_per_mean": 2}, "min_mean": 2, "seed": 0}

    def reply() -> Message:
        (found,) = grid.send_and_receive([Message(attach(RecordDict(), fields), 1000, f"query.{SHARE_QUERY}")])
        return found

    (tmp_path / "audit.shared").write_text("no folder")
    for why in ("cannot be used for this site's secret", "is not valid TOML"):
        reason = reply().error.reason
        assert why in reason
        assert str(tmp_path) not in reason
        path.write_text("=")
        at_site._read_cached.cache_clear()


@pytest.mark.parametrize("kind", ["evaluate", "query.ask"])
def test_work_that_fails_on_some_samples_counts(kind: str, tmp_path: Path) -> None:
    """A server chooses the model: whether it fails may tell of a sample."""
    site = KeptSite(tmp_path, max_scores=1, max_answers=1)
    site.connect()
    asked = asking(site, holdout=0.3)
    site.trained(asked)

    def fails(*_: Any) -> Any:
        raise IndexError("an id beyond the vocabulary")

    (_, what, _, form), app = at_client.ANSWERED[2 if kind == "query.ask" else 3], ClientApp()
    register = app.evaluate() if kind == "evaluate" else app.query("ask")
    register(functools.partial(at_client.answered, what=what, do=fails, form=form))
    site.grid.app = app
    told = [site.reply(kind, asked, tensors={}, split="holdout")[0]["fault"] for _ in range(2)]
    assert told[0] == "its app failed; the log of its SuperNode states why"
    assert "in all runs, and sends no more" in told[1]
