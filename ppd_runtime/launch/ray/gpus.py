"""Which GPU an actor uses, whether Ray hides the others or not."""

from collections.abc import Mapping, Sequence

UNMASKED = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Lets an actor see every GPU of its node: NCCL is slow or fails between processes that each see one alone."""


def own_device(gpu_ids: Sequence[int | str], environment: Mapping[str, str]) -> str:
    """The PyTorch device of an actor's own GPU; empty if it has none.

    Args:
        gpu_ids: those that Ray gave it, by `ray.get_gpu_ids`: numbers of the node's GPUs, or names that
            CUDA_VISIBLE_DEVICES lists.
        environment: the actor's variables. PyTorch counts the GPUs that CUDA_VISIBLE_DEVICES lists, in its order.

    Raises:
        RuntimeError: for a GPU that the actor does not see.
    """
    if not gpu_ids:
        return ""
    own, visible = str(gpu_ids[0]), environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"cuda:{own}"
    listed = [name.strip() for name in visible.split(",")]
    if own not in listed:
        raise RuntimeError(f"Ray gave this worker GPU {own}, but it sees {visible!r} (CUDA_VISIBLE_DEVICES)")
    return f"cuda:{listed.index(own)}"
