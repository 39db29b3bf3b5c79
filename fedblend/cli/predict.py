"""``fedblend predict`` and ``fedblend export``: a run's model in use, and outside of fedblend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedblend.cli.console import Console, note, table
from fedblend.cli.progress import steps_shown
from fedblend.core.errors import FedblendError, listed
from fedblend.core.files import csv_frame, make_folder_of, write_atomically
from fedblend.data.loaders.files import read_image
from fedblend.data.loaders.image_folder import FORMATS, SUFFIXES
from fedblend.data.loaders.npz import as_inputs, read_arrays
from fedblend.data.loaders.table import SUFFIXES as TABLES
from fedblend.data.loaders.table import TableFile, encode, form_of, guesses, read_frame, renamed, texts_of
from fedblend.runs.directory import only_run
from fedblend.runs.predictor import Predictor

SHOWN = 20  # Predictions that the terminal shows


def export_model(run: Path, out: Path, best: bool = False, trust: bool = False) -> None:
    """Write a run's model, and say what was written."""
    predictor = Predictor.of_run(only_run(run), trust, best)
    written = predictor.export(out)
    console = Console()
    about = predictor.description
    console.print(f"{about['model']} of {about['method']}, round {about['round']}, trained on {about['data']}")
    for path in written:
        console.tell(f"{path}  {path.stat().st_size:,} bytes")


def show_predictions(
    run: Path,
    files: Sequence[Path],
    out: Path | None = None,
    best: bool = False,
    trust: bool = False,
    site: Path | None = None,
) -> None:
    """Print the predictions for the samples in files, and write all of them as a CSV file if one is given."""
    names_at_site: Any = None
    if site is not None:
        from fedblend.flower.site import read_site

        data = read_site(site).data
        names_at_site = getattr(data, "of", data)  # of features: the table that they are made of
        if not isinstance(names_at_site, TableFile):
            raise FedblendError(f"--site {site}: data: is no table; leave --site out")
    predictor = Predictor.of_run(only_run(run), trust, best)
    if out is not None:
        make_folder_of(out)
    frames = []
    with steps_shown() as steps:
        for number, path in enumerate(files, 1):
            names, samples = read_samples(path, predictor, names_at_site)
            frames.append(_predictions(names, predictor.predict_proba(samples), predictor))
            steps("files", number, len(files))
    predictions = pd.concat(frames, ignore_index=True)
    console = Console()
    # The probabilities of all classes and labels are in the CSV file only.
    shown = predictions.iloc[:SHOWN, : 3 if predictor.classes else 2 if predictor.labels else None]
    texts = [name for name in shown.columns if name in ("sample", "class", "labels")]
    made = table(texts, [str(name) for name in shown.columns[len(texts) :]])
    for row in shown.itertuples(index=False):
        made.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row))
    console.print(made)
    if len(predictions) > SHOWN:
        console.print(f"... and {len(predictions) - SHOWN:,} more", style="dim")
    if out is not None:
        write_atomically(out, csv_frame(predictions))
        console.tell(f"Predictions: {out}")


def _predictions(names: Sequence[str], outputs: np.ndarray, predictor: Predictor) -> pd.DataFrame:
    """A row for each sample: class and its probability, or labels, with all probabilities; or the predicted numbers."""
    first, known = {"sample": names}, predictor.classes or predictor.labels
    if not known:
        return pd.DataFrame(first | {f"output {i}": column for i, column in enumerate(outputs.T.astype(float))})
    columns = {f"p({name})": column for name, column in zip(known, outputs.T.astype(float), strict=True)}
    if predictor.labels:
        of_samples = [", ".join(np.array(known)[row]) for row in outputs > 0.5]
        return pd.DataFrame(first | {"labels": of_samples} | columns)
    best = outputs.argmax(1)
    found = {"class": np.array(known)[best], "probability": outputs.max(1, initial=0).astype(float)}
    return pd.DataFrame(first | found | columns)


def read_samples(path: Path, predictor: Predictor, site: TableFile | None = None) -> tuple[list[str], np.ndarray]:
    """Read the samples of a file or a folder of pictures: their names, and an array [n, ...] as stored."""
    kind, shape = predictor.description["kind"], predictor.description["shape"]
    if not path.exists():
        raise FedblendError(f"{path}: there is no such file; valid: pictures, folders of pictures, .npz or CSV files")
    if path.suffix == ".npz":
        x = as_inputs(read_arrays(path, needed=("x",))["x"], path, "tokens" if kind == "tokens" else None)[1]
        return [f"{path.name}[{i}]" for i in range(len(x))], x
    is_row = len(shape) == 1 and kind != "tokens"
    if path.suffix.lower() in TABLES and predictor.tokens:
        column = predictor.description["table"]["text"]
        texts = texts_of(_read_renamed(path, [column], site), column, path)
        return [f"{path.name}[{i}]" for i in range(len(texts))], predictor.tokens(texts)
    if path.suffix.lower() in TABLES and is_row:
        return _read_table(path, predictor.description, site)
    if kind == "image":
        pictures = [path]
        if path.is_dir():
            found = sorted(one.relative_to(path) for one in path.rglob("*") if one.suffix.lower() in SUFFIXES)
            # Hidden files are no pictures: macOS writes ._1.png beside 1.png.
            pictures = [path / one for one in found if not any(part.startswith(".") for part in one.parts)]
            if not pictures:
                raise FedblendError(f"{path}: holds no pictures; valid: {', '.join(SUFFIXES)}")
        stacked = np.stack([_read_picture(one, *shape) for one in pictures])
        return [str(one) for one in pictures], stacked
    also = ", or a table (.csv, .tsv, .parquet) with its columns" if is_row or predictor.tokens else ""
    raise FedblendError(f"{path}: is no file of {kind} samples; valid: an .npz file with the array x{also}")


def _read_picture(path: Path, channels: int, height: int, width: int) -> np.ndarray:
    """A picture as uint8 [C, H, W], resized if it has another size."""
    from PIL import Image

    image = read_image(path, FORMATS, "L" if channels == 1 else "RGB", "give another picture")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _read_renamed(path: Path, categories: Collection[str], site: TableFile | None) -> pd.DataFrame:
    """A table whose columns and texts are renamed as those of ``site`` are; ``categories`` are columns of text."""
    if site is None:
        return read_frame(path, categories=categories)
    own = {new: old for old, new in site.rename.items()}
    frame = read_frame(path, categories=[own.get(name, name) for name in categories]).rename(columns=site.rename)
    texts = {name: names for name, names in site.categories.items() if name in frame.columns}
    return frame.assign(**{name: renamed(frame[name], names) for name, names in texts.items()})


def _read_table(path: Path, about: Mapping[str, Any], site: TableFile | None) -> tuple[list[str], np.ndarray]:
    """The rows of a table, float32 [n, d]: the columns of the training table by name, or one for each feature."""
    form = about.get("table")
    frame = _read_renamed(path, form["categories"] if form else (), site)
    if form is None:
        numbers = pd.to_numeric(frame.columns.to_series(), errors="coerce")
        if np.isfinite(numbers).all() and list(numbers) != list(range(len(numbers))):
            raise FedblendError(
                f"{path}: the header holds numbers ({listed(list(frame.columns))}); valid: a first line with names"
            )
        form = form_of(frame)
        if len(frame.columns) != about["shape"][0] or form["categories"]:
            raise FedblendError(
                f"{path}: has {len(frame.columns)} columns ({len(form['categories'])} of text); valid: "
                f"{about['shape'][0]} columns of numbers"
            )
        if frame.isna().to_numpy().any():
            raise FedblendError(f"{path}: has empty cells; valid: a number in each")
    elif form["standardize"] == "client":
        raise FedblendError(f"{path}: the model takes features that each client has standardized; valid: an .npz file")
    else:
        for line in guesses(frame, form):
            note(f"{path}: {line}")
    x = encode(frame, form, path)
    return [f"{path.name}[{i}]" for i in range(len(x))], x
