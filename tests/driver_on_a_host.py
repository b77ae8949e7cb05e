"""Runs on one of the hosts of `hosts.py`: for each line of settings on standard input, a line of results.

Where the settings have a `tell_at`, another line comes before, as soon as there are so many tokens.
"""

import json
import sys

from ppd_runtime import PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead


def main() -> None:
    """Serve the test until its end."""
    given = json.loads(sys.argv[1])
    layout = given["layout"]
    if "stages" not in layout:
        head = OracleHead(((*given["prompt"], *given["text"]),), given["match_rate"], given["vocab_size"])
        layout = layout | {"exit_head": head}
    with PPDRuntime(
        given["folder"],
        **layout,
        transport=given["transport"],
        dtype="float32",
        speculation="always",
        ray_address=given["ray_address"],
        placement="strict-spread",
        placement_timeout_s=60.0,
        bind_interface=given["bind_interface"],
        emulate=EmulatedDevice(given["layer_ms"]),
    ) as runtime:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            settings = json.loads(line)
            tell_at = settings.pop("tell_at", None)
            stream, hits = runtime.stream(given["prompt"], ignore_eos=True, **settings), []
            for event in stream:
                hits.append(event.hit)
                if len(hits) == tell_at:
                    print(json.dumps({"reached": tell_at}), flush=True)
            result, stats = stream.result, stream.result.stats
            told = {
                "tokens": result.token_ids,
                "ms_per_token": (stats.latency_s - stats.time_to_first_token_s) / (stats.new_tokens - 1) * 1000,
                "hits": hits[:-1],
                "restarts": runtime.restarts,
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
