"""Attacks on runs, and leak report cards: what is attacked is what was sent; the commands as users meet them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import PNG, contents, here, refused, succeeded, tiny_run
from helpers import iid, images, labelled, same, slow_except
from helpers import run as after_rounds
from helpers import setup as made_of

from fedblend.analysis.attacks.attack_setup import prepare
from fedblend.analysis.attacks.inversion import cosine_distance
from fedblend.analysis.attacks.outcome import attack_run, read_attacks
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.analysis.points.loss_scaling import SwitchCounter, switches
from fedblend.analysis.privacy.leak_report import NO_ATTACK, NOT_ATTACKED, Leak, leak_report
from fedblend.analysis.privacy.similarity import _shared_means, mean_sizes, recognised_by_chance, similarity_of_means
from fedblend.cli import attack
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.report import scatter_figures
from fedblend.report.scatter_figures import strongest
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

ONE = {"train": {"cohort": 1, "momentum": 0.5, "lr": 0.05, "batch_size": 40, "epochs": 1}, "rounds": 2}
"""One client a round, whose model is then the next round's."""


def run(path: Path, **changes: Any) -> Path:
    return tiny_run(path, **changes).path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with FedAvg."""
    return run(tmp_path_factory.mktemp("runs") / "plain", **ONE)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(path).weights


@pytest.mark.slow
def test_a_round_is_made_again_as_the_run_made_it(made: Path, tmp_path: Path) -> None:
    cohorts = {record["round"]: record.get("cohort") for record in RunDirectory(made).metrics()}
    before, watched = contents(made), []
    shorter = run(tmp_path / "shorter", **ONE | {"rounds": 1})

    snapshots = {r: RoundSnapshot.load(made, r, lambda done, total: watched.append((done, total))) for r in (0, 1, 2)}

    assert same(snapshots[0].task.weights, make_setup(RunDirectory(made).experiment()).weights())
    assert same(snapshots[1].task.weights, weights(shorter))
    assert same(snapshots[2].task.weights, weights(made))
    assert not same(snapshots[1].task.weights, snapshots[2].task.weights)
    assert [snapshots[r].task.round for r in (0, 1, 2)] == [0, 1, 2]
    assert [list(snapshots[r].cohort) for r in (0, 1)] == [cohorts[1], cohorts[2]]
    assert watched == [(0, 1), (1, 1)]  # only round 1 had to be made again
    assert contents(made) == before


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox+fed-augmix": {"method": {"name": "fedprox+fed-augmix", "objective": {"large_lambda": 20.0}}},
    "fedmix": {"method": {"name": "fedmix", "sharing": {"samples_per_mean": 5}}},
    "prune": {"protection": {"name": "prune", "keep": 0.2}},
    "noise": {"protection": {"name": "noise", "scale": 0.01, "clip": 0.5}},
}


@pytest.mark.parametrize("name", slow_except(["fedmix", "prune"], METHODS))
def test_what_is_attacked_is_what_the_server_got(name: str, tmp_path: Path) -> None:
    changes = ONE | METHODS[name]
    first = weights(run(tmp_path / "a", **changes | {"rounds": 1}))
    second = weights(run(tmp_path / "b", **changes))
    snapshot = RoundSnapshot.load(tmp_path / "b", 1)

    target = prepare(snapshot, snapshot.cohort[0], attacker="knows")

    for tensor, sent in target.observed.items():
        # The difference of two weights has their rounding.
        rounding = 4 * torch.finfo(torch.float32).eps * float(second[tensor].abs().max())
        torch.testing.assert_close(sent, second[tensor] - first[tensor], rtol=1e-4, atol=rounding)
    assert target.drawn
    assert len(target.y) == snapshot.task.sizes[target.client]
    if name != "noise":  # which nobody can repeat
        assert cosine_distance(target.victim.observe(target.x, target.y), target.observed).item() < 1e-5


@pytest.mark.parametrize("method", ["feddyn", "scaffold", "moon"])
def test_a_client_outside_the_cohort_is_attacked_with_what_it_keeps(method: str, tmp_path: Path) -> None:
    # Seed 2 draws clients 0 and 3, then 0 and 1. So 3 has trained and is not in the cohort, and 2 has never trained.
    path = run(tmp_path / "a", method=method, seed=2)
    before = checkpoint.read(run(tmp_path / "b", method=method, rounds=1, seed=2))
    snapshot = RoundSnapshot.load(path, 1)

    targets = [prepare(snapshot, client, images=8, steps=3) for client in range(4)]

    assert snapshot.cohort == (0, 1)
    assert same(targets[3].victim.context.client_state, before.client_states[3].parts)
    if method != "moon":  # which keeps the first model
        assert not any(tensor.any() for tensor in targets[2].victim.context.client_state.values())
    for target in targets:
        assert cosine_distance(target.victim.observe(target.x, target.y), target.observed).item() < 1e-5


def test_only_who_knows_the_random_numbers_can_repeat_an_augmented_update(tmp_path: Path) -> None:
    path = run(tmp_path / "a", **ONE | METHODS["fedprox+fed-augmix"])
    snapshot = RoundSnapshot.load(path, 2)

    def cost(attacker: Any) -> float:
        target = prepare(snapshot, 1, images=4, steps=3, attacker=attacker)
        assert (len(target.y), target.steps) == (4, 3)
        return cosine_distance(target.victim.observe(target.x, target.y), target.observed).item()

    assert cost("knows") < 1e-5
    assert cost("guesses") > 1e-3
    assert cost("plain") > 1e-3
    assert cost("guesses") == cost("guesses")


def test_a_client_trains_on_so_many_of_its_images_so_many_times(made: Path) -> None:
    snapshot = RoundSnapshot.load(made, 0)
    target = prepare(snapshot, 2, images=3, steps=5)
    x, y = snapshot.setup.samples(2, 3)

    assert torch.equal(target.x, snapshot.setup.scale(x))
    assert torch.equal(target.y, y)
    assert [sorted(rows) for rows in target.victim.steps.rows(3)] == [[0, 1, 2]] * 5
    assert (target.victim.steps.momentum, target.victim.steps.lr) == (0.5, 0.05)
    assert prepare(snapshot, 2, images=3).steps == 1  # the run's epochs


def test_dropout_is_left_out_of_what_an_attacker_computes(tmp_path: Path) -> None:
    path = run(tmp_path / "a", **ONE | {"model": {"name": "mlp", "hidden": [8], "dropout": 0.5}})
    target = prepare(RoundSnapshot.load(path, 0), 0, images=2, steps=1)

    sent = [target.victim.observe(target.x, target.y) for _ in range(2)]

    assert same(*sent)


def test_the_command_attacks_prints_and_keeps(made: Path) -> None:
    before = contents(made)
    words = ("--round", 1, "--client", 3, "--images", 1, "--steps", 1, "--iterations", 150, "--labels", "inferred")

    told = succeeded(here("attack", made, *words))

    folder = made / "attacks" / "invgrad-round1-client3-1x1-guesses-inferred-iterations150"
    table = json.loads((folder / "attack.json").read_text())
    assert (folder / "images.png").read_bytes().startswith(PNG)
    assert table["psnr"] > 30
    assert f"{table['mse']:.4f}" in told.out
    assert f"{table['psnr']:.2f}" in told.out
    assert "images.png" in told.out
    names = ("round", "client", "images", "steps", "attack", "iterations", "stopped", "attacker")
    assert [table[n] for n in names] == [1, 3, 1, 1, "invgrad", 150, False, "guesses"]
    (each,) = table["each"]
    assert each["rebuilt_as"] == each["label"]
    assert (each["mse"], each["psnr"], each["ssim"]) == (table["mse"], table["psnr"], table["ssim"])
    assert read_attacks(RunDirectory(made)) == [table]
    assert {n: c for n, c in contents(made).items() if not n.startswith("attacks")} == before
    same_again = attack_run(made, 1, 3, images=1, steps=1, iterations=150, labels="inferred").table()
    assert same_again | {"seconds": 0} == table | {"seconds": 0}


def test_ctrl_c_ends_the_command_with_what_it_has(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any, restart: int, number: int, cost: torch.Tensor) -> None:
        if number == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(attack.CostProgress, "__call__", stop)
    words = ("--round", 0, "--client", 0, "--images", 2, "--out", tmp_path / "o")

    told = here("attack", made, *words)

    assert (told.code, "Traceback" in told.err) == (130, False)
    assert "stopped after 5 iterations" in told.err
    assert json.loads((tmp_path / "o" / "attack.json").read_text())["stopped"]
    assert (tmp_path / "o" / "images.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--round", 9, "--client", 0), ["round: 9", "valid: 0 to 2"]),
        (("--round", 2, "--client", 7), ["client: 7", "clients 0 to 3"]),
        (("--round", 2, "--client", 0, "--attack", "invgrat"), ["'invgrat' (did you mean 'invgrad'?)"]),
        (("--round", 2, "--client", 0, "--steps", 3), ["steps: 3", "give images"]),
        (("--round", 2, "--client", 0, "--images", 10**6), ["images: 1000000", "client 0 holds"]),
        (("--round", 2, "--client", 0, "--labels", "some"), ["labels: 'some'", "true, inferred"]),
        (("--round", 2, "--client", 0, "--attacker", "me"), ["attacker: 'me'", "guesses, plain, knows"]),
        (("--round", 2, "--client", 0, "--out", "/proc/none"), ["--out /proc/none"]),
    ],
)
def test_mistakes_end_in_one_message(words: tuple[object, ...], told: list[str], made: Path) -> None:
    refused(here("attack", made, *words), *told)


def test_runs_that_cannot_be_attacked_are_refused(tmp_path: Path) -> None:
    refused(here("attack", tmp_path, "--round", 0, "--client", 0), "holds no run")
    outputs = run(tmp_path / "fd", method="fd", rounds=1)
    refused(here("attack", outputs, "--round", 0, "--client", 0), "'outputs'", "no model")
    toy = run(tmp_path / "toy", data="toy", rounds=1, **iid(2, cohort=1))
    refused(here("attack", toy, "--round", 0, "--client", 0), "data: 'toy'", "rebuild images")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose clients send weights, means, mixed seeds, raw samples, and outputs; the first is attacked."""
    folder = tmp_path_factory.mktemp("study")
    methods = {
        "fedavg": {},
        "fedmix": {"method": {"name": "fedmix", "sharing": {"samples_per_mean": 5}}},
        "mixfld": {"method": {"name": "mixfld", "server_step": {"steps": 1}}},
        "raw": {"method": "global-mixup", "unsafe": True},
        "fd": {"method": "fd"},
    }
    for name, changes in methods.items():
        run(folder / name, **changes)
    attack_run(folder / "fedavg", 2, 0, images=2, steps=1, iterations=30).write()
    attack_run(folder / "fedavg", 2, 1, images=2, steps=1, iterations=30).write()
    return folder


def test_the_card_is_legible_in_eighty_columns(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = succeeded(here("leaks", study)).out
    assert "…" not in told
    tables = told.partition("MSE on the model's scale")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert re.search(r"MSE +PSNR +SSIM +recognised", tables)
    # Texts are folded between words.
    for text in ("weights: 4 tensors,", "2 clients,", "nearest raw sample", "5 (the run)"):
        assert text in tables
    firsts = [line.split()[0] for line in tables.splitlines() if line.startswith(" fd ")]
    assert firsts == ["fd", "fd"]  # once in what left, once in what was rebuilt


def test_the_card_tells_what_left_and_what_was_rebuilt(study: Path, tmp_path: Path) -> None:
    told = succeeded(here("leaks", study, "--out", tmp_path / "card"))

    kept = json.loads((tmp_path / "card" / "leaks.json").read_text())
    rows = {(row["run"], row["kind"]): row for row in kept["leaks"]}
    assert (tmp_path / "card" / "leaks.png").read_bytes().startswith(PNG)
    assert (tmp_path / "card" / "leaks.csv").read_text().count("\n") == len(kept["leaks"]) + 1
    assert set(rows) == {
        ("fedavg", "weights"), ("fedmix", "means"), ("fedmix", "weights"), ("mixfld", "seeds"), ("mixfld", "outputs"),
        ("raw", "raw"), ("raw", "weights"), ("fd", "outputs"),
    }  # fmt: skip
    weights, attacks = rows["fedavg", "weights"], read_attacks(RunDirectory(study / "fedavg"))
    for measure in ("mse", "psnr", "ssim"):
        assert weights[measure] == pytest.approx(np.mean([one[measure] for one in attacks]))
    assert "2 clients" in weights["how"]
    assert rows["raw", "raw"]["psnr"] == "inf"
    assert rows["raw", "weights"]["how"] == NOT_ATTACKED
    assert rows["raw", "weights"]["psnr"] is None
    assert rows["fd", "outputs"]["shape"] == "1 tensor, 100 numbers"
    assert rows["fedavg", "weights"]["shape"] == "4 tensors, 610 numbers"  # 64 x 8 + 8, 8 x 10 + 10
    for name in ("fedavg", "fedmix", "mixfld", "raw", "fd"):
        records = RunDirectory(study / name).metrics()
        sent = sum((Counter(record["bytes_up"]) for record in records), Counter())
        assert {kind: row["bytes"] for (of, kind), row in rows.items() if of == name} == sent
        assert {row["accuracy"] for (of, _), row in rows.items() if of == name} == {records[-1]["accuracy"]}
    assert "means by M_k" in told.out


def test_attacks_of_other_strength_are_kept_apart(tmp_path: Path) -> None:
    path = run(tmp_path / "run")
    cohort = RoundSnapshot.load(path, 1).cohort
    out = next(client for client in range(4) if client not in cohort)

    def attack(client: int, **options: Any) -> None:
        attack_run(path, 1, client, **{"images": 1, "steps": 1, "iterations": 3, **options}).write()

    def stop(restart: int, number: int, cost: torch.Tensor) -> None:
        if number == 3:
            raise KeyboardInterrupt

    for options in ({}, {"lr": 1e-4}, {"restarts": 2}, {"iterations": 4}):
        attack(cohort[0], **options)
    attack(out)
    attack(cohort[1], iterations=9, progress=stop)

    settings = ("", ", lr 0.0001", ", restarts 2", ", client not drawn", ", stopped")
    assert {(leak.kind, leak.how.partition("1 step, ")[2]) for leak in leak_report(RunDirectory(path)).leaks} == {
        *(("weights", f"3 iterations{setting}, 1 client") for setting in settings),
        ("weights", "4 iterations, 1 client"),
    }


def test_features_are_not_attacked_and_have_no_empty_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    toy = run(tmp_path / "toy", data="toy", rounds=1, **iid(2, cohort=1))
    told = succeeded(here("leaks", toy, "--out", tmp_path / "card"))
    assert NO_ATTACK in (tmp_path / "card" / "leaks.csv").read_text()
    assert not (tmp_path / "card" / "leaks.png").exists()
    assert "no figure, since nothing was rebuilt" in told.out
    assert re.search(r"run +what left +sent +test % +member", told.out)
    assert re.search(r"run +kind +rebuilt by *\n", told.out)  # no column of numbers, since nothing was rebuilt
    assert re.search(r"\battacks rebuild\b", told.out)


def test_the_figure_names_methods_once_and_its_note_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedblend.analysis.plotting.png_bytes", lambda figure: figure)
    leak = Leak("a", "a", 0.5, "weights", "", 1, 1, 1, "dlg", psnr=20.0)
    figure: Any = scatter_figures.draw_leaks([leak, *(replace(leak, run=f"run-{n}", psnr=math.nan) for n in range(2))])
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "from weights"]
    assert figure._supxlabel.get_text().endswith("Not measured: weights of a (2 runs)")

    unmeasured = [replace(leak, run=f"run-of-{n}", method=f"method-{n}", psnr=math.nan) for n in range(30)]
    figure = scatter_figures.draw_leaks([leak, *unmeasured])
    figure.canvas.draw()
    assert figure._supxlabel.get_window_extent().x1 < figure.bbox.x1


def test_means_are_remade_as_they_were_sent(study: Path) -> None:
    setup, state = make_setup(RunDirectory(study / "fedmix").experiment()), checkpoint.read(study / "fedmix")

    made, groups = _shared_means(setup, setup.experiment.method.sharing)

    x, number = torch.cat(made), torch.from_numpy(np.concatenate(groups))
    assert torch.equal(x, state.entries.tensors["x"])
    samples = setup.scale(setup.data.train.x[torch.from_numpy(setup.population.order)])
    for k in range(0, len(x), 9):  # each is the mean of the samples that it is said to be made of
        torch.testing.assert_close(x[k], samples[number == k].mean(0), rtol=1e-5, atol=1e-6)
        assert int((number == k).sum()) <= 5


def test_the_nearest_raw_sample_is_found_as_by_hand(study: Path) -> None:
    setup = make_setup(RunDirectory(study / "fedmix").experiment())
    sharing = setup.experiment.method.sharing
    made, groups = _shared_means(setup, sharing)
    x, number = torch.cat(made).double(), np.concatenate(groups)
    samples = setup.scale(setup.data.train.x[torch.from_numpy(setup.population.order)]).double()
    apart = (x[:, None] - samples[None]).square().flatten(2).mean(2)

    found = similarity_of_means(setup, sharing)

    assert found.samples == len(x) < 300  # all of them
    least, rows = apart.min(1)
    grey = float(setup.scale.factor.flatten()[0])
    assert found.mse == pytest.approx(float(least.mean()), rel=1e-4)
    assert found.distance == pytest.approx(float((64 * least).sqrt().mean()) / grey, rel=1e-4)
    assert found.recognised == pytest.approx(float((number[rows.numpy()] == np.arange(len(x))).mean()), abs=0.01)
    assert found.psnr == pytest.approx(
        float((-10 * (least / (grey * 255) ** 2).log10()).clamp(max=100).mean()), rel=1e-3
    )


def test_a_mean_of_one_sample_is_that_sample(tmp_path: Path) -> None:
    method = {"name": "fedmix", "sharing": {"samples_per_mean": 1}}
    path = run(tmp_path / "a", method=method, unsafe=True, policy={"min_mean": 1}, rounds=1)
    setup = make_setup(RunDirectory(path).experiment())

    near = similarity_of_means(setup, setup.experiment.method.sharing)

    assert (near.recognised, near.psnr) == (1.0, 100.0)
    assert near.ssim == pytest.approx(1.0)
    assert near.distance == pytest.approx(0.0, abs=1e-3)
    assert mean_sizes(setup, setup.experiment.method.sharing) == [1, 2, 3, 5, 10, 20, 50, "all"]
    assert recognised_by_chance(setup, 5) == pytest.approx(5 / len(setup.population.order))
    assert recognised_by_chance(setup, "all") == pytest.approx(1 / 4)


def test_means_within_a_class_of_several_labels_are_means_of_any_samples() -> None:
    """Data with several labels have no classes to split by, so that sharing groups them at random."""
    sharing = {"name": "means", "split": "class", "samples_per_mean": 4}
    halves = {half: replace(getattr(images(24), half), y=getattr(labelled(24), half).y) for half in ("train", "test")}
    data = replace(images(24), classes=(), labels=("a", "b", "c"), **halves)
    setup = made_of(data, [range(12), range(12, 24)], method={"name": "naivemix", "sharing": sharing})

    found = similarity_of_means(setup, setup.experiment.method.sharing)

    assert found.samples == 6


def test_larger_means_are_farther_from_raw_samples(study: Path) -> None:
    rows = leak_report(RunDirectory(study / "fedmix")).by_size

    assert [row["samples_per_mean"] for row in rows] == [2, 3, 5, 10, 20, 50, "all"]
    assert [row["own"] for row in rows] == [False, False, True, False, False, False, False]
    far = [row["distance"] for row in rows]
    assert far[0] < far[3] < far[-1]
    assert rows[0]["recognised"] > rows[4]["recognised"]


def test_the_figure_takes_the_most_that_anyone_got() -> None:
    def leak(kind: str, psnr: float) -> Leak:
        return Leak("r", "m", 0.5, kind, "", 1, 1, 1, "", psnr=psnr)

    found = strongest([leak("weights", 9.0), leak("weights", 12.0), leak("means", math.nan), leak("raw", math.inf)])

    assert [(one.kind, one.psnr) for one in found] == [("weights", 12.0), ("raw", math.inf)]


def test_a_damaged_attack_is_told(tmp_path: Path) -> None:
    (tmp_path / "attacks" / "x").mkdir(parents=True)
    (tmp_path / "attacks" / "x" / "attack.json").write_text('{"mse": 1')

    with pytest.raises(FedblendError, match=r"attack.json: is damaged"):
        read_attacks(RunDirectory(tmp_path))


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1), (1e30, 0)])
def test_batches_that_took_the_large_lambda_are_counted(threshold: float, share: int, tmp_path: Path) -> None:
    objective = {"large_lambda": 20.0, "threshold": threshold}
    path = run(tmp_path / "a", method={"name": "fed-augmix", "objective": objective})
    sizes = make_setup(RunDirectory(path).experiment()).sizes(0)
    told: list[int] = []

    rows = switches(path, lambda of_round: told.append(len(of_round)))

    cohorts = [record["cohort"] for record in RunDirectory(path).metrics()[1:]]
    assert [(row.round, row.client) for row in rows] == [(r, c) for r, them in enumerate(cohorts, 1) for c in them]
    assert [row.batches for row in rows] == [-(-int(sizes[row.client]) // 40) for row in rows]
    assert [row.large for row in rows] == [share * row.batches for row in rows]
    assert told == [2, 2]


def test_the_run_that_is_made_again_is_the_run(tmp_path: Path) -> None:
    path = run(tmp_path / "a", method={"name": "fed-augmix", "objective": {"large_lambda": 20.0}})
    setup = make_setup(RunDirectory(path).experiment())
    counter, engine = SwitchCounter(), LoopEngine(setup)
    engine.notes = True

    state = after_rounds(RoundLoop(setup, engine, [counter]), 2)[0]

    assert same(state.weights, weights(path))
    assert counter.rows


def test_a_warm_started_run_is_made_again_from_its_first_weights(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path / "warm", method="fed-augmix", start=str(made))
    begun: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(SwitchCounter, "on_updates", lambda self, task, result: begun.append(dict(task.weights)))
    switches(path)
    assert same(begun[0], weights(made))
