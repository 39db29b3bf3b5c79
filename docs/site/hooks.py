"""What MkDocs does beside its own work: generated pages, links to files outside of docs/, search without a server.

The tables of fields and methods are made from the code, and the page of all runs from the committed results. A page is
made for each notebook in docs/, with its outputs, and for each linked file outside of docs/: from its Markdown, or with
its text as code. So links between files of the repository also lead somewhere on the site.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from reference import filled, part_pages

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=[)#])")
"""The path of a relative link or image."""
NAMED = re.compile(r"\[[\w/-]+\.md\](?=\(([^)\s#]+\.md)[)#])")
"""The text of a link that is the name of its file."""
LONG_CODE = re.compile(r"(?<=<code>)[^<\n]{25,}(?=</code>)")
"""Code in a line of text that is so long that it would make a column of a table too wide."""
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
IN_NAVIGATION = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Files outside of docs/ that have a page even if no page links to them."""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page of all runs, one for each kind of part, and one for each file outside of docs/ that is linked to."""
    files.append(File.generated(config, "site/all-runs.html", content=all_runs()))
    for kind, text in part_pages().items():
        page = f"reference/{kind}.md"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    for notebook in [file.src_uri for file in files if file.src_uri.endswith(".ipynb")]:
        page, pictures = notebook_page(ROOT / "docs" / notebook)
        files.append(File.generated(config, page_of(f"docs/{notebook}"), content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, posixpath.join(posixpath.dirname(notebook), name), content=picture))
    linked = list(IN_NAVIGATION)
    for file in files.documentation_pages():
        linked += targets(file.content_string, f"docs/{file.src_uri}")
    while linked:
        path = linked.pop()
        page = page_of(path)
        if path.startswith("docs/") or files.get_file_from_path(page):
            continue
        if not (ROOT / path).is_file():
            raise PluginError(f"a page links to {path}, which is no file of the repository")
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".md"):
            linked += targets(text, path)
        else:
            head = f"---\nsearch: {{exclude: true}}\n---\n# {posixpath.basename(path)}\n\n`{path}`\n"
            text = f"{head}\n```{Path(path).suffix[1:]}\n{text.rstrip()}\n```\n"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site, named by their titles."""
    uri = page.file.src_uri
    source = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"

    def title(found: re.Match[str]) -> str:
        heading = re.search(r"^# (.+)$", (ROOT / resolved(found[1], source)).read_text(encoding="utf-8"), re.M)
        return f"[{heading[1]}]" if heading else found[0]

    def link(found: re.Match[str]) -> str:
        return posixpath.relpath(page_of(resolved(found[1], source)), posixpath.dirname(uri) or ".")

    parts = FENCED.split(filled(markdown))
    parts[::2] = [LINK.sub(link, NAMED.sub(title, part)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Break lines in long code, such as the name of a test, after a slash, colon or underscore, and nowhere at a ±."""
    return LONG_CODE.sub(
        lambda found: re.sub(r"(/|::|_)(?=\w)", r"\1<wbr>", found[0]), html.replace(" ± ", "\u00a0±\u00a0")
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index of the search as a script too, which pages that are opened as files can load."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")


def all_runs() -> str:
    """The page of all runs. The results lie in a checkout, not in the sdist."""
    evidence = ROOT / "evidence"
    if not evidence.is_dir():
        return "The results of all runs are in the repository, not in this copy of the sources."
    sys.path.insert(0, str(evidence))
    from tables.all_runs import page

    return str(page())


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown (its text, code and outputs, and a link to the file), and its pictures by their names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{cell['metadata']['alt']}]({name})")
            else:
                parts.append("```text\n" + "".join(output.get("text", data.get("text/plain"))).rstrip() + "\n```")
    download = f'<a href="{path.name}" download>This page as a notebook</a>'
    return "\n\n".join([parts[0], download, *parts[1:]]) + "\n", pictures


def targets(markdown: str, source: str) -> list[str]:
    """Paths in the repository of the files that a file links to."""
    return [resolved(path, source) for path in LINK.findall("".join(FENCED.split(markdown)[::2]))]


def resolved(path: str, source: str) -> str:
    """The path in the repository of a link in the file ``source``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def page_of(path: str) -> str:
    """The source of the page for a path in the repository, relative to docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    return f"files/{path}" + ("" if path.endswith(".md") else ".md")
