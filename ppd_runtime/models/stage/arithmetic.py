"""PyTorch's process-wide settings that change bits: the same in every process that computes.

Ordinary decoding runs in the user's process, workers in processes of their own. A setting that the user's program has
changed, such as TF32, would change ordinary decoding alone.
"""

import torch


def settle_arithmetic(device: torch.device) -> None:
    """Give a process that computes on `device` PyTorch's own settings, whatever the program has made of them.

    cuDNN's attention is off on GPUs, which is not PyTorch's default: it plans again for each length of a text, which
    takes tens of milliseconds.
    """
    torch.set_float32_matmul_precision("highest")  # CPUs have products in bfloat16 for it, too
    if device.type != "cuda":
        return
    torch.backends.cudnn.allow_tf32 = True
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    if hasattr(products, "allow_fp16_accumulation"):  # PyTorch 2.7
        products.allow_fp16_accumulation = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
