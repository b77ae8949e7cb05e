"""Stands in for the program guidellm: its command line, so many streamed completions a load, and its report's form.

Options and fields are those of guidellm 0.8.1, as far as `benchmarks.serve_guidellm` uses them; others are refused.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SWEPT = {"concurrent": "streams", "poisson": "rate"}
"""What a profile's loads differ in."""


def main() -> None:
    """Run every load, and write the report."""
    options = argparse.ArgumentParser(prog="guidellm", allow_abbrev=False)
    options.add_argument("command", choices=["run"])
    options.add_argument("--disable-console", action="store_true", required=True)
    for name in ("backend", "tokenizer", "profile", "constraint", "data", "output"):
        options.add_argument(f"--{name}", type=_pairs, required=True)
    options.add_argument("--override", nargs=2, required=True)
    given = options.parse_args()
    assert Path(given.tokenizer["model"], "tokenizer.json").exists()
    place, values = given.override
    swept = SWEPT[given.profile["kind"]]
    assert (place, values.split(",")[0]) == (f"profile.{swept}", given.profile[swept])
    report = {"benchmarks": [_load(given, float(value)) for value in values.split(",")]}
    Path(given.output["path"]).write_text(json.dumps(report))


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(","))


def _load(given: argparse.Namespace, value: float) -> dict[str, Any]:
    """One load; at a rate all come at once here."""
    count = int(given.constraint["count"])
    at_once = int(value) if given.profile["kind"] == "concurrent" else count
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as clients:
        answers = list(clients.map(lambda number: _ask(given, number), range(count)))
    arrivals = [answer for answer in answers if answer]
    gaps = [1000 * (times[-1] - times[0]) / (len(times) - 1) for times in arrivals]
    return {
        "duration": time.monotonic() - began,
        "metrics": {
            "request_totals": {"total": count, "successful": len(arrivals), "errored": count - len(arrivals)},
            "output_token_count": {"successful": {"total_sum": float(sum(map(len, arrivals)))}},
            "time_to_first_token_ms": {"successful": _distribution([1000 * times[0] for times in arrivals])},
            "inter_token_latency_ms": {"successful": _distribution(gaps)},
        },
    }


def _distribution(values: list[float]) -> dict[str, Any]:
    quarters = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values or 3 * [0.0]
    return {"percentiles": dict(zip(("p25", "p50", "p75"), quarters, strict=True))}


def _ask(given: argparse.Namespace, number: int) -> list[float]:
    """When each token came; empty where the server refused."""
    assert (given.backend["kind"], given.data["kind"]) == ("openai_http", "synthetic_text")
    body = {
        "model": given.backend["model"],
        "prompt": "word " * int(given.data["prompt_tokens"]) + str(number),
        "max_tokens": int(given.data["output_tokens"]),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    url = given.backend["target"] + given.backend["request_format"]
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    began, arrivals = time.monotonic(), list[float]()
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            for line in answer:
                if b'"finish_reason":null' in line:
                    arrivals.append(time.monotonic() - began)
    except urllib.error.HTTPError:
        return []
    return arrivals


if __name__ == "__main__":
    sys.exit(main())
