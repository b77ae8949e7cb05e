"""What several files of this folder need."""

from pathlib import Path

import pytest

from ppd_runtime.models.checkpoint.gguf import kept


@pytest.fixture
def own_gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the folders that another one has kept of GGUF files; compiled code is shared."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path / "cache")
