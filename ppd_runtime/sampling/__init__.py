"""How a token is chosen: a request's settings, changes of scores, noise, and log-probabilities."""
