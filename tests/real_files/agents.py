"""What frameworks for agents send, with tools and without."""

import asyncio
from typing import Any

from real_files.openai_python import USER

_QUESTION = USER["content"]


def _openais_agent(url: str, has_tools: bool) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("tiny", AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    agent = Agent("helper", instructions="You help.", model=model, tools=[weather] if has_tools else [])
    result = asyncio.run(Runner.run(agent, _QUESTION, max_turns=2))
    if not has_tools:
        again = [*result.to_input_list(), {"role": "user", "content": "And tomorrow?"}]
        asyncio.run(Runner.run(agent, again, max_turns=2))


def _openais_history(url: str) -> None:
    """An agent without tools goes on with the history of one that had them."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("tiny", AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    history = [
        {"role": "user", "content": _QUESTION},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    asyncio.run(Runner.run(Agent("writer", model=model), history, max_turns=1))


def _pydantics_model(url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))


def _pydantics_agent(url: str) -> None:
    from pydantic_ai import Agent

    helper = Agent(_pydantics_model(url), instructions="You help.")

    @helper.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    history = helper.run_sync(_QUESTION).all_messages()
    Agent(_pydantics_model(url)).run_sync("Write it down.", message_history=history, model_settings={"max_tokens": 4})


SENDERS = {
    "openai-agents: tools": ("openai-agents", lambda url: _openais_agent(url, True)),
    "openai-agents: two turns": ("openai-agents", lambda url: _openais_agent(url, False)),
    "openai-agents: a history with calls": ("openai-agents", _openais_history),
    "pydantic-ai: tools, then without": ("pydantic-ai-slim", _pydantics_agent),
}
