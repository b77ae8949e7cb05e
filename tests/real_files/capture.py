"""Writes `requests.jsonl` anew: what clients' own programs send, told to a server that only listens.

Run by hand in an environment that has the programs (`pip install openai langchain-openai litellm …`); of one that is
not there the lines stay as they are, and so do lines whose program runs nowhere here (a web page's). What a line's
answer has to be is not the program's to say: edit it in the file, a new line begins with status 200.

    cd tests && python -m real_files.capture
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("requests.jsonl")
PROGRAMS = ("openai_python", "frameworks", "agents", "evaluations")
"""Modules with functions that send, by the name of the program's distribution."""
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


class Listener:
    """A server that notes what it is sent, and answers as OpenAI does, with a call where there are tools."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                listener.heard.append((self.path, body))
                data, kind = _answer(self.path, body)
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def _answer(path: str, body: dict[str, Any]) -> tuple[bytes, str]:
    chats, streams = path.endswith("chat/completions"), bool(body.get("stream"))
    calls = chats and body.get("tools") and body["messages"][-1]["role"] != "tool"
    message: dict[str, Any] = {"role": "assistant", "content": None if calls else '{"city": "Paris"}'}
    if calls:
        name = body["tools"][0]["function"]["name"]
        message["tool_calls"] = [{**_CALL, "function": {**_CALL["function"], "name": name}}]
    told = {("delta" if streams else "message"): message} if chats else {"text": " ok"}
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None, **told}
    kind = f"chat.completion{'.chunk' if streams else ''}" if chats else "text_completion"
    whole = {"id": "a-1", "object": kind, "created": 1, "model": "tiny", "choices": [choice], "usage": _USAGE}
    if not streams:
        return json.dumps(whole).encode(), "application/json"
    return f"data: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream"


def _sent(listener: Listener) -> Iterator[dict[str, Any]]:
    """The lines of every program that is installed; of equal requests the first."""
    seen = set[str]()
    for module in PROGRAMS:
        for name, (distribution, send) in import_module(f"real_files.{module}").SENDERS.items():
            try:
                version = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                print(f"{distribution} is not installed: {name} stays as it is", file=sys.stderr)
                continue
            listener.heard.clear()
            with contextlib.suppress(Exception):  # of the answer the program may think what it likes
                send(listener.url)
            if not listener.heard:
                print(f"{distribution} {version} sent nothing for {name}", file=sys.stderr)
            for number, (path, body) in enumerate(listener.heard, 1):
                line = {"program": f"{distribution} {version}", "path": path, "body": body}
                if (text := json.dumps(line)) not in seen:
                    seen.add(text)
                    yield {"name": f"{name}, {number}" if len(listener.heard) > 1 else name, **line}


def main() -> None:
    """Write the file."""
    lines = {line["name"]: line for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
    for line in _sent(Listener()):
        lines[line["name"]] = {"status": 200, **lines.get(line["name"], {}), **line}
    order = ("name", "program", "path", "status", "error", "body")
    written = [{key: line[key] for key in order if key in line} for line in lines.values()]
    FILE.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in written), encoding="utf-8")


if __name__ == "__main__":
    main()
