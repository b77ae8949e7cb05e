"""What the tests of lost messages and workers share."""

import pytest

import ppd_runtime.client.request
import ppd_runtime.launch.supervisor
import ppd_runtime.pipeline.staged.last_stage


@pytest.fixture
def hurried(monkeypatch):
    """Who waits for a lost message does not wait long, and workers that keep dying do not end a request."""
    monkeypatch.setattr(ppd_runtime.client.request, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(ppd_runtime.client.request, "_CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(ppd_runtime.client.request, "_LONGEST_PATIENCE_S", 0.2)
    monkeypatch.setattr(ppd_runtime.client.request, "_REPORT_DEADLINE_S", 0.05)
    monkeypatch.setattr(ppd_runtime.launch.supervisor, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(ppd_runtime.pipeline.staged.last_stage, "_FIRST_S", 0.05)
    monkeypatch.setattr(ppd_runtime.pipeline.staged.last_stage, "_LEAST_S", 0.02)
    monkeypatch.setattr(ppd_runtime.pipeline.staged.last_stage, "_LONGEST_S", 0.2)
    monkeypatch.setattr(ppd_runtime.pipeline.staged.last_stage, "_PASSES", 16)
