"""`ppd serve` of SmolLM2 asked by programs that others wrote: each calls two tools in turn, then gets its answer.

Choices of tools are named, so the model's calls obey their schemas, and the last choice is none. The final text has to
be the one that the same conversation gets without the client: so the model read what the client meant.
"""

import asyncio
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import openai
import pytest
from grids import nightly
from pydantic import BaseModel
from served import DEADLINE_S, Served
from smollm2 import needs_smollm2

from ppd_runtime.models.checkpoint.packages import SMOLLM2

pytestmark = [needs_smollm2, pytest.mark.processes]
TEMPLATE = Path(__file__).parents[2] / "examples" / "chatml_tools.jinja"
QUESTION = "What time is it in Bern, and how is the weather there?"
USER = {"role": "user", "content": QUESTION}
RESULTS = {"weather": "sunny", "clock": "noon"}
"""By tools, in the order in which they are called."""
GREEDY = {"temperature": 0, "max_tokens": 60}
City = Literal["Bern", "Zug", "Chur"]


class Weather(BaseModel):
    """The weather of a city."""

    city: City


class Clock(BaseModel):
    """The time of day in a city."""

    city: City


class Answer(BaseModel):
    """What came of the question."""

    weather: Literal["sunny", "rainy"]
    time: Literal["noon", "midnight"]


MODELS: dict[str, type[BaseModel]] = {"weather": Weather, "clock": Clock}


class Made(list[tuple[str, str]]):
    """The calls so far: the tool's name and the city."""

    def weather(self, city: City) -> str:
        """The weather of a city."""
        return self.noted("weather", city)

    def clock(self, city: City) -> str:
        """The time of day in a city."""
        return self.noted("clock", city)

    def noted(self, name: str, city: str) -> str:
        """Note a call; its result."""
        self.append((name, city))
        return RESULTS[name]

    def noted_json(self, name: str, arguments: str | dict[str, str]) -> str:
        """Note a call whose arguments are as the client gives them, if they obey the schema; its result."""
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return self.noted(name, MODELS[name].model_validate(given).city)


def client_of(name: str, reason: str) -> Any:
    """A client's package; one that is installed and cannot be imported fails the test."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with Served(log, "--model", SMOLLM2, "--method", "autoregressive", "--chat-template", str(TEMPLATE)) as found:
        yield found


@pytest.fixture(scope="module")
def base_url(served: Served) -> str:
    return f"{served.url}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=DEADLINE_S, max_retries=0) as found:
        yield found


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def check(served: Served, made: Made) -> Callable[..., None]:
    """Checks the calls that were made, and the final text, whose form may be that of a class."""

    def checked(text: str | None, form: type[BaseModel] | None = None) -> None:
        assert [name for name, _ in made] == list(RESULTS)
        assert all(city in get_args(City) for _, city in made)
        messages: list[dict[str, Any]] = [USER]
        for name, city in made:
            function = {"name": name, "arguments": json.dumps({"city": city})}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [{"id": name, "function": function}]},
                {"role": "tool", "tool_call_id": name, "content": RESULTS[name]},
            ]
        asked: dict[str, Any] = {"messages": messages, **GREEDY}
        if form is not None:
            schema = {"name": "answer", "schema": form.model_json_schema()}
            asked["response_format"] = {"type": "json_schema", "json_schema": schema}
        answer = served.client.post("/v1/chat/completions", json=asked).json()
        assert text == answer["choices"][0]["message"]["content"] != ""

    return checked


def functions() -> list[dict[str, Any]]:
    """The tools in OpenAI's form."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": model.__doc__, "parameters": model.model_json_schema()},
        }
        for name, model in MODELS.items()
    ]


def named(name: str) -> dict[str, Any]:
    """A choice in OpenAI's form."""
    return {"type": "function", "function": {"name": name}}


def test_openais_chats(client: openai.OpenAI, made: Made, check: Callable) -> None:
    messages: list[Any] = [USER]
    for name in RESULTS:
        asked = {"model": SMOLLM2, "messages": messages, "tools": functions(), "tool_choice": named(name), **GREEDY}
        (choice,) = client.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        result = made.noted_json(call.function.name, call.function.arguments)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    asked = {"model": SMOLLM2, "messages": messages, "tools": functions(), "tool_choice": "none", **GREEDY}
    check(client.chat.completions.create(**asked).choices[0].message.content)


def test_openais_streamed_chats(client: openai.OpenAI, made: Made, check: Callable) -> None:
    def answered(**choice: Any) -> Any:
        asked = {"model": SMOLLM2, "messages": messages, "tools": functions(), **choice, **GREEDY}
        with client.chat.completions.stream(**asked) as stream:
            return stream.get_final_completion().choices[0].message

    messages: list[Any] = [USER]
    for name in RESULTS:
        message = answered(tool_choice=named(name))
        (call,) = message.tool_calls
        result = made.noted_json(call.function.name, call.function.arguments)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    check(answered(tool_choice="none").content)


def test_openais_parsed_chats(client: openai.OpenAI, made: Made, check: Callable) -> None:
    messages: list[Any] = [USER]
    tools = [openai.pydantic_function_tool(model, name=name) for name, model in MODELS.items()]
    for name in RESULTS:
        asked = {"model": SMOLLM2, "messages": messages, "tools": tools, "tool_choice": named(name), **GREEDY}
        message = client.chat.completions.parse(**asked).choices[0].message
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, MODELS[name])
        result = made.noted(name, call.function.parsed_arguments.city)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    check(client.chat.completions.create(model=SMOLLM2, messages=messages, **GREEDY).choices[0].message.content)
    asked = {"model": SMOLLM2, "messages": messages, "response_format": Answer, **GREEDY}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Answer)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_responses(client: openai.OpenAI, made: Made, check: Callable, stream: bool) -> None:
    def answered(**choice: Any) -> Any:
        asked = {"model": SMOLLM2, "input": items, "tools": tools, "temperature": 0, "max_output_tokens": 60, **choice}
        answer = client.responses.create(**asked, stream=stream)
        return list(answer)[-1].response if stream else answer

    items: list[Any] = [USER]
    tools = [{"type": "function", **function["function"]} for function in functions()]
    for name in RESULTS:
        response = answered(tool_choice={"type": "function", "name": name})
        (call,) = response.output
        result = made.noted_json(call.name, call.arguments)
        items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    check(answered(tool_choice="none").output_text)
    parsed = client.responses.parse(model=SMOLLM2, input=items, text_format=Answer, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Answer)


@nightly
@pytest.mark.parametrize("of_responses", [False, True])
def test_openai_agents(base_url: str, made: Made, check: Callable, of_responses: bool) -> None:
    agents = client_of("agents", "openai-agents is not installed: make .venv/clients.stamp")
    agents.set_tracing_disabled(True)

    class OneAfterTheOther(agents.RunHooks):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            following = {"weather": "clock", "clock": "none"}[tool.name]
            agent.model_settings = replace(agent.model_settings, tool_choice=following)

    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=DEADLINE_S, max_retries=0)
    kind = agents.OpenAIResponsesModel if of_responses else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(
        name="clerk",
        model=kind(model=SMOLLM2, openai_client=client),
        tools=[agents.function_tool(made.weather), agents.function_tool(made.clock)],
        model_settings=agents.ModelSettings(tool_choice="weather", **GREEDY),
        reset_tool_choice=False,
        output_type=Answer,
    )
    result = asyncio.run(agents.Runner.run(agent, QUESTION, hooks=OneAfterTheOther()))
    assert isinstance(result.final_output, Answer)
    check(agents.ItemHelpers.text_message_outputs(result.new_items), Answer)


@nightly
@pytest.mark.parametrize("of_responses", [False, True])
def test_langchain(base_url: str, made: Made, check: Callable, of_responses: bool) -> None:
    langchain = client_of("langchain_openai", "langchain-openai is not installed")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    model = langchain.ChatOpenAI(
        model=SMOLLM2, base_url=base_url, api_key="none", max_retries=0, use_responses_api=of_responses, **GREEDY
    )
    tools = {name: tool(getattr(made, name)) for name in RESULTS}
    messages: list[Any] = [HumanMessage(QUESTION)]
    for name in RESULTS:
        message = model.bind_tools(list(tools.values()), tool_choice=name).invoke(messages)
        messages += [message, *(tools[call["name"]].invoke(call) for call in message.tool_calls)]
    check(model.invoke(messages).text)


@nightly
def test_litellm(base_url: str, made: Made, check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    litellm = client_of("litellm", "litellm is not installed")
    messages: list[Any] = [USER]

    def answered(**settings: Any) -> Any:
        asked = {"model": f"openai/{SMOLLM2}", "messages": messages, "api_base": base_url, "api_key": "none", **GREEDY}
        return litellm.completion(**asked, **settings).choices[0].message

    for name in RESULTS:
        message = answered(tools=functions(), tool_choice=named(name))
        (call,) = message.tool_calls
        result = made.noted_json(call.function.name, call.function.arguments)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    check(answered().content)


@nightly
@pytest.mark.parametrize("of_responses", [False, True])
def test_pydantic_ai(base_url: str, made: Made, check: Callable, of_responses: bool) -> None:
    pydantic_ai = client_of("pydantic_ai", "pydantic-ai is not installed")
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class OneAfterTheOther(AbstractCapability):
        def get_model_settings(self) -> Any:
            return lambda context: {"tool_choice": [["weather"], ["clock"], "none"][context.run_step - 1]}

    kind = OpenAIResponsesModel if of_responses else OpenAIChatModel
    model = kind(SMOLLM2, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    tools = [made.weather, made.clock]
    agent = pydantic_ai.Agent(model, tools=tools, capabilities=[OneAfterTheOther()], model_settings=GREEDY)
    check(agent.run_sync(QUESTION).output)


@nightly
def test_instructor(client: openai.OpenAI, made: Made, check: Callable) -> None:
    instructor = client_of("instructor", "instructor is not installed")
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    messages: list[Any] = [USER]
    for name, model in MODELS.items():
        asked = {"model": SMOLLM2, "messages": messages, "max_retries": 0, **GREEDY}
        found, completion = patched.create_with_completion(response_model=model, **asked)
        message = completion.choices[0].message
        (call,) = message.tool_calls
        result = made.noted(name, found.city)
        call.function.name = name  # instructor names it after the class
        messages += [
            {"content": None} | message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
    check(client.chat.completions.create(model=SMOLLM2, messages=messages, **GREEDY).choices[0].message.content)


@nightly
def test_anthropics_messages(served: Served, made: Made, check: Callable) -> None:
    anthropic = client_of("anthropic", "anthropic is not installed")
    messages: list[Any] = [USER]
    tools = [
        {"name": name, "description": model.__doc__, "input_schema": model.model_json_schema()}
        for name, model in MODELS.items()
    ]
    with anthropic.Anthropic(base_url=served.url, api_key="none", timeout=DEADLINE_S, max_retries=0) as client:
        asked = {"model": SMOLLM2, "tools": tools, "max_tokens": 60, "extra_body": {"temperature": 0}}
        for name in RESULTS:
            with client.messages.stream(
                **asked, messages=messages, tool_choice={"type": "tool", "name": name}
            ) as stream:
                message = stream.get_final_message()
            (call,) = message.content
            result = {"type": "tool_result", "tool_use_id": call.id, "content": made.noted_json(call.name, call.input)}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        check(client.messages.create(**asked, messages=messages, tool_choice={"type": "none"}).content[0].text)
