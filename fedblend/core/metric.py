"""The base of metrics: functions of a model's outputs on all samples that are scored together."""

from __future__ import annotations

import torch

from fedblend.core.context import Task
from fedblend.core.dataset import TaskKind
from fedblend.core.part import Part


class Metric(Part):
    """Base of metrics. A metric is computed from the outputs of one pass over the samples, on the CPU.

    ``outputs`` are float32 [n, C], logits of classes or labels, and predictions in regression; ``targets`` are int64
    [n] or float32 [n, C]. A value that is not defined, such as the AUC of samples of one class, is NaN: the record then
    has none.
    """

    to_define = ("overall",)
    tasks: tuple[TaskKind, ...] = ("classification",)
    """The tasks that the metric is for."""
    larger_is_better: bool = True
    """Whether a larger value is better."""

    @property
    def label(self) -> str:
        """The metric's name in records and tables, and in ``target_metric`` and ``validation.metric``."""
        return self.name

    def require_possible(self, task: Task) -> None:
        """Raise ``ValueError`` where the metric is not defined for a task."""
        if task.kind not in self.tasks:
            raise ValueError(f"'{self.label}' is for {' and '.join(self.tasks)}, but the data are for {task.kind}")

    def overall(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The metric of all samples together."""
        raise TypeError(f"{type(self).__name__} defines no overall value")

    def by_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[float] | None:
        """The metric of each class, NaN where it is not defined; ``None`` for a metric that has no values by class."""
        return None
