"""Why requests took as long as they did: the terms of each, and what would have helped."""
