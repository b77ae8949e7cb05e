"""The server's answers, asked for by OpenAI's own client over a socket."""

import math
import socket
from pathlib import Path

import openai
import pytest
from servers import Running, running

from ppd_runtime import OrdinaryDecoding

PROMPT = "import os and then"


def complete(client: openai.OpenAI, **settings):
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **settings}
    return client.completions.create(**settings)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1, "seed": 5, "top_p": 0.9}])
def test_a_completion_is_the_generators_text(client, ordinary, settings) -> None:
    expected = ordinary.generate(PROMPT, max_new_tokens=12, **settings)
    answer = complete(client, **settings)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(expected.prompt_ids),
        "completion_tokens": 12,
        "total_tokens": len(expected.prompt_ids) + 12,
    }
    assert choice.ppd["layout"] == {"method": "autoregressive"}
    assert choice.ppd["latency_s"] > 0


def test_a_stream_is_the_same_text_with_its_usage(client) -> None:
    whole = complete(client, temperature=1, seed=3)
    chunks = list(complete(client, temperature=1, seed=3, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 12 + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)


def test_a_streams_pieces_tell_the_usage_up_to_them_where_that_is_wanted(client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = complete(client, prompt=["a", "another"], max_tokens=3, stream=True, stream_options=options)
    for number in (0, 1):
        told = [piece.usage for piece in pieces if piece.choices[0].index == number]
        assert [usage.completion_tokens for usage in told] == [1, 2, 3, 3]
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told)
    prompts = {piece.choices[0].index: piece.usage.prompt_tokens for piece in pieces}
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (sum(prompts.values()), 6)
    assert prompts[0] < prompts[1]


@pytest.mark.parametrize("chat", [False, True])
def test_a_streams_timeline_comes_where_it_is_wanted(client, chat) -> None:
    extra = {"extra_body": {"ppd": {"timeline": True}, "ignore_eos": True}}
    if chat:
        messages = [{"role": "user", "content": PROMPT}]
        chunks = [*client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, stream=True, **extra)]
    else:
        chunks = [*complete(client, stream=True, **extra)]
    told = [getattr(chunk.choices[0], "ppd", None) or {} for chunk in chunks]
    assert (told[0]["processes"], told[0]["stages"]) == (["one process"], None)
    passes = [one for ppd in told[1:] for one in ppd.get("passes", ())]
    assert [token for _, what, _, _, token in passes if what == "choice"] == list(range(12))
    assert {what for _, what, *_ in passes} == {"layers", "head", "choice"}
    assert all("passes" not in (getattr(c.choices[0], "ppd", None) or {}) for c in complete(client, stream=True))
    with pytest.raises(openai.BadRequestError, match="ppd={'timeline': True}: is for stream=true"):
        complete(client, **extra)


def test_a_streams_log_probabilities_are_the_whole_answers(client) -> None:
    whole = complete(client, logprobs=1).choices[0].logprobs
    told = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=1, stream=True)][:-1]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for one in told for value in getattr(one, name)] == getattr(whole, name)


def test_prompts_and_choices_come_in_order(client, ordinary) -> None:
    ids = ordinary.prompt_ids(PROMPT)
    answer = complete(client, prompt=[PROMPT, "another"], n=2, temperature=1, seed=7)
    expected = [
        ordinary.generate(prompt, max_new_tokens=12, temperature=1, seed=seed).text
        for prompt in (PROMPT, "another")
        for seed in (7, 8)
    ]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    by_ids = complete(client, prompt=[ids, ids], temperature=1, seed=7)
    assert [choice.text for choice in by_ids.choices] == [expected[0]] * 2
    streamed = [""] * 4
    for chunk in complete(client, prompt=[PROMPT, "another"], n=2, temperature=1, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_texts_differ_and_each_tells_its_own(client, seed: int | None) -> None:
    asked = {"temperature": 1, "max_tokens": 20}
    answers = [complete(client, seed=seed, n=2, **asked) for _ in range(3)]
    assert len({choice.text for answer in answers for choice in answer.choices}) > 2
    for answer in answers:
        first, second = answer.choices
        assert second.ppd["seed"] == first.ppd["seed"] + 1
        assert complete(client, seed=second.ppd["seed"], **asked).choices[0].text == second.text


@pytest.mark.parametrize("temperature", [0, 1])
def test_biases_are_applied(client, ordinary, temperature: int) -> None:
    plain = ordinary.generate(PROMPT, max_new_tokens=12).token_ids
    asked = {"temperature": temperature, "seed": 3}
    expected = ordinary.generate(PROMPT, max_new_tokens=12, logit_bias={plain[0]: -100, 7: 2.5}, **asked)
    assert plain[0] not in expected.token_ids
    answer = complete(client, logit_bias={str(plain[0]): -100, "7": 2.5}, **asked)
    assert answer.choices[0].text == expected.text
    always = complete(client, logit_bias={"70": 100}, **asked)
    assert always.choices[0].text == ordinary.tokenizer.decode([70] * 12)
    talk = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"70": 100}, "max_tokens": 3}
    chat = client.chat.completions.create(model="tiny", **talk)
    assert chat.choices[0].message.content == ordinary.tokenizer.decode([70] * 3)


def test_echo_gives_the_prompts_log_probabilities_as_lm_eval_reads_them(client, ordinary) -> None:
    expected = ordinary.generate(PROMPT, max_new_tokens=1, logprobs=1, prompt_logprobs=True)
    answer = complete(client, echo=True, logprobs=1, max_tokens=1).choices[0]
    told = answer.logprobs
    assert answer.text == PROMPT + expected.text
    assert told.tokens == [ordinary.tokenizer.decode([t]) for t in (*expected.prompt_ids, *expected.token_ids)]
    noted = [*expected.prompt_logprobs, *expected.logprobs]
    assert told.token_logprobs == [None, *(one.logprob for one in noted)]
    assert told.top_logprobs[0] is None
    assert all(max(top.values()) == one.top[0][1] for top, one in zip(told.top_logprobs[1:], noted, strict=True))
    assert told.text_offset == [sum(map(len, told.tokens[:place])) for place in range(len(told.tokens))]
    scored = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert (scored.choices[0].text, scored.usage.completion_tokens) == (PROMPT, 0)
    assert scored.choices[0].logprobs.token_logprobs == told.token_logprobs[:-1]


def test_a_chat_is_its_template_continued(client, ordinary) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    expected = ordinary.generate("system: s\nuser: hi\n", max_new_tokens=8, add_special_tokens=False)
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert (answer.message.role, answer.message.content) == ("assistant", expected.text)
    told = answer.logprobs.content
    assert len(told) == 8
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob >= one.logprob for one in told)
    assert all(math.isclose(one.logprob, one.top_logprobs[0].logprob) for one in told)  # greedy
    stream = list(client.chat.completions.create(**asked, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected.text


def test_stops_end_a_text(client, ordinary) -> None:
    text = ordinary.generate(PROMPT, max_new_tokens=12).text
    stop = text[4:7]
    answer = complete(client, stop=stop).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")


def test_models_and_tokens(client, server, ordinary) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    ids = ordinary.prompt_ids(PROMPT)
    assert server.post("/tokenize", prompt=PROMPT).json()["tokens"] == ids
    assert server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()["count"] > 1
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": ordinary.tokenizer.decode(ids)}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/v1/models", "/v1/models/none", "/version", "/openapi.json", "/v1/nothing"]
)
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    with server.client() as client:
        whole, head = client.get(path), client.head(path)
        changes = ("date", "x-request-id")
        for answer in (whole, head):
            for name in changes:
                answer.headers.pop(name, None)
        assert (head.status_code, head.headers, head.content) == (whole.status_code, whole.headers, b"")
        assert int(head.headers["content-length"]) == len(whole.content)
        assert client.head("/metrics").status_code == 200
        assert client.head("/v1/completions").status_code == 405


VLLMS_COUNTS = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 0,
    "vllm:kv_cache_usage_perc": 0,
    "vllm:num_preemptions_total": 0,
    "vllm:prompt_tokens_total": 11,
    "vllm:generation_tokens_total": 12,
    "vllm:prefix_cache_queries_total": 11,
    "vllm:prefix_cache_hits_total": 0,
    "vllm:request_success_total": 1,
    "vllm:request_prompt_tokens_sum": 11,
    "vllm:request_generation_tokens_sum": 12,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:inter_token_latency_seconds_count": 1,
    "vllm:time_per_output_token_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:request_queue_time_seconds_count": 1,
}
"""By vLLM's names: what one request of 11 and 12 tokens adds."""


def test_metrics_count_by_vllms_names(client, server) -> None:
    complete(client)
    before = server.counts()
    complete(client)
    after = server.counts()
    assert {name: after[name] - before[name] for name in VLLMS_COUNTS} == VLLMS_COUNTS


def test_errors_are_the_clients_own(client) -> None:
    with pytest.raises(openai.NotFoundError, match="'other'") as found:
        complete(client, model="other")
    assert (found.value.code, found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="positions") as found:
        complete(client, max_tokens=10**6)
    assert found.value.code == "context_length_exceeded"


BAD = {
    "an unknown field": ({"logit_biases": {"1": 2}}, "logit_biases"),
    "a bias beyond the range": ({"logit_bias": {"1": 101}}, "logit_bias"),
    "a bias as text": ({"logit_bias": {"1": "5"}}, "logit_bias"),
    "a bias of a text": ({"logit_bias": {"fox": 5}}, "logit_bias"),
    "a bias of a token that there is not": ({"logit_bias": {"300": 5}}, "logit_bias"),
    "biases as a list": ({"logit_bias": [5]}, "logit_bias"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "a temperature below 0": ({"temperature": -1}, "temperature"),
    "a temperature as text": ({"temperature": "1"}, "temperature"),
    "too many choices": ({"n": 100}, "n"),
    "no choice": ({"n": 0}, "n"),
    "too many log-probabilities": ({"logprobs": 21}, "logprobs"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "texts and ids": ({"prompt": ["a", 1]}, "prompt"),
    "a token that there is not": ({"prompt": [10**8]}, "prompt"),
    "a truth as token": ({"prompt": [True]}, "prompt"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a stop that is no text": ({"stop": [1]}, "stop"),
    "too many stops": ({"stop": ["a"] * 1001}, "stop"),
    "a stop token that there is not": ({"stop_token_ids": [10**8]}, "stop_token_ids"),
    "no token": ({"max_tokens": 0}, "max_tokens"),
    "options of a stream without one": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "usage of pieces alone": ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    "a stream of prompt log-probabilities": ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
    "a seed beyond 64 bits": ({"seed": 2**70}, "seed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_with_its_field(server: Running, name: str) -> None:
    wrong, param = BAD[name]
    answer = server.post("/v1/completions", **{"prompt": "a", "max_tokens": 4, **wrong})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert error["message"].startswith((f"{param}=", f"{param}: ", "token id 100000000", "the prompt is empty"))
    assert server.taken == 0


def test_what_chats_and_tokens_get_wrong_is_told_with_its_field(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, wrong, param in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 0}, "max_tokens"),
        ("/detokenize", {"tokens": [10**8]}, "tokens"),
    ):
        answer = server.post(path, **wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_bad_messages_are_refused(server: Running, messages: object) -> None:
    answer = server.post("/v1/chat/completions", messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_field_that_is_not_supported_is_told_with_its_value(server: Running) -> None:
    error = server.post("/v1/completions", prompt="a", best_of_all=7).json()["error"]
    assert error["message"] == "best_of_all=7: this server does not support it, leave it out"
    assert (error["param"], error["code"]) == ("best_of_all", "unsupported_parameter")


@pytest.mark.parametrize("name", ["k" * 200_000, "a\nb", "\x1b[31m"])
def test_an_unknown_fields_name_is_told_in_a_short_line(server: Running, name: str) -> None:
    message = server.post("/v1/completions", prompt="a", **{name: 7}).json()["error"]["message"]
    assert message.isprintable()
    assert len(message) < 300


def test_a_fault_of_a_field_names_all_forms_that_it_has(server: Running) -> None:
    error = server.post("/v1/completions", prompt="a", stop=5).json()["error"]
    assert error["message"] == "stop=5: input should be a valid string, or input should be a valid list"


def test_a_token_has_one_bias(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="a", logit_bias={"28": -100, "028": 100})
    assert answer.status_code == 400
    assert "'028' is no token id" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_conversations_fault_is_told_without_its_template(server: Running, path: str) -> None:
    with server.client() as client:
        body = b'{"messages": [{"role": "user", "content": "hi \\ud83d"}]}'
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith("messages: holds half a character")


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE"])
def test_the_methods_of_a_path_are_told(server: Running, method: str) -> None:
    with server.client() as client:
        assert client.request(method, "/health").headers["allow"] == "GET, HEAD"


def test_a_template_that_fails_is_no_failure_of_the_server(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ 1 // (messages | length - 1) }}")
    with running(ordinary, chat_template=template) as server:
        answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "line 1: ZeroDivisionError: integer division or modulo by zero" in answer.json()["error"]["message"]


def test_without_a_template_chats_are_refused(ordinary: OrdinaryDecoding) -> None:
    with running(ordinary) as server:
        answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert "no chat template: start the server with --chat-template FILE" in error["message"]


def test_a_model_says_whether_it_can_chat(ordinary: OrdinaryDecoding, server: Running) -> None:
    with running(ordinary) as plain:
        for found, chats in ((plain, False), (server, True)):
            with found.client() as client:
                (model,) = client.get("/v1/models").json()["data"]
                assert client.get(f"/v1/models/{model['id']}").json() == model
                assert model["chat"] is chats


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = Path(__file__).parents[2] / "ppd_runtime/server/page.html"
    text = page.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text.replace("http-equiv", "")


def test_no_answer_waits_for_an_acknowledgement(server: Running) -> None:
    """With Nagle's algorithm a body, and a stream's next token, waits up to 40 ms for that of what went before."""
    with server.client() as client:
        assert client.get("/health").status_code == 200
        sockets = [one.transport.get_extra_info("socket") for one in server.server.server_state.connections]
        assert sockets
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)
