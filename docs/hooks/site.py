"""What `make docs` does besides rendering docs/: README.md is the front page, and the repository's files can be read.

A page's link to a file outside docs/ leads to a page of the site that shows the file, so that the site needs neither an
address of the repository nor a network. Loaded by mkdocs, as mkdocs.yml says.
"""

import ast
import os
import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
AS_THEY_ARE = {".png", ".svg", ".json", ".csv"}
ROLE = re.compile(r":(?:func|class|meth|mod|attr|exc|data|obj):<code>~?([^<]*)</code>")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"  # in nobody's search results
SCRIPT = Path(os.environ.get("MERMAID", "/nowhere"))
MERMAID = "javascripts/mermaid.min.js"


def place(name: str) -> str:
    """Return where the site has a file or folder of the repository."""
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"repository/{name}" if Path(name).suffix in {".md", *AS_THEY_ARE} else f"repository/{name}.md"


def origin(page: str) -> str:
    """Return which file of the repository a page of the site shows."""
    if page == "index.md":
        return "README.md"
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def targets(name: str, text: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a page links."""
    for match in LINK.finditer(FENCE.sub("", text)):
        if "://" not in match[2]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))


def listing(folder: Path) -> str:
    """Return a table of a folder's files, with what each says of itself."""
    rows = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.suffix == ".py":
            says = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        elif path.suffix == ".yaml":
            says = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        else:
            says = ""
        rows.append(f"| `{path.name}{'/' if path.is_dir() else ''}` | {says.replace('|', chr(92) + '|')} |")
    return "\n".join(["| | |", "| --- | --- |", *rows, ""])


def shown(name: str) -> str:
    """Return the page that shows a file or folder of the repository."""
    path = ROOT / name
    if path.is_dir():
        return f"{HIDDEN}\n# {name}/\n\n{listing(path)}"
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}.get(path.suffix, "text")
    return f"{HIDDEN}\n# {name}\n\n````{language}\n{path.read_text(encoding='utf-8')}\n````\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Draw diagrams by the script that `make docs` fetched, if it could; else the theme asks a public server for it."""
    if SCRIPT.is_file():
        config.extra_javascript.append(MERMAID)  # type: ignore[arg-type]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, generated pages, and what pages link outside docs/."""

    def add(uri: str, **content: Any) -> None:
        if files.get_file_from_path(uri) is None:
            level = InclusionLevel.NOT_IN_NAV if uri.startswith("repository/") else InclusionLevel.INCLUDED
            files.append(File.generated(config, uri, inclusion=level, **content))

    if SCRIPT.is_file():
        add(MERMAID, abs_src_path=str(SCRIPT))
    reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
    add("reference/keys.md", content=reference["keys_page"]())
    for name, text in reference["api_pages"]().items():
        add(f"reference/api/{name}", content=text)
    pages = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    pages += [origin(file.src_uri) for file in files.documentation_pages() if file.generated_by is None]
    seen = set(pages)
    while pages:
        name = pages.pop()
        path = ROOT / name
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            if not name.startswith("docs/"):
                add(place(name), content=text)
            new = {target for target in targets(name, text) if (ROOT / target).exists()} - seen
            seen |= new
            pages += sorted(new)
        elif path.is_file() and path.suffix in AS_THEY_ARE:
            add(place(name), abs_src_path=str(path))
        elif not name.startswith("docs/"):
            add(place(name), content=shown(name))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and leave out what only tests read of a block's first line."""
    name, here = origin(page.file.src_uri), posixpath.dirname(page.file.src_uri) or "."

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        if "://" in match[2] or not (ROOT / target).exists():
            return match[0]
        return f"{match[1]}{posixpath.relpath(place(target), here)}{match[3]}"

    def within(text: str) -> str:
        return LINK.sub(moved, text)

    if page.file.generated_by is not None and page.file.src_uri.startswith("repository/") and name[-3:] != ".md":
        return markdown
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        parts += [within(markdown[end : block.start()])]
        parts += [f"{block['fence']}{block['language']}\n{block['text']}{block['fence']}"]
        end = block.end()
    return "".join([*parts, within(markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show Sphinx's roles in docstrings, as editors do: the last part of the name that they refer to."""
    return ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2] if role[0].count('~') else role[1]}</code>", html)
