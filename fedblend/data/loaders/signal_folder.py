"""One-dimensional signals in folders, one folder for each class."""

from __future__ import annotations

import hashlib
import io
import wave
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, legible, require_memory
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import TestShare
from fedblend.data.loaders.image_folder import load_classes, read_counted

SUFFIXES = (".wav", ".npy", ".csv", ".txt")


@part("dataset", "signal-folder")
class SignalFolder:
    """Signals under ``path``: ``train/CLASS/*`` and ``test/CLASS/*``, or only ``CLASS/*``; one file a signal.

    A file is sound (`.wav`, 8 or 16 bits), a NumPy array (`.npy`, [T] or [channels, T]), or numbers (`.csv`, `.txt`: a
    row for each point in time, a column for each channel, without a header). With ``clients``, a folder for each client
    lies above those of its classes; ``val`` is the test half where there is no ``test``: both as in `image-folder`.
    Without ``train`` and ``test``, ``test_share`` of each class (of each client's signals, with ``clients``) is test,
    by a draw that depends only on the folder's name.
    """

    path: FilePath
    """The folder; in an experiment file relative to that file."""
    length: Count | None = None
    """Points in time of all signals: longer ones are cut, zeros follow shorter ones (default: all have one length)."""
    clients: bool = False
    """Whether a folder for each client, such as a hospital, lies above its classes' folders."""
    test_share: TestShare = 0.2
    """Share of each class, or of each client's signals, that is test, without folders `train` and `test`."""

    def load(self) -> Dataset:
        """Load x float32 [n, channels, T] and y int64 [n]."""
        read = partial(self._read, {})
        return load_classes(self.path, "features", SUFFIXES, self.clients, self.test_share, read)

    def _read(self, rates: dict[int, Path], files: list[Path], root: Path, digest: hashlib._Hash) -> np.ndarray:
        """The signals of some files; ``rates`` has the first file of each frame rate of sound, of all halves."""
        signals: list[np.ndarray] = []
        for file in files:
            raw = read_counted(file, root, digest)
            signal = read_signal(file, raw)
            if file.suffix.lower() == ".wav":
                with wave.open(io.BytesIO(raw)) as sound:
                    rate = sound.getframerate()
                rates.setdefault(rate, file)
                if rate != (other := next(iter(rates))):
                    found = f"has {rate} frames a second, {rates[other].name} has {other}"
                    raise FedblendError(f"{file}: {found}; valid: one frame rate; convert it")
            if signals and signal.shape[0] != signals[0].shape[0]:
                found = f"has {signal.shape[0]} channels, {files[0].name} has {signals[0].shape[0]}"
                raise FedblendError(f"{file}: {found}; valid: one number of channels, such as only mono sound")
            if self.length is not None:
                signal = np.pad(signal[:, : self.length], ((0, 0), (0, max(0, self.length - signal.shape[1]))))
            if signals and signal.shape != signals[0].shape:
                found = f"has {signal.shape[1]} points in time, {files[0].name} has {signals[0].shape[1]}"
                raise FedblendError(f"{file}: {found}; give data.length to cut or fill all signals")
            signals.append(signal)
        return np.stack(signals)


def read_signal(path: Path, raw: bytes) -> np.ndarray:
    """A signal float32 [channels, T]; sound is in [-1, 1]. Raises :class:`FedblendError` for a damaged file."""
    try:
        if path.suffix.lower() == ".wav":
            signal = _sound(raw)
        elif path.suffix.lower() == ".npy":
            signal = np.load(io.BytesIO(raw), allow_pickle=False)
            signal = signal[None] if signal.ndim == 1 else signal
        else:
            signal = np.loadtxt(io.StringIO(raw.decode("utf-8")), delimiter=_delimiter(raw), ndmin=2).T
    # The readers raise errors of many kinds for damaged files.
    except (ValueError, OSError, EOFError, LookupError, TypeError, MemoryError, wave.Error, SyntaxError) as error:
        raise FedblendError(f"{path}: is damaged or no signal ({legible(error)}); repair or remove it") from None
    if signal.ndim != 2 or not signal.size or signal.dtype.kind not in "iuf":
        found = f"{signal.dtype} of shape {list(signal.shape)}"
        raise FedblendError(f"{path}: holds {found}; valid: numbers [T] or [channels, T]")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(signal, np.float32)


def _delimiter(raw: bytes) -> Literal[",", ";"] | None:
    first = raw.split(b"\n", 1)[0]
    return "," if b"," in first else ";" if b";" in first else None


def _sound(raw: bytes) -> np.ndarray:
    """The samples of a file in WAV's form, in [-1, 1]."""
    with wave.open(io.BytesIO(raw)) as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        require_memory(file.getnframes() * channels * 4, "a signal", "is it the right file?")
        frames = file.readframes(file.getnframes())
    if width not in (1, 2):
        raise ValueError(f"it has {8 * width} bits a sample; valid: 8 or 16")
    # 8 bits are without a sign, 16 bits with one.
    numbers = np.frombuffer(frames, "<u1" if width == 1 else "<i2").astype(np.float32)
    scaled = (numbers - 128) / 128 if width == 1 else numbers / 32768
    return scaled.reshape(-1, channels).T
