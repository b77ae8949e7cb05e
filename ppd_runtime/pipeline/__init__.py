"""Pipelined decoding as state machines that know no sockets, no Ray and no clocks.

`paper/main_process.py` is the place to start: Algorithm 2 of the paper. `paper/sub_process.py` is the other side, and
`staged/` is the staged layout. `messages.py` has what they say to each other, and `ppd_runtime.workers.worker` runs
each of them on a real stage and a real transport.
"""
