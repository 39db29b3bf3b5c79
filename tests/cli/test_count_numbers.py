"""What the linter of pages counts as a number in a paragraph."""

import subprocess
import sys
from pathlib import Path

from helpers import each
from script_helpers import ROOT, script

LINTER = script("docs/site/count_numbers.py")


@each(
    ("text", "count"),
    [
        ("70 to 74 % of 1,200 samples of 28 x 28 pixels, -0.5 points.", 5),
        ("CIFAR10, LeNet-5, SHA-256, 3x3, 2^-10 and commit 671c9b8.", 1),
        ("Python 3.11 to 3.13, torch 2.13.0, Figure 8, seeds 0, 1 and 2, exit code 70, in [0, 1], FedMix 2.", 0),
        ("On 2026-11-23, in 2025, on 3 November 2026 (Balle and Wang 2018, Theorem 8).", 0),
        ("`lr = 0.1`, [the table](page.md#20-clients-of-100), ![20 of 40](figures/a.png), <b id=3>", 0),
        ("FedMix 64.3 %, FedAvg 61", 2),
    ],
)
def test_numbers_that_a_reader_meets_count(text: str, count: int) -> None:
    assert LINTER.numbers(text) == count


def test_paragraphs_are_those_of_text_with_their_lines() -> None:
    page = """# Title with 4, 5, 6, 7

One
paragraph.
| 1 | 2 | 3 |

1. First
    - nested
      item
```
1 2 3 4
```
<!-- mark
-->
## Appendix: 1
gone
### gone, too
gone
## Text
again
"""
    assert list(LINTER.paragraphs(page)) == [
        (3, "One paragraph."),
        (7, "First"),
        (8, "nested item"),
        (20, "again"),
    ]


def test_the_command_names_each_paragraph(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n1 2 3\n\n1 2 3 4\n")
    done = subprocess.run([sys.executable, ROOT / "docs/site/count_numbers.py", page], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == (
        f"{page}:5: 4 numbers in a paragraph (at most 3): move them into a table, or under an Appendix heading\n"
    )
