"""The figure of a search: the score on validation samples against each field's value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedblend.analysis import plotting
from fedblend.experiment.study import Interval

if TYPE_CHECKING:
    from fedblend.runs.tuning import MethodSearch

WIDTH, HEIGHT = 3.4, 3.4  # Width and height of a panel in inches


def draw_search(searches: Sequence[MethodSearch]) -> bytes:
    """A PNG with a panel for each field: a mark for each trial, in its method's style; large ones are the best trials.

    Hollow marks are trials that were ended early, at the score that they had then.
    """
    from matplotlib.lines import Line2D

    fields = list(dict.fromkeys(path for search in searches for path in search.fields))
    figure = plotting.blank_figure(max(2, len(fields)) * WIDTH, HEIGHT)
    panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
    metric = searches[0].metric
    percent = metric == "accuracy"
    styles = plotting.line_styles([search.label for search in searches])
    for axes, field in zip(panels, fields, strict=True):
        plotting.style_axes(axes, field, f"validation {metric}{' (%)' if percent else ''}" if axes is panels[0] else "")
        axes.margins(0.08)
        interval = next(search.fields[field] for search in searches if field in search.fields)
        ordered = interval if isinstance(interval, list) else []
        numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in ordered)
        for search in searches:
            for trial in search.trials:
                if trial.score is None or field not in trial.values:
                    continue
                value = trial.values[field]
                x = value if numeric else ordered.index(value)
                y = 100 * trial.score if percent else trial.score
                colour, marker = styles[search.label].colour, styles[search.label].marker
                fill = "none" if trial.pruned else "full"
                axes.plot([x], [y], marker, color=colour, fillstyle=fill, alpha=0.75, clip_on=False)
                if trial is search.best:
                    axes.plot([x], [y], marker, color=colour, markersize=14, fillstyle="none", clip_on=False)
        if ordered and not numeric:
            names = [str(value.get("name", value)) if isinstance(value, dict) else str(value) for value in ordered]
            axes.set_xticks(range(len(ordered)), names)
        elif _spans(ordered) or (isinstance(interval, Interval) and interval.log):
            tried = [t.values[field] for search in searches for t in search.trials if field in t.values]
            plotting.log_axis(axes, tried)
    figure.suptitle(f"Validation {metric} of each trial, by its values", fontsize=10, color=plotting.INK)

    def mark(style: plotting.LineStyle, **options: Any) -> Line2D:
        return Line2D([], [], color=style.colour, marker=style.marker, linestyle="", **options)

    grey = plotting.LineStyle(plotting.INK, "", "o")
    marks = {name: mark(style) for name, style in styles.items()} if len(searches) > 1 else {}
    marks["best trial of a method"] = mark(grey, markersize=10, fillstyle="none")
    if any(trial.pruned for search in searches for trial in search.trials):
        marks["ended early"] = mark(grey, fillstyle="none")
    columns = len(marks) if len(marks) <= 6 else 4
    plotting.add_legend(figure, [*marks.values()], [*marks], loc="outside lower center", ncols=columns)
    return plotting.png_bytes(figure)


def _spans(values: Sequence[float]) -> bool:
    """Whether numbers are above 0 and span a factor of 20."""
    return len(values) > 1 and min(values) > 0 and max(values) >= 20 * min(values)
