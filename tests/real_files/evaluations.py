"""What programs send that measure: vLLM's bench client and lm-eval."""

import asyncio
from pathlib import Path
from typing import Any

from real_files.openai_python import USER

_DEMO = Path(__file__).parents[2] / "ppd_runtime/models/demo"


def _vllm(url: str, kind: str, path: str, **settings: Any) -> None:
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

    asked = RequestFuncInput("import os", f"{url}/{path}", 2, 4, "tiny", **settings)

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await ASYNC_REQUEST_FUNCS[kind](asked, session)

    asyncio.run(ask())


def _evaluated(url: str, kind: str, path: str, **settings: Any) -> Any:
    from lm_eval.api.registry import get_model

    made = {"model": "tiny", "base_url": f"{url}/{path}", "tokenized_requests": False, "max_retries": 1}
    return get_model(kind)(**{**made, **settings})


def _asked(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, 0)]


def _generated(url: str) -> None:
    until = {"until": ["\n\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 4}
    _evaluated(url, "local-completions", "completions", tokenizer_backend=None).generate_until(
        _asked("generate_until", "import os", until)
    )


def _scored(url: str) -> None:
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": str(_DEMO)}
    model = _evaluated(url, "local-completions", "completions", **tokenizer, tokenized_requests=True)
    model.loglikelihood(_asked("loglikelihood", "import", " os"))


def _chatted(url: str) -> None:
    from lm_eval.models.api_models import JsonChatStr

    model = _evaluated(url, "local-chat-completions", "chat/completions")
    history = model.apply_chat_template([{"role": "system", "content": "You help."}, USER])
    assert isinstance(history, JsonChatStr)
    until = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 4}
    model.generate_until(_asked("generate_until", history, until))


SENDERS = {
    "vLLM's bench: a completion": ("vllm", lambda url: _vllm(url, "openai", "completions", ignore_eos=True)),
    "vLLM's bench: a chat": (
        "vllm",
        lambda url: _vllm(url, "openai-chat", "chat/completions", extra_body={"temperature": 0.0}),
    ),
    "lm-eval: a text": ("lm_eval", _generated),
    "lm-eval: a score": ("lm_eval", _scored),
    "lm-eval: a chat": ("lm_eval", _chatted),
}
