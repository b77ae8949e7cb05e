"""The workers, which run the machines of the pipeline on a real stage and a real transport."""
