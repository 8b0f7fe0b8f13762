"""Draws docs/packing.svg: the same five documents padded, packed, and packed with the mask missing."""

from __future__ import annotations

from pathlib import Path

LENGTHS = [5, 3, 6, 2, 4]
PACK = 10
CELL, GAP, TOP = 15, 36, 64
COLOURS = ["#2f7ed8", "#e0741b", "#1f9d6b", "#b4519d", "#8a72d4"]
PADDING, LEAK = "#c9ced6", "#d92d20"


def row(cells: list[str], x: int, y: int) -> list[str]:
    """One row of tokens as squares."""
    return [
        f'<rect x="{x + i * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="{colour}"/>'
        for i, colour in enumerate(cells)
    ]


def mask(documents: list[int], x: int, y: int, size: int, leaks: bool) -> list[str]:
    """Who sees whom in a pack: lower triangles, and with a missing mask all that lies between them."""
    step = 96 / size
    parts = [f'<rect x="{x}" y="{y}" width="96" height="96" rx="3" fill="none" stroke="{PADDING}"/>']
    if leaks:
        parts.append(f'<path d="M{x} {y}V{y + 96}H{x + 96}Z" fill="{LEAK}" fill-opacity=".32"/>')
    start = 0.0
    for document in documents:
        length = LENGTHS[document] * step
        place = f"M{x + start:.1f} {y + start:.1f}v{length:.1f}h{length:.1f}z"
        parts.append(f'<path d="{place}" fill="{COLOURS[document]}"/>')
        start += length
    return parts


def text(words: str, x: int, y: int, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={kind!r}" if kind else ""}>{words}</text>'


def drawing() -> str:
    """The whole SVG; its words take a colour that reads on white and on black."""
    longest = max(LENGTHS)
    padded = [[COLOURS[d]] * n + [PADDING] * (longest - n) for d, n in enumerate(LENGTHS)]
    packs = [[0, 1, 3], [2, 4]]
    packed = [[COLOURS[d] for d in pack for _ in range(LENGTHS[d])] for pack in packs]
    lefts = [20, 20 + longest * CELL + 2 * GAP + 40, 20 + longest * CELL + 4 * GAP + 40 + PACK * CELL + 96]
    parts = [text("padded", lefts[0], 26, "h"), text("30 positions for 20 tokens", lefts[0], 44)]
    for number, cells in enumerate(padded):
        parts += row(cells, lefts[0], TOP + number * (CELL + 4))
    for left, title, note, leaks in (
        (lefts[1], "packed", "20 positions, every document by itself", False),
        (lefts[2], "packed, mask missing", "runs, learns the wrong thing, says nothing", True),
    ):
        parts += [text(title, left, 26, "h"), text(note, left, 44)]
        for number, cells in enumerate(packed):
            parts += row(cells, left, TOP + number * (CELL + 4))
        parts += mask(packs[0], left, TOP + 2 * (CELL + 4) + 12, PACK, leaks)
        legend = ("each document sees", "its own past") if not leaks else ("red: attention to", "other documents")
        parts += [text(line, left + 108, TOP + 2 * (CELL + 4) + 54 + 16 * i) for i, line in enumerate(legend)]
    width, height = lefts[2] + 280, TOP + 2 * (CELL + 4) + 12 + 96 + 16
    style = "text{font:12px system-ui,sans-serif;fill:#6b7480}.h{font-size:15px;font-weight:600;fill:#7a8494}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    title = "<title>Five documents: padded, packed, and packed with the mask missing</title>"
    return f"{head}{title}<style>{style}</style>{''.join(parts)}</svg>\n"


if __name__ == "__main__":
    (Path(__file__).resolve().parent / "packing.svg").write_text(drawing())
