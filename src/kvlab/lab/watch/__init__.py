"""A server that runs, watched from outside: what its prefix cache has, by its KV events and its metrics."""
