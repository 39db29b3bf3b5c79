"""Download a file once, with progress, resume after a break, and check its SHA-256."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedblend.core.errors import FedblendError

TIMEOUT_S = 30  # Seconds without a response after which a download fails
BLOCK = 1 << 16  # Bytes that are written at a time


@dataclass
class ResumingDownloader:
    """A downloader for pooch that stores received bytes in ``part``, and requests only the remaining bytes.

    If the server ignores the range and sends the whole file, ``part`` is overwritten. pooch checks the SHA-256 of the
    complete file.
    """

    part: Path

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        """Download ``url`` into ``output_file``. Raises the errors of ``requests``."""
        import requests
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        label = TextColumn("downloading {task.description}")
        columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        done = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                # The part is as long as the file: it is complete, or a part of another file.
                os.replace(self.part, output_file)
                return
            response.raise_for_status()
            is_partial = response.status_code == requests.codes.partial_content
            length = response.headers.get("Content-Length")
            self.part.parent.mkdir(parents=True, exist_ok=True)
            done = done if is_partial else 0
            total = done + int(length) if length else None
            with open(self.part, "ab" if is_partial else "wb") as file, progress:
                task = progress.add_task(self.part.stem, completed=done, total=total)
                for block in response.iter_content(BLOCK):
                    progress.advance(task, file.write(block))
        if total is not None and self.part.stat().st_size < total:
            raise requests.ConnectionError("the connection was lost; the next attempt resumes here")
        os.replace(self.part, output_file)


def download(url: str, sha256: str, folder: str, remedy: str) -> Path:
    """Download ``url`` into the user's cache, unless it is there, and return its path.

    Raises :class:`FedblendError` with the file, its address and ``remedy`` if the download fails or the file has
    another SHA-256.
    """
    import pooch
    import requests

    name = url.rsplit("/", 1)[-1]
    cache = Path(pooch.os_cache("fedblend")) / folder
    try:
        pooch.get_logger().setLevel("WARNING")
        downloader = ResumingDownloader(cache / f"{name}.part")
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=cache, downloader=downloader))
    except (requests.RequestException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if error.args and getattr(error.args[0], "reason", None) and isinstance(error, requests.ConnectionError):
            # The message of requests has several lines.
            reason = f"no connection to {urlsplit(url).netloc}"
        raise FedblendError(f"{folder}: cannot download {name} from {url} ({reason}); {remedy}") from None
