"""Products on processors of other makes: the same bits, in every form that each of them has."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from grids import nightly

from ppd_runtime.models.native import library

NATIVE = Path(library.__file__).parent
PROGRAM = Path(__file__).parents[1] / "native" / "products.cpp"
FOR_ARM, ARM = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
Bits = dict[tuple[str, str], str]
"""A hash by number format and number of tokens."""


def bits_by_form(folder: Path, compiler: str, options: list[str], run: list[str]) -> dict[str, Bits]:
    """What the program prints, by form; `bfloat16` has one form, which the compiler's options decide."""
    program = folder / "products"
    sources = [PROGRAM, NATIVE / "bfloat16.cpp", NATIVE / "quantised.cpp"]
    headers = [f"-I{NATIVE}", f"-I{Path(torch.__file__).parent / 'include'}"]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", *options]
    subprocess.run([compiler, *flags, *headers, *sources, "-o", program], check=True, capture_output=True)
    printed = subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout
    found: dict[str, Bits] = {}
    for number_format, form, tokens, hashed in map(str.split, printed.splitlines()):
        found.setdefault(form, {})[number_format, tokens] = hashed
    return found


@nightly
@needs_compiler
@pytest.mark.skipif(not (shutil.which(FOR_ARM) and shutil.which(ARM)), reason=f"needs {FOR_ARM} and {ARM}")
def test_an_arm_processor_gives_this_ones_bits(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    here = bits_by_form(tmp_path / "here", library.cpp_compiler(), ["-march=native"], [])
    there = bits_by_form(tmp_path, FOR_ARM, ["-march=armv8.2-a+dotprod", "-static"], [ARM])
    assert set(there) == {"plain", "neon", "vectors"}
    assert all(bits == here["plain"] for form, bits in here.items() if form != "vectors")
    for form, bits in there.items():
        assert bits == here[form if form in here else "plain"], form
