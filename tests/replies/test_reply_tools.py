"""What a request says of tools: what is taken, and what is refused in which words."""

import pytest

from ppd_runtime.replies.python_calls import python_calls
from ppd_runtime.replies.tools import check_history, tool_use

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


def test_tools_come_in_openais_form_or_as_functions() -> None:
    use = tool_use([WEATHER, add])
    assert list(use.schemas) == ["weather", "add"]
    assert use.schemas["add"]["required"] == ["a"]
    assert use.told[1].told["function"]["description"] == "Add two numbers."
    assert "strict" not in use.told[0].told["function"]
    assert (use.choice, use.parallel, use.is_forced) == ("auto", True, False)


def test_a_choice_says_which_tools_may_be_called() -> None:
    assert tool_use([WEATHER, add], "none").told == ()
    assert tool_use([WEATHER, add], "required").is_forced
    for given in ("add", {"type": "function", "function": {"name": "add"}}):
        use = tool_use([WEATHER, add], given, False)
        assert (use.is_forced, list(use.schemas), use.parallel) == (True, ["add"], False)


def function(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": "weather"}, "tools='weather': give a list"),
        ({"tools": [5]}, "tools: number 0 is 5: only functions are known"),
        ({"tools": [{"type": "web_search"}]}, "tools: number 0 is {'type': 'web_search'}: only functions"),
        ({"tools": [{"type": "function"}]}, "tools: number 0 has no function"),
        ({"tools": [WEATHER, function(name=None)]}, "tools: number 1 has no name: give function.name"),
        ({"tools": [function(name="a b")]}, "number 0 has the name 'a b': give function.name, 1 to 128 letters"),
        ({"tools": [function(description=5)]}, r"number 0 \(f\) has a description that is no text"),
        ({"tools": [function(parameters=[])]}, r"number 0 \(f\) has parameters=\[\]: give a JSON schema"),
        ({"tools": [function(), function()]}, "tools: 'f' is the name of several"),
        ({"tools": [function(name=f"f{number}") for number in range(513)]}, "tools: 513 of them, give at most 512"),
        ({"tools": [lambda city: city]}, "tools: number 0: .*docstring.*or give it in OpenAI's form"),
        ({"tool_choice": "required"}, "tool_choice='required': there are no tools"),
        ({"tool_choice": "g", "tools": [WEATHER]}, "tool_choice='g': is no tool of the request, give one of weather"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice={'type': 'function'}: give auto"),
        ({"tool_choice": 5}, "tool_choice=5: give auto, none, required"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls='no': give true or false"),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(settings: dict, message: str) -> None:
    asked = {"tools": None, "tool_choice": None, "parallel_tool_calls": None, **settings}
    with pytest.raises(ValueError, match=message):
        tool_use(asked["tools"], asked["tool_choice"], asked["parallel_tool_calls"])


def call(**fields: object) -> dict:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}, **fields}]}


def result(call_id: object = "1") -> dict:
    return {"role": "tool", "content": "x", "tool_call_id": call_id}


@pytest.mark.parametrize(
    "history",
    [
        [call(), result()],
        [call(), result(), {"role": "user"}, result()],
        [call(id=None), {"role": "tool", "content": "x"}],
        [{"role": "assistant", "tool_calls": None}],
        [{"role": "assistant", "tool_calls": []}, call(function={"name": "f", "arguments": {}})],
    ],
)
def test_histories_of_calls_and_results_are_taken(history: list) -> None:
    check_history(history)


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([result()], "messages: number 0 is the result of the call '1', which no message before it made"),
        ([call(), result("2")], "number 1 is the result of the call '2'"),
        ([result(), call()], "number 0 is the result of the call '1'"),
        ([call(), result([])], r"number 1 is the result of the call \[\]"),
        ([call(), {"role": "tool"}], "number 1 is the result of no call: give tool_call_id"),
        ([{"role": "tool"}], "number 0 is the result of a call, and there is none before it"),
        ([call(function={})], "number 0 has the call .*, which names no function"),
        ([call(function="f")], "number 0 has the call .*, which names no function"),
        ([call(function={"name": "f", "arguments": 5})], "number 0 calls 'f' with no object"),
        ([call(id=5)], "number 0 calls 'f' with id=5"),
        ([{"role": "assistant", "tool_calls": "f"}], "number 0 has tool_calls='f': give a list"),
    ],
)
def test_results_of_calls_that_nobody_made_are_refused(history: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_history(history)


@pytest.mark.parametrize(
    "code",
    [
        "",
        "f",
        "f(1)",
        "f(**{})",
        "f(a=b)",
        "f(a={1})",
        "f(a={{}})",
        "f(a={[]: 1})",
        "import os",
        "f(a=1e999)",
        "f(",
        "(" * 9999,
        "f(a=1)" * 20_000,
    ],
)
def test_code_that_is_no_call_of_literals_is_refused(code: str) -> None:
    with pytest.raises(ValueError):
        python_calls(code)


def test_calls_in_python_are_read_without_running_them() -> None:
    assert python_calls("x = f(a=-1, b={'c': (1, True)})") == [("f", '{"a": -1, "b": {"c": [1, true]}}')]
    assert python_calls("f()\na.g(b='é')") == [("f", "{}"), ("a.g", '{"b": "é"}')]
