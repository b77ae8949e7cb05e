"""What starts workers and keeps them alive: threads, processes of this host, or Ray."""
