"""Pipelined decoding as state machines that know no sockets, no Ray and no clocks.

`paper/main_process.py` is the place to start: Algorithm 2 of the paper. `paper/sub_process.py` is the other side, and
`staged/` is the staged layout. `messages.py` defines their messages, and `ppd_runtime.workers.worker` runs each machine
on a real stage and transport.
"""
