"""Items of papers: they are complete, their numbers are the papers', and claims are judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import each, slow_except
from reproduce_helpers import ITEMS, RUNNABLE

from fedblend.core.errors import FedblendError
from fedblend.methods.augment.pictures import HorizontalFlip
from fedblend.papers import claims, formatting
from fedblend.papers.items import SCALES, Item, Line, all_papers, item_names, read_paper
from fedblend.papers.plan import _given, fingerprint, plan_item
from fedblend.papers.result import paper_numbers
from fedblend.papers.verdicts import judge

EVERY_TABLE = {
    "fedmix": "table-1 figure-2 table-2 table-3 table-4 table-5 figure-3 table-6 table-7 table-9 figure-4 table-10 "
    "appendix-g table-11 table-12 table-13 table-14 table-15 table-16 table-17 table-18",
    "aggenhance": "table-1 figure-5 figure-2 figure-3 figure-6 figure-7 figure-8 figure-9 figure-11 figure-13 "
    "figure-16 figure-10 figure-14 figure-15",
    "mix2fld": "figure-2 figure-3 table-2 table-3 payload",
    "xormixfl": "table-2 figure-2 figure-3 table-3 table-4",
    "fed-augmix": "table-2 table-3 figure-3 figure-8 figure-9 figure-4 figure-5 figure-6 figure-7",
}
"""Every table and figure of the papers that shows a result."""


def item(paper: str, name: str) -> Item:
    return all_papers()[paper].items[name]


def test_every_table_and_figure_of_the_papers_is_an_item() -> None:
    wanted = {f"{paper}/{name}" for paper, all_names in EVERY_TABLE.items() for name in all_names.split()}

    assert {name for name in item_names() if "/choice-" not in name} == wanted


@each(
    ("name", "quantity", "row", "column", "number"),
    [
        ("fedmix/table-1", "accuracy", "fedmix", "cifar10", 81.2),
        ("fedmix/table-1", "rounds", "fedprox-localmix", "femnist", 39),
        ("fedmix/table-7", "accuracy", "fedmix", "0.25", 80.5),  # 81.2 elsewhere: the paper's numbers disagree
        ("fedmix/table-18", "accuracy", "global", "0.5", 91.1),
        ("aggenhance/table-1", "rounds", "fedavg-enhanced", "voc", 23),
        ("mix2fld/table-3", "privacy", "cifar10", "0.49", 10.143),
        ("xormixfl/table-4", "target", "xor-5", "3,4/0.95", 68.95),
        ("fed-augmix/table-2", "psnr", "cifar100-converged", "10.0", 9.393),
    ],
)
def test_a_papers_number_stands_at_its_row_and_column(
    name: str, quantity: str, row: str, column: str, number: float
) -> None:
    assert paper_numbers(item(*item_names()[name]), quantity)[row, column] == number


@each(("paper", "name"), ITEMS)
def test_the_papers_own_numbers_bear_its_claims_out(paper: str, name: str) -> None:
    for claim in item(paper, name).claims:
        quantity = claim.of or next(iter(item(paper, name).quantities))
        numbers = paper_numbers(item(paper, name), quantity)
        read = claims.parse_claim(claim.holds, list(item(paper, name).rows), list(item(paper, name).all_columns))

        verdict = claims.judge_claim(read, numbers, {}, claim.where, paper=numbers)
        if claim.up_to:  # of one column, the best
            verdict = (
                claims.Verdict(dict([max(verdict.lines.items(), key=lambda one: one[1].margin)]), (0, 0))
                if verdict.lines
                else verdict
            )

        if claim.differs:
            assert verdict.word in ("holds in part", "does not hold"), claim.says
        else:
            assert verdict.word in ("holds", "not measured"), claim.says


@pytest.mark.parametrize("name", slow_except(RUNNABLE[::6], RUNNABLE))
def test_an_item_has_sound_experiments_at_every_scale(name: str) -> None:
    for scale in SCALES:
        made = plan_item(name, scale)
        assert made.cells
        # Smaller scales list their differences; the paper's scale has none.
        assert bool(made.smaller()) is (scale != "paper" or bool(made.item.smaller)) or scale == "laptop"


def test_a_laptop_replaces_data_only_where_the_heading_says_so() -> None:
    made = plan_item("aggenhance/figure-8", "laptop")

    assert {cell.other_data for cell in made.cells} == {("mnist5k", "mnist")}
    assert "data: mnist5k, not mnist" in made.smaller()
    assert "rounds: 20, not 60" in made.smaller()
    own = plan_item("fedmix/table-5", "laptop")
    assert {cell.other_data for cell in own.cells} == {None}
    assert "rounds: 40, not 500" in own.smaller()


def test_a_fingerprint_names_what_an_experiment_states_and_no_defaults() -> None:
    cell = plan_item("fedmix/table-5", "laptop").cells[0]
    train = cell.experiment.train

    stated = _given(cell.experiment)

    assert stated["data"] == {"name": "cifar10"}
    assert stated["train"] == {"cohort": 15}  # the paper's other settings of local training are the defaults
    assert "augment" not in stated["train"]
    assert fingerprint(cell.experiment.model_copy(update={"name": "other", "seed": 3})) == cell.fingerprint
    changed = train.model_copy(update={"augment": (HorizontalFlip(),)})
    assert fingerprint(cell.experiment.model_copy(update={"train": changed})) != cell.fingerprint


def test_an_untrained_model_stays_untrained_where_rounds_are_scaled_down() -> None:
    for scale in SCALES:
        rounds = {cell.row: cell.experiment.rounds for cell in plan_item("fed-augmix/table-2", scale).cells}
        assert rounds["mnist-untrained"] == 0
        assert rounds["mnist-converged"] >= 1


def test_a_file_with_too_few_numbers_in_a_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "mine"\n[bases.a]\n[items.t]\ntitle = "t"\nbase = "a"\ngrid = { rounds = [1, 2] }\nrows = { x = {} }\n'
        '[items.t.quantities.q]\nlabel = "q"\nmeasure = "accuracy"\npaper = { x = [1] }\n'
    )

    with pytest.raises(FedblendError, match=r"items\.t\.quantities\.q: row 'x' has 1 numbers, but there are 2 columns"):
        read_paper(path)


def test_what_several_items_or_claims_have_stands_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'title = "mine"\nbases = {}\nrows.a = { label = "A", method = "fedavg" }\n'
        'quantities.q = { label = "Q", measure = "accuracy", digits = 2 }\n'
        '[items.t]\ntitle = "t"\nnote = "n"\nrows = ["a"]\nquantities = ["q"]\n'
        '[items.u]\nlike = "t"\ntitle = "u"\n[items.u.rows]\n'
        'a = { label = "B" }\nb = { like = "a", method = "fedmix" }\nc = {}\n'
        '[[items.u.claims]]\nsays = "s"\nholds = "a > b"\n'
        'choices = [{ choice = "1" }, { choice = "2", holds = "a < b" }]\n'
    )

    first, second = read_paper(tmp_path / "mine.toml").items.values()

    assert (second.title, second.note, second.quantities["q"].digits) == ("u", "n", 2)
    assert [(one.says, one.holds, one.choice) for one in second.claims] == [("s", "a > b", "1"), ("s", "a < b", "2")]
    assert first.rows == {"a": Line(label="A", method="fedavg")}
    assert second.rows == {
        "a": Line(label="B", method="fedavg"), "b": Line(label="A", method="fedmix"), "c": Line()
    }  # fmt: skip


@each(
    ("text", "told"),
    [
        ('items.t.rows = ["fedavgg"]', "items.t.rows: there is no 'fedavgg' (did you mean 'fedavg'?)"),
        ('items.t.rows.a.like = "fedavgg"', "items.t.rows.a.like: there is no 'fedavgg'"),
        ('items.t.quantities = ["q"]', "items.t.quantities: there is no 'q'"),
        ('items.t.like = "t"', "items.t.like: there is no 't'"),
        ('bases.b.like = "c"', "bases.b.like: there is no 'c'"),
    ],
)
def test_a_name_that_stands_nowhere_is_told_with_its_field(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'title = "mine"\nrows.fedavg = {{ label = "A" }}\n{text}\n')
    with pytest.raises(FedblendError) as caught:
        read_paper(path)
    assert str(caught.value).startswith(f"{path}: {told}")


CELLS = {("a", "1"): 5.0, ("b", "1"): 3.0, ("a", "2"): 2.0, ("b", "2"): 3.0}


@each(
    ("text", "where", "margins", "word"),
    [
        ("a > b", None, {"1": 2.0, "2": -1.0}, "holds in part"),
        ("a > b", ["1"], {"1": 2.0}, "holds"),
        ("b > a", ["1"], {"1": -2.0}, "does not hold"),
        ("a - b >= 2", ["1"], {"1": 0.0}, "holds"),
        ("6 > a > b", None, {"1": 1.0, "2": -1.0}, "holds in part"),
        ("@1 >= @2", None, {"a": 3.0, "b": 0.0}, "holds"),
        ("a@1 > 2 * a@2", None, {"": 1.0}, "holds"),
        ("mean:a > mean:b", None, {"": 0.5}, "holds"),
        ("spread:b < spread:a", None, {"": 3.0}, "holds"),
        ("max:@2 <= 3", None, {"": 0.0}, "holds"),
        ("min:* >= max:b*", None, {"": -1.0}, "does not hold"),  # 2 of all rows, 3 of those that begin with b
        ("a@1 > max:a", None, {"": 3.0}, "holds"),  # 5 against 2, the best of the others
        ("a@2 <= min:@2", None, {"": 1.0}, "holds"),
        ("a@1 >= mean:a", None, {"": 1.5}, "holds"),  # a mean is of all
        ("b > a < 6", None, {"1": -2.0, "2": 1.0}, "holds in part"),
        ("( a@1 - a@2 ) / b@1 >= 1", None, {"": 0.0}, "holds"),
    ],
)
def test_a_claim_is_judged_at_each_place(
    text: str, where: list[str] | None, margins: Mapping[str, float], word: str
) -> None:
    verdict = claims.judge_claim(claims.parse_claim(text, ["a", "b"], ["1", "2"]), CELLS, {}, where)

    assert {line: check.margin for line, check in verdict.lines.items()} == margins
    assert verdict.word == word


@each(
    ("name", "words", "numbers"),
    [
        ("fedmix/table-1", "LocalMix and FedProx", {"fedmix": 5.0, "localmix": 9.0, "fedprox": 4.0}),
        ("fedmix/table-2", "LocalMix is the lowest", {"localmix": 5.0, "fedavg": 6.0, "global": 7.0, "fedprox": 4.0}),
        ("xormixfl/table-2", "MixFL, which", {"mixfl": 5.0, "vanilla": 4.0, "standalone": 6.0, "xormixfl": 3.0}),
        ("mix2fld/figure-2", "FL has the highest", {"fl": 5.0, "fd": 4.0, "mixfld-50": 3.0, "mix2fld-50-100": 6.0}),
        ("mix2fld/figure-2", "FL has the highest", {"fl": 5.0, "fd": 6.0, "mixfld-50": 3.0, "mix2fld-50-100": 4.0}),
        ("xormixfl/table-3", "lowest mean of XorMixFL", {"xor-1": 9.0, "xor-3": 6.0, "mixfl-1": 7.0, "mixfl-3": 5.0}),
    ],
)
def test_a_claim_about_several_rows_fails_by_one_of_them(name: str, words: str, numbers: Mapping[str, float]) -> None:
    (claim,) = (one for one in item(*item_names()[name]).claims if words in one.says)

    ours = {(row, "x"): n for row, n in numbers.items()}
    verdict = claims.judge_claim(claims.parse_claim(claim.holds), ours, {}, paper=ours)

    assert [check.margin for check in verdict.lines.values()] == [-1.0]
    assert verdict.word == "does not hold"


def test_the_nearest_row_is_chosen_by_the_papers_number_in_each_column() -> None:
    """Means 80 and 90 beside the paper's 84 in x, and 60 and 81 beside 80 in y: the first row in x, the second in y."""
    ours = {("b-2", "x"): 80.0, ("b-10", "x"): 90.0, ("b-2", "y"): 60.0, ("b-10", "y"): 81.0}
    ours |= {("a", "x"): 85.0, ("a", "y"): 85.0}
    paper = {(row, column): 84.0 if column == "x" else 80.0 for row in ("b-2", "b-10") for column in "xy"}
    claim = claims.parse_claim("a > nearest:b-*", ["a", "b-2", "b-10"], ["x", "y"])

    verdict = claims.judge_claim(claim, ours, {}, paper=paper)
    by_seed = judge("a > nearest:b-*", {0: ours, 1: ours}, ["x", "y"], paper=paper)

    assert {line: check.margin for line, check in verdict.lines.items()} == {"x": 5.0, "y": 4.0}
    assert {line: one.margins for line, one in by_seed.lines.items()} == {"x": (5.0, 5.0), "y": (4.0, 4.0)}
    assert (
        claims.judge_claim(claim, ours, {}).word == "not measured"
    )  # without the paper's number no row is the nearest


def test_a_target_that_neither_side_reached_leaves_a_claim_undecided() -> None:
    never = {("a", ""): math.inf, ("b", ""): math.inf}
    claim = claims.parse_claim("a < b", ["a", "b"], [""])

    assert claims.judge_claim(claim, never, {}).word == "undecided"
    assert claims.judge_claim(claim, never | {("a", ""): 3.0}, {}).word == "holds"
    assert claims.judge_claim(claim, never | {("b", ""): 3.0}, {}).word == "does not hold"


def test_a_claim_that_is_undecided_somewhere_holds_in_part() -> None:
    cells = {("a", "x"): 1.0, ("b", "x"): 2.0, ("a", "y"): math.inf, ("b", "y"): math.inf}

    verdict = claims.judge_claim(claims.parse_claim("a < b", ["a", "b"], ["x", "y"]), cells, {})
    places = {line: [check.holds, check.margin] for line, check in verdict.lines.items()}
    claim = {"verdict": verdict.word, "places": places, "seeds": [1, 2], "paper": "holds"}

    assert verdict.word == "holds in part"
    assert formatting.verdict_text(claim, {"other_data": [], "scale": "paper"}) == "holds in x; undecided in y"


def test_a_claim_counts_the_seeds_in_which_it_holds() -> None:
    by_seed = {0: {("a", ""): 1.0, ("b", ""): 0.0}, 1: {("a", ""): 1.0, ("b", ""): 2.0}, 2: {("a", ""): 1.0}}
    means = {("a", ""): 1.0, ("b", ""): 1.0}

    verdict = claims.judge_claim(claims.parse_claim("a > b", ["a", "b"], [""]), means, by_seed)

    assert verdict.seeds == (1, 2)
    assert verdict.word == "does not hold"


def test_means_of_a_claim_are_over_the_seeds_that_all_of_its_cells_have() -> None:
    by_seed = {0: {("a", ""): 50.0, ("b", ""): 60.0}, 1: {("a", ""): 90.0}, 2: {("a", ""): 90.0}}
    means = {("a", ""): 230 / 3, ("b", ""): 60.0}

    verdict = claims.judge_claim(claims.parse_claim("a > b", ["a", "b"], [""]), means, by_seed)

    assert verdict.word == "does not hold"
    assert verdict.lines[""].margin == -10.0
    assert verdict.seeds == (0, 1)


@each("text", ["spread:a <= 1", "min:a > 5", "mean:a > 5", "b@1 < max:a", "b < max:@2"])
def test_a_reduced_operand_without_all_of_its_cells_is_not_measured(text: str) -> None:
    by_seed = {seed: {("a", "1"): 10.0, ("b", "1"): 1.0} for seed in (0, 1)}
    claim, table = claims.parse_claim(text, ["a", "b"], ["1", "2"]), list(itertools.product("ab", "12"))

    assert claims.judge_claim(claim, by_seed[0], by_seed, None, table).word == "not measured"
    whole = {cell: 10.0 if cell[0] == "a" else 1.0 for cell in table}
    assert claims.judge_claim(claim, whole, {0: whole, 1: by_seed[1]}, None, table).word == "holds"


def test_a_seed_without_all_cells_of_a_smallest_number_does_not_count() -> None:
    by_seed = {0: {("a", "1"): 10.0, ("a", "2"): 1.0}, 1: {("a", "1"): 10.0}}

    verdict = claims.judge_claim(claims.parse_claim("min:a > 5", ["a"], ["1", "2"]), by_seed[0], by_seed)

    assert (verdict.word, verdict.seeds) == ("does not hold", (0, 1))


@each(
    ("text", "message"),
    [
        ("a > c", "no row 'c'"),
        ("min:c* > b", r"no row 'c\*'"),
        ("a* > b", r"no row 'a\*'"),
        ("b@1 < max:@2*", r"no column '2\*'"),
        ("aa > b", r"did you mean 'a'\?"),
        ("a@3 > b", "no column '3'"),
        ("a + b", "compares nothing"),
        ("a > @1", "names rows and columns alone"),
        ("mean:a@1 > b", "is one cell"),
        ("a > ( b", "cannot be read"),
    ],
)
def test_a_claim_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(FedblendError, match=message):
        claims.parse_claim(text, ["a", "b"], ["1", "2"])
