"""Draw one token on the clock: main process and sub-processes through a hit and a miss, ordinary decoding below.

python docs/token_clock.py docs/token_clock.svg
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

HALF, HEAD, HOP = 6.0, 1.0, 0.35  # half depth, a head and a message, in the picture's unit of time
UNIT, LANE, BOX, LEFT, TOP = 36, 58, 34, 128, 54
COLOURS = {
    "main": "#2f6fb0",
    "head": "#17405f",
    "candidate": "#d98a2b",
    "winner": "#3d9a50",
    "true": "#8d99a6",
    "ordinary": "#b9c2cb",
}


@dataclass
class Drawing:
    """SVG elements, placed by time (in units) and lane."""

    elements: list[str] = field(default_factory=list)

    def box(self, lane: int, start: float, end: float, kind: str, label: str) -> None:
        """A piece of work."""
        x, y, width = LEFT + start * UNIT, TOP + lane * LANE, (end - start) * UNIT
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{BOX}" rx="4" fill="{COLOURS[kind]}"/>'
        )
        dark = kind in ("ordinary",)
        self.text(
            x + width / 2, y + BOX / 2 + 4, label, "middle", "#222" if dark else "#fff", 12 if width > UNIT else 11
        )

    def arrow(
        self, start: tuple[float, int], end: tuple[float, int], colour: str = "#555", dashed: bool = False
    ) -> None:
        """A message from (time, lane) to (time, lane)."""
        (t1, lane1), (t2, lane2) = start, end
        down = lane2 > lane1
        y1 = TOP + lane1 * LANE + (BOX if down else 0)
        y2 = TOP + lane2 * LANE + (0 if down else BOX)
        style = ' stroke-dasharray="4 3"' if dashed else ""
        self.elements.append(
            f'<line x1="{LEFT + t1 * UNIT:.1f}" y1="{y1}" x2="{LEFT + t2 * UNIT:.1f}" y2="{y2}" stroke="{colour}" '
            f'stroke-width="1.6" marker-end="url(#head)"{style}/>'
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", colour: str = "#333", size: int = 13) -> None:
        """Words at a place in pixels."""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(words)}</text>"
        )

    def svg(self, width: float, height: float) -> str:
        """The whole picture."""
        body = "\n".join(self.elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            'font-family="Helvetica, Arial, sans-serif">\n'
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
            '<path d="M0,0 L7,3 L0,6 z" fill="#555"/></marker></defs>\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
        )


def draw() -> str:
    """A token at full depth, a hit, then a miss."""
    picture = Drawing()
    for lane, name in enumerate(("main process", "sub-process 1", "sub-process 2", "sub-process 3", "ordinary")):
        picture.text(10, TOP + lane * LANE + BOX / 2 + 5, name)
    exit_at, first = HALF, 2 * HALF + HEAD
    picture.box(0, 0, HALF, "main", "token 1: layers 1 … d̄")
    _speculate(picture, exit_at, first, "hit: sub-process 2 was right", winner=2)
    second = first + HALF + HEAD
    _speculate(picture, first, second, "miss: start at layer 1", winner=None)
    _after_miss(picture, second)
    for number in range(2):
        start = number * first
        picture.box(4, start, start + 2 * HALF, "ordinary", f"token {number + 1}: layers 1 … d")
        picture.box(4, start + 2 * HALF, start + first, "head", "head")
    end = LEFT + (second + HALF + 0.5) * UNIT
    return picture.svg(end, TOP + 4 * LANE + BOX + 18)


def _speculate(picture: Drawing, exit_at: float, decided: float, verdict: str, winner: int | None) -> None:
    """From the exit layer's state to the token: the rest of main's pass, and a candidate in each sub-process."""
    picture.box(0, exit_at, decided - HEAD, "main", "layers d̄+1 … d")
    picture.box(0, decided - HEAD, decided, "head", "head")
    for lane in (1, 2, 3):
        begin = exit_at + HOP
        picture.arrow((exit_at, 0), (begin, lane))
        picture.box(lane, begin, begin + HEAD, "head", "exit")
        kind = "winner" if lane == winner else "candidate"
        picture.box(lane, begin + HEAD, decided - HOP, kind, f"candidate {lane}: 1 … d−d̄")
    if winner:
        picture.arrow((decided - HOP, winner), (decided, 0), COLOURS["winner"])
    picture.text(LEFT + decided * UNIT, TOP - 14, verdict, "middle", COLOURS["winner"] if winner else "#b03a2e", 13)
    x = LEFT + decided * UNIT
    picture.elements.append(
        f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{TOP + 3 * LANE + BOX + 6}" stroke="#999" stroke-dasharray="2 3"/>'
    )


def _after_miss(picture: Drawing, begin: float) -> None:
    picture.box(0, begin, begin + HALF, "main", "token 3: layers 1 … d̄")
    for lane in (1, 2, 3):
        picture.arrow((begin, 0), (begin + HOP, lane), dashed=True)
        picture.box(lane, begin + HOP, begin + HALF, "true", "true token, own cache")


def main() -> None:
    """Write the picture to the path given."""
    drawing = draw()
    Path(sys.argv[1]).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
