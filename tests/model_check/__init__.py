"""An explicit-state model checker for the pipeline: the real worker loops and the real client over a toy model.

Start reading at `system.py`: what a state is and what can happen in it; `search.py` goes through all of it.
"""
