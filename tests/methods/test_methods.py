"""What holds for every method, alone and combined: engines agree, a resumed run is the same, neutral settings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baselines_helpers import GROUPS, skewed
from helpers import (
    RAGGED,
    each,
    engine_of,
    federation,
    federation_of,
    images,
    run,
    same,
    same_state,
    same_up_to_rounding,
    setup,
    slow_after_first,
    slow_except,
    without_machine,
)

from fedblend.core.engine import TrainTask, aggregator_of
from fedblend.core.loop import RoundLoop
from fedblend.core.state import to_tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.aggregators.fednova import NormalisedMean
from fedblend.runs import checkpoint

DEEP = {"name": "mlp", "hidden": [8, 6]}
LENET = {"data": images(side=14), "model": "lenet5", "scale": "standard"}
WORLD = {"groups": GROUPS, "model": DEEP, "train": {"cohort": 3, "lr": 0.02}, "unsafe": True}
MIXES = ("localmix", "naivemix", "fedmix", "fedmix-hidden", "fed-augmix")
MEAN = {"name": "mean", "by": "clients"}
MEANS = {"name": "means", "split": "class", "samples_per_mean": 4}
COUNTS = {"name": "counts", "counts": [[6, 6, 2], [6, 6, 5], [6, 6, 3]]}
"""Samples by label: label 2 lacks 4 at client 0, the server of XOR-ed seeds."""


def with_objective(name: str, mix: str) -> dict[str, Any]:
    """A mixing method whose objective is the base of another one."""
    base = setup(method=mix, model=DEEP).experiment.method.model_dump()["objective"]
    return {"name": mix, "objective": {"name": name, "base": base}}


def on_entries(base: str, **options: Any) -> dict[str, Any]:
    sharing = {"name": "hidden-means"} if base == "hidden-mix" else {"name": "means", "split": "class"}
    return {"sharing": sharing, "objective": {"name": "virtual-samples", "base": base, "entries": 3, **options}}


NOISE = {"name": "noise", "scale": 0.01, "clip": 1.0}
PICTURES = {"cohort": 6, "epochs": 2, "batch_size": 4, "lr": 0.05}
PICTURES["augment"] = [{"name": "random-crop", "padding": 1}, "horizontal-flip"]
FEDAVG = {
    "noise of clients": {"protection": NOISE},
    "noise of the server": {"protection": {**NOISE, "side": "server"}},
    "late uploads": {"slow": {"seconds": [1.0, 1.0, 2.0, 3.0], "deadline": 3.0, "late": "next-round"}, "rounds": 6},
    **{
        f"augmented, {more}": {"groups": RAGGED, "train": {**PICTURES, **more}}
        for more in ({}, {"steps": 5}, {"accumulate": 2})
    },
}
ONE_STEP_OR_MORE = [range(0, 1), range(1, 4), range(4, 10), range(10, 19), [], range(19, 36)]
FEDREP = {
    f"fedrep, clipped, {more}": {
        "groups": ONE_STEP_OR_MORE,
        "holdout": 0.3,
        "train": {"cohort": 5, "epochs": 1, "batch_size": 5, "clip_norm": 0.05, **more},
    }
    for more in ({}, {"momentum": 0.9}, {"optimizer": "adam"})
}
"""Clients of one step train head and body in it, beside clients that train one of them."""
METHODS: dict[str, Any] = {
    **{name: name for name in ("scaffold", "feddyn", "moon", "ditto", "fedavgm", "fedadagrad", "fedadam", "fedyogi")},
    "scaffold, option I": {"name": "scaffold", "terms": [{"name": "scaffold", "option": "I"}]},
    "scaffold by the median": {"name": "scaffold", "aggregator": "median"},
    "scaffold on FedMix": {"name": "fedmix", "terms": ["scaffold"], "aggregator": MEAN},
    "feddyn on NaiveMix": {"name": "naivemix", "terms": ["feddyn"], "aggregator": MEAN},
    "moon on FedMix": {"name": "fedmix", "terms": ["moon"]},
    "ditto on FedMix": {"name": "fedmix", "personal": "ditto"},
    "Yogi on FedMix": {"name": "fedmix", "server_step": "fedyogi"},
    "fedper": "fedper",
    "fedper on FedMix": {"name": "fedmix", "personal": "fedper", "terms": ["proximal"]},
    "fedper with scaffold": {"name": "scaffold", "personal": "fedper", "terms": ["scaffold", "moon"]},
    "fedper with feddyn and Adam": {"name": "feddyn", "personal": "fedper", "server_step": "fedadam"},
    "fedrep": {"name": "fedavg", "personal": "fedrep", "terms": ["proximal"]},
    "fedrep on FedMix": {"name": "fedmix", "personal": {"name": "fedrep", "head_share": 0.7}},
    "pfedme": {"name": "pfedme", "personal": {"lambda": 3.0, "steps": 2, "personal_lr": 0.1}},
    "fedproto": "fedproto",
    "fedproto on LocalMix": {
        "name": "localmix",
        "upload": "prototypes",
        "stateful_clients": True,
        "terms": ["prototypes"],
    },
    "three terms": {"name": "fedavg", "terms": ["scaffold", "moon", "proximal"], "aggregator": MEAN},
    "all terms on FedMix": {"name": "fedmix", "terms": ["fedntd", "moon", "proximal"]},
    **{f"{name} on {mix}": with_objective(name, mix) for name in ("fedlc", "fedrs") for mix in MIXES},
    **{f"fedntd on {mix}": {"name": mix, "terms": ["fedntd"]} for mix in MIXES},
    **{f"pfedme on {mix}": {"name": mix, "personal": {"name": "pfedme", "steps": 2}} for mix in MIXES},
    "fednova on scaffold": {"name": "scaffold", "aggregator": "fednova"},
    "fednova on fedmix with terms": {"name": "fedmix", "aggregator": "fednova", "terms": ["fedntd", "proximal"]},
    "augmix on NaiveMix": {"name": "naivemix+fed-augmix", "objective": {"large_lambda": 20.0}},
    "augmix on FedMix": {"name": "fedprox+fedmix+fed-augmix", "objective": {"large_lambda": 20.0}},
    "augmix on LocalMix": {"name": "fed-augmix", "objective": {"base": "localmix", "large_lambda": 20.0}},
    "augmix on HiddenMix": {
        "name": "fedmix-hidden",
        "sharing": {"layer": 1},
        "objective": {"name": "augmix", "base": {"name": "hidden-mix", "layer": 1}, "large_lambda": 20.0},
    },
    "augmix on means of which one client has none": {
        "name": "naivemix+fed-augmix",
        "sharing": {"name": "local-means", "samples_per_mean": 8},
        "objective": {"large_lambda": 20.0},
    },
    "ccvr": {"name": "ccvr", "sharing": {"min_samples": 1}, "server_step": {"per_class": 40, "epochs": 2}},
    "training on means": {"sharing": MEANS, "server_step": {"name": "train-on-means", "epochs": 2, "lr": 0.05}},
    **{name: {"name": name, "sharing": {"steps": 4, "per_class": 2}} for name in ("feddm", "server-matched")},
    **{f"statmix on {base}": {"name": "statmix", "objective": {"base": base}} for base in ("plain", "localmix")},
    **{f"vhl on {base}": {"name": "vhl", "objective": {"base": base, "tau": 0.5}} for base in ("plain", "localmix")},
    **{f"entries on {base}": on_entries(base) for base in ("plain", "fedmix", "hidden-mix")},
    "entries of others": on_entries("plain", exclude_own=True),
    "shared-set": "shared-set",
    "mixup with a few raw samples": {"name": "global-mixup", "sharing": "raw-seeds"},
    "fd": "fd",
    **{name: {"name": name, "server_step": {"steps": 20}} for name in ("fld", "mixfld", "mix2fld")},
    "aggenhance": {"server_step": {"name": "aggenhance", "steps": 5, "epochs": 2}},
    **{
        name: {
            "name": name,
            "upload": {"name": "model", "from_round": 2},
            "server_step": {"epochs": 3, "batch_size": 5},
        }
        for name in ("xormixfl", "mixfl")
    },
    "xormixfl in three rounds": {"name": "xormixfl", "server_step": {"epochs": 3, "batch_size": 5, "rounds": 3}},
    **dict.fromkeys(["noise of clients", "noise of the server", "late uploads"], "fedavg"),
    **dict.fromkeys(FEDAVG, "fedavg"),
    **dict.fromkeys(FEDREP, "fedrep"),
}
WORLDS: dict[str, dict[str, Any]] = {
    **{name: {"holdout": 0.2} for name in METHODS if name.startswith(("fedper", "fedrep", "ditto", "pfedme"))},
    **{name: {"model": {"name": "mlp", "hidden": []}} for name in ("fd", "fld", "mixfld", "mix2fld", "shared-set")},
    **{
        name: {"groups": None, "partition": COUNTS, "data": images(n=60)}
        for name in METHODS
        if "xormixfl" in name or name == "mixfl"
    },
    "augmix on means of which one client has none": {"policy": {"min_mean": 5}},
    "statmix on localmix": LENET,
    "aggenhance": LENET,
    "entries of others": {"groups": [list(range(24)), list(range(24, 32)), list(range(32, 40))]},
    **FEDAVG,
    **FEDREP,
}
"""By method: what it needs beside :data:`WORLD`."""
QUICK = [
    "scaffold on FedMix",
    "fedper with scaffold",
    "pfedme",
    "fedlc on fedmix",
    "fednova on scaffold",
    "augmix on means of which one client has none",
    "ccvr",
    "training on means",
    "feddm",
    "statmix on plain",
    "entries on fedmix",
    "entries of others",
    "shared-set",
    "mixup with a few raw samples",
    "fd",
    "aggenhance",
    "xormixfl",
    "noise of clients",
    "late uploads",
    "augmented, {}",
    "fedrep, clipped, {'momentum': 0.9}",
]


@pytest.mark.parametrize("name", slow_except(QUICK, METHODS))
def test_stacks_compute_what_the_loop_computes_and_a_resumed_run_is_the_same(name: str, tmp_path: Path) -> None:
    made = setup(**{**WORLD, "method": METHODS[name], **WORLDS.get(name, {})})

    (loop, records), (stacked, others) = (
        run(RoundLoop(made, engine), 3) for engine in (engine_of(made), StackedEngine(made, stack=2))
    )

    for table in ("weights", "server_state", "global_outputs"):
        same_up_to_rounding(getattr(stacked, table), getattr(loop, table), steps=1000)
    same_up_to_rounding(stacked.entries.tensors, loop.entries.tensors, steps=1000)
    same_up_to_rounding(to_tensors(stacked.client_states), to_tensors(loop.client_states), steps=1000)
    costs = ("round", "cohort", "bytes_up", "bytes_down")
    assert [{k: r.get(k) for k in costs} for r in records] == [{k: r.get(k) for k in costs} for r in others]
    assert any(not torch.equal(tensor, made.weights()[n]) for n, tensor in loop.weights.items()) or loop.client_states

    half, _ = run(made, 1)
    checkpoint.write(tmp_path, half)
    kept = checkpoint.read(tmp_path)
    assert kept is not None
    ended, rest = run(made, 2, checkpoint.match_model(kept, made.weights(), len(made.population), tmp_path))
    assert without_machine(rest) == without_machine(records[1:])
    assert same_state(ended, loop)


ONE = {"groups": [list(range(20))], "train": {"cohort": 1}}
EQUAL = {"groups": [list(range(i, i + 9)) for i in (0, 10, 20, 30)], "train": {"cohort": 3, "momentum": 0.5}}
ONE_STEP = {"name": "pfedme", "steps": 1, "lambda": 4.0, "personal_lr": 0.25}


def neutral(mix: str, **objective: Any) -> dict[str, Any]:
    return {"name": mix, "objective": objective}


@each(
    ("method", "base", "steps", "changes"),
    [
        # Exactly the same:
        ({"name": "fedntd", "terms": [{"name": "fedntd", "beta": 0.0}]}, "fedavg", 0, {}),
        ({"terms": [{"name": "proximal", "mu": 0.0}]}, "fedavg", 0, {}),
        (neutral("fedlc", tau=0.0), "fedavg", 0, {}),
        (neutral("fedrs", alpha=1.0), "fedavg", 0, {}),
        ({"name": "fedmix", "objective": {"name": "fedlc", "tau": 0.0, "base": {"name": "fedmix"}}}, "fedmix", 0, {}),
        ({"server_step": {"name": "aggenhance", "steps": 2, "epochs": 0}}, "fedavg", 0, {"scale": "unit"}),
        (neutral("fed-augmix", severity=0), "fedavg", 0, {}),
        ({"name": "fedmix+fed-augmix", "objective": {"severity": 0}}, "fedmix", 0, {}),
        (neutral("fedfa", probability=0.0), "fedavg", 0, LENET),
        (neutral("statmix", probability=0.0), "fedavg", 0, {}),
        (neutral("statmix", probability=0.0, base="localmix"), "localmix", 0, {}),
        *(
            (on_entries(base, weight=0.0), base_method, 0, {})
            for base, base_method in (
                ("plain", "fedavg"),
                ("fedmix", {"sharing": {"name": "means", "split": "class"}, "objective": "fedmix"}),
            )
        ),
        (on_entries("plain", exclude_own=True), "fedavg", 0, ONE),
        *(
            ({"name": base, "personal": {"name": "fedper", "layers": 0}}, base, 0, {"holdout": 0.2})
            for base in ("fedavg", "fedmix", "scaffold")
        ),
        # But for rounding:
        *(
            (neutral(mix, **off), "fedavg", 100, {})
            for mix in ("fedmix", "naivemix")
            for off in ({"lambda": 0.0}, {"mixed_share": 0.0})
        ),
        *((neutral(mix, exclude_own=True), "fedavg", 100, ONE) for mix in ("fedmix", "naivemix")),
        *(({"name": base, "personal": ONE_STEP}, base, 100, {}) for base in ("fedavg", "fedmix")),
        *(({"name": base, "aggregator": "fednova"}, base, 1, EQUAL) for base in ("fedavg", "fedmix")),
        (
            {"sharing": "class-noise", "objective": {"name": "virtual-homogeneity", "lambda": 0.0}},
            {"sharing": "class-noise", "objective": {"name": "virtual-samples", "weight": 0.5}},
            1000,
            {},
        ),
    ],
)
def test_a_neutral_setting_is_the_base_method(method: Any, base: Any, steps: int, changes: dict[str, Any]) -> None:
    made, wanted = (
        run(setup(**{"groups": skewed(), "model": DEEP, "train": {"cohort": 3}, **changes, "method": one}), 2)[0]
        for one in (method, base)
    )
    if steps:
        same_up_to_rounding(made.weights, wanted.weights, steps=steps)
    else:
        assert same(made.weights, wanted.weights)


@pytest.mark.parametrize("term", [{"name": "fedntd", "beta": 0.0}, {"name": "moon", "mu": 0.0}], ids=["fedntd", "moon"])
def test_a_fixed_model_keeps_its_running_statistics(term: Any) -> None:
    net = {"name": "module", "path": "helpers:BatchNormNet"}
    fed, plain = (federation(method={"terms": terms}, model=net, train={"cohort": 3}) for terms in ([term], []))
    state, _ = run(fed, 1)
    before = {name: tensor.clone() for name, tensor in state.weights.items()}

    made, wanted = run(fed, 2, state)[0], run(plain, 3)[0]

    assert same(state.weights, before)
    assert same(made.weights, wanted.weights)


def test_fednova_and_scaffold_count_the_steps_of_shared_layers() -> None:
    """With FedRep, half of a client's two steps train its head alone, whose gradients the others do not see."""
    rep = {"name": "fedrep", "head_share": 0.5}
    world = {
        "groups": [list(range(i, i + 8)) for i in (0, 10, 20)],
        "train": {"cohort": 3},
        "model": DEEP,
        "holdout": 0.2,
    }

    nova, mean = (federation(method={"personal": rep, "aggregator": one}, **world) for one in ("fednova", "mean"))
    same_up_to_rounding(run(nova, 2)[0].weights, run(mean, 2)[0].weights, steps=10)

    made = setup(method={"name": "scaffold", "personal": rep}, **world)
    begun = federation_of(made).start()[0]
    state, _ = run(made, 1)
    alone = setup(method={"personal": rep}, **world)
    for client in range(3):
        (update,) = LoopEngine(alone).train(TrainTask(0, begun.weights, None, alone.sizes(0)), [client])
        for name in (n for n in update.weights if n not in made.own_layers):
            slope = (begun.weights[name] - update.weights[name]) / made.experiment.train.lr
            torch.testing.assert_close(
                state.client_states[client].parts[f"terms.0/{name}"], slope, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("method", slow_after_first(["flea", "vhl"]))
def test_pfedme_takes_objectives_that_read_the_rounds_model_or_encode_classes(method: str) -> None:
    made = setup(method={"name": method, "personal": {"name": "pfedme", "steps": 1}}, model=DEEP, holdout=0.2)
    starts = []

    class Spy(LoopEngine):
        def _step(self, loss: Any, *more: Any) -> Any:
            starts.append(len(loss.context.start))
            return super()._step(loss, *more)

    loop, stacked = (run(RoundLoop(made, engine), 1)[0] for engine in (Spy(made), StackedEngine(made, stack=2)))

    assert set(starts) == ({len(made.weights())} if method == "flea" else {0})
    same_up_to_rounding(stacked.weights, loop.weights, steps=1000)


def test_fednova_counts_every_step_of_an_objective_that_makes_several_a_batch() -> None:
    plain = setup(method={"name": "fedavg", "aggregator": "fednova"})
    layer = {"sharing": {"layer": 1}, "objective": {"layer": 1}}
    hidden = setup(method={"name": "naivemix-hidden", "aggregator": "fednova", **layer})
    train = plain.experiment.train
    for made, steps in ((plain, train.batches_of(25)), (hidden, 2 * train.batches_of(25))):
        aggregator = aggregator_of(made, 0)
        assert isinstance(aggregator, NormalisedMean)
        assert aggregator.work.steps_of(0, 25) == steps
