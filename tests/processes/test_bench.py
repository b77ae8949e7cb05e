"""`ppd bench` with pipelined decoding on processes of its own."""

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from ppd_runtime.cli.main import app


def test_pipelined_decoding_in_a_comparison(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--model", model_folder("llama"), "--methods", "ppd", "--limit", 1, "--max-new-tokens", 8, "--out", out)
    result = CliRunner().invoke(app, ["bench", *map(str, given), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["rows"]["ppd"]["settings"] == {"launcher": "auto"}
    assert report["overall"]["ppd"]["equal_tokens"] == 1
