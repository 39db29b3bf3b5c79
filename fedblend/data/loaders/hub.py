"""Data sets of the Hugging Face Hub with an image, or numbers, and a label in each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, listed, missing_package, or_valid
from fedblend.core.paths import absolute_folder
from fedblend.core.registry import part
from fedblend.data.loaders.files import TestShare, converted, sha256_array
from fedblend.data.loaders.npz import dataset_of


@part("dataset", "hub")
class Hub:
    """A data set of the Hugging Face Hub, through ``flwr-datasets`` (extra ``hub``).

    Each row has an image (or a list of numbers) and a label, and optionally a client (a writer, a hospital). Example:
    ``flwrlabs/femnist`` with ``client = "writer_id"`` and ``label = "character"``. The data set is downloaded once,
    into the cache of ``datasets``. A local folder of Parquet files is a data set too. No code from the Hub is run.
    Raises :class:`FedblendError` for a failed download, unknown columns, and images of several sizes.
    """

    dataset: Annotated[str, BeforeValidator(absolute_folder)]
    """The name on the Hub, such as "ylecun/mnist", or a folder of Parquet files, relative to the experiment file."""
    subset: str | None = None
    """The configuration, if the data set has several."""
    inputs: str | None = None
    """The column with the image or the numbers; the default is the only column of images."""
    label: str | None = None
    """The column with the label; the default is the only column of classes."""
    client: str | None = None
    """The column with the client of each sample; the default is no clients."""
    train: str = "train"
    """The training split."""
    test: str = "test"
    """The test split; empty if there is none."""
    colour: Literal["as stored", "grey", "rgb"] = "as stored"
    """Colours of the images; "as stored" needs images of one kind."""
    test_share: TestShare = 0.2
    """Share of each client's samples (without clients: of each class's) that is test, without a test split."""
    kind_: Literal["tokens"] | None = None
    """What `inputs` holds: "tokens" for ids of tokens, as many in each row, which are not scaled."""

    def load(self) -> Dataset:
        """Load x uint8 [n, C, H, W], float32 [n, d] or int64 tokens [n, T], and y int64 [n] or float32 [n, q]."""
        names = [self.train, *([self.test] if self.test else [])]
        splits = fetch_splits(self.dataset, self.subset, names)
        columns = self._columns(splits[0].features)
        arrays = {name: self._join(splits, column) for name, column in columns.items()}
        if self.test:
            arrays["split"] = np.repeat(["train", "test"], [len(split) for split in splits])
        classes = getattr(splits[0].features[columns["y"]], "names", None)
        if classes:
            arrays["classes"] = np.array(classes)
        files = {name: sha256_array(array) for name, array in arrays.items()}
        name = self.dataset.rstrip("/").split("/")[-1]
        return dataset_of(arrays, name, Path(self.dataset), self.test_share, files, self.kind_)

    def _columns(self, features: dict[str, Any]) -> dict[str, str]:
        """The columns of x, y and client. Raises for an unknown column, and if the default column is ambiguous."""
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        found: dict[str, str] = {}
        for array, option, column, kind in (
            ("x", "inputs", self.inputs, "Image"),
            ("y", "label", self.label, "ClassLabel"),
            ("client", "client", self.client, None),
        ):
            fitting = [name for name, feature_kind in kinds.items() if feature_kind == kind]
            if column is None and (kind is None or len(fitting) == 1):
                found |= {array: fitting[0]} if fitting else {}
            elif column is None or column not in kinds:
                unknown = f"there is no column '{column}' in" if column else "name a column of"
                raise FedblendError(f"data.{option}: {unknown} '{self.dataset}'{or_valid(column or '', kinds)}")
            else:
                found[array] = column
        return found

    def _join(self, splits: Sequence[Any], column: str) -> np.ndarray:
        parts = [self._array(split, column) for split in splits]
        self._require_one_shape([part.shape[1:] for part in parts], column)
        return np.concatenate(parts)

    def _array(self, split: Any, column: str) -> np.ndarray:
        """A column as an array: images as uint8 [n, H, W] or [n, H, W, 3], other entries as stored."""
        if type(split.features[column]).__name__ != "Image":
            return np.asarray(split.with_format("numpy")[column][:])
        modes = {"grey": "L", "rgb": "RGB"}
        images: list[np.ndarray] = []
        for image in split[column]:
            where = f"data.inputs: '{column}' in row {len(images)}"
            if image is None:
                raise FedblendError(f"{where} is empty; valid: an image in each row")
            images.append(np.asarray(converted(image, modes.get(self.colour), where), np.uint8))
        self._require_one_shape([image.shape for image in images], column)
        return np.stack(images)

    def _require_one_shape(self, shapes: Sequence[tuple[int, ...]], column: str) -> None:
        if len(set(shapes)) > 1:
            found = f"entries of several shapes in '{column}' ({listed(sorted(map(list, set(shapes))))})"
            raise FedblendError(f"data.dataset: '{self.dataset}' has {found}; all must have one shape")


def fetch_splits(dataset: str, subset: str | None, names: Sequence[str]) -> list[Any]:
    """Load splits of a data set of the Hub; download them into the cache of ``datasets`` if need be."""
    try:
        from flwr_datasets import FederatedDataset
    except ImportError:
        raise missing_package("dataset 'hub'", "flwr-datasets", "hub") from None
    whole = FederatedDataset(dataset=dataset, subset=subset, partitioners={}, shuffle=False)
    try:
        return [whole.load_split(name) for name in names]
    # Several libraries raise here: no such data set, no internet, a damaged file, no such split.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise FedblendError(
            f"data.dataset: cannot load the splits {listed(names)} of '{dataset}' ({reason}); give a name of "
            'https://huggingface.co/datasets or a folder of Parquet files, data.train and data.test ("" for none)'
        ) from None
