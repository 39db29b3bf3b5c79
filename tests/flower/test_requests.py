"""A server that sends words that are none, and what a site's policy says of kinds of payload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import ALL, FORMS, NOISE, Nodes, experiment, federate, nodes, weights_of
from flower_sites import OwnSite
from flwr.app import Message
from helpers import slow_except
from test_flower_methods import quick
from test_lying_queries import KINDS as BY_LABEL

from fedblend.core.errors import FedblendError
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.trees import add_prefix
from fedblend.experiment.config import as_table
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import client as at_site
from fedblend.flower.messages import VERSION, pack, to_record, unpack
from fedblend.flower.requests import Start, StrategyRound, StrategyShare, read_request
from fedblend.flower.site import KINDS, Site, describe_setup, site_of_node

WORDS: dict[str, Any] = {
    "client": 0,
    "round": 0,
    "run": "ab" * 16,
    "request": {"wanted": [0] * 10, "dummies": []},
    **{
        "begins": "round",
        "mark": "3-77",
        "state": "0-1",
        "keep": "1-2",
        "pool": "ab" * 32,
        "owners": [[0, 2], [-1, 3]],
    },
    **{"total": 100, "split": "holdout", "own": "2-5", "personal": "2-6"},
    **{"quantity": "models", "threshold": 3, "present": [0, 1], "dropped": [2]},
    **{"version": VERSION, "clients": [0, 1]},
    **{"sharing": {"name": "means"}, "min_mean": 2, "seed": 0, "objective": "mix", "terms": []},
}
"""A valid value of each field of a request."""

NO_WORDS = ["anything", "", -1, 2**70, 0.5, True, [[]], [[0]], [["0", 1]], {"a": 1}, "0-1-2", "../x", "\u0661-1"]
"""Values of which each field takes one or none."""


def words_of(kind: str) -> dict[str, Any]:
    asked = experiment("fedavg")
    told = {"experiment": as_table(asked), "setup": describe_setup(make_setup(asked)), **WORDS}
    return {name: told[name] for name in FORMS[kind].model_fields}


@pytest.mark.parametrize("kind", FORMS)
def test_words_that_are_none_are_refused_before_anything_is_looked_at(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(at_site, "engine_for", lambda *given: seen.append(given))
    (node,) = (grid := Nodes([{"partition-id": 0}])).contexts
    told = words_of(kind)
    assert read_request(FORMS[kind], json.loads(json.dumps(told)), {}).keys() == told.keys()

    def fault(fields: dict[str, Any], tensors: Any = None) -> str:
        (reply,) = grid.send_and_receive([Message(pack(fields, to_record(tensors or {})), node, kind)])
        return str(unpack(reply.content)[0].get("fault"))

    for name in told:
        for value in NO_WORDS:
            # A digest may be empty; the experiment's own fields are checked when it is read.
            if (name, value) not in [("run", ""), ("pool", ""), ("experiment", {"a": 1})] and value != told[name]:
                answer = fault(told | {name: value})
                begins = "version: " if name == "version" else f"a request that is none: {name}"
                assert answer.startswith(begins), (name, value, answer)
    for clients in (0, True, 4.0, 10**7 + 1, 10**12, "4", None):
        answer = fault(told | {"setup": {**told["setup"], "clients": clients}})
        assert answer.startswith("a request that is none: setup.clients: "), clients
    for name in FORMS[kind].model_fields:
        if FORMS[kind].model_fields[name].is_required():
            missing = f"a request that is none: {name}: is missing; it must be given"
            assert fault({n: value for n, value in told.items() if n != name}) == missing
    assert fault(told | {"\x1b[31m" + "x" * 10_000: 1}).startswith("a request that is none: ")
    assert fault(told, {"odd/name": torch.zeros(1)}) == "a request that is none: it sends a tensor 'odd/name'" or (
        kind in ("query.hello", "query.ask")
    )
    assert len(seen) == (kind == "query.ask")


@pytest.mark.parametrize("form", [StrategyShare, StrategyRound])
def test_words_to_an_app_of_ones_own_are_of_a_closed_form(form: Any) -> None:
    told = {name: WORDS[name] for name in form.model_fields if name != "own"} | (
        {"own": [0, 2]} if "own" in form.model_fields else {}
    )
    read_request(form, told, {})
    for name in told:
        with pytest.raises(FedblendError, match=f"a request that is none: {name}"):
            read_request(form, told | {name: -0.5}, {})
    with pytest.raises(FedblendError, match="a request that is none: more"):
        read_request(form, told | {"more": 1}, {})
    with pytest.raises(FedblendError, match="it sends a tensor 'odd/name'"):
        read_request(form, told, {"odd/name": torch.zeros(1)})


def test_a_site_with_protection_does_not_train_from_what_it_keeps_whatever_a_server_calls_it(tmp_path: Path) -> None:
    """The model that a site keeps holds a sample: protection must never be sized by the distance from it."""
    site = OwnSite(tmp_path, allow=["weights"], min_noise=0.5, rounds=3, protection=NOISE)
    site.connect()
    about = {"method": "fedavg", "evaluate_model": "device", "model": {"name": "mlp", "hidden": []}, "train": ALL}
    asked = site.experiment(**about)
    told = {"mark": None, "state": None, "pool": None, "keep": "0-7"}
    weights = weights_of(asked)
    assert site.reply("train", asked, 0, tensors=weights, begins="round", **told)[1]
    for begins in (Start.OWN, "anything", "Own", "own ", "", None):
        fields, tensors = site.reply("train", asked, 1, begins=begins, **told | {"mark": "0-7", "keep": "1-7"})
        assert ("fault" in fields, tensors) == (True, {})
    assert len([line for line in site.log() if "refused" not in line and not line.get("begun")]) == 1


def test_no_kind_that_the_servers_model_makes_leaves_by_default() -> None:
    others = {k.name for k in PAYLOAD_KINDS.values() if k.through_model or k.entries == "sample"}
    assert not {"raw", "seeds", "shared", *others} & set(Site().allow)
    assert set(KINDS) - set(site_of_node({}).allow) == {k.name for k in PAYLOAD_KINDS.values() if k.through_model}
    assert "prototypes" in site_of_node({"allow": "prototypes, features"}).allow
    with pytest.raises(FedblendError, match=r"'prototype' is no kind of payload .did you mean 'prototypes'"):
        site_of_node({"allow": "prototype"})


THROUGH_MODEL = {
    "hidden-means": ("fedmix-hidden", "Version 0.2 let them out as 'means'"),
    "prototypes": ("fedproto", "Version 0.2 let them out as 'prototypes'"),
    "map-statistics": ("fedfa", "Version 0.2 let them out as 'extras'"),
    "statistics": ("ccvr", "may tell of single ones"),
    "features": ("flea", "may tell of single ones"),
}


@pytest.mark.parametrize("kind", slow_except(["hidden-means", "prototypes"], THROUGH_MODEL))
def test_what_the_servers_model_makes_of_samples_needs_a_word(kind: str, tmp_path: Path) -> None:
    method, told = THROUGH_MODEL[kind]
    asked = quick(method, rounds=1)
    for word in ("", kind):
        grid = nodes(allow=word)
        try:
            federate(grid, asked, tmp_path / (word or "none"))
        except FedblendError:
            assert not word
        faults = [str(unpack(reply.content)[0].get("fault")) for *_, reply in grid.kept]
        assert any(f"lets no {kind} out" in fault and told in fault for fault in faults) == (not word)


@pytest.mark.parametrize("kind", [*BY_LABEL, "scores"])
def test_a_site_that_demands_noise_sends_nothing_without_noise(kind: str, tmp_path: Path) -> None:
    for least in ({}, {"min_noise": 0.1}):
        site = OwnSite(tmp_path / str(len(least)), allow=[*BY_LABEL, "scores"], protection=NOISE, max_scores=9, **least)
        if kind == "scores":
            asked = site.experiment(method="fedavg", holdout=0.3)
            weights = weights_of(asked)
            told = site.reply("evaluate", asked, tensors=weights, split="holdout")[0]
        else:
            site.write(protection={"name": "none"})
            told = site.trained(site.experiment(method=BY_LABEL[kind], policy={"min_mean": 20}, train=ALL))[0]
        noiseless = "this site sends only what has noise of 0.1 or more" in told.get("fault", "")
        assert (noiseless, "fault" in told) == (bool(least), bool(least)), told


def test_scores_are_rounded_to_what_a_curve_needs(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["scores", "metrics"], min_mean=4)
    asked = site.experiment(method="fedavg", holdout=0.375, metrics=["f1"])
    made = make_setup(asked).weights()
    rights = set()
    for round in range(6):
        weights = {n: t * (1 - 0.4 * round) for n, t in made.items()}
        told = site.reply("evaluate", asked, round, tensors=add_prefix("weights/", weights), split="holdout")[0]
        assert told["samples"] == 30
        assert told["metrics"] == {name: float(f"{value:.3g}") for name, value in told["metrics"].items()}
        rights.add(told["right"])
    assert all(right % 4 == 0 or right == 30 for right in rights)
