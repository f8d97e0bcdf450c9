"""OpenAI's protocol over HTTP, served by the engine of a run."""
