"""Experiments of tests of reports."""

from fedblend.experiment.config import resolve

HOSTILE = "a<b>&</script>"
"""A method's label that would be markup without escaping."""


def experiment(method, seed, **more):
    """A small experiment on digits; one method has a hostile label."""
    spec = {"name": method, "label": HOSTILE} if method == "naivemix" else method
    fields = {
        "name": "tiny",
        "data": "digits",
        "model": "mlp",
        "partition": {"name": "classes", "clients": 6, "classes_per_client": 3},
        "rounds": 3,
        "target": 0.2,
        "holdout": 0.2,
        "unsafe": True,
        "train": {"cohort": 3, "epochs": 1, "lr": 0.05},
    }
    return resolve({**fields, "method": spec, "seed": seed, **more})
