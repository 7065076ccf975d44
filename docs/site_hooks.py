"""Hooks of mkdocs: what the pages link to outside docs/ becomes part of the site.

Invariant: the pages are written for a code host, where a link is a path in the repository. The site shows the
same pages: a file outside docs/ that a page links to is added below ``repository/``, as a page, and the links
to it are rewritten. Neither needs the address of a host.
"""

import os
import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from page_links import is_address, links, resolved, with_links

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository/"
"""Folder of the site for files that do not lie in docs/."""
LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".service": "ini",
}


def on_startup(*, command: str, dirty: bool) -> None:
    """Link the documented parts of the package into a folder of its import name, which the root of the
    repository need not have.

    Before anything is configured: mkdocstrings drops paths that do not exist.
    """
    folder = ROOT / "build" / "package" / "caesura"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", "client", "io_struct", "process"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(ROOT / name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside docs/ that a page leads to, directly or through another such file."""
    pages = [
        (posixpath.join("docs", file.src_uri), file.content_string) for file in files.documentation_pages()
    ]
    while pages:
        page, text = pages.pop()
        for link in links(text):
            path = resolved(page, link.partition("#")[0])
            if is_address(link) or path.startswith("docs/") or files.get_file_from_path(site_uri(path)):
                continue
            if not (ROOT / path).is_file():  # mkdocs says so
                continue
            content = (ROOT / path).read_text(encoding="utf-8")
            if path.endswith(".md"):
                pages.append((path, content))
            else:
                content = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, '')}\n{content}````\n"
            files.append(File.generated(config, site_uri(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return ``markdown`` with links of the repository as links of the site."""
    source = page.file.src_uri
    path = source.removeprefix(OUTSIDE) if source.startswith(OUTSIDE) else posixpath.join("docs", source)

    def rewritten(link: str) -> str:
        target, mark, anchor = link.partition("#")
        if is_address(link) or not target:
            return link
        uri = site_uri(resolved(path, target))
        return os.path.relpath(uri, posixpath.dirname(source) or ".") + mark + anchor

    return with_links(markdown, rewritten)


def site_uri(path: str) -> str:
    """Return the place in the site's sources of a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE + (path if path.endswith(".md") else f"{path}.md")
