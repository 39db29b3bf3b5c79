"""Parts: found by name, validated, written out and read back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import each

import fedblend
from fedblend import part
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Objective, Personal
from fedblend.core.optimizer import Schedule
from fedblend.core.paths import from_file, import_from
from fedblend.core.registry import build, known
from fedblend.core.server_step import ServerStep
from fedblend.core.sharing import Sharing
from fedblend.experiment.config import resolve
from fedblend.experiment.parts import BASES, dump, has_option, require_usable
from fedblend.methods.objectives.fedmix import FedMix, LocalMix
from fedblend.methods.sharing.means import SharedMeans
from fedblend.models.cnn import MLP

REQUIRED = {
    ("dataset", "npz"): {"path": "some.npz"},
    ("dataset", "features"): {"of": "digits", "model": "helpers:BatchNormNet"},
    ("dataset", "hub"): {"dataset": "some/where"},
    ("dataset", "image-folder"): {"path": "pictures"},
    ("dataset", "signal-folder"): {"path": "signals"},
    ("dataset", "table"): {"path": "some.csv", "target": "y"},
    ("model", "module"): {"path": "helpers:BatchNormNet"},
    ("metric", "torchmetrics"): {"path": "torchmetrics.classification:MulticlassF1Score"},
    ("optimizer", "torch"): {"path": "torch.optim:RMSprop"},
    ("partition", "counts"): {"counts": [[1, 2], [3, 4]]},
    ("selection", "list"): {"clients": [[0, 1], [2]]},
    ("selection", "available"): {"trace": "trace.csv"},
}
"""Options that have no default."""

# Other test files may have declared parts of their own.
ALL = [
    (kind, name)
    for kind in registry.MODULES
    for name, cls in known(kind).items()
    if cls.__module__.startswith("fedblend.")
]


@each(("kind", "name"), ALL)
def test_every_part_is_built_by_its_name_and_written_out_to_the_same(kind: str, name: str) -> None:
    made = build(kind, {"name": name, **REQUIRED.get((kind, name), {})})

    table = dump(made)

    assert table["name"] == name
    assert None not in table.values()
    assert build(kind, table) == made
    assert (kind, name) in REQUIRED or build(kind, name) == made
    assert dump(build(kind, table)) == table
    assert (made.kind, made.name) == (kind, name)


@each(("kind", "name"), list(REQUIRED))
def test_a_required_option_is_asked_for(kind: str, name: str) -> None:
    needed = REQUIRED[kind, name]
    for option in needed:
        others = {other: value for other, value in needed.items() if other != option}
        with pytest.raises(FedblendError, match=rf"{option}: is missing"):
            build(kind, {"name": name, **others})


@each(("kind", "name"), ALL)
def test_every_part_is_frozen_and_says_what_it_is(kind: str, name: str) -> None:
    made = build(kind, {"name": name, **REQUIRED.get((kind, name), {})})
    for field in registry.fields_of(type(made)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field, getattr(made, field))
    assert (type(made).__doc__ or "").strip()


@each(
    ("kind", "spec", "made"),
    [
        ("objective", {"name": "fedmix", "lambda": 0.3, "warmup": 2}, FedMix(lam=0.3, warmup=2)),
        ("objective", {"name": "fedmix", "lambda": 1}, FedMix(lam=1.0)),
        ("objective", {"name": "localmix"}, LocalMix(lam=None)),
        ("objective", {"name": "localmix", "lambda": 0.0}, LocalMix(lam=0.0)),
        ("sharing", {"name": "means", "samples_per_mean": 7}, SharedMeans(samples_per_mean=7)),
        ("sharing", {"name": "means", "refresh": 0.0}, SharedMeans(refresh=0.0)),
        ("model", {"name": "mlp", "hidden": []}, MLP(hidden=())),
    ],
)
def test_options_are_read_and_survive_the_round_trip(kind: str, spec: dict[str, Any], made: object) -> None:
    read = build(kind, spec)
    assert read == made
    assert build(kind, dump(read)) == made
    assert dump(read).items() >= {k: v for k, v in spec.items() if v is not None}.items()


def test_paths_are_kept_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    def path(given: str) -> str:
        return build("dataset", {"name": "npz", "path": given}).path

    assert path("a/../b.npz") == str(tmp_path / "b.npz")
    assert path("/data/b.npz") == "/data/b.npz"
    assert path("~/b.npz") == "/home/someone/b.npz"
    table = from_file({"data": [{"name": "npz", "path": "../b.npz"}, 3]}, tmp_path / "one" / "two" / "e.toml")
    assert build("dataset", copy.deepcopy(table)["data"][0]).path == str(tmp_path / "one" / "b.npz")
    assert table == {"data": [{"name": "npz", "path": "../b.npz"}, 3]}
    assert build("dataset", "mnist").folder is None
    with pytest.raises(FedblendError, match="path: 5 is not valid: input should be a valid string"):
        build("dataset", {"name": "npz", "path": 5})


@each(
    ("field", "has"),
    [
        ("method.objective.lambda", True),
        ("method.objective.lam", False),
        ("method.objective.name", True),
        ("method.objective", True),
        ("method.objective.alpha", False),
        ("method.objective.lambda.x", False),
        ("method.sharing.refresh", True),
        ("model.hidden", True),
        ("train.lr", True),
        ("trian.lr", False),
    ],
)
def test_an_experiment_knows_its_fields_as_a_file_spells_them(field: str, has: bool) -> None:
    made = resolve({"data": "digits", "partition": "iid", "model": "mlp", "method": "fedmix"})
    assert has_option(made, field) is has


def test_a_part_already_made_is_taken_as_it_is() -> None:
    made = FedMix(lam=0.3)
    assert build("objective", made) is made


def test_a_class_in_place_of_a_part_and_an_object_without_the_decorator_are_told_apart() -> None:
    class Mine(Objective):
        pass

    with pytest.raises(FedblendError, match=r"^method\.objective: FedMix is a class; write FedMix\(\)$"):
        build("objective", FedMix, "method.objective")
    with pytest.raises(FedblendError, match=r"put @part\('objective', NAME\) above the class$"):
        build("objective", Mine(), "method.objective")


@each(
    ("options", "told"),
    [
        ({"lam": 2.0}, "FedMix.lam: 2.0 is not valid: input should be less than or equal to 1"),
        ({"lam": "x"}, "FedMix.lam: 'x' is not valid: input should be a valid number"),
        ({"lamb": 0.1}, "FedMix: no option lamb (did you mean 'lam'?)"),
        ({"entries": "all"}, "FedMix.entries: 'all' is not valid: input should be"),
        ((2.0,), "FedMix.lam: 2.0 is not valid: input should be less than or equal to 1"),
        ((0.1, "batch", 0.0, -1.0), "FedMix.mixed_share: -1.0 is not valid"),
        ((*dataclasses.astuple(FedMix()), 1), "FedMix: 10 options at most; valid: lam, "),
    ],
)
def test_a_part_that_is_made_in_python_with_a_wrong_option_is_refused_in_one_line(options: Any, told: str) -> None:
    with pytest.raises(FedblendError) as error:
        FedMix(**options) if isinstance(options, dict) else FedMix(*options)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_a_part_that_makes_another_one_wrongly_does_not_seem_wrong_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outer(Objective):
        def __post_init__(self) -> None:
            FedMix(lam=3.0)

        def phases(self) -> tuple[Any, ...]:
            return ()

    monkeypatch.setitem(registry._registry, "objective", dict(known("objective")))
    part("objective", "outer")(Outer)

    with pytest.raises(FedblendError, match=r"^method.objective: FedMix.lam: 3.0 is not valid"):
        build("objective", "outer", "method.objective")


@each(
    ("spec", "told"),
    [
        ("fedmixx", "objective.name: unknown objective 'fedmixx' (did you mean 'fedmix'?)"),
        ({"name": "navemix"}, "(did you mean 'naivemix'?)"),
        (
            {"name": "fedmix", "lamda": 0.1},
            "objective.lamda: unknown key for the objective 'fedmix' (did you mean 'lambda'?)",
        ),
        ({"name": "fedmix", "exclude": True}, "(did you mean 'exclude_own'?)"),
        ({"name": "fedmix", "lambda": -0.1}, "objective.lambda: -0.1 is not valid: "),
        ({"name": "fedmix", "lambda": 1.01}, "objective.lambda: 1.01 is not valid: "),
        ({"name": "fedmix", "lambda": float("nan")}, "objective.lambda: nan is not valid: "),
        ({"name": "fedmix", "lambda": "much"}, "objective.lambda: 'much' is not valid: "),
        ({"name": "fedmix", "lambda": None}, "objective.lambda: None is not valid: "),
        ({"name": "fedmix", "warmup": -1}, "objective.warmup: -1 is not valid: "),
        ({"name": "fedmix", "warmup": 1.5}, "objective.warmup: 1.5 is not valid: "),
        ({"name": "fedmix", "taylor": "exact"}, "objective.taylor: 'exact' is not valid: "),
        ({"name": "localmix", "alpha": 0}, "objective.alpha: 0 is not valid: "),
        ({"name": "localmix", "alpha": float("inf")}, "objective.alpha: inf is not valid: "),
        ({"name": "hidden-mix", "layer": 0}, "objective.layer: 0 is not valid: "),
        ({"name": "plain", "lambda": 0.1}, "valid: none"),
        ({"lambda": 0.1}, "names no objective"),
        (3, "objective: 3 names no objective"),
        (None, "objective: None names no objective"),
        (["fedmix"], "names no objective"),
        (SharedMeans(), "names no objective"),
    ],
)
def test_a_mistake_is_told_with_field_value_and_what_would_be_valid(spec: Any, told: str) -> None:
    with pytest.raises(FedblendError) as error:
        build("objective", spec)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", ["al", 0, 2.5])
def test_an_option_of_two_types_tells_both(size: Any) -> None:
    with pytest.raises(FedblendError, match=r"^sharing\.samples_per_mean: .*all"):
        build("sharing", {"name": "means", "samples_per_mean": size})


# Parts of the user's own -----------------------------------------------------------------------------------


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> type:
    """A part of the user's own, declared in this module for one test."""

    class Half(Objective):
        """An objective of the user's own."""

        share: float = 0.5

        def phases(self) -> tuple[Any, ...]:
            return ()

    Half.__qualname__ = "Half"
    monkeypatch.setitem(registry._registry, "objective", dict(known("objective")))
    made = part("objective", "half")(Half)
    monkeypatch.setattr(sys.modules[__name__], "Half", made, raising=False)
    return made


def test_a_users_part_is_named_by_its_dotted_path_and_validated_like_any(half: type) -> None:
    path = f"{__name__}:Half"
    made = build("objective", {"name": path, "share": 0.25})
    assert made == half(share=0.25)
    assert dump(made) == {"name": path, "share": 0.25}
    assert build("objective", dump(made)) == made
    assert known("objective")["half"] is half
    with pytest.raises(FedblendError, match="share: 'x' is not valid"):
        build("objective", {"name": path, "share": "x"})


def test_a_part_of_an_installed_package_is_found_by_its_name_and_imported_when_it_is_used(
    half: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As pip leaves a package with entry points; the module fails when it is imported.
    (tmp_path / "strange.py").write_text("raise RuntimeError\n")
    (tmp_path / "strange-1.dist-info").mkdir()
    points = f"[fedblend.objective]\ninstalled = {__name__}:Half\nstrange = strange:Strange\nfedmix = strange:Mine\n"
    (tmp_path / "strange-1.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)

    made = build("objective", {"name": "installed", "share": 0.25})

    assert made == half(share=0.25)
    assert dump(made) == {"name": f"{__name__}:Half", "share": 0.25}
    assert build("objective", "fedmix") == FedMix()
    with pytest.raises(FedblendError, match=r"unknown objective 'strangely' \(did you mean 'strange'\?\)"):
        build("objective", "strangely")
    with registry.trust_only([f"{__name__}:Half"], "name it"):
        build("objective", "installed")
        with pytest.raises(registry.UntrustedCode, match="'strange:Strange' is not code of fedblend's own and is not"):
            build("objective", "strange")
    with pytest.raises(FedblendError, match=r"strange\.py, line 1: RuntimeError"):
        build("objective", "strange")


@each(
    ("name", "told"),
    [
        (
            "no_such_module:Half",
            "cannot import 'no_such_module:Half': No module named 'no_such_module'; write package.module:Name, with "
            "no_such_module.py beside the experiment file or in a folder of PYTHONPATH",
        ),
        ("json.no_such:Half", "No module named 'json.no_such'; write package.module:Name"),
        ("no_such.module:Half", "No module named 'no_such'; write package.module:Name, with no_such/module.py beside"),
        (f"{__name__}:Nothing", "cannot import"),
        (":Half", "cannot import"),
        ("fedblend.methods.sharing.means:SharedMeans", "is no part of the kind 'objective'"),
        ("collections:OrderedDict", "is no part of the kind 'objective'"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_told(name: str, told: str) -> None:
    with pytest.raises(FedblendError) as error:
        build("objective", name)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("x = 1\ndef f(:\n    pass\n", 2, "SyntaxError: invalid syntax"),
        ("import no_such_package\n", 1, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("from json import no_such_name\n", 1, "ImportError: cannot import name 'no_such_name' from 'json' ("),
        ("\n\nx = y\n", 3, "NameError: name 'y' is not defined"),
        ("import json\njson.loads('')\n", 2, "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (
            "import fedblend\n\n@fedblend.part('objektive', 'mine')\nclass Mine: pass\n",
            3,
            "part: unknown kind 'objektive' (did you mean 'objective'?)",
        ),
    ],
)
@pytest.mark.parametrize("imported", ["by its name", "by another module"])
def test_an_error_in_a_users_module_is_told_with_its_line(
    text: str, line: int, told: str, imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_parts.py").write_text(text, encoding="utf-8")
    (tmp_path / "more_parts.py").write_text("import wrong_parts\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = "wrong_parts:Mine" if imported == "by its name" else "more_parts:Mine"

    with pytest.raises(FedblendError) as error:
        build("objective", path, "method.objective")

    place = f"{tmp_path / 'wrong_parts.py'}, line {line}: "
    assert str(error.value).startswith(f"method.objective: cannot import '{path}': {place}{told}")
    assert str(error.value).endswith("; mend this line")


@pytest.mark.parametrize("kind", sorted(BASES))
def test_a_users_part_without_the_base_of_its_kind_is_refused_at_its_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_parts.py").write_text(f"import fedblend\n\n@fedblend.part('{kind}', 'bare')\nclass Bare: pass\n")
    monkeypatch.delitem(sys.modules, "bare_parts", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(FedblendError) as error:
        build(kind, "bare_parts:Bare", "field")

    module, _, base = BASES[kind].partition(":")
    assert str(error.value) == (
        f"field: cannot import 'bare_parts:Bare': {tmp_path / 'bare_parts.py'}, line 3: the {kind} 'bare' does not "
        f"inherit from {base}; valid: class Bare({base}), with {base} from {module}; mend this line"
    )
    assert all(issubclass(cls, getattr(sys.modules[module], base)) for cls in known(kind).values())


@each(
    ("kind", "methods", "told"),
    [
        (
            "objective",
            {"loss": lambda self, net, batch: 0},
            "the objective 'own': loss cannot be called: too many positional arguments; "
            "valid: def loss(self, net, batch, drawn, context)",
        ),
        (
            "objective",
            {"loss": lambda self, net, batch, drawn, context, more: 0},
            "the objective 'own': loss cannot be called: missing a required argument: 'more'; "
            "valid: def loss(self, net, batch, drawn, context)",
        ),
        ("objective", {"draw": lambda self, rng, plan: {}}, "the objective 'own' defines no loss or phases; "),
        (
            "aggregator",
            {"agregate": lambda self, uploads: {}},
            "the aggregator 'own' defines no aggregate or finish or for_round (is it 'agregate'?); "
            "valid: methods as in Aggregator",
        ),
        (
            "partition",
            {"splits": lambda self: 0},
            "the partition 'own' defines no split (is it 'splits'?); "
            "valid: def split(self, labels, classes, seed, natural)",
        ),
        ("dataset", {"load": lambda self, path: 0}, "the dataset 'own': load cannot be called: missing a required"),
        ("model", {"build": lambda self, shape: 0}, "the model 'own': build cannot be called: too many positional"),
        ("channel", {}, "the channel 'own' defines no transmit or delivers; valid: methods as in Channel"),
        ("metric", {"overall": lambda self, outputs: 0}, "the metric 'own': overall cannot be called: "),
    ],
)
def test_a_users_part_that_the_loop_could_not_call_is_refused_where_it_is_declared(
    kind: str, methods: dict[str, Any], told: str
) -> None:
    module, _, base = BASES.get(kind, "builtins:object").partition(":")
    cls = type("Own", (getattr(sys.modules[module], base),), {**methods, "__module__": __name__})
    with pytest.raises(FedblendError) as error:
        part(kind, "own")(cls)
    assert str(error.value).startswith(told)
    assert "own" not in known(kind)


def test_a_users_part_may_inherit_rename_wrap_and_extend_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    class Losses:
        def loss(self, model: Any, *rest: Any, scale: float = 1) -> Any:
            return scale

    def with_noise(function: Any) -> Any:
        @functools.wraps(function)
        def noisy(self: Any, net: Any, batch: Any, drawn: Any, context: Any) -> Any:
            return function(self, net, batch, drawn, context, 0.5)

        return noisy

    monkeypatch.setattr(registry, "_registry", {kind: dict(parts) for kind, parts in registry._registry.items()})

    def own(kind: str, *bases: type, **methods: Any) -> Any:
        cls = type("Own", bases, {**methods, "__module__": __name__})
        return part(kind, f"own {len(registry._registry[kind])}")(cls)

    assert own("objective", Losses, Objective)().loss(None) == 1
    assert own("objective", own("objective", Losses, Objective))().loss(None) == 1
    assert own("objective", Objective, loss=with_noise(lambda *given: given[-1]))().loss(1, 2, 3, 4) == 0.5
    assert own("schedule", Schedule, factor=lambda self, step: 0.5)().factor(3) == 0.5
    assert own("schedule", Schedule, __annotations__={"factor": Any})(factor=len).factor([1]) == 1
    with pytest.raises(FedblendError, match="defines no loss or phases"):
        own("objective", Objective, Losses)


def test_fedblends_own_parts_could_be_a_users() -> None:
    nothing = {(kind, "none") for kind in ("sharing", "personal", "server_step", "adversary")}
    for kind, name in ALL:
        cls = known(kind)[name]
        if (kind, name) not in nothing:
            require_usable(kind, name, cls)


def test_an_old_field_of_a_users_part_names_the_new_one() -> None:
    for kind, base, old, new in (
        ("objective", Objective, "sends", 'exchanges = "extras"'),
        ("objective", Objective, "breaks_privacy", 'reads = ("raw",)'),
        ("personal", Personal, "keeps_layers", "the methods own_layers, terms or after_training alone"),
        ("sharing", Sharing, "by_label", 'made_of = "label"'),
        ("server_step", ServerStep, "breaks_privacy", 'works_on = "raw"'),
    ):
        with pytest.raises(FedblendError) as error:
            require_usable(kind, "mine", type("Mine", (type("Between", (base,), {old: True}),), {}))
        assert str(error.value) == f"the {kind} 'mine' has {old}, which fedblend 0.3 no longer reads; valid: {new}"


def test_a_part_of_an_unknown_kind_is_refused_where_it_is_declared() -> None:
    with pytest.raises(FedblendError) as error:
        part("losses", "mine")
    assert str(error.value) == f"part: unknown kind 'losses'; valid: {', '.join(registry.MODULES)}"


def test_the_fedblend_that_runs_is_found_before_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(Path(fedblend.__file__).resolve().parents[1])
    # As an editable install has it, of which the path says nothing.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder).resolve() != Path(ours)])
    import_from([str(tmp_path)])
    import_from([str(tmp_path)])
    assert sys.path[-2:] == [ours, str(tmp_path)]
