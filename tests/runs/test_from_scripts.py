"""``fedblend.run`` with ranks and ``fedblend.run_study`` with jobs, from scripts without ``if __name__ == "__main__"``.

The processes that they start must not run the script again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import PATIENCE_S, TINY, contents, write
from helpers import each

import fedblend
from fedblend.core.errors import FedblendError
from fedblend.experiment.study import expand

SCRIPT = """
import fedblend
print("the script begins")
table = {
    "name": "tiny", "rounds": 1, "data": "digits", "partition": {"name": "iid", "clients": 4}, "engine": "loop",
    "model": {"name": "mlp", "hidden": [8]}, "train": {"cohort": 2, "epochs": 1, "batch_size": 40},
}
"""

RANKS = """
result = fedblend.run(fedblend.Experiment(**table, ranks=2), out="two")
print("rounds", result.metrics["round"].tolist())
"""

STUDY = """
frame = fedblend.run_study({**table, "seeds": [0, 1, 2]}, out="study", jobs=2)
print("rows", len(frame))
"""

OWN_PART = """
from fedblend.core.objective import Objective

@fedblend.part("objective", "own")
class Own(Objective):
    def loss(self, net, batch, drawn, context):
        return context.task.loss(net(batch.x), batch.y)

table["method"] = {"objective": Own()}
"""


def run_python(folder, *words, stdin=""):
    command = [sys.executable, *words]
    return subprocess.run(
        command, input=stdin, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def states(study):
    return [json.loads(path.read_text(encoding="utf-8"))["state"] for path in sorted(study.glob("*/status.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "standard input", "-c", "interactive"])
def test_ranks_and_jobs_run_without_a_guard_in_the_script(way, tmp_path):
    code = SCRIPT + {"file": RANKS + STUDY, "interactive": STUDY}.get(way, RANKS)
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    words = {"file": ["script.py"], "standard input": ["-"], "-c": ["-c", code], "interactive": ["-i"]}[way]

    done = run_python(tmp_path, *words, stdin="" if way in ("file", "-c") else code)

    assert done.returncode == 0, done.stderr
    expected = ["the script begins"]
    expected += ["rounds [0, 1]"] if "two" in code else []
    expected += ["rows 6"] if "study" in code else []
    assert done.stdout.splitlines() == expected, done.stderr
    assert "Traceback" not in done.stderr
    assert states(tmp_path / "study") == (["done"] * 3 if "study" in code else [])


@pytest.mark.slow
def test_ranks_run_in_a_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="Jupyter (nbclient, ipykernel) is not installed")
    nbclient = pytest.importorskip("nbclient", reason="Jupyter (nbclient, ipykernel) is not installed")
    pytest.importorskip("ipykernel", reason="Jupyter (nbclient, ipykernel) is not installed")
    cells = [nbformat.v4.new_code_cell(code) for code in (SCRIPT, RANKS)]
    notebook = nbformat.v4.new_notebook(cells=cells)

    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()

    printed = [output.text for cell in notebook.cells for output in cell.outputs if output.get("name") == "stdout"]
    assert printed == ["the script begins\n", "rounds [0, 1]\n"]


@pytest.mark.slow
def test_a_part_of_the_script_itself_runs_in_one_process_and_says_so(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + OWN_PART + STUDY + RANKS, encoding="utf-8")

    done = run_python(tmp_path, "script.py")

    assert done.stdout.splitlines() == ["the script begins", "rows 6"], done.stderr
    assert done.stderr.count("no other process can import '__main__:Own'") == 1
    assert states(tmp_path / "study") == ["done"] * 3
    last = done.stderr.splitlines()[-1]
    assert "FedblendError: ranks: 2 processes cannot all import '__main__:Own', which this script" in last


PRINTING_PART = """
import warnings
from fedblend import part
from fedblend.core.objective import Objective


@part("objective", "printing")
class Printing(Objective):
    def loss(self, net, batch, drawn, context):
        print("a printed line")
        warnings.warn("a warning of the part")
        try:
            input()
        except EOFError:
            pass
        return context.task.loss(net(batch.x), batch.y)
"""


@pytest.mark.slow
def test_what_user_code_prints_reads_and_warns_of_does_not_disturb_the_processes(tmp_path, monkeypatch):
    (tmp_path / "printing.py").write_text(PRINTING_PART, encoding="utf-8")
    (tmp_path / "site" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('Python starts')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    own = 'table["method"] = {"objective": "printing:Printing"}\n'
    (tmp_path / "script.py").write_text(SCRIPT + own + STUDY, encoding="utf-8")

    done = run_python(tmp_path, "script.py")

    assert done.stdout.splitlines() == ["Python starts", "the script begins", "rows 6"], done.stderr
    assert "a printed line" in done.stderr
    assert done.stderr.count("Python starts") == 2, "of each worker process"
    assert done.stderr.count("UserWarning: a warning of the part") == 1, "one warning of all processes is enough"


def test_run_takes_an_experiment_its_file_and_its_table(tmp_path):
    table = {**TINY, "rounds": 0, "method": "fedavg"}
    file = write(tmp_path / "my.toml", table)
    given = [fedblend.Experiment(**table), table, file, str(file)]
    losses = [fedblend.run(one, tmp_path / f"run-{i}").metrics["loss"].tolist() for i, one in enumerate(given)]
    assert losses == losses[:1] * 4
    with pytest.raises(FedblendError, match=r"^experiment: it describes 2 runs; fedblend.run_study makes them all$"):
        fedblend.run(table | {"seeds": [0, 1]}, tmp_path / "two")
    with pytest.raises(FedblendError, match=r"^experiment: 3 is none; valid: an Experiment, a file, or"):
        fedblend.run(3, tmp_path / "three")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_files_is_no_folder_for_a_run(tmp_path, resume):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "facts.json").write_text('{"mine": 1}', encoding="utf-8")
    (tmp_path / "own" / "metrics.jsonl").write_text("mine\n", encoding="utf-8")
    before = contents(tmp_path)
    for name, fault in (
        ("own", "already holds files; name another folder"),
        ("own/facts.json", "is a file; name a folder"),
    ):
        with pytest.raises(FedblendError) as error:
            fedblend.run(TINY, tmp_path / name, resume=resume)
        assert str(error.value) == f"out {tmp_path / name}: {fault}"
    assert contents(tmp_path) == before


def test_a_run_begins_anew_where_one_was_cut_before_its_configuration_was_written(tmp_path):
    (tmp_path / "run.lock").touch()
    (tmp_path / "facts.json").write_text("{}", encoding="utf-8")
    assert fedblend.run(TINY | {"rounds": 0}, tmp_path).path == tmp_path


def test_a_study_takes_no_folder_with_files_unless_it_resumes(tmp_path):
    table = TINY | {"rounds": 0, "method": "fedavg"}
    (tmp_path / "mine.txt").touch()
    with pytest.raises(FedblendError) as error:
        fedblend.run_study(table, tmp_path)
    assert str(error.value) == (
        f"out {tmp_path}: already holds files; give resume=True to go on with its runs, or name another folder"
    )
    assert sorted(contents(tmp_path)) == ["mine.txt"]


@each("function", ["run", "run_study", "read_run", "read_study"])
@each("path", ["", 3])
def test_what_is_no_path_is_refused(function, path):
    given = [TINY, path] if function.startswith("run") else [path]
    field = "out" if function.startswith("run") else "path"
    with pytest.raises(FedblendError, match=rf"^{field}: {path!r} is not valid; give a path$"):
        getattr(fedblend, function)(*given)


def test_a_tilde_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write(tmp_path / "my.toml", {"rounds": 0, "method": "fedavg"})

    result = fedblend.run("~/my.toml", "~/one")
    study = fedblend.run_study(Path("~/my.toml"), Path("~/several"))
    written = result.predictor.export("~/model.safetensors")

    assert result.path == tmp_path / "one"
    assert fedblend.read_run("~/one").metrics.equals(result.metrics)
    assert fedblend.read_study("~/several").equals(study)
    assert written == [tmp_path / "model.safetensors", tmp_path / "model.json"]


def test_run_study_takes_experiments(tmp_path):
    one, two = (fedblend.Experiment(**TINY, seed=seed, method="fedavg") for seed in (0, 1))
    alone = fedblend.run_study(one, tmp_path / "alone")
    both = fedblend.run_study([one, two], tmp_path / "both", jobs=1)
    assert alone["run"].unique().tolist() == ["fedavg-seed0"]
    assert both["run"].unique().tolist() == ["fedavg-seed0", "fedavg-seed1"]
    assert both["accuracy"].tolist()[:3] == alone["accuracy"].tolist()
    for given, fault in (
        ([one, one], "study: two runs would both be called 'fedavg-seed0'; give them labels of their own"),
        ([one, 3], "study: 3 is no Experiment; valid: a list of Experiments"),
        (3, "study: 3 is none; valid: a file, a file's table, or a list of Experiments"),
        ([], "study: [] is none; valid: a file, a file's table, or a list of Experiments"),
    ):
        with pytest.raises(FedblendError) as error:
            fedblend.run_study(given, tmp_path / "not")
        assert str(error.value) == fault
    for jobs in (0, -1, 1.5, "2"):
        with pytest.raises(FedblendError) as error:
            fedblend.run_study(one, tmp_path / "not", jobs=jobs)
        assert str(error.value) == f"jobs: {jobs!r} is not valid; give a whole number from 1"
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("start", [fedblend.run, fedblend.run_study])
def test_a_resume_that_is_no_truth_value_is_refused(start, tmp_path):
    with pytest.raises(FedblendError, match="resume: 'yes' is not valid; give True or False"):
        start(TINY | {"method": "fedavg"}, tmp_path / "out", resume="yes")
    assert not (tmp_path / "out").exists()


def test_run_study_resumes_the_newest_runs_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = TINY | {"method": "fedavg", "checkpoint_every": 1}
    with pytest.warns(UserWarning, match=r"^runs.tiny: nothing to resume; its runs start from round 0$"):
        fedblend.run_study(table | {"rounds": 1}, resume=True)
    longer = fedblend.run_study(table, resume=True)
    assert longer["round"].tolist() == [0, 1, 2]
    run = Path("runs", "tiny", "fedavg-seed0")
    with pytest.warns(UserWarning, match=r"has 2 rounds already, more than rounds = 1; all are kept$"):
        shorter = fedblend.run_study(table | {"rounds": 1}, resume=True)
    assert shorter.equals(longer)
    assert [str(path) for path in Path("runs").iterdir()] == [str(run.parent)]


def test_values_of_python_and_numpy_are_those_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("my.npz", x=np.eye(40, 5), y=np.arange(40) % 3)
    table = TINY | {"rounds": 1, "method": "fedavg"}
    first = fedblend.run(table | {"seed": 1}, "first")
    given = table | {
        "seed": np.int64(1), "start": None, "train": table["train"] | {"lr": np.float64(0.05), "cohort": np.int32(2)},
        "model": {"name": "mlp", "hidden": np.array([8])}, "partition": {"name": "iid", "clients": np.uint8(4)},
    }  # fmt: skip

    assert fedblend.run(given, "numpy").experiment == first.experiment
    warm = fedblend.Experiment(**table | {"start": Path("first")})
    own = fedblend.Experiment(**table | {"data": {"name": "npz", "path": Path("my.npz")}})
    assert (warm.start, own.data.path) == (str(tmp_path / "first"), str(tmp_path / "my.npz"))
    assert own.data.load().train.x.shape[1] == 5
    for seeds in (range(2), (0, 1), np.arange(2), [np.int64(0), 1]):
        assert list(expand(table | {"seeds": seeds}).experiments) == ["fedavg-seed0", "fedavg-seed1"]
