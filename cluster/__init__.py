"""Pipelined decoding on a cluster: what `ray job submit` runs, and the files that clusters are described with."""
