"""The charts of a section of a report, in the order of the page."""

from __future__ import annotations

from fedblend.report.curve_figures import BY_BYTES, BY_ROUND, BY_TIME, by_epsilon, curve_chart, lines
from fedblend.report.figures import Chart, class_chart, time_chart
from fedblend.report.privacy import epsilon_by_round
from fedblend.report.sections import DatasetSection


def section_charts(section: DatasetSection) -> list[Chart]:
    """The charts that have data: curves, accuracy by class, time by phase. Splits have their own."""
    curves, styles = section.curves, section.styles
    measure = "accuracy" if curves["accuracy"].notna().any() else "loss"
    scores, losses = lines(curves, measure), lines(curves, "loss")
    word = f"Test {measure}"
    drawn = [curve_chart("accuracy", "Test accuracy by round", scores, BY_ROUND, measure, styles, section.targets)]
    if measure == "loss":
        drawn = [curve_chart("loss", "Test loss by round", losses, BY_ROUND, "loss", styles)]
    drawn.append(curve_chart("cost", f"{word} by megabytes sent", scores, BY_BYTES, measure, styles))
    if len(curves) and curves["clock"].max() > 0:
        drawn.append(curve_chart("clock", f"{word} by time", scores, BY_TIME, measure, styles))
    if measure == "accuracy":
        drawn.append(curve_chart("loss", "Test loss by round", losses, BY_ROUND, "loss", styles))
    trained = lines(curves, "train_loss")
    for i, (objective, methods) in enumerate(section.by_objective.items(), 1):
        of_objective = [line for line in trained if line.method in methods]
        name, title = f"train_loss-{i}", f"Training loss by round, objective: {objective}"
        drawn.append(curve_chart(name, title, of_objective, BY_ROUND, "train_loss", styles))
    if measure == "accuracy" and (spent := epsilon_by_round(section.guarantees)):
        drawn.append(curve_chart("epsilon", "Test accuracy by epsilon", scores, by_epsilon(spent), measure, styles))
    drawn += [class_chart(section.groups), time_chart(section.rows)]
    return [chart for chart in drawn if chart is not None]
