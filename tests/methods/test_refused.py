"""What does not go together ends in one message, before the first round where that can be known."""

from __future__ import annotations

from typing import Any

import pytest
from baselines_helpers import GROUPS
from helpers import each, federation, iid, images, labelled, numbers, run
from torch import nn

from fedblend.core.errors import FedblendError

Rows = list[tuple[dict[str, Any], str]]

LINEAR = {"name": "mlp", "hidden": []}
DEEP = {"name": "mlp", "hidden": [5]}
LENET = {"data": images(side=14), "model": "lenet5"}
SAMPLES = {"data": images(n=60), "unsafe": True, "model": LINEAR}
MEANS = {"name": "means", "split": "class"}
HIDDEN_NOVA = {"name": "fedmix-hidden", "aggregator": "fednova"}
SOFTMAX = {"name": "fed3r", "upload": {"name": "model", "from_round": 2}, "server_step": {"head": "softmax"}}


class EndsInNorm(nn.Sequential):
    """A model whose last layer with weights is no dense one."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3))


class FrozenBody(nn.Sequential):
    """A network of which only the last layer is trained."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 3))


def module(name: str) -> dict[str, str]:
    return {"name": "module", "path": f"{__name__}:{name}"}


def based(name: str, base: Any) -> dict[str, Any]:
    """An objective on another one."""
    return {"name": name, "base": base}


def parts(sharing: Any, objective: Any = "plain", server_step: str = "none") -> dict[str, Any]:
    """A method of these parts."""
    return {"sharing": sharing, "objective": objective, "server_step": server_step}


def methods(rows: list[tuple[Any, str]], **base: Any) -> Rows:
    """Rows of which each changes the method."""
    return [({**base, "method": method}, told) for method, told in rows]


def parts_of(name: str, rows: Rows, sharing: Any = None, **base: Any) -> Rows:
    """Rows of which each changes parts of one method."""
    method = {"name": name} if sharing is None else {"name": name, "sharing": sharing}
    return methods([({**method, **parts}, told) for parts, told in rows], **base)


AGGREGATORS: Rows = [
    ({**iid(10, cohort), "method": {"aggregator": spec}}, rf"method\.aggregator[.:] ?{told}")
    for spec, cohort, told in (
        ({"name": "krum", "byzantine": 2}, 6, "byzantine: 2 needs 7 uploads.*train.cohort is 6.*valid: 0 to 1"),
        ({"name": "krum"}, 2, "byzantine: 1 needs 5.*train.cohort is 2.*valid: a train.cohort of 5 or more"),
        ({"name": "multi-krum", "byzantine": 4}, 10, "byzantine: 4 needs 11.*valid: 0 to 3"),
        ({"name": "multi-krum", "kept": 10}, 10, "kept: 10 of a train.cohort of 10.*valid: 1 to 9"),
        ({"name": "trimmed-mean", "share": 0.1}, 9, "share: 0.1 of a train.cohort of 9.*valid: from 0.112 to"),
        ({"name": "trimmed-mean", "share": 0.4}, 2, "share: 0.4.*valid: 0, or a train.cohort of 3 or more"),
        ({"name": "trimmed-mean", "share": 0.5}, 9, "share: 0.5 is not valid: input should be less than 0.5"),
        ({"name": "krum", "byzantine": -1}, 9, "byzantine: -1 is not valid"),
        ({"name": "multi-krum", "kept": 0}, 9, "kept: 0 is not valid"),
        ({"name": "interval-mean", "low": 1.0, "high": -1.0}, 9, "low: 1.0 is not below high: -1.0"),
        ({"name": "interval-mean", "low": float("nan")}, 9, "low: nan is not below high"),
    )
]
BASES: Rows = [
    *(
        (
            {"method": {"name": "fed-augmix", "objective": {"base": base}}},
            rf"^method\.(objective\.base|sharing).*{told}",
        )
        for base, told in (
            ("augmix", "'augmix' cannot be its own base"),
            (based("fedlc", "augmix"), "'augmix' cannot be its own base"),
            (based("fedlc", based("virtual-samples", "fedrs")), "'fedrs' changes logits itself"),
            ("fedfa", "'fedfa' keeps a state from round to round, which 'augmix' does not pass on"),
            (based("fedlc", "fedfa"), "'fedfa' keeps a state from round to round"),
            ("fedmyx", "unknown objective 'fedmyx'.*fedmix"),
            ({"name": "fedmix", "lambada": 1}, "lambada: unknown key"),
            ({"name": "fedmix", "lambda": 2}, "lambda: 2 is not valid"),
            ("fedmix", "'augmix' reads the model's inputs"),
        )
    ),
    *methods(
        [
            (parts("means", based("augmix", "global-mixup")), "reads raw samples; valid: raw"),
            (parts("means", based("augmix", based("fedlc", "global-mixup"))), "reads raw samples; valid: raw"),
            (
                parts("channel-statistics", based("fedlc", based("statmix", "fedmix"))),
                "'fedmix' needs x, y, which clients do not share beside channel stat",
            ),
            (
                {"name": "fedmix-hidden", "objective": based("augmix", {"name": "hidden-mix", "layer": 3})},
                r"method\.sharing\.layer: 2 and method\.objective\.layer: 3 differ",
            ),
            (parts("channel-statistics", based("statmix", "fedmix")), r"method\.objective\.base: 'fedmix' needs x, y"),
            (parts("hidden-means", based("virtual-homogeneity", "hidden-mix")), "'hidden-mix' mixes hidden states"),
            ({"objective": based("fedlc", "fedfa")}, "base: 'fedfa' keeps a state"),
        ]
    ),
]
CCVR: Rows = [
    *parts_of(
        "ccvr",
        [
            ({"sharing": {"min_samples": 21}}, r"method.sharing.min_samples: 21 .* valid: 1 to 20"),
            ({"server_step": "train-on-seeds"}, "shares moments of features, but method.server_step 'train-on-seeds'"),
            ({"server_step": "train-on-means"}, "shares moments of features, but method.server_step 'train-on-means'"),
            ({"sharing": {"name": "means"}}, "'means' shares the model's inputs, but method.server_step 'ccvr'"),
            (parts({"name": "features", "layer": 1}, "flea", "train-on-seeds"), "'features' shares hidden states, but"),
            ({"objective": "naivemix"}, "but method.objective 'naivemix' reads"),
            ({"personal": "fedper"}, "'fedper' keeps layers"),
        ],
        sharing={"min_samples": 1},
        unsafe=True,
        groups=[range(12), range(12, 20), range(20, 40)],
    ),
    ({"method": "ccvr", "model": module("EndsInNorm")}, r"'ccvr' sets the last layer .* is a LayerNorm"),
]
STATES: Rows = [
    (
        {"protection": "noise", "method": "scaffold"},
        "'noise' changes models only, but 'scaffold' in method.terms sends",
    ),
    ({"channel": "wireless", "method": "scaffold"}, "'wireless' loses downlinks, but 'scaffold' needs the server's"),
    ({"train": {"momentum": 0.9}, "method": "scaffold"}, "train.momentum: 0.9 makes steps longer than gradients"),
    *methods(
        [
            ({"name": "scaffold", "aggregator": "secure-mean"}, "'secure-mean' would not mask"),
            ({"name": "feddyn", "aggregator": "mean"}, "no mean in which clients count alike"),
            ({"name": "fd", "personal": "ditto"}, "'ditto' trains beside a global model"),
            ({"name": "fedavg", "terms": ["prototypes"]}, 'does not send; valid: upload = "prototypes"'),
            ({"name": "fd", "terms": ["prototypes"]}, 'does not send; valid: upload = "prototypes"'),
            ({"name": "fedproto", "stateful_clients": False}, "sends no models"),
        ]
    ),
]
OWN_LAYERS: Rows = [
    ({"method": "fedper", "model": DEEP, "holdout": 0.2, **changes}, told)
    for changes, told in (
        ({"evaluate_model": "server"}, "evaluate_model: 'server' has no whole model to evaluate, because 'fedper'"),
        ({"method": {"name": "aggenhance", "personal": "fedper"}}, "'aggenhance' trains a whole model at the server"),
        ({"method": {"name": "fd", "personal": "fedper"}}, "'fedper' trains beside a global model"),
        ({"method": {"name": "fedper", "personal": {"layers": -1}}}, "personal.layers: -1 is not valid"),
        ({"holdout": 0.0}, r"evaluate_model: 'each' needs .*; valid with holdout \(such as 0.2\)"),
        ({"method": {"name": "fedper", "personal": {"layers": 2}}}, "the model has 2 layers .*; valid: 0 to 1"),
        ({"method": "fedbn"}, "'fedbn' keeps normalisation layers at clients, and the model has none"),
        ({"model": module("FrozenBody")}, "the model has 1 layers with trained weights, of which one must be shared"),
        ({"method": "fedrep", "train": {"accumulate": 2}}, r"train\.accumulate: 2: 'fedrep' changes its layers within"),
        *(
            ({"method": "fednova", "train": train}, "'fednova' computes how far the steps of SGD move a client")
            for train in (
                {"optimizer": "adam"},
                {"accumulate": 2},
                {"schedule_in_round": "cosine"},
                {"momentum": 0.9, "optimizer_state": "keep"},
            )
        ),
        *(
            (
                {"method": HIDDEN_NOVA, "model": {"name": "mlp", "hidden": [5, 5]}, **more},
                "'fednova' does not know how momentum and proximal terms",
            )
            for more in ({"train": {"momentum": 0.5}}, {"method": {**HIDDEN_NOVA, "terms": ["proximal"]}})
        ),
    )
]
AUGMENTED: Rows = [
    ({"train": {"augment": [augment]}, **changes}, rf"train\.augment{told}")
    for augment, changes, told in (
        ("random-crop", {"data": numbers()}, ": 'random-crop' needs pictures, but 'numbers' holds"),
        ({"name": "random-crop", "padding": 4}, {}, ".*padding: 4 is not valid for pictures of 4 x 4 pixels"),
        ("random-crob", {}, ".*did you mean 'random-crop'"),
        ({"name": "horizontal-flip", "probability": 2.0}, {}, r"\[0\]\.probability: 2\.0 is not valid"),
    )
]
FEATURES: Rows = [
    *(
        ({**LENET, "method": "fedfa", **changes}, told)
        for changes, told in (
            (
                {"model": {"name": "mlp", "hidden": [6]}},
                r"method.objective.layers: not given: .*valid: a convolutional",
            ),
            (
                {"model": {"name": "module", "path": "helpers:RowsLSTM"}, "data": images()},
                "not given: .*valid: a convolutional network",
            ),
            ({"method": {"name": "fedfa", "personal": "pfedme"}, "holdout": 0.2}, "'pfedme' takes several steps"),
        )
    ),
    *parts_of(
        "fedfa",
        [
            ({"objective": {"layers": [2, 3]}}, r"\[2, 3\]: .*has after layers 1, 2"),
            ({"objective": {"layers": [2, 1]}}, "layers: .*rising order"),
            ({"objective": {"layers": []}}, "layers"),
            ({"aggregator": "secure-mean"}, "'fedfa' sends more beside the model"),
        ],
        **LENET,
    ),
    *methods(
        [
            ({"objective": "flea"}, "'none' shares nothing, but .*'flea' reads hidden states; valid: .*features"),
            ({"name": "flea", "objective": {"layer": 2}}, "method.sharing.layer: 1 and method.objective.layer: 2"),
            ({"name": "flea", "sharing": {"fraction": 0}}, "sharing.fraction: 0"),
            ({"name": "flea", "objective": {"alpha": 0}}, "objective.alpha: 0"),
            ({"name": "fedmix-hidden", "sharing": {"multiplier": 1.0}}, r"multiplier: 1.0 needs bounds"),
        ]
    ),
    ({"method": "flea", "model": LINEAR}, "method.objective.layer: 1: mlp has 1 layers"),
]
METRICS: Rows = [
    ({"metrics": ["mae"]}, r"metrics\[0\]: 'mae' is for regression, but the data are for classification"),
    ({"metrics": [{"name": "top-k", "k": 3}]}, r"metrics\[0\]: k: 3: all samples are right with 3 classes"),
    ({"data": labelled(), "metrics": ["top-k"]}, "'top-5' is for classification, but the data are for multi-label"),
    ({"data": labelled(), "metrics": ["ece"]}, "'ece' is for classification, but the data are for multi-label"),
    ({"data": labelled(), "metrics": ["mae"]}, "'mae' is for regression, but the data are for multi-label"),
    ({"metrics": ["hamming-loss"]}, "'hamming-loss' is for multi-label, but the data are for classif"),
    ({"data": numbers(), "metrics": ["f1"]}, "'f1' is for classification and multi-label, but the data are for reg"),
    ({"metrics": [{"name": "f1", "average": "micro"}]}, "average: 'micro' is the accuracy"),
    ({"data": labelled(), "target": 0.5, "stop_at_target": True}, "target_metric: accuracy is not defined for multi"),
    ({"metrics": ["f2"]}, r"metrics\[0\].name: unknown metric 'f2'.*f1"),
    ({"metrics": ["f1", "f1"]}, r"metrics\[1\]: 'f1' is recorded already"),
    ({"target": 0.5, "target_metric": "f1"}, "target_metric: 'f1' is not recorded; valid: accuracy, loss, another"),
    ({"metrics": "auc", "validation": {"metric": "acu"}}, "validation.metric: 'acu' is not recorded.*'auc'"),
    (
        {"metrics": "auc", "validation": {"metric": "auc"}},
        "^validation.metric: 'auc', but no samples are kept for validation; give validation.server or "
        "validation.clients$",
    ),
    ({"target": 80.0}, "target: 80 is not valid: an accuracy is a share, from 0 to 1"),
    ({"stop_at_target": True}, "stop_at_target: true, but there is no target to reach"),
    ({"holdout": 0.5, "validation": {"clients": 0.5}}, "validation.clients: 0.5 and holdout: 0.5 leave no samples"),
    ({"validation": {"sever": 0.5}}, "validation.sever: unknown key.*'server'"),
    ({"validation": {"server": 1.0}}, "validation.server: 1.0 is not valid"),
    ({"metrics": [{"name": "torchmetrics", "path": "os:system"}]}, "it is the path of a metric of torchmetrics"),
]
OUTPUTS: Rows = [
    ({"method": "fd", "evaluate_model": "server"}, "evaluate_model: 'server' has no model to evaluate"),
    ({"method": "fd", "protection": {"name": "noise", "scale": 1.0}}, "'noise' changes models"),
    ({"method": "fd", "adversary": "nan"}, "'nan' changes models"),
    (
        {"method": {"upload": "silent", "stateful_clients": True}, "convergence_tol": 0.01},
        "convergence_tol: 0.01, but the server's model never changes; valid: no convergence_tol",
    ),
    *methods(
        [
            ({"stateful_clients": True}, "stateful_clients: true keeps clients on their own weights"),
            ({"terms": ["distill"]}, "'distill' needs mean outputs"),
            ("fld", "unsafe: false does not allow 'raw-seeds'"),
            ({"name": "mix2fld", "sharing": {"lambda": 0.5}}, "has no inverse"),
        ]
    ),
    (
        {
            "data": images(classes=4),
            "groups": [[i for i in range(40) if i % 4 // 2 == k] for k in range(2)],
            "method": {"name": "mix2fld", "sharing": {"coordinated": True}},
            "model": LINEAR,
        },
        "no two of 2 devices hold the same two labels",
    ),
]
SHARINGS: Rows = [
    *methods(
        [
            (parts("mixed-seeds", server_step="train-on-means"), "server_step 'train-on-means' reads the"),
            (parts("raw", server_step="train-on-means"), "server_step 'train-on-means' reads the model's"),
            (parts(MEANS, server_step="train-on-seeds"), "method.server_step 'train-on-seeds' reads samples as stored"),
            (parts("mixed-seeds", "fedmix"), "'mixed-seeds' shares seeds, but"),
            (parts("mixed-seeds", based("virtual-samples", "naivemix")), "'mixed-seeds' shares seeds, but"),
            (parts("raw", "fedmix"), "'raw' shares raw samples, but"),
            (parts("means", "global-mixup"), "'global-mixup' reads raw samples"),
        ],
        unsafe=True,
    ),
    *methods(
        [
            (
                parts("hidden-means", "hidden-mix", "train-on-means"),
                "'hidden-means' shares hidden states, but method.ser",
            ),
            (
                parts("means", "statmix"),
                "'means' shares the model's inputs, but .*objective 'statmix' reads statistics",
            ),
            (parts("channel-statistics", "fedmix"), "shares statistics of channels, but .*objective 'fedmix'"),
            (parts("channel-statistics", "statmix", "train-on-means"), "'train-on-means' reads the model's inputs"),
            (
                parts({**MEANS, "name": "local-means"}, server_step="train-on-means"),
                "'train-on-means' trains on shared data, but those of 'local-means' never",
            ),
            ("shared-set", "unsafe: false does not allow 'raw-seeds'"),
            ("prior-samples", "unsafe: false does not allow 'prior-samples'"),
            (parts({"name": "local-means", "server_average": 2}, "fedmix"), "server_average: 2.*valid: 1"),
            (
                parts({"name": "secure-means", "server_average": 2}, "fedmix"),
                "server_average: groups of 2 clients are smaller than the smallest sum, fewest = 3",
            ),
            (parts({"name": "secure-means", "refresh": 0.5}, "fedmix"), "unknown key for the sharing 'secure-means'"),
        ]
    ),
    ({"method": "fedmix", "policy": {"min_mean": 1}}, r"policy.min_mean: 1 .*valid: 2 or more"),
    *parts_of("statmix", [({"sharing": {"of": "client"}}, r"min_mean: 50 .*valid: 1 to 10")], policy={"min_mean": 50}),
    (
        {"method": {"name": "fedmix", "sharing": "secure-means"}, "channel": "wireless"},
        "'secure-means' sums the data that clients share once, but the channel 'wireless' l",
    ),
]
SLOW: Rows = [
    ({"groups": GROUPS, **changes}, told)
    for changes, told in (
        ({"slow": {"share": 0.5}, "train": {"epochs": 1}}, "slow.share: 0.5, but train.epochs is 1"),
        ({"slow": {"deadline": 3}}, "slow.deadline: 3, but slow.seconds does not say"),
        ({"slow": {"seconds": [1, 0, 1, 1]}}, r"slow.seconds.*greater than 0"),
        ({"slow": {"seconds": [1, 1]}}, "slow.seconds: 2 numbers, the least 1, for 4 clients; valid: a number above 0"),
        ({"slow": {"epochs": "clients.csv"}}, 'a number for each client, or "FILE.csv:COLUMN"'),
        ({"slow": {"epochs": "no.csv:epochs"}}, "no.csv: no such file; give a CSV file with columns epochs"),
        ({"method": {"aggregator": {"name": "mean", "by": [1, 2]}}}, "method.aggregator.by: 2 numbers"),
        ({"method": {"aggregator": {"name": "mean", "by": "size"}}}, "should be 'samples' or 'clients', or "),
        ({"method": {"aggregator": {"name": "secure-mean", "by": [1]}}}, "'samples' or 'clients'"),
        *(
            ({"slow": {"late": "next-round"}, "method": method}, f"slow.late: 'next-round', but {why}")
            for method, why in (
                ("scaffold", "parts of the method send more beside the model"),
                ("fednova", "method.aggregator 'fednova' counts the steps of one round"),
                ("fd", "method.upload 'outputs' sends no models"),
                ({"aggregator": "secure-mean"}, "method.aggregator 'secure-mean' knows a masked sum only"),
                ({"name": "aggenhance"}, "method.server_step 'aggenhance' works with single uploads"),
            )
        ),
    )
]
PROTECTIONS: Rows = [
    ({"protection": {"name": "noise", **options}}, told)
    for options, told in (
        ({"multiplier": 1.0}, "multiplier: 1.0 is a multiple of clip, which is not given"),
        ({"multiplier": 1.0, "scale": 1.0, "clip": 1.0}, "both set the noise"),
        ({"scale": -1.0}, r"protection.scale: -1.0 is not valid"),
        ({"clip": 0}, r"protection.clip: 0 is not valid"),
        ({"distribution": "cauchy"}, r"protection.distribution: 'cauchy' is not valid"),
        ({"clip": 1.6e-44, "multiplier": 0.04}, "multiplier: noise of .* is too small for float32"),
        ({"scale": 1e-40}, "scale: noise of .* is too small for float32"),
        ({"clip": 1.0, "multiplier": 1e-31}, "multiplier: noise of .* is too small for float32"),
    )
]
SELECTIONS: Rows = [
    (
        {"groups": [[], range(3), range(3, 6), []], "train": {"cohort": 3}},
        "train.cohort: 3 clients.*only 2 of 4.*valid: 1 to 2",
    ),
    ({"train": {"epochs": 0.5}}, r"train\.epochs: 0\.5 is not valid: .*train\.steps"),
    *(
        ({"selection": {"name": "list", "clients": clients}, "groups": [range(9), range(9, 20), []]}, told)
        for clients in ([[0, 0]], [[0], [2]], [[7]])
        for told in [r"selection.clients\[\d\]: .*; valid: different clients that hold"]
    ),
    *(
        ({"selection": {"name": "power-of-choice", "candidates": 4}, **changes}, told)
        for changes, told in (
            (iid(6, 5), "selection.candidates: 4 is less than train.cohort: 5; valid: 5 or more"),
            ({"method": "fd", "holdout": 0.2}, "under the server's model, but clients keep weights .* of their own"),
            ({"method": "fedrep", "holdout": 0.2}, "under the server's model, but clients keep layers .* of their own"),
            ({"evaluate_model": "device"}, "leaves open which clients are in the first round"),
        )
    ),
]
XOR: Rows = [
    (
        {
            **SAMPLES,
            "partition": {"name": "counts", "counts": rows or [[6, 6, 2], [6, 6, 5], [6, 6, 3]]},
            "method": {"name": "xormixfl", "sharing": sharing},
        },
        told,
    )
    for sharing, rows, told in (
        ({"server": 3}, None, "method.sharing.server: 3: there are 3 clients"),
        ({"targets": [3]}, None, r"method.sharing.targets: \[3\] is not valid: labels from 0 to 2"),
        ({"dummies": [5], "targets": [2]}, None, r"method.sharing.dummies: \[5\] is not valid"),
        ({"dummies": 3}, None, "method.sharing.dummies: 3 is more than the 2 labels that are no targets"),
        ({"targets": [2], "dummies": [1, 2]}, None, "dummies: 2 is a target label"),
        ({"dummies": []}, None, "dummies: is empty"),
        ({"targets": []}, None, "targets: is empty"),
        ({"alpha": 1.0}, None, "method.sharing.alpha"),
        ({"p": 0}, None, "method.sharing.p"),
        ({"offset": 256}, None, "method.sharing.offset"),
        ({"targets": [2], "dummies": [1]}, [[6, 0, 2], [6, 6, 5], [6, 6, 3]], r"the server .* has no samples of \[1\]"),
        ({}, [[0, 0, 0], [6, 6, 5], [6, 6, 3]], r"method\.sharing\.server: 0: it holds no samples"),
    )
]


@each(
    ("changes", "told"),
    [
        *(AGGREGATORS + BASES + CCVR + STATES + OWN_LAYERS + AUGMENTED + FEATURES + METRICS + OUTPUTS + SHARINGS),
        *(SLOW + PROTECTIONS + SELECTIONS + XOR),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_first_round(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FedblendError, match=told):
        federation(**changes)


MOMENTS = {"groups": [range(0, 40, 2), range(1, 40, 2)], "model": LINEAR}
THREE = {"groups": [range(k, 40, 3) for k in range(3)], "model": LINEAR}
SECURE = {"name": "secure-moments", "fewest": 2}


@each(
    ("changes", "told"),
    [
        *parts_of(
            "fed3r",
            [
                ({"sharing": {"multiplier": 1.0}}, "method.sharing.multiplier: 1 needs a largest length"),
                ({"sharing": {"min_samples": 21}}, "method.sharing.min_samples: 21"),
                ({"sharing": {"gram": "none"}}, "the head 'ridge' needs second moments"),
                (SOFTMAX, "takes clients' changes for gradients"),
            ],
            **MOMENTS,
        ),
        *parts_of(
            "fed3r",
            [
                ({"sharing": {**SECURE, "range": 1.0}}, "method.sharing.range: a number of 'sums' is beyond 1"),
                ({"sharing": {**SECURE, "clients": 2}}, "sharing.clients: 2 in the sum at most, but 3 hold samples"),
                ({"sharing": {**SECURE, "noise_over": 4}}, "noise_over: 4 clients to a sum, but only 3 hold"),
            ],
            **THREE,
        ),
        *methods(
            [
                ("fed3r", "needs classes"),
                ("statmix", r"'channel-statistics' needs images .*\[5\]"),
                (parts("means", "virtual-homogeneity"), "'virtual-homogeneity' needs classes.*valid: virtual-samples"),
                ({"name": "naivemix", "sharing": {"multiplier": 1.0}}, "needs targets that are classes"),
            ],
            data=numbers(),
            model=DEEP,
            scale="standard",
        ),
        *(
            ({**SAMPLES, "method": method, "partition": {"name": "counts", "counts": counts}}, told)
            for method, counts, told in (
                ("virtual-xor", [[5, 5, 5], [5, 5, 5]], "nothing to mix with; choose another server"),
                ("virtual-seeds", [[5, 5, 0], [5, 0, 5]], "nothing to mix with; let clients hold two labels"),
            )
        ),
        (
            {"method": {"name": "fedmix", "sharing": {"split": "class"}}, "policy": {"min_mean": 8}},
            "'means': nothing was shared before round 1.*policy.min_mean: 8",
        ),
        (
            {
                "method": {"sharing": {**MEANS, "samples_per_mean": 2}, "server_step": "train-on-means"},
                "groups": [range(3), range(3, 6)],
            },
            "nothing to work on; let clients make larger means",
        ),
        (
            {"slow": {"seconds": [9.0] * 4, "deadline": 1.0}},
            r"0 good uploads of 2, but min_uploads is 1 \(clients .*: missed the deadline \(slow\)\)",
        ),
        ({"channel": {"name": "wireless", "bandwidth": 39e3}, "train": {"cohort": 4}}, "0 good uploads of 4"),
    ],
)
def test_what_only_the_first_round_can_tell_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FedblendError, match=told):
        run(federation(**changes), 1)
