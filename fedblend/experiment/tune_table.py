"""The table ``[tune]`` of an experiment file: which fields to search, over which values, with which budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, Int, Positive
from fedblend.experiment.fields import FrozenTable


class Interval(FrozenTable):
    """The values from ``low`` to ``high``: whole numbers if both are."""

    low: Int | Float
    """The least value."""
    high: Int | Float
    """The largest value."""
    log: bool = False
    """Whether values are drawn on a logarithmic scale, as suits learning rates."""

    @pydantic.model_validator(mode="after")
    def _require_an_interval(self) -> Interval:
        if not self.low < self.high or (self.log and self.low <= 0):
            bound = "above 0 and " if self.log else ""
            raise ValueError(f"low {self.low:g}, high {self.high:g} is no interval; valid: low {bound}below high")
        return self


class Tune(FrozenTable):
    """A search for the best values of fields, on validation samples. Every method has the same budget."""

    fields: dict[str, list[Any] | Interval] = Field(min_length=1)
    """The fields by their path, such as "train.lr": a list of values, or a table with `low`, `high` and `log`. A method
    without a field is searched over the others. At least one method must have each field.
    """
    search: Literal["random", "grid", "tpe"] = "random"
    """How values are chosen: at random, all combinations of lists, or by a tree of Parzen estimators (Optuna's TPE)."""
    trials: Count | None = None
    """Most trials of a method (default: 20, in a grid all)."""
    rounds: Count | None = None
    """Most rounds of a method over all its trials; no further trial begins after them."""
    minutes: Positive | None = None
    """Most minutes of a method over all its trials, those before an interruption too; no further trial begins after
    them.
    """
    halving: bool = False
    """End trials once, after a third of the rounds, that are not among the best third at that round (the first step of
    successive halving). All others make all their rounds.
    """

    @pydantic.model_validator(mode="after")
    def _require_values(self) -> Tune:
        for field, values in self.fields.items():
            if field == "seed":
                valid = "seeds = [0, 1, 2] for the best values"
                raise ValueError(f"fields.seed: a search would choose the seed; valid: {valid}")
            if values == []:
                raise ValueError(f"fields.{field}: [] is not valid: at least one value is needed")
            if self.search == "grid" and isinstance(values, Interval):
                raise ValueError(f"fields.{field}: search = 'grid' needs a list of values, not an interval")
        return self

    def trials_of(self, fields: Mapping[str, Any]) -> int:
        """Most trials of a method with these of the fields."""
        if self.search != "grid":
            return self.trials or 20
        cells = math.prod(len(values) for values in fields.values())
        return min(cells, self.trials or cells)


def read_tune(table: Mapping[str, Any]) -> Tune:
    """The table ``tune`` of a file. Raises :class:`FedblendError` if it is missing or invalid."""
    given = table.get("tune")
    if not isinstance(given, Mapping):
        example = '"train.lr" = { low = 0.001, high = 1.0, log = true }'
        raise FedblendError(f"tune: is missing; say what to search, such as [tune.fields] with {example}")
    for key in ("grid", "variants"):
        if key in table:
            raise FedblendError(f"{key}: not valid beside 'tune'; write its fields under [tune.fields]")
    try:
        return Tune(**given)
    except pydantic.ValidationError as error:
        raise FedblendError(registry.explain(error, "tune")) from None
