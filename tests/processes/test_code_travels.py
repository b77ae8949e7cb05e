"""Compiled code of a cluster: one worker compiles, all run what it has made."""

import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from compilers import needs_compiler
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch import startup

PROMPT = [5, 9, 200, 31]
ADDRESSES = [
    place.address
    for places in psutil.net_if_addrs().values()
    for place in places
    if place.family == socket.AF_INET and not place.address.startswith("127.")
]


@nightly
@needs_compiler
@pytest.mark.skipif(not ADDRESSES, reason="no address but this host's own")
def test_the_program_compiles_nothing_and_the_tokens_are_those_of_compiled_code(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the program's host has no GPU."""
    monkeypatch.setattr(startup, "_sees_device", lambda spec: False)
    folder, settings = str(model_folder("llama")), {"dtype": "float32", "device": "cpu", "compile": True}
    with PPDRuntime(folder, k=1, launcher="ray", bind_interface=ADDRESSES[0], **settings) as runtime:
        assert all(not spec.code for spec in runtime._specs)
        assert ray.get(runtime._workers._code).startswith(b'{"machine": ["cpu", ')
        tokens = runtime.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids
    ordinary = OrdinaryDecoding(folder, **settings).generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert tokens == ordinary.token_ids
