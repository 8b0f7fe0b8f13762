"""Draws docs/packing.svg: the same five documents padded, packed, and packed with the
mask missing.
"""

from __future__ import annotations

from pathlib import Path

LENGTHS = [5, 3, 6, 2, 4]
PACK = 10
CELL, TOP, MASK = 18, 74, 108
LEFTS = (12, 176, 396)  # narrow, so that the words can be read on a phone
COLORS = ["#2f7ed8", "#e0741b", "#1f9d6b", "#b4519d", "#8a72d4"]
PADDING, LEAK = "#c9ced6", "#d92d20"


def row(cells: list[str], x: int, y: int) -> list[str]:
    """One row of tokens as squares."""
    return [
        f'<rect x="{x + i * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" '
        f'rx="2" fill="{color}"/>'
        for i, color in enumerate(cells)
    ]


def mask(documents: list[int], x: int, y: int, size: int, leaks: bool) -> list[str]:
    """Who sees whom in a pack: lower triangles, and with a missing mask all that lies
    between them.
    """
    step = MASK / size
    parts = [
        f'<rect x="{x}" y="{y}" width="{MASK}" height="{MASK}" '
        f'rx="3" fill="none" stroke="{PADDING}"/>'
    ]
    if leaks:
        parts.append(
            f'<path d="M{x} {y}V{y + MASK}H{x + MASK}Z" fill="{LEAK}" fill-opacity=".32"/>'
        )
    start = 0.0
    for document in documents:
        length = LENGTHS[document] * step
        place = f"M{x + start:.1f} {y + start:.1f}v{length:.1f}h{length:.1f}z"
        parts.append(f'<path d="{place}" fill="{COLORS[document]}"/>')
        start += length
    return parts


def text(words: str, x: int, y: int, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={kind!r}" if kind else ""}>{words}</text>'


def heading(x: int, title: str, *notes: str) -> list[str]:
    return [text(title, x, 24, "h"), *(text(note, x, 44 + 17 * i) for i, note in enumerate(notes))]


def drawing() -> str:
    """The whole SVG; its words take a color that reads on white and on black."""
    longest = max(LENGTHS)
    padded = [[COLORS[d]] * n + [PADDING] * (longest - n) for d, n in enumerate(LENGTHS)]
    packs = [[0, 1, 3], [2, 4]]
    packed = [[COLORS[d] for d in pack for _ in range(LENGTHS[d])] for pack in packs]
    parts = heading(LEFTS[0], "padded", "30 positions", "for 20 tokens")
    for number, cells in enumerate(padded):
        parts += row(cells, LEFTS[0], TOP + number * (CELL + 4))
    for left, title, notes, legend in (
        (
            LEFTS[1],
            "packed",
            ("20 positions,", "every document by itself"),
            ("each sees", "its own", "past"),
        ),
        (
            LEFTS[2],
            "packed, mask missing",
            ("runs, learns the wrong", "thing, says nothing"),
            ("red: what", "it must", "not see"),
        ),
    ):
        parts += heading(left, title, *notes)
        for number, cells in enumerate(packed):
            parts += row(cells, left, TOP + number * (CELL + 4))
        below = TOP + 2 * (CELL + 4) + 8
        parts += mask(packs[0], left, below, PACK, leaks=left == LEFTS[2])
        parts += [
            text(line, left + MASK + 10, below + 40 + 17 * i) for i, line in enumerate(legend)
        ]
    width, height = LEFTS[2] + PACK * CELL + 44, TOP + 2 * (CELL + 4) + MASK + 24
    style = "text{font:14px system-ui,sans-serif;fill:#767e8a}.h{font-size:16px;font-weight:700}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * 5 // 4}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    )
    title = "<title>Five documents: padded, packed, and packed with the mask missing</title>"
    return f"{head}{title}<style>{style}</style>{''.join(parts)}</svg>\n"


if __name__ == "__main__":
    (Path(__file__).resolve().parent / "packing.svg").write_text(drawing())
