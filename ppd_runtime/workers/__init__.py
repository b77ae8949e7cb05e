"""What runs in a worker: the machines of the pipeline on a real stage and a real transport."""
