"""Whether code can be compiled here."""

import pytest
from torch._inductor.cpp_builder import get_cpp_compiler


def _no_compiler() -> str:
    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return f"no C++ compiler here: {error}"
    return ""


needs_compiler = pytest.mark.skipif(bool(_no_compiler()), reason=_no_compiler())
