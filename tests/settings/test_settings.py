"""What is read off settings' dataclasses for signatures and command lines."""

from dataclasses import dataclass, field, fields

import pytest

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.fields import default_of, documentation, summary


@dataclass(frozen=True)
class Example:
    """An example."""

    first: int = 1
    """One sentence, of
    two lines. Another, with 0.5 in it."""
    bare: int = 2
    last: tuple[int, ...] = field(default_factory=tuple)
    """No full stop"""


def test_docstrings_are_read_off_the_source() -> None:
    assert documentation(Example) == {
        "first": "One sentence, of two lines. Another, with 0.5 in it.",
        "last": "No full stop",
    }
    assert summary(Example, "first") == "One sentence, of two lines."
    assert summary(Example, "last") == "No full stop"
    assert summary(Example, "bare") == ""
    assert [default_of(setting) for setting in fields(Example)] == [1, 2, ()]


@pytest.mark.parametrize("settings", [RuntimeConfig, SamplingParams])
def test_every_setting_begins_with_a_short_sentence(settings: type) -> None:
    for setting in fields(settings):
        assert 0 < len(summary(settings, setting.name)) <= 120, setting.name
        assert summary(settings, setting.name).endswith(".")
