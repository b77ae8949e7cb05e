"""The paper's layout: a main process at full depth, and sub-processes that start the next token early."""
