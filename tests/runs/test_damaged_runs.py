"""Files of a run that hold something else than fedblend wrote: each ends in one message that names file and field."""

import json
import os
import shutil

import pytest
from cli_helpers import TINY, here, refused, succeeded, write
from helpers import slow_after_first, slow_except

from fedblend.core.errors import FedblendError
from fedblend.runs.directory import RunDirectory, read_study

RUN = "fedavg-seed0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study of one run."""
    folder = tmp_path_factory.mktemp("study")
    succeeded(here("run", write(folder / "tiny.toml", {"rounds": 1}), "--out", folder / "out", "--jobs", 1))
    return folder / "out"


@pytest.fixture
def study(finished, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(finished, tmp_path / "out")


def set_in(path, *keys, value):
    """Set a value in a JSON file, or in the last line of JSON lines."""
    *before, last = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    table = inside = json.loads(last)
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    path.write_text("\n".join([*before, json.dumps(table)]) + "\n")


@pytest.mark.parametrize(
    ("file", "keys", "value", "words"),
    [
        ("status.json", ["state"], 3, "state: 3 is not valid: input should be 'running'"),
        ("status.json", ["round"], "many", "round: 'many' is not valid"),
        ("status.json", ["reason"], ["a"], "reason: ['a'] is not valid"),
        ("facts.json", ["import_from"], "/", "import_from: '/' is not valid"),
        ("facts.json", ["versions"], [], "versions: [] is not valid"),
        ("facts.json", ["data"], 3, "data: 3 is not valid"),
        ("facts.json", ["data", "classes"], [1], "data.classes.0: 1 is not valid"),
        ("facts.json", ["clients"], None, "clients: None is not valid"),
        ("facts.json", ["clients", "holding"], -1, "clients.holding: -1 is not valid"),
        ("facts.json", ["clients", "samples"], {"x": 1}, "clients.samples: {'x': 1} is not valid"),
        ("facts.json", ["clients", "smallest"], [1], "clients.smallest: [1] is not valid"),
        ("facts.json", ["model", "parameters"], "many", "model.parameters: 'many' is not valid"),
        ("facts.json", ["engine"], {"engine": "loop"}, "engine.stack: is missing"),
        ("facts.json", ["scale", "factor"], "0.1", "scale.factor: '0.1' is not valid"),
        ("split.json", ["counts"], [["a"]], "counts.0.0: 'a' is not valid"),
        ("split.json", ["counts"], [[1]], "counts: a row has not one number for each of the 10 classes"),
        ("split.json", ["measures"], {"divergence": []}, "measures.divergence: [] is not valid"),
        ("metrics.jsonl", ["round"], "1", "line 2: round: '1' is not valid"),
        ("metrics.jsonl", ["round"], 10**400, "line 2: round: "),
        ("metrics.jsonl", ["loss"], "low", "line 2: loss: 'low' is not valid"),
        ("metrics.jsonl", ["accuracy"], 2, "line 2: accuracy: 2 is not valid"),
        ("metrics.jsonl", ["bytes_up"], [1], "line 2: bytes_up: [1] is not valid"),
        ("metrics.jsonl", ["bytes_up", "weights"], {}, "line 2: bytes_up.weights: {} is not valid"),
        ("metrics.jsonl", ["bytes_down", "weights"], 10**400, "line 2: bytes_down.weights: "),
        ("metrics.jsonl", ["machine"], 0, "line 2: machine: 0 is not valid"),
        (
            "metrics.jsonl",
            ["machine", "seconds"],
            {"train": "long"},
            "line 2: machine.seconds.train: 'long' is not valid",
        ),
        ("metrics.jsonl", ["channel"], {"up": None}, "line 2: channel.up: None is not valid"),
        ("metrics.jsonl", ["cohort"], [[0]], "line 2: cohort.0: [0] is not valid"),
        ("metrics.jsonl", ["refused"], [{"client": 1}], "line 2: refused.0.reason: is missing"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(study, file, keys, value, words):
    set_in(study / RUN / file, *keys, value=value)
    for command in (["report", study, "--out", study / "new.html"], ["inspect", study]):
        if (file, command[0]) != ("split.json", "inspect"):
            refused(here(*command), f"{study / RUN / file}: {words}", "restore it")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('name = "iid"', "name = 3", "partition.name: 3 is not valid"),
        ("rounds = 1", "rounds = -1", "rounds: -1 is not valid"),
        ("seed = 0", 'seed = "a"', "seed: 'a' is not valid"),
        ('label = ""', "label = []", "method.label: [] is not valid"),
        ("eval_every = 1", "eval_every = [1]", "eval_every: [1] is not valid"),
        ("augment = []", 'augment = ["flip"]', "train.augment.0: 'flip' is not valid"),
        ("seed = 0", "x = [" + "[" * 5_000, "is not valid TOML"),
        ("seed = 0", f"seed = {'9' * 5_000}", "is not valid TOML"),
    ],
)
def test_a_wrong_configuration_is_named(study, before, after, words):
    path = study / RUN / "config.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    refused(here("compare", study), f"{path}: ", words)


@pytest.mark.parametrize("name", ["..", "../out2", "/tmp/x", "a/b", ""])
def test_a_study_names_no_folder_outside_of_its_own(study, name):
    set_in(study / "study.json", "experiments", value={name: TINY})
    with pytest.raises(FedblendError, match=r"study.json: experiments"):
        read_study(study)
    refused(here("resume", study), f"{study / 'study.json'}: experiments")


REPLACED = {
    "a folder": lambda path: path.mkdir(),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "deep brackets": lambda path: path.write_text("[" * 100_000),
    "a number of 5,000 digits": lambda path: path.write_text('{"round": ' + "9" * 5_000 + "}\n{}\n"),
    "a list": lambda path: path.write_text("[]\n[]\n"),
    "other bytes": lambda path: path.write_bytes(b"\xff\xfe\x00{}\n{}\n"),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("file", ["status.json", "facts.json", "metrics.jsonl", "study.json"])
def test_something_else_in_place_of_a_file(study, file, what):
    path = study / file if file == "study.json" else study / RUN / file
    path.unlink()
    REPLACED[what](path)
    refused(here("compare", study), f"{path}: ")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "facts.json: data: is missing; "),
        (["data"], "facts.json: data: is missing; "),
        (["scale"], "facts.json: scale: is missing; "),
        (["data", "shape"], "facts.json: data.shape: is missing; "),
        (["data", "outputs"], "facts.json: data.outputs: is missing; "),
        (["scale", "offset"], "scale: 1 factors and 0 offsets for samples of shape [1, 8, 8]; the run is damaged"),
    ],
)
@pytest.mark.parametrize("command", ["export", "predict"])
def test_a_model_is_not_used_without_what_its_facts_say_of_it(study, command, keys, words):
    facts = study / RUN / "facts.json"
    if keys:
        table = inside = json.loads(facts.read_text())
        for key in keys[:-1]:
            inside = inside[key]
        del inside[keys[-1]]
        facts.write_text(json.dumps(table))
    else:
        facts.unlink()
    arguments = ["samples.npz"] if command == "predict" else ["--out", study / "model.safetensors"]
    refused(here(command, study / RUN, *arguments), words)
    assert not (study / "model.safetensors").exists()


DAMAGED = {
    **{what: REPLACED[what] for what in ("a folder", "a pipe", "a device without end", "other bytes")},
    "a part of it": lambda path: path.write_bytes((path.with_name("whole")).read_bytes()[:-300]),
    "nothing": lambda path: path.touch(),
}


@pytest.mark.parametrize("what", slow_except(["a folder", "a part of it", "nothing"], DAMAGED))
def test_something_else_in_place_of_a_checkpoint(study, what):
    run = study / RUN
    path = run / "checkpoint.safetensors"
    path.rename(run / "whole")
    DAMAGED[what](path)
    before = (run / "metrics.jsonl").read_bytes()
    outcome = refused(here("resume", study), f"{path}: is not a checkpoint of fedblend", "begin again in another")
    assert outcome.err.count("is damaged") == 1
    assert RunDirectory(run).status()["state"] == "done"
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("what", slow_after_first(["a folder", "a pipe"]))
@pytest.mark.parametrize("file", ["study.lock", f"{RUN}/run.lock"])
def test_something_else_in_place_of_a_lock(study, file, what):
    (study / file).unlink(missing_ok=True)
    REPLACED[what](study / file)
    refused(here("resume", study), "cannot be used as a folder for runs: ")


def test_a_record_may_hold_further_fields_and_numbers_that_diverged(study):
    path = study / RUN / "metrics.jsonl"
    set_in(path, "loss", value=float("inf"))
    set_in(path, "of_a_later_version", value=[1])
    assert RunDirectory(study / RUN).metrics()[-1]["of_a_later_version"] == [1]
    succeeded(here("compare", study))
