"""Named methods: each is a preset of parts, and no other code depends on its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedblend.core.errors import FedblendError, brief, or_valid
from fedblend.experiment.tables import as_part

Presets = dict[str, tuple[str, dict[str, Any]]]
"""Methods by name: a line of text, and the parts that differ from FedAvg's."""

BY_CLIENTS = {"name": "mean", "by": "clients"}


def _preset(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A method's line of text and fields; parts are given by their names, or as tables, and listed as tables."""
    return text, {
        field: [as_part(one) for one in given] if field == "terms" else given if field == "upload" else as_part(given)
        for field, given in fields.items()
    }


FAMILIES: dict[str, Presets] = {
    "Averaging": {
        "fedavg": _preset("weighted average of local training (McMahan et al. 2017)"),
    },
    "Mixed data": {
        "localmix": _preset("mixup within a client's batches (FedMix, figure 1b)", objective="localmix"),
        "global-mixup": _preset(
            "mixup with all raw samples: breaks privacy (FedMix)", sharing="raw", objective="global-mixup"
        ),
        "naivemix": _preset(
            "mixup with other clients' means (FedMix, equation 1)", sharing="means", objective="naivemix"
        ),
        "fedmix": _preset(
            "Global Mixup by a Taylor term on means (FedMix, equation 5)", sharing="means", objective="fedmix"
        ),
        "fedmix-checked": _preset(
            "FedMix whose Taylor term is checked at the mixed sample",
            sharing="means",
            objective={"name": "fedmix", "remedy": "check"},
        ),
        "virtual-means": _preset(
            "shared class means are further samples of each client",
            sharing={"name": "means", "split": "class", "samples_per_mean": 20},
            objective="virtual-samples",
        ),
        "shared-set": _preset(
            "raw samples as further ones: breaks privacy (Zhao 2018)", sharing="raw-seeds", objective="virtual-samples"
        ),
        "virtual-seeds": _preset(
            "inversely mixed seeds are further samples of each client",
            sharing="mixed-seeds",
            objective="virtual-samples",
        ),
        "virtual-xor": _preset(
            "decoded XOR-ed seeds are further samples of each client", sharing="xor-seeds", objective="virtual-samples"
        ),
        "vhl": _preset(
            "noise by class, features aligned (Tang et al. 2022)",
            sharing="class-noise",
            objective="virtual-homogeneity",
        ),
        "statmix": _preset(
            "channel statistics of others' images (Lewy et al. 2022)", sharing="channel-statistics", objective="statmix"
        ),
        "fed-augmix": _preset("augmented views, and outputs kept near (Fed-AugMix)", objective="augmix"),
        "noise-mix": _preset(
            "control: NaiveMix with noise as means (FedMix, Table 9)", sharing="noise", objective="naivemix"
        ),
        "local-means": _preset(
            "control: NaiveMix with one's own means (FedMix, Table 9)", sharing="local-means", objective="naivemix"
        ),
        "naivemix-hidden": _preset(
            "NaiveMix on hidden states (FedMix, appendix E)",
            sharing="hidden-means",
            objective={"name": "hidden-mix", "form": "naivemix"},
        ),
        "fedmix-hidden": _preset(
            "FedMix on hidden states (FedMix, appendix E)",
            sharing="hidden-means",
            objective={"name": "hidden-mix", "form": "fedmix"},
        ),
        "fedfa": _preset("perturbed statistics of hidden maps (Zhou, Konukoglu 2023)", objective="fedfa"),
        "flea": _preset(
            "mixup with features of single samples (Xia et al. 2024)", sharing="features", objective="flea"
        ),
    },
    "Against client drift": {
        "scaffold": _preset(
            "control variates at both ends (Karimireddy et al. 2020)", terms=["scaffold"], aggregator=BY_CLIENTS
        ),
        "feddyn": _preset("dynamic regularisation (Acar et al. 2021)", terms=["feddyn"], aggregator=BY_CLIENTS),
        "moon": _preset("model-contrastive term (Li, He and Song 2021)", terms=["moon"]),
        "fednova": _preset("updates divided by local steps (Wang et al. 2020)", aggregator="fednova"),
        "fedntd": _preset("distillation of the not-true classes (Lee et al. 2022)", terms=["fedntd"]),
        "fedlc": _preset("logits calibrated by label counts (Zhang et al. 2022)", objective="fedlc"),
        "fedrs": _preset("restricted softmax for missing classes (Li, Zhan 2021)", objective="fedrs"),
    },
    "Optimisers at the server": {
        "fedavgm": _preset("momentum at the server (Hsu et al. 2019)", server_step="fedavgm"),
        "fedadagrad": _preset("Adagrad at the server (Reddi et al. 2021)", server_step="fedadagrad"),
        "fedadam": _preset("Adam at the server (Reddi et al. 2021)", server_step="fedadam"),
        "fedyogi": _preset("Yogi at the server (Reddi et al. 2021)", server_step="fedyogi"),
    },
    "Training at the server": {
        "aggenhance": _preset("tuned on class interior points (Ou et al. 2022)", server_step="aggenhance"),
        "aggenhance-secure": _preset(
            "points made by clients, for secure sums (AggEnhance)", server_step="aggenhance-secure"
        ),
        "server-means": _preset(
            "trained on class means that clients share once",
            sharing={"name": "means", "split": "class", "samples_per_mean": 20},
            server_step="train-on-means",
        ),
        "server-matched": _preset(
            "trained on synthetic samples that clients share once",
            sharing={"name": "matched-samples", "networks": "random"},
            server_step="train-on-means",
        ),
        "feddm": _preset(
            "trained on synthetic samples alone (Xiong et al. 2023)",
            upload="nothing",
            sharing="matched-samples",
            server_step={"name": "train-on-means", "epochs": 20},
        ),
        "ccvr": _preset(
            "last layer trained on Gaussian features (Luo et al. 2021)",
            sharing="feature-statistics",
            server_step="ccvr",
        ),
        "prior-samples": _preset("tuned on real samples: breaks privacy (AggEnhance)", server_step="prior-samples"),
    },
    "Personal models": {
        "ditto": _preset("a second model of each client, near w (Li et al. 2021)", personal="ditto"),
        "fedper": _preset("shared body, own head (Arivazhagan et al. 2019)", personal="fedper"),
        "fedrep": _preset("own head, trained before the body (Collins et al. 2021)", personal="fedrep"),
        "pfedme": _preset(
            "personal models by Moreau envelopes (Dinh et al. 2020)", personal="pfedme", aggregator=BY_CLIENTS
        ),
        "fedproto": _preset(
            "mean embeddings by class are shared (Tan et al. 2022)",
            upload="prototypes",
            stateful_clients=True,
            terms=["prototypes"],
        ),
        "fedbn": _preset("own normalisation layers (Li et al. 2021)", personal="fedbn"),
    },
    "Outputs in place of models": {
        "fd": _preset(
            "mean outputs by label; devices keep their models (Mix2FLD)",
            upload="outputs",
            stateful_clients=True,
            terms=["distill"],
        ),
        "fld": _preset(
            "outputs up, model down, raw seeds: breaks privacy (Mix2FLD)",
            upload="outputs",
            sharing="raw-seeds",
            server_step="distill-to-model",
        ),
        "mixfld": _preset(
            "outputs up, model down, mixed seeds (Mix2FLD)",
            upload="outputs",
            sharing={"name": "mixed-seeds", "inverse": False},
            server_step="distill-to-model",
        ),
        "mix2fld": _preset(
            "outputs up, model down, inversely mixed seeds (Mix2FLD)",
            upload="outputs",
            sharing="mixed-seeds",
            server_step="distill-to-model",
        ),
    },
    "One shot": {
        "xormixfl": _preset(
            "the server trains on decoded XOR-ed samples (XorMixFL)",
            upload="nothing",
            sharing="xor-seeds",
            server_step="train-on-seeds",
        ),
        "mixfl": _preset(
            "the server trains on mixed samples (XorMixFL, section 1)",
            upload="nothing",
            sharing="mixed-target-seeds",
            server_step="train-on-seeds",
        ),
        "vanilla-fl": _preset("FedAvg for one round, until convergence (XorMixFL)"),
        "standalone": _preset(
            "the server trains on its own samples alone (XorMixFL)",
            upload="nothing",
            sharing="base-samples",
            server_step="train-on-seeds",
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
