"""Fetching a file once, with progress, checked against its SHA-256."""

from __future__ import annotations

from pathlib import Path

from fedblend.errors import FedblendError

PATIENCE_S = 30
"""Seconds without an answer after which a download is given up."""


class Progress:
    """A bar in the terminal, with the four things that pooch asks of one."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        self.total = 0
        label = TextColumn("fetching {task.description}")
        columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(name)
        self._bar.start()

    def update(self, count: int) -> None:
        """Tell of ``count`` further bytes."""
        self._bar.update(self._task, total=self.total or None, advance=count)

    def reset(self) -> None:
        """Start again from nothing."""
        self._bar.reset(self._task)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def fetch(url: str, sha256: str, folder: str, remedy: str) -> Path:
    """The file at ``url`` in the user's cache, fetched there unless it is there already.

    Raises :class:`FedblendError` with the file, its address and ``remedy`` if it cannot be had or
    is not what its SHA-256 says.
    """
    import pooch
    import requests

    name = url.rsplit("/", 1)[-1]
    place = Path(pooch.os_cache("fedblend")) / folder
    there = (place / name).exists()
    bar = None if there else Progress(f"{folder}/{name}")
    try:
        downloader = pooch.HTTPDownloader(progressbar=bar or False, timeout=PATIENCE_S)
        pooch.get_logger().setLevel("WARNING")
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=place, downloader=downloader))
    except (requests.RequestException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FedblendError(f"{folder}: cannot fetch {name} from {url} ({reason}); {remedy}") from None
    finally:
        if bar:
            bar.close()
