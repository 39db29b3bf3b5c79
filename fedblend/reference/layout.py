"""The page's words on what no single field tells: how a file is laid out, and units."""

from __future__ import annotations

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
