"""What people are told a process' name is, by its rank: in the paper's layout, or as one of several stages."""

_ONLY_ONE = {"client", "main process"}


def process_name(rank: int, num_stages: int = 0) -> str:
    """A process' name in a list. Rank 0 is the main process or the last stage, -1 the client; `num_stages` 0 is the
    paper's layout."""
    if rank < 0:
        return "client"
    if num_stages:
        return f"stage {rank or num_stages}"
    return f"sub-process {rank}" if rank else "main process"


def named_process(rank: int, num_stages: int = 0) -> str:
    """A process' name in a sentence."""
    name = process_name(rank, num_stages)
    return f"the {name}" if name in _ONLY_ONE else name


def short_name(rank: int, num_stages: int = 0) -> str:
    """A worker's as one word, for command lines and labels."""
    if num_stages:
        return f"stage-{rank or num_stages}"
    return f"sub-{rank}" if rank else "main"
