"""Fuzzes a target for long: `PYTHONPATH=tests:. python -m fuzz.run decoding --inputs 1000000 --seed 1`.

With atheris installed, `python -m fuzz.run decoding --atheris -runs=1000000` lets libFuzzer look for inputs that reach
new code; what follows `--atheris` is libFuzzer's.
"""

import argparse
import logging
import sys
import tempfile
import time

from fuzz.inputs import CORPUS, mutations

_TARGETS = ("decoding", "stream", "ring", "round_trip")  # of `targets`, which atheris has to import itself


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=_TARGETS)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's own arguments")
    options = parser.parse_args()
    logging.disable()  # a line for each input that is no message
    if options.atheris is None:
        _run_mutations(options.target, options.inputs, options.seed)
    else:
        _run_atheris(options.target, options.atheris)


def _run_mutations(target: str, count: int, seed: int) -> None:
    from fuzz.targets import TARGETS

    run, num_messages, began = TARGETS[target], 0, time.perf_counter()
    for number, data in enumerate(mutations(target, seed, count)):
        try:
            num_messages += run(data)
        except BaseException:
            print(f"input {number} of seed {seed}: {data!r}")
            raise
        if number % 100_000 == 99_999:
            print(f"{number + 1} inputs", flush=True)
    seconds = time.perf_counter() - began
    print(f"{target}: {count} inputs of seed {seed} in {seconds:.0f} s, {num_messages} messages in them, no failure")


def _run_atheris(target: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["ppd_runtime.pipeline", "ppd_runtime.transport"]):
        from fuzz.targets import TARGETS

    def run(data: bytes) -> None:
        TARGETS[target](data)

    found = tempfile.mkdtemp(prefix="ppd-fuzz-")  # libFuzzer adds to the first folder
    atheris.Setup([sys.argv[0], *arguments, found, str(CORPUS / target)], run)
    print(f"inputs that reach new code: {found}", flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
