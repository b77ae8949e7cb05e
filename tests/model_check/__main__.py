"""`PYTHONPATH=tests python -m model_check [words]`: the long searches, or those whose names hold all the words."""

import sys
import time

from model_check.cases import DEEP, LONGER, QUICK
from model_check.staged_cases import STAGED_DEEP, STAGED_LONGER, STAGED_QUICK

deep = (*DEEP, *STAGED_DEEP)
for case in (*QUICK, *LONGER, *STAGED_QUICK, *STAGED_LONGER, *deep):
    if all(word in case.name for word in sys.argv[1:]) and (sys.argv[1:] or case in deep):
        began = time.perf_counter()
        system, explored = case.search()
        runs = sum(automaton.runs for automaton in system.automata)
        print(f"{case.name}: {explored}; {runs:,} steps by real code; {time.perf_counter() - began:.0f} s", flush=True)
