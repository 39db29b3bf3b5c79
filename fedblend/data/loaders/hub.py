"""Any data set of the Hugging Face Hub that has a picture or numbers and a label in each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, did_you_mean, listed
from fedblend.core.paths import absolute_folder
from fedblend.core.registry import part
from fedblend.data.loaders.arrays import dataset_of
from fedblend.data.loaders.files import TestShare, sha256_array


@part("dataset", "hub")
class Hub:
    """A data set of the Hugging Face Hub, through ``flwr-datasets``: pip install "fedblend[hub]".

    Each row holds a picture (or a list of numbers) and a label, and may name its client (a writer, a hospital), such
    as ``flwrlabs/femnist`` with ``client = "writer_id"`` and ``label = "character"``. It is fetched once, into the
    cache of ``datasets``; a folder of Parquet files on this machine is a data set too. Nothing of the Hub's own code
    is run. Raises :class:`FedblendError` where it cannot be had, for columns that are not there, and for pictures of
    several sizes.
    """

    dataset: Annotated[str, BeforeValidator(absolute_folder)]
    """Its name on the Hub, such as "ylecun/mnist", or a folder of Parquet files; in a file, relative to that."""
    subset: str | None = None
    """Its configuration, where it has several."""
    inputs: str | None = None
    """The column with the picture or the numbers; unless given, the one of pictures."""
    label: str | None = None
    """The column with the label; unless given, the one of classes."""
    client: str | None = None
    """The column that says whose sample it is, where there is one."""
    train: str = "train"
    """The split to train on."""
    test: str = "test"
    """The split to test on; empty where there is none."""
    colour: Literal["as stored", "grey", "rgb"] = "as stored"
    """How pictures are read; as they are stored, all must be of one kind."""
    test_share: TestShare = 0.2
    """Share of each client's samples (else of each class's) that is test, where there is no split to test on."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, C, H, W] or float32 [n, d]; y int64 [n] or float32 [n, q]."""
        names = [self.train, *([self.test] if self.test else [])]
        splits = fetch_splits(self.dataset, self.subset, names)
        columns = self._columns(splits[0].features)
        arrays: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            arrays[name] = self._joined(splits, column)
        if self.test:
            arrays["split"] = np.repeat(["train", "test"], [len(split) for split in splits])
        classes = getattr(splits[0].features[columns["y"]], "names", None)
        if classes:
            arrays["classes"] = np.array(classes)
        files = {name: sha256_array(array) for name, array in arrays.items()}
        return dataset_of(arrays, self.dataset.rstrip("/").split("/")[-1], Path(self.dataset), self.test_share, files)

    def _columns(self, features: dict[str, Any]) -> dict[str, str]:
        """The columns of x, y and client. Raises for one that is not there, or where none was named and none fits."""
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        found: dict[str, str] = {}
        for array, option, named, kind in (
            ("x", "inputs", self.inputs, "Image"),
            ("y", "label", self.label, "ClassLabel"),
            ("client", "client", self.client, None),
        ):
            fitting = [name for name, its in kinds.items() if its == kind]
            if named is None and (kind is None or len(fitting) == 1):
                found |= {array: fitting[0]} if fitting else {}
            elif named is None or named not in kinds:
                what = f"there is no column '{named}'{did_you_mean(named, kinds)}" if named else "which column is it?"
                raise FedblendError(f"data.{option}: {what} in '{self.dataset}'; valid: {listed(list(kinds))}")
            else:
                found[array] = named
        return found

    def _joined(self, splits: Sequence[Any], column: str) -> np.ndarray:
        """A column of all splits as one array."""
        parts = [self._array(split, column) for split in splits]
        self._require_one_shape([part.shape[1:] for part in parts], column)
        return np.concatenate(parts)

    def _array(self, split: Any, column: str) -> np.ndarray:
        """A column as an array: pictures uint8 [n, H, W] or [n, H, W, 3], all else as it is."""
        if type(split.features[column]).__name__ != "Image":
            return np.asarray(split.with_format("numpy")[column][:])
        modes = {"grey": "L", "rgb": "RGB"}
        pictures = []
        for picture in split[column]:
            mode = modes.get(self.colour, "L" if picture.mode in ("1", "L") else "RGB")
            pictures.append(np.asarray(picture.convert(mode), np.uint8))
        self._require_one_shape([picture.shape for picture in pictures], column)
        return np.stack(pictures)

    def _require_one_shape(self, shapes: Sequence[tuple[int, ...]], column: str) -> None:
        if len(set(shapes)) > 1:
            raise FedblendError(
                f"data.dataset: '{self.dataset}' holds entries of several shapes in '{column}' "
                f"({listed(sorted(map(list, set(shapes))))}); all must be of one"
            )


def fetch_splits(dataset: str, subset: str | None, names: Sequence[str]) -> list[Any]:
    """The splits of a data set of the Hub, fetched into the cache of ``datasets`` unless they are there already.

    Raises :class:`FedblendError` if ``flwr-datasets`` is not installed, the data set cannot be had, or a split is not
    there.
    """
    try:
        from flwr_datasets import FederatedDataset
    except ImportError:
        raise FedblendError('data: "hub" needs flwr-datasets; install it: pip install "fedblend[hub]"') from None
    whole = FederatedDataset(dataset=dataset, subset=subset, partitioners={}, shuffle=False)
    try:
        return [whole.load_split(name) for name in names]
    # Whatever goes wrong on the way: no such data set, no internet, a damaged file, a split that is not there.
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FedblendError(
            f"data.dataset: cannot have the splits {listed(names)} of '{dataset}' ({reason}); give a name of "
            "https://huggingface.co/datasets or a folder of Parquet files, and its splits as data.train and data.test "
            '(test = "" for none)'
        ) from None
