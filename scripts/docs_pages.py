"""MkDocs hook: pages whose files lie outside docs/, under the links that a checkout has.

A link to such a file is right in a checkout (`../sglang_patches/PATCHES.md`) and in the built site alike.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "sglang_patches/PATCHES.md": "patches.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File, and the page that it becomes."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for source, target in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return markdown
