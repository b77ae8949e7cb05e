"""Continue a file of prompts on Ray, one after the other, and write each result as a line of JSON.

python examples/batch_on_ray.py prompts.txt results.jsonl

It starts a Ray node on this host. `ray_address="10.0.0.1:6379"` joins a cluster instead; `cluster/job.py` is the job
for `ray job submit`, which also goes on where a killed run stopped.
"""

import json
import sys
from pathlib import Path

from ppd_runtime import PPDRuntime


def main(prompts: Path, results: Path) -> None:
    """The workers are Ray actors, PPDMain and PPDSub; they stay for the whole batch."""
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line]
    with PPDRuntime("demo", k=1, launcher="ray", ray_address="local") as runtime, results.open("w") as out:
        for number, prompt in enumerate(lines, 1):
            result = runtime.generate(prompt, max_new_tokens=32)
            out.write(json.dumps({"prompt": prompt, **result.to_dict()}) + "\n")
            print(f"{number}/{len(lines)}: {result.stats.hits} of {len(result.token_ids)} tokens started early")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
