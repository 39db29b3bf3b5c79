"""Fetching a file once, with progress, going on where it was broken off, checked against its SHA-256."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedblend.core.errors import FedblendError

PATIENCE_S = 30
"""Seconds without an answer after which a download is given up."""


BLOCK = 1 << 16
"""Bytes written at once."""


class Progress:
    """A bar in the terminal while a file comes: ``there`` bytes of ``total`` to begin with, if that is known."""

    def __init__(self, name: str, there: int, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        label = TextColumn("fetching {task.description}")
        columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(name, completed=there, total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, count: int) -> None:
        """Tell of ``count`` further bytes."""
        self._bar.update(self._task, advance=count)


@dataclass
class Resuming:
    """A downloader for pooch that keeps what came in ``part`` until all is there, and asks for the rest only.

    A server that cannot send a rest sends everything, and the part begins anew. What was put together from several
    tries is checked against its SHA-256 like everything else.
    """

    part: Path

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Fetch ``url`` into ``output_file``. Raises what ``requests`` raises."""
        import requests

        there = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
        with requests.get(url, headers=headers, stream=True, timeout=PATIENCE_S) as answer:
            if answer.status_code == requests.codes.requested_range_not_satisfiable:
                # The part is as long as the whole: nothing is left to fetch, or it was another file's.
                os.replace(self.part, output_file)
                return
            answer.raise_for_status()
            goes_on = answer.status_code == requests.codes.partial_content
            length = answer.headers.get("Content-Length")
            self.part.parent.mkdir(parents=True, exist_ok=True)
            there = there if goes_on else 0
            total = there + int(length) if length else None
            with open(self.part, "ab" if goes_on else "wb") as file, Progress(self.part.stem, there, total) as bar:
                for block in answer.iter_content(BLOCK):
                    file.write(block)
                    bar.update(len(block))
        if total is not None and self.part.stat().st_size < total:
            raise requests.ConnectionError("the connection broke off; the next try goes on from here")
        os.replace(self.part, output_file)


def fetch(url: str, sha256: str, folder: str, remedy: str) -> Path:
    """The file at ``url`` in the user's cache, fetched there unless it is there already.

    Raises :class:`FedblendError` with the file, its address and ``remedy`` if it cannot be had or
    is not what its SHA-256 says.
    """
    import pooch
    import requests

    name = url.rsplit("/", 1)[-1]
    place = Path(pooch.os_cache("fedblend")) / folder
    try:
        pooch.get_logger().setLevel("WARNING")
        downloader = Resuming(place / f"{name}.part")
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=place, downloader=downloader))
    except (requests.RequestException, OSError, ValueError) as error:
        cause = getattr(error.args[0], "reason", None) if error.args else None
        if cause is not None and isinstance(error, requests.ConnectionError):
            reason = f"no connection to {urlsplit(url).netloc}"  # the library's own words run over lines
        else:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FedblendError(f"{folder}: cannot fetch {name} from {url} ({reason}); {remedy}") from None
