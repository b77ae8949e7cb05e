"""Predictive pipelined decoding as two state machines that know no sockets, no Ray and no clocks.

Start reading at `main_process.py`; `sub_process.py` is the other side, `messages.py` what they say to each other,
and `ppd_runtime.workers.worker` runs either of them on a real stage and a real transport.
"""
