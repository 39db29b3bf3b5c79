"""The page ``docs/configuration.md``, generated from the code.

``python -m fedblend.experiment.reference > docs/configuration.md`` writes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedblend.core import registry
from fedblend.data.measures import noniid_measures, smoothed
from fedblend.experiment import presets
from fedblend.experiment.options import Entry, part_entry, table_entries

LAYOUT = """\
## How a file is laid out

An experiment file is [TOML](https://toml.io). Every field has a default but `data` and `partition`.

```toml
name = "my-study"
rounds = 20
seeds = [0, 1, 2]
data = "mnist5k"
partition = { name = "classes", clients = 20, classes_per_client = 2 }
method = "fedmix"

[train]
cohort = 5
lr = 0.05
```

- **Top-level fields come first.** What stands below a `[table]` belongs to that table. So `rounds`, `seeds` and all
  that is written in one line, such as `data = "mnist5k"` or `partition = { ... }`, go before the first `[table]`.
- **A part is a name or a table.** `model = "mlp"`, `model = { name = "mlp", hidden = [64] }` and a table `[model]`
  with `name = "mlp"` and `hidden = [64]` are three ways to write one field.
- **A method is a preset, and what is changed of it.** `method = "fedmix"`, or
  `method = { name = "fedmix", objective = { lambda = 0.2 } }`. A part's table without a name changes options of the
  preset's part; one with another name replaces it. Without a preset's name a method is its parts alone.
- **Paths** of data are relative to the file; in Python and in `--set` to the current folder. A part or a model of your
  own is named by `module:Class`, with the module beside the file.

Four fields make one file a study of several runs: all combinations of the first three, and the variants:

- **`methods`** in place of `method`: a list of names and tables, before the first `[table]`, or a table `[[methods]]`
  for each. Of two with one name each needs a `label` of its own, or is called by its options.
- **`seeds`** in place of `seed`: every choice that is random in a run follows from its seed, the split among them.
- **`[grid]`**: lists of values by field, the field's path in quotes. Every method of the file must have the field.
- **`[[variants]]`**: further runs for each seed, each a table of fields that are laid over the file's, without its
  methods and grid; for runs that differ in more than a grid can say (`examples/heart.toml`).

```toml
rounds = 20
seeds = [0, 1, 2]
data = "mnist5k"
partition = { name = "dirichlet", clients = 20, alpha = 0.5 }

[train]
cohort = 5

[grid]
"train.lr" = [0.01, 0.05]
"partition.alpha" = [0.1, 1.0]

[[methods]]
name = "fedavg"

[[methods]]
name = "fedmix"
label = "fedmix, lambda 0.2"
objective.lambda = 0.2
```

These are 2 methods x 4 cells of the grid x 3 seeds = 24 runs, each in a folder of its own. On the command line
`--set train.lr=0.1` sets a field of all of them (the value is read as TOML, else as text),
`--set partition.samples=none` takes one out of the file whose default is "not given", `--seeds 0,1` gives their seeds.
"""

UNITS = """\
## Units

- **Shares and probabilities** are numbers from 0 to 1 in files, in Python and in `metrics.jsonl` (also `target`, an
  accuracy). Tables and reports show accuracies in per cent.
- **Rounds** are counted from 1; round 0 in a run's record is the untrained model.
- **Loss**: cross-entropy in nats, or in regression the squared error summed over the outputs; a mean over samples.
- **Learning rate**: a step is the learning rate times the gradient of the mean loss over the batch.
- **Noise** is in units of the model's inputs, after the `scale`; with the scale `standard` 1 is their deviation.
- **Bytes** are those of the tensors that would be sent; 1 MB is 10⁶ bytes. **Time** is wall clock in seconds.
- **Image sizes** are in pixels, **sizes of clients, batches and means** in samples.
"""


HEAD = """\
# Configuration

Every field of an experiment file, and of `fedblend.Experiment`. `fedblend list NAME` prints the same for one name.

<!-- Made from the code by `python -m fedblend.experiment.reference > docs/configuration.md`; write there, not here. -->
"""


def page() -> str:
    """The whole page, as Markdown."""
    experiment, *inner = table_entries()
    return "\n".join(
        [
            HEAD,
            LAYOUT,
            UNITS,
            *_section("## The experiment", experiment),
            *(line for entry in inner for line in _section(f"## `[{entry.where}]`", entry)),
            *(line for kind in registry.MODULES for line in _kind(kind)),
            *_presets(),
            "## Measures of a split\n",
            "`fedblend data show FILE` prints them, and every report has them beside the picture of the split.\n",
            markdown(inspect.getdoc(noniid_measures) or ""),
            "`smoothed`: " + markdown(inspect.getdoc(smoothed) or ""),
        ]
    )


def markdown(docstring: str) -> str:
    """A docstring's reStructuredText as Markdown, ending in a newline.

    >>> markdown("See :func:`a.b.fit` in :mod:`a.b` for ``x``.")
    'See `fit` in `a.b` for `x`.\\n'
    """
    modules = re.sub(r":mod:`(.+?)`", r"`\1`", docstring)
    names = re.sub(r":\w+:`(?:[\w.]+\.)?(\w+)`", r"`\1`", modules)
    return re.sub(r"``(.+?)``", r"`\1`", names).replace("::\n", ":\n").strip() + "\n"


def _kind(kind: str) -> Iterable[str]:
    """A section for each part of a kind that fedblend declares; users' parts are left out."""
    entries = [part_entry(cls) for cls in registry.known(kind).values() if cls.__module__.startswith("fedblend.")]
    yield f"## Parts: {kind}\n"
    yield f"In a file: `{entries[0].where}`.\n"
    for entry in entries:
        yield from _section(f"### {kind} `{entry.name}`", entry)


def _section(head: str, entry: Entry) -> Iterable[str]:
    yield head + "\n"
    yield markdown(entry.text)
    if entry.options:
        rows = [[f"`{o.name}`", o.type, _code(o.default), o.text] for o in entry.options]
        yield _table(["option", "type and range", "default", "what it is"], rows)


def _code(default: str) -> str:
    return default if default in ("required", "not given", "its defaults") else f"`{default}`"


def _presets() -> Iterable[str]:
    yield "## Methods\n"
    yield "Presets of parts, by name. What is not named is the default of `[method]`.\n"
    rows = [[f"`{name}`", text, _parts(spec)] for name, (text, spec) in presets.presets().items()]
    yield _table(["method", "what it is", "parts"], rows)


def _parts(spec: Mapping[str, Any]) -> str:
    """A preset's parts with the options that it sets: ``sharing `means`, terms `proximal```."""
    words = []
    for field, given in spec.items():
        if not isinstance(given, (Mapping, list)):
            words.append(f"{field} `{given}`")
            continue
        for part in given if isinstance(given, list) else [given]:
            options = "".join(f", {name} = {value}" for name, value in part.items() if name != "name")
            words.append(f"{field} `{part['name']}{options}`")
    return "; ".join(words) or "the defaults"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def fill(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    r"""The page with the text between ``<!-- NAME -->`` and ``<!-- end -->`` replaced by that of the maker NAME.

    >>> fill("<!-- sum -->\nold\n<!-- end -->", {"sum": lambda: "2"})
    '<!-- sum -->\n2\n<!-- end -->'
    """

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{makers[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)(.+?) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    print(page(), end="")
