"""Tensors from device to device with `torch.distributed`, beside control messages over ZeroMQ."""
