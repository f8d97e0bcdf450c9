"""The search for the best batch, blocks, block size and token budget in a memory."""
