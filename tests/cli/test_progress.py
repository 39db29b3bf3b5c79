"""Progress of long work: remaining time, and lines outside a terminal."""

import pytest

from fedblend.cli import progress
from fedblend.cli.progress import RemainingTime, RunProgress, Steps
from fedblend.core.record import RoundRecord
from fedblend.experiment.config import Experiment


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_remaining_time_follows_the_pace_since_the_first_call(clock):
    remaining, texts = RemainingTime(), []

    for now, task, done in [(100, "a", 4), (106, "a", 6), (106, "b", 0), (108, "b", 5), (130, "a", 10), (131, "a", 3)]:
        clock.now = now
        texts.append(remaining.left(task, done, 10))

    # a: 2 steps in 6 s, 4 more; b: 5 in 2 s, 5 more; a finished or restarted task has no remaining time.
    assert texts == ["", "  12 s left", "", "  2 s left", "", ""]
    clock.now = 133
    assert remaining.left("a", 4, 10) == "  12 s left"


def test_a_task_that_begins_again_has_a_pace_of_its_own(clock):
    remaining, texts = RemainingTime(), []

    for now, done in [(100, 0), (110, 1), (120, 2), (120, 0), (121, 1), (122, 0), (125, 1)]:
        clock.now = now
        texts.append(remaining.left("clients attacked", done, 2))

    assert texts == ["", "  10 s left", "", "", "  1 s left", "", "  3 s left"]


def test_outside_a_terminal_a_line_comes_every_ten_seconds(clock, capsys):
    steps = Steps()

    for done in range(31):
        clock.now = 100 + done
        steps("dlg", done, 40, f"cost {done}")

    assert capsys.readouterr().err.splitlines() == ["dlg: 11/40  cost 11  29 s left", "dlg: 22/40  cost 22  18 s left"]


def runs_shown(*slugs):
    partition = {"name": "iid", "clients": 2}
    return RunProgress({n: Experiment(data="digits", partition=partition, model="mlp", rounds=9) for n in slugs}, {})


def choice(engine, stack, why):
    return {"engine": engine, "stack": stack, "ranks": 1, "memory_format": "contiguous", "why": why}


def test_the_engine_that_is_timed_is_named_every_ten_seconds(clock, capsys):
    with runs_shown("a") as shown:
        for now, engine in [(100, "1 stacked"), (104, "4 stacked"), (111, "8 stacked"), (112, "16 stacked")]:
            clock.now = now
            shown.step("a", f"timing engines: {engine}", 0, 0)

    assert capsys.readouterr().err.splitlines() == ["a: timing engines: 8 stacked"]


def test_steps_of_a_long_round_have_a_pace_and_those_of_a_short_one_are_not_shown(clock, capsys):
    with runs_shown("a") as shown:
        for now, done in [(100, 0), (101, 1), (104, 2), (108, 3), (114, 4)]:
            clock.now = now
            shown.step("a", "testing", done, 5)
        shown("a", RoundRecord(round=1))
        for clock.now in (115, 123):
            shown.step("a", "training", 0, 5)

    assert capsys.readouterr().err.splitlines() == ["a: testing 80%  4 s left", "a: round 1/9  0.0 MB sent"]


def test_costly_testing_is_told_once_with_its_remedies(capsys):
    with runs_shown("a", "b") as shown:
        shown("b", RoundRecord(round=8, machine={"seconds": {"train": 1.0, "evaluate": 50.0}}))  # little is left
        for round, testing in [(0, 90.0), (1, 1.0), (2, 5.0), (3, 9.0)]:
            shown("a", RoundRecord(round=round, machine={"seconds": {"train": 3.0, "evaluate": testing}}))

    told = [line for line in capsys.readouterr().err.splitlines() if "eval_" in line]
    assert told == [
        "a: testing takes 50% of the time; cheaper: eval_every (rounds between tests) or eval_samples (a fixed part of "
        "the test samples)"
    ]


def test_each_choice_of_an_engine_is_told_once(capsys):
    choices = {
        "a": choice("loop", None, "milliseconds per client step: loop 0.5"),
        "b": choice("stacked", 5, "milliseconds per client step: 5 stacked 1"),
        "c": choice("loop", None, "milliseconds per client step: loop 0.6"),
        "d": choice("stacked", 2, "as asked for"),
    }

    with runs_shown(*choices) as shown:
        for slug, chosen in choices.items():
            shown(slug, RoundRecord(round=1, machine={"engine": chosen}))

    assert [line for line in capsys.readouterr().err.splitlines() if "engine" in line] == [
        "a: engine loop (milliseconds per client step: loop 0.5)",
        "b: engine stacked, 5 clients at once (milliseconds per client step: 5 stacked 1)",
    ]
