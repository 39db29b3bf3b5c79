"""Paragraphs with more than three numbers: name each one, and end with exit code 1.

python docs/site/count_numbers.py [FILE ...]     default: docs/**/*.md and README.md

A list item is a paragraph. Code, tables, headings, pictures, links' targets and all that stands under a heading that
begins with "Appendix" do not count, nor do names such as CIFAR10, versions, dates and references to papers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 3
NOT_TEXT = re.compile(r"^ *```.*?^ *```|<!--.*?-->", re.M | re.S)
HEADING = re.compile(r"(#+) +(.*)")
STARTS = re.compile(r"^([-*+] |\d+[.)] )")
NOT_COUNTED = re.compile(
    r"`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)|<[^>]*>|https?://\S+|arXiv:\S+|\[0, 1\]"
    r"|\b\d{4}-\d\d(-\d\d)?\b|\b(\d\d? [A-Z][a-z]+ )?(19|20)\d\d\b|\d+\.\d+\.\d\S*"
    r"|(?i:\b(figures?|tables?|sections?|equations?|theorems?|lemmas?|algorithms?|codes?|requests?|seeds?|python|pytorch"
    r"|flower|zen|versions?) \d[\d.]*((,| and| or| to) \d[\d.]*)*)"
    r"|\b[A-Z]\w*[A-Z]\w* \d(?![.,]?\d| ?%)"  # FedMix 2
)
NUMBER = re.compile(r"(?<![\w.^])(?<!\w-)(?<!\^-)\d[\d.,]*( x \d+)*(?!\w)")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The line on which each paragraph or list item begins, and its text."""
    text = NOT_TEXT.sub(lambda found: "\n" * found[0].count("\n"), text)
    start, lines, appendix = 0, list[str](), 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.strip()
        heading = HEADING.match(line)
        if lines and (not line or heading or line[0] == "|" or STARTS.match(line)):
            yield start, " ".join(lines)
            lines = []
        if heading:
            level = len(heading[1])
            appendix = level if heading[2].startswith("Appendix") else appendix if appendix < level else 0
        elif line and line[0] != "|" and not appendix:
            start = start if lines else number
            lines.append(line if lines else STARTS.sub("", line))


def numbers(paragraph: str) -> int:
    """How many numbers a reader meets in a paragraph."""
    return len(NUMBER.findall(NOT_COUNTED.sub(" ", paragraph)))


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    failed = False
    for page in pages:
        for line, paragraph in paragraphs(page.read_text(encoding="utf-8")):
            if (count := numbers(paragraph)) > MOST:
                failed = True
                name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
                print(
                    f"{name}:{line}: {count} numbers in a paragraph (at most {MOST}): "
                    "move them into a table, or under an Appendix heading"
                )
    sys.exit(failed)
