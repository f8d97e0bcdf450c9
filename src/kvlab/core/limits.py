"""The most that one request may ask for: none takes the memory or the time of the others."""

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16  # stop strings
MAX_STOP_CHARS = 1024  # of each
MAX_STOP_TOKENS = 300
MAX_BIASES = 300  # tokens whose logits are changed
MAX_ALLOWED = 1024  # tokens that alone may be sampled
MAX_BAD_WORDS = 300
MAX_BAD_WORD_TOKENS = 32  # of each
MAX_GRAMMAR_CHARS = 128 << 10
MAX_BIAS = 100.0  # of a logit, up or down
MAX_PENALTY = 2.0  # for a token's presence or frequency, up or down
MAX_WHOLE = 2**31 - 1  # of whole numbers that nothing else bounds
MAX_TEMPERATURE = 1e9  # and repetition penalty: float32 still divides by it
