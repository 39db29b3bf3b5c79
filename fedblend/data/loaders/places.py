"""Where the files of a data set may lie, and what is told where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedblend.core.errors import FedblendError, listed
from fedblend.data.loaders.files import data_folder, existing, sha256_file


@dataclass(frozen=True)
class Home:
    """A data set's files, the folders below ``$FEDBLEND_DATA`` where they are looked for, and their address.

    These are data sets whose files fedblend does not fetch: no SHA-256 of what lies at ``address`` is known, so that
    nothing could tell a sound file from another.
    """

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    address: str
    option: str = "folder"

    def find(self, folder: str | None) -> Path:
        """The folder that holds all files: ``folder``, or the first that does of the usual ones.

        Raises :class:`FedblendError` that names a file that is missing, its address, and where to put it.
        """
        if folder is not None:
            place = existing(folder, f"data.{self.option}")
            missing = [name for name in self.files if not (place / name).exists()]
            if missing:
                raise FedblendError(
                    f"data.{self.option}: '{place}' holds no {missing[0]}; the data set '{self.name}' needs "
                    f"{listed(self.files)} (from {self.address})"
                )
            return place
        found = self.found()
        if found is None:
            raise self.absent()
        return found

    def found(self) -> Path | None:
        """The first of the usual folders that holds all files, or ``None``."""
        base = data_folder()
        for place in [base / sub for sub in self.folders] if base else []:
            if all((place / name).exists() for name in self.files):
                return place
        return None

    def absent(self) -> FedblendError:
        """The error where no folder holds the files."""
        return FedblendError(
            f"data: '{self.name}' needs {listed(self.files)}, but {looked(self.folders)}. fedblend does not fetch "
            f"them by itself: take them from {self.address} and put them into {self.folders[0]}/ under the folder that "
            f"$FEDBLEND_DATA names, or give their folder as data.{self.option}"
        )


def looked(folders: Sequence[str]) -> str:
    """Where was looked for files in vain."""
    base = data_folder()
    if base is None:
        return "$FEDBLEND_DATA is not set, so that there is no folder to look in"
    return f"they are not in {' nor in '.join(str(base / sub) for sub in folders)}"


def fingerprints(paths: Sequence[Path], root: Path) -> dict[str, str]:
    """SHA-256 of files by their path below ``root``.

    Raises :class:`FedblendError` if two of them are the same: one of the two then stands under a wrong name.
    """
    prints = {path.relative_to(root).as_posix(): sha256_file(path) for path in paths}
    first: dict[str, str] = {}
    for name, sha in prints.items():
        other = first.setdefault(sha, name)
        if other != name:
            raise FedblendError(f"{root / name}: is the same file as {other}; one of the two has a wrong name")
    return prints
