"""Parts trained for one model: exit heads, adapters, probes, and files of layer sets."""
