"""`ppd serve` on emulated devices: as many as wanted, each as slow as wanted, on the cores that there are.

python -m benchmarks.emulated_server --stages 4 --emulate-layer-ms 3 --compile --port 8000
"""

import argparse
import sys
from contextlib import ExitStack

from benchmarks.recording import positive
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.server.run import Prepared, serve_prepared
from ppd_runtime.server.settings import ServerSettings


def main() -> None:
    """Serve until a signal ends it."""
    options = parser().parse_args()
    device = EmulatedDevice(options.emulate_layer_ms, row_cost=options.row_cost)
    place = {"dtype": options.dtype, "compile": options.compile, "emulate": device}
    prepared = Prepared(ServerSettings(port=options.port))
    with ExitStack() as stack:
        if options.stages:
            staged = {"stages": options.stages, "rows": options.rows, "max_requests": options.max_requests}
            generator = stack.enter_context(PPDRuntime(options.model, **staged, **place))
        else:
            generator = stack.enter_context(OrdinaryDecoding(options.model, **place))
        serve_prepared(generator, prepared, lambda: _tell(f"{generator.info.name} at {prepared.url}"))


def _tell(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo")
    made.add_argument("--stages", type=int, default=4, help="0: ordinary decoding on one device")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--rows", type=positive, help="of a pass; default: by what a row costs")
    made.add_argument("--max-requests", type=positive, help="that run at once")
    made.add_argument("--emulate-layer-ms", type=float, required=True)
    made.add_argument("--row-cost", type=float, default=0.0, help="of a further row, as a share of the first one's")
    made.add_argument("--port", type=int, default=8000, help="0: a free one")
    return made


if __name__ == "__main__":
    main()
