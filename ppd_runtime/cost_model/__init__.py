"""What pipelined decoding costs and saves, predicted."""
