"""The processor's name, as the system tells it."""

import platform
import re
from pathlib import Path


def processor() -> str:
    """The name, such as AMD EPYC 7B13; else what is known of its make."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
