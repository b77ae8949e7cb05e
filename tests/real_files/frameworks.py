"""What frameworks for chats send: LangChain, LiteLLM, LlamaIndex, Haystack, instructor, llm."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_files.openai_python import PICTURE, USER

_QUESTION = USER["content"]


def _langchain(url: str, **settings: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model="tiny", max_retries=0, **{"max_tokens": 4, **settings})


def _langchains_history(url: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    call = {"name": "weather", "args": {"city": "Paris"}, "id": "call_1"}
    _langchain(url).invoke(
        [
            SystemMessage("You help."),
            HumanMessage(_QUESTION),
            AIMessage("", tool_calls=[call], additional_kwargs={"reasoning_content": "Ask the tool.", "refusal": None}),
            ToolMessage("sunny", tool_call_id="call_1", name="weather"),
            AIMessage([{"type": "text", "text": "Sunny.", "annotations": [], "id": "msg_1"}]),
            HumanMessage([{"type": "text", "text": "Thanks."}]),
        ]
    )


def _langchains_tools(url: str) -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    _langchain(url).bind_tools([weather]).invoke(_QUESTION)


def _langchains_completion(url: str) -> None:
    from langchain_openai import OpenAI

    OpenAI(base_url=url, api_key="none", model="tiny", max_tokens=4, n=2, best_of=2, max_retries=0).invoke("import os")


def _langchains_plain_completion(url: str) -> None:
    from langchain_openai import OpenAI

    OpenAI(base_url=url, api_key="none", model="tiny", max_tokens=4, max_retries=0).invoke("import os")


def _langchains_structure(url: str) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    _langchain(url).with_structured_output(City).invoke(_QUESTION)


def _litellm(url: str, messages: list[Any], **settings: Any) -> None:
    import litellm

    asked = {"model": "openai/tiny", "max_tokens": 4, "max_retries": 0, **settings}
    for _ in litellm.completion(api_base=url, api_key="none", messages=messages, **asked):
        pass


def _litellms_history(url: str) -> None:
    from litellm.types.utils import ChatCompletionMessageToolCall, Function, Message

    call = ChatCompletionMessageToolCall(id="call_1", function=Function(name="weather", arguments='{"city": "Paris"}'))
    called = Message(role="assistant", content=None, tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"}
    _litellm(url, [USER, called, result], model="hosted_vllm/tiny", reasoning_effort="low")


def _litellms_completion(url: str) -> None:
    import litellm

    litellm.text_completion(
        "import os", model="text-completion-openai/tiny", api_base=url, api_key="none", max_tokens=4
    )


def _llama_index(url: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(model="tiny", api_base=url, api_key="none", is_chat_model=True, max_tokens=4, max_retries=0)


def _llama_indexs_chat(url: str) -> None:
    from llama_index.core.base.llms.types import ChatMessage

    _llama_index(url).chat([ChatMessage(role=role, content="Hi.") for role in ("system", "user", "assistant", "user")])


def _haystack(url: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage, ToolCall
    from haystack.utils import Secret

    call = ToolCall("weather", {"city": "Paris"}, id="call_1")
    history = [
        ChatMessage.from_user(_QUESTION),
        ChatMessage.from_assistant(tool_calls=[call]),
        ChatMessage.from_tool("sunny", origin=call),
    ]
    made = {"model": "tiny", "api_base_url": url, "api_key": Secret.from_token("none"), "max_retries": 0}
    OpenAIChatGenerator(**made, generation_kwargs={"max_tokens": 4}).run(history)


def _instructor(url: str, mode: str) -> None:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
    client.chat.completions.create(model="tiny", messages=[USER], response_model=City, max_tokens=4, max_retries=0)


def _llm(url: str) -> None:
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        models = f"- model_id: tiny\n  model_name: tiny\n  api_base: {url}\n  api_key_name: none\n"
        Path(folder, "extra-openai-models.yaml").write_text(models, encoding="utf-8")
        import llm

        model = llm.get_model("tiny")
        model.key = "none"
        conversation = model.conversation()
        conversation.prompt(_QUESTION, system="You help.", max_tokens=4).text()
        conversation.prompt("And tomorrow?", max_tokens=4).text()


def _streamed(url: str) -> None:
    async def ask() -> None:
        async for _ in _langchain(url, stream_usage=True, temperature=0).astream(_QUESTION):
            pass

    asyncio.run(ask())


_MESSAGE_WITH_PICTURE = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}]
_THINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
_LANGCHAIN: dict[str, Callable[[str], Any]] = {
    "a history with calls": _langchains_history,
    "streamed with its usage": _streamed,
    "tools": _langchains_tools,
    "a structured answer": _langchains_structure,
    "log-probabilities": lambda url: _langchain(url, logprobs=True, top_logprobs=2).invoke(_QUESTION),
    "thinking switched off": lambda url: _langchain(url, **_THINKING, reasoning_effort="low").invoke(_QUESTION),
    "a picture": lambda url: _langchain(url).invoke(_MESSAGE_WITH_PICTURE),
    "a completion": _langchains_plain_completion,
    "the best of two completions": _langchains_completion,
}
_LITELLM: dict[str, Callable[[str], Any]] = {
    "a history with calls": _litellms_history,
    "a chat, streamed": lambda url: _litellm(url, [USER], stream=True, stream_options={"include_usage": True}),
    "thinking switched off": lambda url: _litellm(url, [USER], **_THINKING),
    "a completion": _litellms_completion,
}
SENDERS = {
    **{f"LangChain: {name}": ("langchain-openai", send) for name, send in _LANGCHAIN.items()},
    **{f"LiteLLM: {name}": ("litellm", send) for name, send in _LITELLM.items()},
    "LlamaIndex: a chat": ("llama-index-llms-openai-like", _llama_indexs_chat),
    "LlamaIndex: a streamed text": (
        "llama-index-llms-openai-like",
        lambda url: list(_llama_index(url).stream_complete(_QUESTION)),
    ),
    "Haystack: a history with calls": ("haystack-ai", _haystack),
    "instructor: JSON in the text": ("instructor", lambda url: _instructor(url, "MD_JSON")),
    "instructor: tools": ("instructor", lambda url: _instructor(url, "TOOLS")),
    "llm: a conversation": ("llm", _llm),
}
