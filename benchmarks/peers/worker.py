"""One engine in a process of its own: reads workloads, answers with seconds.

    python worker.py ADAPTER MODEL_FOLDER

Runs in the virtual environment of its engine, so it uses the standard library and numpy only. A
line of standard input is JSON, `{"workload": "w64", "run": 3}`; the answer is a line of JSON,
`{"seconds": ..., "tokens": ...}`. What an engine prints goes to standard error.
"""

import importlib
import json
import os
import sys
from time import perf_counter

from workloads import WORKLOADS, w1


def main() -> None:
    """Load the engine, say so, then serve workloads until the end of input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    adapter = importlib.import_module(sys.argv[1])
    started = perf_counter()
    with adapter.engine(sys.argv[2]) as generate:
        generate(w1(-1))  # whatever is compiled or allocated at first use
        answers.write(json.dumps({"loaded": perf_counter() - started}) + "\n")
        for line in sys.stdin:
            order = json.loads(line)
            requests = WORKLOADS[order["workload"]](order["run"])
            started = perf_counter()
            tokens = generate(requests)
            answer = {"seconds": perf_counter() - started, "tokens": tokens}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
