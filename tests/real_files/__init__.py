"""Files and requests as other programs write them, made by those programs: what a report shows becomes a line here.

To add a folder or a file, write a function in `folders.py` that makes it, by the program that it is from where that
installs, and name it in `OPENED`, or in `REFUSED` with the words of the refusal. What opens is compared with
transformers' `generate` from the same files, in floats and in int8 (`tests/models/test_real_folders.py`). `STAGED`
there names the lines that run in stages, too. `hub_cache.py` lays out a hub's cache, `converted.py` writes GGUF as
llama.cpp's converter does. Requests are lines of `requests.jsonl`, as a server that only listens heard
them: the program and its version, the path, the body, and the status or error that the answer has to have.
"""
