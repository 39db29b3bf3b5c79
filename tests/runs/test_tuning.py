"""``fedblend tune``: budgets, early ends, interruptions, and the file with the best values."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_helpers import PNG, TINY, changed, contents, here, refused, write

import fedblend
from fedblend.cli.tune import begin_search, lines_of_ends, told_how_to_go_on
from fedblend.core.errors import FedblendError, Stopped
from fedblend.experiment.config import as_table, resolve
from fedblend.experiment.study import Tune
from fedblend.experiment.toml_tables import read_toml
from fedblend.runs import api, runner, tuning
from fedblend.runs.directory import RunDirectory, folders_of_parts, locked_study, runs_in
from fedblend.runs.tuning import MethodSearch, Trial, _best_file, _Chooser, tune

pytest.importorskip("optuna", reason="the extra 'tune' is not installed")

LR = {"low": 0.001, "high": 1.0, "log": True}


def search(**changes):
    """A file that searches the learning rate on samples of the server."""
    base = {"validation": {"server": 0.2}, "rounds": 3, "tune": {"trials": 3, "fields": {"train.lr": LR}}}
    return changed(changed(TINY, base), changes)


def scores(searches):
    """Values and outcomes of all trials."""
    return [[(one.values, one.score, one.round, one.rounds, one.pruned) for one in each.trials] for each in searches]


@pytest.mark.slow
def test_each_method_has_the_same_budget_and_only_its_own_fields(tmp_path):
    fields = {"train.lr": LR, "method.objective.lambda": [0.05, 0.2]}
    methods = ["fedavg", {"name": "fedmix", "sharing": {"samples_per_mean": 5}}]
    avg, mix = tune(search(methods=methods, tune={"trials": 3, "fields": fields}), tmp_path)
    assert [len(one.trials) for one in (avg, mix)] == [3, 3]
    assert list(avg.fields) == ["train.lr"]
    assert all(set(trial.values) == set(fields) for trial in mix.trials)
    for each in (avg, mix):
        runs = [RunDirectory(trial.folder) for trial in each.trials]
        assert [run.experiment().train.lr for run in runs] == [trial.values["train.lr"] for trial in each.trials]
        # The score is the validation score of the best round, as the records have it.
        for trial, run in zip(each.trials, runs, strict=True):
            by_round = {r.round: r.score_of("accuracy", validation=True) for r in run.records()}
            assert trial.score == by_round[trial.round] == max(score for n, score in by_round.items() if n)
        assert each.best.score == max(trial.score or 0 for trial in each.trials)
    best = api.expand_file(tmp_path / "best.toml", (), None).experiments
    assert {name: one.train.lr for name, one in best.items()} == {
        "fedavg-seed0": avg.best.values["train.lr"],
        "fedmix-seed0": mix.best.values["train.lr"],
    }
    assert best["fedmix-seed0"].method.objective.lam == mix.best.values["method.objective.lambda"]
    assert best["fedmix-seed0"].method.sharing.samples_per_mean == 5


def test_a_field_that_no_method_has_is_refused_and_a_term_has_its_name_in_the_path(tmp_path):
    def fields(path):
        table = search(rounds=1, methods=["fedavg", "fedprox"], tune={"trials": 1, "fields": {"train.lr": LR}})
        table["tune"]["fields"][path] = [0.5]
        return write(tmp_path / "x.toml", table)

    said = "tune.fields: no method of the file has 'method.terms.mu' (did you mean 'method.terms.proximal.mu'?)"
    refused(here("tune", fields("method.terms.mu"), "--out", tmp_path / "out"), said)
    assert here("tune", fields("method.terms.proximal.mu"), "--out", tmp_path / "out").code == 0
    best = api.expand_file(tmp_path / "out" / "best.toml", (), None).experiments
    assert best["fedprox-seed0"].method.terms[0].mu == 0.5


@pytest.mark.slow
def test_an_interrupted_search_goes_on_to_the_same_result(tmp_path):
    whole = tune(search(), tmp_path / "whole")
    trials = []

    def interrupt(label, trial, most):
        trials.append(trial)
        if len(trials) == 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        tune(search(), tmp_path / "again", interrupt)
    before = {name: content for name, content in contents(tmp_path / "again").items() if "metrics" in name}
    again = tune(search(), tmp_path / "again")
    assert scores(again) == scores(whole)
    after = contents(tmp_path / "again")
    assert all(after[name] == content for name, content in before.items())


def test_a_grid_tries_each_combination_once_and_a_budget_of_rounds_ends_a_search(tmp_path):
    fields = {"train.lr": [0.1, 0.01], "train.batch_size": [20, 40]}
    (each,) = tune(search(tune={"search": "grid", "trials": 9, "fields": fields}), tmp_path / "grid")
    tried = sorted(tuple(trial.values.values()) for trial in each.trials)
    assert tried == [(0.01, 20), (0.01, 40), (0.1, 20), (0.1, 40)]
    (few,) = tune(search(tune={"trials": 9, "rounds": 4, "fields": {"train.lr": LR}}), tmp_path / "rounds")
    assert [trial.rounds for trial in few.trials] == [3, 3]  # the second begins before the budget is spent


def test_a_search_that_goes_on_counts_the_minutes_of_earlier_trials(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def execute(*given, **named):
        clock.now += 60
        return runner.execute(*given, **named)

    def interrupt(label, trial, most):
        if label == "fedprox":
            raise Stopped("enough")

    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(tuning, "execute", execute)
    table = search(
        methods=["fedavg", "fedprox"], rounds=1, tune={"trials": 9, "minutes": 2, "fields": {"train.lr": LR}}
    )
    with pytest.raises(Stopped):
        tune(table, tmp_path, interrupt)
    first = tune(table, tmp_path)
    assert [len(each.trials) for each in first] == [2, 2]
    assert scores(tune(table, tmp_path)) == scores(first)
    # A killed process, or an earlier version, noted no seconds: those of the rounds count.
    (tmp_path / tuning.SECONDS).unlink()
    for each in first:
        for trial in each.trials:
            lines = RunDirectory(trial.folder).metrics()
            lines[-1]["machine"]["seconds"] = {"train": 60.0}
            (trial.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert scores(tune(table, tmp_path)) == scores(first)


@pytest.mark.slow
def test_halving_ends_trials_early_and_they_stay_ended(tmp_path):
    fields = {"train.lr": [0.2, 1e-6, 2e-6, 3e-6]}
    table = search(rounds=9, tune={"search": "grid", "halving": True, "fields": fields})
    (each,) = tune(table, tmp_path)
    assert any(trial.pruned for trial in each.trials)
    assert all(trial.rounds < 9 for trial in each.trials if trial.pruned)
    assert not each.best.pruned
    assert each.best.values == {"train.lr": 0.2}
    assert scores(tune(table, tmp_path)) == scores([each])


@pytest.mark.parametrize(
    ("rounds", "every", "end"),
    [(9, 1, 3), (10, 1, 3), (31, 5, 10), (31, 30, 30), (30, 30, None), (2, 1, 1), (1, 1, None)],
)
def test_halving_ends_trials_once_after_a_third_and_never_in_the_last_round(rounds, every, end):
    fields = {"train.lr": [0.1, 0.2, 0.3, 0.4]}
    chooser = _Chooser(Tune(fields=fields, halving=True), fields, resolve({**TINY, "rounds": rounds}))
    evaluated = [round for round in range(1, rounds + 1) if round % every == 0 or round == rounds]
    ended = []
    # Rising trials are each the best one up to the first evaluated round after a third, and the worst one after it.
    for sign in (1, 1, 1, 1, -1):
        asked, values = chooser.ask()
        ends = chooser.prunes(asked)
        place = len(ended) * sign
        scored = [(round, place if round == end else -place) for round in evaluated]
        ended.append(next((round for round, score in scored if ends(round, score)), None))
        chooser.tell(asked, Trial(Path(), values, 0.5, rounds, rounds, ended[-1] is not None), True)
    assert ended == [None, None, None, None, end]


def test_a_trial_with_all_rounds_was_not_ended_early_whatever_its_status_says(tmp_path):
    """Earlier versions could end a trial after its last round."""
    table = search(tune={"trials": 1, "halving": True, "fields": {"train.lr": LR}})
    (each,) = tune(table, tmp_path)
    RunDirectory(each.trials[0].folder).set_status("done", 3, "ended by on_round")
    assert scores(tune(table, tmp_path)) == scores([each])
    assert not each.trials[0].pruned


def test_a_best_value_at_an_end_of_its_list_is_told():
    def found(values, best):
        trials = [Trial(Path(), {"train.lr": one}, float(one == best), 1, 1) for one in values]
        return MethodSearch("fedavg", {"train.lr": values}, trials=trials)

    ends = [found([0.3, 0.01, 0.1], one).at_an_end.get("train.lr") for one in (0.3, 0.01, 0.1)]
    assert ends == ["largest", "smallest", None]
    assert not found([0.3, 0.01], 0.3).at_an_end  # of two, each one is at an end
    assert not found(["a", "b", "c"], "c").at_an_end
    assert not MethodSearch("fedavg", {"train.lr": [1, 2, 3]}).at_an_end
    both = [found([1, 2, 3], 3), found([1, 2, 3], 3), found([1, 2, 3], 2)]
    (line,) = lines_of_ends(both)
    assert line.startswith("The largest train.lr tried was the best one of fedavg, fedavg; a larger one may be better")


@pytest.mark.slow
def test_the_command_writes_a_table_a_figure_and_a_file_that_runs(tmp_path):
    (tmp_path / "x.toml").write_bytes(write(tmp_path / "y.toml", search()).read_bytes())
    told = here("tune", tmp_path / "x.toml", "--out", tmp_path / "found")
    assert told.code == 0, told.err
    assert "3/3: train.lr=" in told.err
    with open(tmp_path / "found" / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert {0.001 <= json.loads(row["values"])["train.lr"] <= 1.0 for row in rows} == {True}
    assert (tmp_path / "found" / "tune.png").read_bytes().startswith(PNG)
    assert here("run", tmp_path / "found" / "best.toml", "--out", tmp_path / "best", "--jobs", 1).code == 0
    refused(here("tune", tmp_path / "x.toml", "--out", tmp_path / "found"), "add --resume to go on")
    assert here("tune", tmp_path / "x.toml", "--out", tmp_path / "found", "--resume").code == 0
    assert read_toml(tmp_path / "found" / "best.toml")["data"] == {"name": "digits"}


def test_fields_of_the_command_line_are_set_as_in_a_run(tmp_path):
    table = search(rounds=1, seeds=[0, 1], tune={"trials": 1, "minutes": 9, "fields": {"train.lr": [0.1]}})
    words = ("--set", "seed=7", "--set", "scale=none", "--set", "tune.minutes=none")

    done = here("tune", write(tmp_path / "x.toml", table), *words, "--out", tmp_path / "out")

    assert done.code == 0, done.err
    (trial,) = runs_in(tmp_path / "out" / "fedavg")
    made = RunDirectory(trial).experiment()
    assert (made.seed, made.scale.name) == (7, "none")
    (best,) = api.expand_file(tmp_path / "out" / "best.toml", (), None).experiments.values()
    assert (best.seed, best.scale.name) == (7, "none")
    searched, _ = begin_search("tune", tmp_path / "x.toml", [("tune.minutes", None)], False, tmp_path / "other")
    assert searched["tune"] == {"trials": 1, "fields": {"train.lr": [0.1]}}


def test_a_file_with_a_search_runs_with_its_own_values_and_a_note(tmp_path):
    file = write(tmp_path / "x.toml", search(train={"lr": 0.03}))
    ran = here("run", file, "--out", tmp_path / "runs", "--jobs", 1)
    assert ran.code == 0, ran.err
    assert (
        f"[tune] has no effect here, and its fields have the file's values; to search: fedblend tune {file}" in ran.err
    )
    (one,) = runs_in(tmp_path / "runs")
    assert RunDirectory(one).experiment().train.lr == 0.03
    plain = write(tmp_path / "y.toml", {key: value for key, value in search().items() if key != "tune"})
    assert "tune" not in here("run", plain, "--out", tmp_path / "plain", "--jobs", 1).err
    wrong = write(tmp_path / "z.toml", search(tune={"search": "rando"}))
    refused(here("run", wrong), "tune.search: 'rando' is not valid")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"validation": {"server": 0.0}}, "validation: no samples are kept for validation"),
        ({"tune": 3}, "tune: is missing"),
        ({"tune": {"fields": {"train.lr": {"low": 2, "high": 1}}}}, "is no interval"),
        ({"tune": {"fields": {"train.lr": {"low": 0, "high": 1, "log": True}}}}, "valid: low above 0 and below high"),
        ({"tune": {"search": "grid"}}, "search = 'grid' needs a list of values"),
        ({"grid": {"train.lr": [1]}}, "grid: not valid beside 'tune'"),
        (
            {"tune": {"fields": {"train.l": [1.0]}}},
            "tune.fields: no method of the file has 'train.l' (did you mean 'train.lr'?)",
        ),
        (
            {"tune": {"fields": {"seed": [0, 1]}}},
            "tune: fields.seed: a search would choose the seed; valid: seeds = [0, 1, 2] for the best values",
        ),
        ({"tune": {"fields": {"train.lr": [-1.0]}}}, "none of 3 trials succeeded: train.lr"),
    ],
)
def test_bad_searches_end_in_one_message(changes, said, tmp_path):
    table = search(**changes)
    if isinstance(changes.get("tune"), dict) and "fields" in changes["tune"]:
        table["tune"]["fields"] = changes["tune"]["fields"]
    with pytest.raises(FedblendError) as error:
        tune(table, tmp_path)
    assert said in str(error.value)


def test_defaults_of_trials():
    assert [Tune(fields={"a": [1, 2, 3]}, search=way).trials_of({"a": [1, 2, 3]}) for way in ("grid", "tpe")] == [3, 20]


def test_a_search_does_not_go_on_with_trials_of_another_experiment_nor_beside_another_search(tmp_path):
    tune(search(), tmp_path)
    with locked_study(tmp_path), pytest.raises(FedblendError, match="in use by another process"):
        tune(search(), tmp_path)
    with pytest.raises(FedblendError, match=r"train\.batch_size: 5 differs from .* a run goes on with the experiment"):
        tune(search(train={"batch_size": 5}), tmp_path)


def test_a_search_is_corrected_after_its_trial_failed_before_it_began(tmp_path):
    table = search(tune={"trials": 1})
    (one,) = tune(table, tmp_path / "first")
    folder = tmp_path / "second" / one.trials[0].folder.relative_to(tmp_path / "first")
    runner.keep_failure(folder, resolve({**TINY, "train": {"lr": 7}}), "a slip in the user's model")
    assert scores(tune(table, tmp_path / "second")) == scores([one])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(3, 5), (5, 3)])
def test_finished_trials_have_the_rounds_that_the_file_has_now(before, now, tmp_path):
    tune(search(rounds=before), tmp_path / "again")
    again, whole = (tune(search(rounds=now), tmp_path / name) for name in ("again", "whole"))
    assert scores(again) == scores(whole)


def test_a_smaller_loss_is_better_and_a_trial_that_diverges_has_no_score(tmp_path):
    table = search(
        validation={"server": 0.2, "metric": "loss"},
        train={"lr_decay": 1.0},
        tune={"search": "grid", "fields": {"train.lr": [1e18, 1e-6, 0.1]}},
    )
    (each,) = tune(table, tmp_path)
    assert each.best.values == {"train.lr": 0.1}
    assert sum(trial.score is None for trial in each.trials) == 1


def test_a_trial_that_reaches_its_target_was_not_ended_early(tmp_path):
    table = search(target=0.0, stop_at_target=True, tune={"trials": 2, "fields": {"train.lr": LR}})
    (each,) = tune(table, tmp_path)
    assert [(trial.rounds, trial.pruned) for trial in each.trials] == [(1, False)] * 2
    (later,) = tune({**table, "target": 1.0}, tmp_path)
    assert [(trial.rounds, trial.pruned) for trial in later.trials] == [(table["rounds"], False)] * 2


@pytest.mark.parametrize("second_value", [{"name": "adam"}, "adam"])
def test_values_that_are_parts_leave_nothing_to_the_next_method(second_value, tmp_path):
    values = [{"name": "adam", "eps": 1e-3}, second_value]
    methods = ["fedavg", "fedprox"]
    first, second = ([{"train.optimizer": value}] for value in values)
    searches = [
        MethodSearch(name, {"train.optimizer": values}, trials=[Trial(tmp_path, one[0], 1.0, 1, 1)])
        for name, one in zip(methods, (first, second), strict=True)
    ]
    plain = {key: value for key, value in search().items() if key not in ("tune", "method")}
    (tmp_path / "best.toml").write_text(_best_file(plain, methods, searches))
    made = api.expand_file(tmp_path / "best.toml", (), None).experiments
    assert [one.train.optimizer.eps for one in made.values()] == [1e-3, 1e-8]


def test_a_method_of_ones_own_needs_no_name(tmp_path):
    terms = [{"name": "proximal", "mu": 0.1}]
    methods = ["fedmix", {"label": "near", "terms": terms}]
    tune(search(methods=methods, tune={"trials": 1, "fields": {"train.lr": LR}}), tmp_path)
    made = api.expand_file(tmp_path / "best.toml", (), None).experiments
    assert list(made) == ["fedmix-seed0", "near-seed0"]
    near = as_table(made["near-seed0"])["method"]
    assert (near["objective"]["name"], near["terms"]) == ("plain", terms)


def test_the_best_file_runs_where_it_lies(tmp_path):
    """Two methods of one name, and a run to begin with."""
    methods = [{"name": "fedprox", "terms": [{"name": "proximal", "mu": mu}]} for mu in (0.01, 1.0)]
    table = search(
        methods=methods, start=str(tmp_path / "first" / "run"), tune={"trials": 1, "fields": {"train.lr": LR}}
    )
    first = {key: value for key, value in table.items() if key not in ("methods", "tune", "start")}
    fedblend.run(resolve(first), out=tmp_path / "first" / "run")

    tune(table, tmp_path / "search")

    study = api.expand_file(tmp_path / "search" / "best.toml", (), None)
    assert len(study.experiments) == 2
    assert {one.start for one in study.experiments.values()} == {str(tmp_path / "first" / "run")}


def test_a_file_of_a_search_finds_networks_of_its_trials(tmp_path):
    trial = tmp_path / "search" / "fedavg" / "trial-1"
    trial.mkdir(parents=True)
    (trial / "config.toml").write_text("")
    (trial / "facts.json").write_text(json.dumps({"import_from": [str(tmp_path / "nets")]}))
    assert folders_of_parts(tmp_path / "search") == []
    with locked_study(tmp_path / "search"):
        assert folders_of_parts(tmp_path / "search") == [str(tmp_path / "nets")]
    assert folders_of_parts(trial) == [str(tmp_path / "nets")]


def test_ctrl_c_names_the_command_that_goes_on_with_the_whole_search(tmp_path):
    command = told_how_to_go_on("advise", Path("my.toml"), Path("a folder"))
    with pytest.raises(Stopped, match=r"Go on with: fedblend advise my.toml --resume --out 'a folder'$"), command:
        raise Stopped("fedblend resume a folder/search/trial-1")
