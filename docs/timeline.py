"""Draw the first tokens of a real run on the clock, k = 3, on emulated devices: more than this machine may have.

python docs/timeline.py docs/timeline.png
"""

import sys
from pathlib import Path

from ppd_runtime import PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.tracing.timeline import draw_timeline

PROMPT = "def read_lines(path):"


def main(path: Path) -> None:
    """Decode twice, the first time to warm up, and draw the second."""
    with PPDRuntime(k=3, launcher="processes", emulate=EmulatedDevice(layer_ms=5.0), trace=True) as runtime:
        for _ in range(2):
            result = runtime.generate(PROMPT, max_new_tokens=16)
        assert result.trace is not None
        draw_timeline(result.trace, path, lambda token: str(runtime.tokenizer.decode([token])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
