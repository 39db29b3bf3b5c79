"""Named methods: each is a preset of parts, and no other code depends on its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedblend.core.errors import FedblendError, brief, did_you_mean

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("weighted average of local training (McMahan et al. 2017)", {}),
    "localmix": (
        "mixup within each client's batches (FedMix, figure 1b)",
        {"objective": {"name": "localmix"}},
    ),
    "global-mixup": (
        "mixup with raw samples of all clients: an upper bound, breaks privacy (FedMix, figure 1a)",
        {"sharing": {"name": "raw"}, "objective": {"name": "global-mixup"}},
    ),
    "naivemix": (
        "mixup with other clients' means (FedMix, equation 1)",
        {"sharing": {"name": "means"}, "objective": {"name": "naivemix"}},
    ),
    "fedmix": (
        "Global Mixup approximated by a Taylor term on means (FedMix, equation 5)",
        {"sharing": {"name": "means"}, "objective": {"name": "fedmix"}},
    ),
    "aggenhance": (
        "FedAvg, tuned on class interior points of the clients' models (AggEnhance, Ou et al. 2022)",
        {"server_step": {"name": "aggenhance"}},
    ),
    "aggenhance-secure": (
        "AggEnhance where clients make the points, for secure aggregation (AggEnhance, Figure 12)",
        {"server_step": {"name": "aggenhance-secure"}},
    ),
    "prior-samples": (
        "FedAvg tuned on real samples at the server: a comparison, breaks privacy (AggEnhance, Figure 9)",
        {"server_step": {"name": "prior-samples"}},
    ),
    "scaffold": (
        "FedAvg with control variates against client drift (SCAFFOLD, Karimireddy et al. 2020)",
        {"terms": [{"name": "scaffold"}], "aggregator": {"name": "mean", "by": "clients"}},
    ),
    "feddyn": (
        "FedAvg with dynamic regularisation (FedDyn, Acar et al. 2021)",
        {"terms": [{"name": "feddyn"}], "aggregator": {"name": "mean", "by": "clients"}},
    ),
    "moon": ("FedAvg with a model-contrastive term (MOON, Li et al. 2021)", {"terms": [{"name": "moon"}]}),
    "ditto": (
        "FedAvg, and a personal model for each client near the global one (Ditto, Li et al. 2021)",
        {"personal": {"name": "ditto"}},
    ),
    "fedavgm": ("FedAvg with momentum at the server (Hsu et al. 2019)", {"server_step": {"name": "fedavgm"}}),
    "fedadagrad": ("FedAvg with Adagrad at the server (Reddi et al. 2021)", {"server_step": {"name": "fedadagrad"}}),
    "fedadam": ("FedAvg with Adam at the server (Reddi et al. 2021)", {"server_step": {"name": "fedadam"}}),
    "fedyogi": ("FedAvg with Yogi at the server (Reddi et al. 2021)", {"server_step": {"name": "fedyogi"}}),
    "fd": (
        "federated distillation: mean outputs by label are exchanged, devices keep their models (Mix2FLD)",
        {"upload": "outputs", "stateful_clients": True, "terms": [{"name": "distill"}]},
    ),
    "fld": (
        "outputs up, a model down, distilled on raw seeds at the server: breaks privacy (Mix2FLD, section III-A)",
        {"upload": "outputs", "sharing": {"name": "raw-seeds"}, "server_step": {"name": "distill-to-model"}},
    ),
    "mixfld": (
        "outputs up, a model down, distilled on mixed seeds (Mix2FLD, section III-B)",
        {
            "upload": "outputs",
            "sharing": {"name": "mixed-seeds", "inverse": False},
            "server_step": {"name": "distill-to-model"},
        },
    ),
    "mix2fld": (
        "outputs up, a model down, distilled on inversely mixed seeds (Mix2FLD, section III-C)",
        {"upload": "outputs", "sharing": {"name": "mixed-seeds"}, "server_step": {"name": "distill-to-model"}},
    ),
    "xormixfl": (
        "one shot: the server balances its labels with decoded XOR-encoded samples, and trains (XorMixFL)",
        {"upload": "nothing", "sharing": {"name": "xor-seeds"}, "server_step": {"name": "train-on-seeds"}},
    ),
    "mixfl": (
        "one shot: the server balances its labels with mixed samples, and trains (XorMixFL, section 1)",
        {"upload": "nothing", "sharing": {"name": "mixed-target-seeds"}, "server_step": {"name": "train-on-seeds"}},
    ),
    "vanilla-fl": (
        "one shot: FedAvg, for one round of training until convergence (XorMixFL, section 4)",
        {},
    ),
    "standalone": (
        "the server trains on its own samples alone (XorMixFL, section 4)",
        {"upload": "nothing", "sharing": {"name": "base-samples"}, "server_step": {"name": "train-on-seeds"}},
    ),
    "fed-augmix": (
        "augmented views of each image, whose outputs are kept near the image's own (Fed-AugMix)",
        {"objective": {"name": "augmix"}},
    ),
    "noise-mix": (
        "control: NaiveMix with random noise in place of means (FedMix, Table 9)",
        {"sharing": {"name": "noise"}, "objective": {"name": "naivemix"}},
    ),
    "local-means": (
        "control: NaiveMix with the client's own means only (FedMix, Table 9)",
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
}

PROXIMAL = {"name": "proximal"}

AUGMENTED = ("naivemix", "fedmix")
"""Methods that also have a preset with Fed-AugMix; other objectives can be `augmix`'s base too, without a preset."""


def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """All named methods: name -> (description, parts).

    Some also exist with Fed-AugMix's divergence. Methods that train clients also exist with FedProx's term.
    """
    with_views = {
        f"{name}+fed-augmix": (
            f"Fed-AugMix on: {SINGLE[name][0]}",
            {**SINGLE[name][1], "objective": {"name": "augmix", "base": SINGLE[name][1]["objective"]}},
        )
        for name in AUGMENTED
    }
    methods = SINGLE | with_views
    with_prox = {
        "fedprox" if name == "fedavg" else f"fedprox+{name}": (
            "FedAvg with a proximal term (Li et al. 2020)" if name == "fedavg" else f"FedProx with: {text}",
            {**spec, "terms": [*spec.get("terms", []), PROXIMAL]},
        )
        for name, (text, spec) in methods.items()
        if spec.get("upload") != "nothing"
    }
    return methods | with_prox


def expand(spec: Mapping[str, Any], where: str = "method") -> dict[str, Any]:
    """The parts of a method: its preset, updated with the fields of ``spec``.

    ``spec`` is such as ``{name = "fedmix", objective = {lambda = 0.2}}``; without a name it consists of parts only. A
    part table without a name changes options of the preset's part. A part table with another name replaces it.
    """
    given = dict(spec)
    name = given.pop("name", None)
    if name is None:
        return given
    all_presets = presets()
    if not isinstance(name, str) or name not in all_presets:
        raise FedblendError(
            f"{where}.name: unknown method {brief(name)}{did_you_mean(str(name), all_presets)}; "
            f"valid: {', '.join(all_presets)}"
        )
    parts = dict(all_presets[name][1])
    for field, value in given.items():
        parts[field] = overlay(parts.get(field), value)
    return parts


def overlay(preset: Any, given: Any) -> Any:
    """Update a preset's part with given options, and a part inside it likewise."""
    if isinstance(given, Mapping) and isinstance(preset, Mapping):
        if "name" in given and given["name"] != preset.get("name"):
            return dict(given)
        return {**preset, **{field: _overlay_part(preset.get(field), value) for field, value in given.items()}}
    return given


def _overlay_part(preset: Any, given: Any) -> Any:
    return overlay(preset, given) if isinstance(preset, Mapping) and "name" in preset else given
