"""Plain text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], numeric: Collection[int]) -> str:
    """Lines of cells as a table; the first is its head, the last its total. Columns in `numeric` end flush."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def text(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip()

    rule = "  ".join("-" * w for w in widths)
    head, *rows, total = map(text, lines)
    return "\n".join([head, rule, *rows, rule, total])
