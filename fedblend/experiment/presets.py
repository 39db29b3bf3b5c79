"""Named methods: each is a preset of parts, and no other code depends on its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedblend.core.errors import FedblendError, brief, or_valid
from fedblend.experiment.tables import as_part

Presets = dict[str, tuple[str, dict[str, Any]]]
"""Methods by name: a line of text, and the parts that differ from FedAvg's."""

BY_CLIENTS = {"name": "mean", "by": "clients"}

FAMILIES: dict[str, Presets] = {
    "Averaging": {
        "fedavg": ("weighted average of local training (McMahan et al. 2017)", {}),
    },
    "Mixed data": {
        "localmix": ("mixup within a client's batches (FedMix, figure 1b)", {"objective": {"name": "localmix"}}),
        "global-mixup": (
            "mixup with all raw samples: breaks privacy (FedMix)",
            {"sharing": {"name": "raw"}, "objective": {"name": "global-mixup"}},
        ),
        "naivemix": (
            "mixup with other clients' means (FedMix, equation 1)",
            {"sharing": {"name": "means"}, "objective": {"name": "naivemix"}},
        ),
        "fedmix": (
            "Global Mixup by a Taylor term on means (FedMix, equation 5)",
            {"sharing": {"name": "means"}, "objective": {"name": "fedmix"}},
        ),
        "fedmix-checked": (
            "FedMix whose Taylor term is checked at the mixed sample",
            {"sharing": {"name": "means"}, "objective": {"name": "fedmix", "remedy": "check"}},
        ),
        "virtual-means": (
            "shared class means are further samples of each client",
            {
                "sharing": {"name": "means", "split": "class", "samples_per_mean": 20},
                "objective": {"name": "virtual-samples"},
            },
        ),
        "shared-set": (
            "raw samples as further ones: breaks privacy (Zhao 2018)",
            {"sharing": {"name": "raw-seeds"}, "objective": {"name": "virtual-samples"}},
        ),
        "virtual-seeds": (
            "inversely mixed seeds are further samples of each client",
            {"sharing": {"name": "mixed-seeds"}, "objective": {"name": "virtual-samples"}},
        ),
        "virtual-xor": (
            "decoded XOR-ed seeds are further samples of each client",
            {"sharing": {"name": "xor-seeds"}, "objective": {"name": "virtual-samples"}},
        ),
        "vhl": (
            "noise by class, features aligned (Tang et al. 2022)",
            {"sharing": {"name": "class-noise"}, "objective": {"name": "virtual-homogeneity"}},
        ),
        "statmix": (
            "channel statistics of others' images (Lewy et al. 2022)",
            {"sharing": {"name": "channel-statistics"}, "objective": {"name": "statmix"}},
        ),
        "fed-augmix": (
            "augmented views, and outputs kept near (Fed-AugMix)",
            {"objective": {"name": "augmix"}},
        ),
        "noise-mix": (
            "control: NaiveMix with noise as means (FedMix, Table 9)",
            {"sharing": {"name": "noise"}, "objective": {"name": "naivemix"}},
        ),
        "local-means": (
            "control: NaiveMix with one's own means (FedMix, Table 9)",
            {"sharing": {"name": "local-means"}, "objective": {"name": "naivemix"}},
        ),
        "naivemix-hidden": (
            "NaiveMix on hidden states (FedMix, appendix E)",
            {"sharing": {"name": "hidden-means"}, "objective": {"name": "hidden-mix", "form": "naivemix"}},
        ),
        "fedmix-hidden": (
            "FedMix on hidden states (FedMix, appendix E)",
            {"sharing": {"name": "hidden-means"}, "objective": {"name": "hidden-mix", "form": "fedmix"}},
        ),
        "fedfa": ("perturbed statistics of hidden maps (Zhou, Konukoglu 2023)", {"objective": {"name": "fedfa"}}),
        "flea": (
            "mixup with features of single samples (Xia et al. 2024)",
            {"sharing": {"name": "features"}, "objective": {"name": "flea"}},
        ),
    },
    "Against client drift": {
        "scaffold": (
            "control variates at both ends (Karimireddy et al. 2020)",
            {"terms": [{"name": "scaffold"}], "aggregator": BY_CLIENTS},
        ),
        "feddyn": (
            "dynamic regularisation (Acar et al. 2021)",
            {"terms": [{"name": "feddyn"}], "aggregator": BY_CLIENTS},
        ),
        "moon": ("model-contrastive term (Li, He and Song 2021)", {"terms": [{"name": "moon"}]}),
        "fednova": ("updates divided by local steps (Wang et al. 2020)", {"aggregator": {"name": "fednova"}}),
        "fedntd": ("distillation of the not-true classes (Lee et al. 2022)", {"terms": [{"name": "fedntd"}]}),
        "fedlc": ("logits calibrated by label counts (Zhang et al. 2022)", {"objective": {"name": "fedlc"}}),
        "fedrs": ("restricted softmax for missing classes (Li, Zhan 2021)", {"objective": {"name": "fedrs"}}),
    },
    "Optimisers at the server": {
        "fedavgm": ("momentum at the server (Hsu et al. 2019)", {"server_step": {"name": "fedavgm"}}),
        "fedadagrad": ("Adagrad at the server (Reddi et al. 2021)", {"server_step": {"name": "fedadagrad"}}),
        "fedadam": ("Adam at the server (Reddi et al. 2021)", {"server_step": {"name": "fedadam"}}),
        "fedyogi": ("Yogi at the server (Reddi et al. 2021)", {"server_step": {"name": "fedyogi"}}),
    },
    "Training at the server": {
        "aggenhance": (
            "tuned on class interior points (Ou et al. 2022)",
            {"server_step": {"name": "aggenhance"}},
        ),
        "aggenhance-secure": (
            "points made by clients, for secure sums (AggEnhance)",
            {"server_step": {"name": "aggenhance-secure"}},
        ),
        "server-means": (
            "trained on class means that clients share once",
            {
                "sharing": {"name": "means", "split": "class", "samples_per_mean": 20},
                "server_step": {"name": "train-on-means"},
            },
        ),
        "server-matched": (
            "trained on synthetic samples that clients share once",
            {
                "sharing": {"name": "matched-samples", "networks": "random"},
                "server_step": {"name": "train-on-means"},
            },
        ),
        "feddm": (
            "trained on synthetic samples alone (Xiong et al. 2023)",
            {
                "upload": "nothing",
                "sharing": {"name": "matched-samples"},
                "server_step": {"name": "train-on-means", "epochs": 20},
            },
        ),
        "ccvr": (
            "last layer trained on Gaussian features (Luo et al. 2021)",
            {"sharing": {"name": "feature-statistics"}, "server_step": {"name": "ccvr"}},
        ),
        "prior-samples": (
            "tuned on real samples: breaks privacy (AggEnhance)",
            {"server_step": {"name": "prior-samples"}},
        ),
    },
    "Personal models": {
        "ditto": (
            "a second model of each client, near w (Li et al. 2021)",
            {"personal": {"name": "ditto"}},
        ),
        "fedper": ("shared body, own head (Arivazhagan et al. 2019)", {"personal": {"name": "fedper"}}),
        "fedrep": ("own head, trained before the body (Collins et al. 2021)", {"personal": {"name": "fedrep"}}),
        "pfedme": (
            "personal models by Moreau envelopes (Dinh et al. 2020)",
            {"personal": {"name": "pfedme"}, "aggregator": BY_CLIENTS},
        ),
        "fedproto": (
            "mean embeddings by class are shared (Tan et al. 2022)",
            {"upload": "prototypes", "stateful_clients": True, "terms": [{"name": "prototypes"}]},
        ),
        "fedbn": ("own normalisation layers (Li et al. 2021)", {"personal": {"name": "fedbn"}}),
    },
    "Outputs in place of models": {
        "fd": (
            "mean outputs by label; devices keep their models (Mix2FLD)",
            {"upload": "outputs", "stateful_clients": True, "terms": [{"name": "distill"}]},
        ),
        "fld": (
            "outputs up, model down, raw seeds: breaks privacy (Mix2FLD)",
            {"upload": "outputs", "sharing": {"name": "raw-seeds"}, "server_step": {"name": "distill-to-model"}},
        ),
        "mixfld": (
            "outputs up, model down, mixed seeds (Mix2FLD)",
            {
                "upload": "outputs",
                "sharing": {"name": "mixed-seeds", "inverse": False},
                "server_step": {"name": "distill-to-model"},
            },
        ),
        "mix2fld": (
            "outputs up, model down, inversely mixed seeds (Mix2FLD)",
            {"upload": "outputs", "sharing": {"name": "mixed-seeds"}, "server_step": {"name": "distill-to-model"}},
        ),
    },
    "One shot": {
        "xormixfl": (
            "the server trains on decoded XOR-ed samples (XorMixFL)",
            {"upload": "nothing", "sharing": {"name": "xor-seeds"}, "server_step": {"name": "train-on-seeds"}},
        ),
        "mixfl": (
            "the server trains on mixed samples (XorMixFL, section 1)",
            {"upload": "nothing", "sharing": {"name": "mixed-target-seeds"}, "server_step": {"name": "train-on-seeds"}},
        ),
        "vanilla-fl": ("FedAvg for one round, until convergence (XorMixFL)", {}),
        "standalone": (
            "the server trains on its own samples alone (XorMixFL)",
            {"upload": "nothing", "sharing": {"name": "base-samples"}, "server_step": {"name": "train-on-seeds"}},
        ),
    },
}
"""Named methods by family, as lists show them."""

SINGLE: Presets = {name: preset for family in FAMILIES.values() for name, preset in family.items()}

START = ("fedavg", "fedprox", "fedlc", "fedmix", "server-means")
"""Five methods to start with: the baseline, two that send nothing beside the model, and two blends."""

PROXIMAL = {"name": "proximal"}

WITH_PROXIMAL = ("Averaging", "Mixed data", "Training at the server", "Outputs in place of models", "One shot")
"""Families whose methods also exist with FedProx's term, where clients train; any other method may have the term too,
without a preset.
"""

AUGMENTED = ("naivemix", "fedmix")
"""Methods that also have a preset with Fed-AugMix; other objectives can be `augmix`'s base too, without a preset."""


def presets() -> Presets:
    """All named methods: name -> (description, parts)."""
    return {name: preset for family in families().values() for name, preset in family.items()}


def families() -> dict[str, Presets]:
    """All named methods by family.

    Some also exist with Fed-AugMix's divergence. Some that train clients also exist with FedProx's term; all these but
    `fedprox` itself are a family of their own, the last.
    """
    with_views = {
        f"{name}+fed-augmix": (
            f"Fed-AugMix on {name}",
            {**SINGLE[name][1], "objective": {"name": "augmix", "base": SINGLE[name][1]["objective"]}},
        )
        for name in AUGMENTED
    }
    result = {family: dict(methods) for family, methods in FAMILIES.items()}
    result["Mixed data"] |= with_views
    with_prox = {
        f"fedprox+{name}": (f"FedProx with {name}", {**spec, "terms": [*spec.get("terms", []), PROXIMAL]})
        for family in WITH_PROXIMAL
        for name, (_, spec) in result[family].items()
        if spec.get("upload") != "nothing" and name != "fedavg"
    }
    result["Averaging"]["fedprox"] = ("FedAvg with a proximal term (Li et al. 2020)", {"terms": [PROXIMAL]})
    return result | {"With FedProx's term": with_prox}


def expand(spec: Mapping[str, Any], where: str = "method") -> dict[str, Any]:
    """The parts of a method: its preset, updated with the fields of ``spec``.

    ``spec`` is such as ``{name = "fedmix", objective = {lambda = 0.2}}``; without a name it consists of parts only. A
    part table without a name changes options of the preset's part. A part table with another name replaces it. A list
    of terms replaces the preset's; a table of terms by name, ``{moon = {mu = 1}}``, changes options of the preset's.
    """
    given = dict(spec)
    name = given.pop("name", None)
    if name is None:
        return given
    all_presets = presets()
    if not isinstance(name, str) or name not in all_presets:
        meant = _how_to_combine(str(name), all_presets) or _how_to_name_a_part(name)
        meant = meant or or_valid(str(name), all_presets, everything="fedblend list methods")
        raise FedblendError(f"{where}.name: unknown method {brief(name)}{meant}")
    parts = dict(all_presets[name][1])
    for field, value in given.items():
        parts[field] = overlay(parts.get(field), value, f"{where}.{field}")
    return parts


def _how_to_combine(name: str, all_presets: Presets) -> str:
    """How to combine two methods whose names are joined by ``+``; empty if a preset combines them, or one is unknown.

    >>> print(_how_to_combine("fedmix+scaffold", presets()))
     (to combine them, write method = {name = "fedmix", ...} with the parts of scaffold: terms, aggregator)
    """
    first, _, second = name.partition("+")
    if f"{second}+{first}" in all_presets or not {first, second} <= set(all_presets):
        return ""
    parts = ", ".join(all_presets[second][1])
    return f' (to combine them, write method = {{name = "{first}", ...}} with the parts of {second}: {parts})'


def _how_to_name_a_part(name: Any) -> str:
    """What to write instead of a part of the user's own as a method; empty if the name is no ``module:Class``."""
    if not isinstance(name, str) or ":" not in name:
        return ""
    cls = name.partition(":")[2]
    return (
        f': a method names a part of your own in the field of its kind; write {{ label = "{cls}", objective = {{ name '
        f'= "{name}" }} }} in place of "{name}" for an objective; other fields: sharing, terms, personal, upload, '
        "aggregator, server_step"
    )


def overlay(preset: Any, given: Any, where: str = "") -> Any:
    """Update a preset's part, or a list's parts by their names, with given options, and a part inside it likewise."""
    if isinstance(preset, list) and isinstance(given, Mapping):
        parts = {part["name"]: part for part in map(as_part, preset)}
        for name in given:
            if name not in parts:
                raise FedblendError(f"{where}.{name}: there is no such part here; valid: {', '.join(parts) or 'none'}")
        return [overlay(part, given.get(name, {})) for name, part in parts.items()]
    if isinstance(given, Mapping) and isinstance(preset, Mapping):
        if "name" in given and given["name"] != preset.get("name"):
            return dict(given)
        return {**preset, **{field: _overlay_part(preset.get(field), value) for field, value in given.items()}}
    return given


def _overlay_part(preset: Any, given: Any) -> Any:
    return overlay(preset, given) if isinstance(preset, Mapping) and "name" in preset else given
