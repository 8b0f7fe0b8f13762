"""The pages of docs/ in a terminal: a page, a section of it, a setting, or where words stand."""

from __future__ import annotations

import difflib
import re
import shlex
import textwrap
from dataclasses import dataclass

from automodel_lite.cli.line import argument_parser
from automodel_lite.config.components import DOCS_DIR
from automodel_lite.errors import ConfigError, listed, meant, nearest

_WIDTH = 100
_MOST_PLACES = 20


def docs(argv: list[str]) -> int:
    """Print the documentation: a page, one of its sections, a setting, or where words stand.

    automodel-lite docs
    automodel-lite docs packing
    automodel-lite docs data bad rows
    automodel-lite docs cookbook/lora
    automodel-lite docs training.max_steps
    automodel-lite docs overlong
    """
    parser = argument_parser(docs.__doc__)
    parser.add_argument(
        "topic", nargs="*", help="a page and words of its heading, a setting, or words to look for"
    )
    print(answer(parser.parse_args(argv).topic).strip())
    return 0


@dataclass(frozen=True)
class Section:
    """A heading of a page with all that is below it."""

    page: str
    level: int
    heading: str
    text: str

    @property
    def command(self) -> str:
        """Returns what is typed to print it."""
        words = [self.page] if self.level == 1 else [self.page, self.heading.replace("`", "")]
        return shlex.join(["automodel-lite", "docs", *words])


def answer(topic: list[str]) -> str:
    """Returns what is printed for the words that were typed; raises ConfigError where nothing has
    this name.
    """
    pages = read_pages()
    typed = [word for text in topic for word in text.replace("#", " ").split()]
    # a dash or a quote alone is no word
    words = [word for word in typed if re.search(r"\w", word)]
    if not words:
        return _overview(pages)
    name, rest = words[0], " ".join(words[1:])
    if page := _page_named(name, pages):
        # `lora` is a page, and one of the cookbook has its name
        twins = [other for other in pages if other != page and other.endswith(f"/{page}")]
        also = "".join(f"\n\nSee also: automodel-lite docs {twin}" for twin in twins)
        return _part_of(page, rest, pages[page]) if rest else pages[page].rstrip() + also
    asked = " ".join(words)
    everywhere = [section for page, text in pages.items() for section in sections_of(page, text)]
    found = _setting(asked, pages["config"]) or _headed(asked, everywhere)
    found = found or _mentioning(asked, everywhere)
    if found:
        return found
    keys = re.findall(r"^\| `([\w.]+)` \|", pages["config"], flags=re.MULTILINE)
    near = nearest(name, keys if "." in name else pages)
    raise ConfigError(
        f"docs {asked}: no page, heading or setting has this name, and no page says it"
        f"{meant(near)} automodel-lite docs lists the pages."
    )


def read_pages() -> dict[str, str]:
    """Returns name -> text of each page, in the order in which the first page links to them."""
    pages = {}
    for path in sorted(DOCS_DIR.rglob("*.md")):
        name = path.relative_to(DOCS_DIR).with_suffix("").as_posix()
        pages[name.removesuffix("/README")] = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w/]+?)(?:/README)?\.md", pages["README"])
    order = dict.fromkeys(["README", *links, *pages])
    return {name: pages[name] for name in order}


def sections_of(page: str, text: str) -> list[Section]:
    """Returns the sections of a page, in its order. A `#` in a block of code is no heading."""
    lines = text.splitlines()
    heads = []
    is_code = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and (found := re.match(r"(#+) +(.*)", line)):
            heads.append((number, len(found[1]), found[2].strip()))
    found_sections = []
    for place, (start, level, heading) in enumerate(heads):
        # it ends at the next heading of its level or above
        ends = [number for number, other, _ in heads[place + 1 :] if other <= level]
        end = ends[0] if ends else len(lines)
        found_sections.append(Section(page, level, heading, "\n".join(lines[start:end])))
    return found_sections


def _overview(pages: dict[str, str]) -> str:
    lines = [
        "automodel-lite docs PAGE prints one; PAGE and words of a heading a section of it.",
        "",
    ]
    for page, text in pages.items():
        title, *below = sections_of(page, text)
        heads = ", ".join(section.heading for section in below if section.level == 2)
        entry = f"{page:24s} {title.heading}{f': {heads}' if heads else ''}"
        lines.append(textwrap.fill(entry, _WIDTH, subsequent_indent=" " * 25))
    return "\n".join(lines)


def _plain(text: str) -> str:
    """`Which tokens are trained on` -> `whichtokensaretrainedon`."""
    return re.sub(r"[^\w=.]|_", "", text.lower())


def _page_named(name: str, pages: dict[str, str]) -> str | None:
    """Returns the page that is meant: by its name, its path, its beginning, or a close name."""
    wanted = name.lower().removeprefix("docs/").removesuffix(".md").removesuffix("/readme")
    by_name = {_plain(page): page for page in reversed(pages)}
    by_name |= {_plain(page.rpartition("/")[2]): page for page in reversed(pages)}
    wanted = _plain(wanted)
    if wanted in by_name:
        return by_name[wanted]
    # a setting has dots and equals signs; short words begin too many names
    if re.search(r"[.=]", wanted) or len(wanted) < 4:
        return None
    beginning = [page for known, page in by_name.items() if known.startswith(wanted)]
    if len(set(beginning)) == 1:
        return beginning[0]
    close = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.8)
    return by_name[close[0]] if close else None


def _part_of(page: str, words: str, text: str) -> str:
    """Returns the section of a page whose heading has the words, or is closest to them, else the
    places of the page where they stand.
    """
    known = {_plain(section.heading): section for section in sections_of(page, text)[1:]}
    asked = _plain(words)
    for heading, section in known.items():
        if asked == heading:
            return section.text
    for heading, section in known.items():
        if asked in heading:
            return section.text
    if close := difflib.get_close_matches(asked, known, n=1):
        return known[close[0]].text
    if places := _mentioning(words, sections_of(page, text)):
        return places
    heads = listed([repr(section.heading) for section in known.values()], most=40)
    raise ConfigError(
        f"docs {page} {words}: the page does not say it; its headings are {heads or 'none'}."
    )


def _setting(name: str, text: str) -> str:
    """Returns the lines on a setting: its row in a table, and for a key of a group the line of each
    option.
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[0] == f"`{name}`":
            _, kind, default, resumable, meaning = cells
            found += [name, f"  type       {kind}", f"  default    {default}"]
            if resumable:
                found.append("  resumable  a run may continue with another value")
            if meaning:
                found.append(f"  meaning    {meaning}")
    group, _, key = name.partition(".")
    blocks = re.split(r"^\*\*`(\w+=\w+)`\*\*", text, flags=re.MULTILINE)
    for option, block in zip(blocks[1::2], blocks[2::2]):
        if option == name:
            found.append(f"{option}{block.partition('### ')[0].rstrip()}")
        if key and option.startswith(f"{group}="):
            lines = re.findall(rf"^{re.escape(key)}:.*", block, flags=re.MULTILINE)
            found += [f"{option:32s} {group}.{line}" for line in lines[:1]]
    return "\n".join(found)


def _headed(words: str, everywhere: list[Section]) -> str:
    """Returns the section whose heading has the words; of several, what prints each."""
    asked = _plain(words)
    exact = [section for section in everywhere if _plain(section.heading) == asked]
    found = exact or [section for section in everywhere if asked in _plain(section.heading)]
    if len(found) == 1:
        return found[0].text
    return "\n".join(section.command for section in found)


def _mentioning(words: str, everywhere: list[Section]) -> str:
    """Returns what prints the sections in which all words stand, each with its first such line."""
    asked = words.lower().split()
    lines = []
    for section in everywhere:
        own = section.text.splitlines()[1:]
        # of nested sections the innermost
        ends = [number for number, line in enumerate(own) if re.match("#+ ", line)]
        own = own[: ends[0]] if ends else own
        if all(word in "\n".join(own).lower() for word in asked):
            line = next(line for line in own if asked[0] in line.lower())
            lines.append(f"{section.command}\n    {textwrap.shorten(line, _WIDTH - 4)}")
    more = f"\nand {len(lines) - _MOST_PLACES} more places" if lines[_MOST_PLACES:] else ""
    return "\n".join(lines[:_MOST_PLACES]) + more
