"""Code of our own for passes over few tokens on CPUs, in C++: compiled on the machine that runs it, kept on disk."""
