Feature: OpenAI's protocol over HTTP
  Clients that know nothing of kvlab talk to its engine. Here OpenAI's own Python client asks a server of SmolLM2, one of 512
  tokens of context that runs 8 sequences at once and lets 8 requests wait. Answers are greedy unless a request says otherwise;
  JSON stands for the fields of a request.

  Background:
    Given a client of a server of SmolLM2

  Rule: Completions and chats are answered as OpenAI's servers do

    @R18.1
    Scenario: A completion goes on with its prompt
      When it completes {"prompt": "The capital of France is", "max_tokens": 2}
      Then it gets " Paris."
      And the answer ended by "length"

    @R18.1
    Scenario: A chat is asked under the model's chat template, and ends where the model ends it
      When it chats {"messages": [{"role": "user", "content": "What is 1+1?"}]}
      Then it gets a text with "1 + 1 = 2"
      And the answer ended by "stop"

    @R18.1
    Scenario: A completion that sets no limit has 16 tokens
      When it completes {"prompt": "One, two, three,"}
      Then the answer has 16 tokens
      And the answer ended by "length"

    @R18.1
    Scenario Outline: A prompt is <what>
      When it completes {"prompt": <prompt>, "max_tokens": 1}
      Then it gets the texts <texts>

      Examples:
        | what               | prompt                                           | texts               |
        | a text             | "The capital of France is"                       | [" Paris"]          |
        | token ids          | [504, 3575, 282, 4649, 314]                      | [" Paris"]          |
        | a list of texts    | ["The capital of France is", "One, two, three,"] | [" Paris", " four"] |
        | a list of id lists | [[504, 3575, 282, 4649, 314], [2705, 28, 827, 28, 1296, 28]] | [" Paris", " four"] |

    @R18.1
    Scenario: A message may come in parts
      When it chats {"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 3}
      And it chats {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]}], "max_tokens": 3}
      Then both texts are the same

    @R18.1
    Scenario: A system message changes the prompt
      When it chats {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 1}
      And it chats {"messages": [{"role": "system", "content": "You are a parrot."}, {"role": "user", "content": "Who are you?"}], "max_tokens": 1}
      Then the answers had different numbers of prompt tokens

    @R18.1
    Scenario: The newer name of the limit wins
      When it chats {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 9, "max_completion_tokens": 3}
      Then the answer has 3 tokens

    @R18.1
    Scenario: Usage counts tokens
      When it completes {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 3}
      Then the usage has 5 prompt tokens, 3 completion tokens and 8 in total

    @R18.1
    Scenario: The prompt is echoed
      When it completes {"prompt": "The capital of France is", "max_tokens": 1, "echo": true}
      Then it gets "The capital of France is Paris"

    @R18.1
    Scenario: Token ids come back where they are asked for
      When it completes {"prompt": "The capital of France is", "max_tokens": 1, "return_token_ids": true}
      Then the prompt was [504, 3575, 282, 4649, 314] and the answer [7042]

    @R18.1
    Scenario: Null is the same as leaving a field out
      When it completes {"prompt": "One, two, three,", "max_tokens": 3}
      And it completes {"prompt": "One, two, three,", "max_tokens": 3, "stop": null, "top_p": null, "n": null, "seed": null, "logit_bias": null, "top_k": null}
      Then both texts are the same

    @R18.1
    Scenario: Text becomes token ids and back
      When it posts /tokenize {"prompt": "The capital of France is"}
      Then it gets the JSON {"tokens": [504, 3575, 282, 4649, 314], "count": 5, "max_model_len": 512}
      When it posts /tokenize {"prompt": "The capital", "return_token_strs": true}
      Then it gets the JSON {"tokens": [504, 3575], "count": 2, "max_model_len": 512, "token_strs": ["The", "Ġcapital"]}
      When it posts /detokenize {"tokens": [504, 3575, 282, 4649, 314]}
      Then it gets the JSON {"prompt": "The capital of France is"}

    @R18.1
    Scenario: A conversation has as many tokens as /tokenize says
      When it posts /tokenize {"messages": [{"role": "user", "content": "Who are you?"}]}
      And it chats {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 1}
      Then the prompt had as many tokens as that

    @R18.1
    Scenario: Tools are a part of a conversation, for /tokenize too
      When it posts /tokenize {"messages": [{"role": "user", "content": "Who?"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
      And it chats {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}]}
      Then the prompt had as many tokens as that

    @R18.1
    Scenario: The model is listed
      Then the server's only model is "smollm2_135m" with a context of 512 tokens

  Rule: A request says how its tokens are drawn

    @R18.1
    Scenario: The same seed draws the same answer
      When it completes {"prompt": "My favourite food is", "max_tokens": 8, "temperature": 1.5, "seed": 7}
      And it completes {"prompt": "My favourite food is", "max_tokens": 8, "temperature": 1.5, "seed": 7}
      Then both texts are the same

    @R18.1
    Scenario: Another seed draws another answer
      When it completes {"prompt": "My favourite food is", "max_tokens": 8, "temperature": 1.5, "seed": 7}
      And it completes {"prompt": "My favourite food is", "max_tokens": 8, "temperature": 1.5, "seed": 8}
      Then the texts differ

    @R18.1
    Scenario: Several samples of one prompt, which is counted once
      When it completes {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 6, "n": 3, "temperature": 1.5, "seed": 7}
      Then it gets 3 choices that differ
      And the usage has 5 prompt tokens, 18 completion tokens and 23 in total

    @R18.1
    Scenario Outline: With <field> only the likeliest token is left
      When it completes {"prompt": "One, two, three,", "max_tokens": 4}
      And it completes {"prompt": "One, two, three,", "max_tokens": 4, "temperature": 2, "<field>": <value>}
      Then both texts are the same

      Examples:
        | field | value |
        | top_k | 1     |
        | top_p | 1e-6  |
        | min_p | 0.999 |

    @R18.1
    Scenario Outline: With <field> a model repeats itself less
      When it chats {"messages": [{"role": "user", "content": "Say an emoji"}], "max_tokens": 12}
      And it chats {"messages": [{"role": "user", "content": "Say an emoji"}], "max_tokens": 12, "<field>": <value>}
      Then the second text has fewer "🌟" than the first

      Examples:
        | field              | value |
        | frequency_penalty  | 2     |
        | presence_penalty   | 2     |
        | repetition_penalty | 2     |

    @R18.1
    Scenario: A bias forbids a token
      When it completes {"prompt": "The capital of France is", "max_tokens": 1, "logit_bias": {"7042": -100}}
      Then it does not get " Paris"

    @R18.1
    Scenario: Only the tokens that are allowed are sampled
      When it completes {"prompt": "The capital of France is", "max_tokens": 3, "allowed_token_ids": [4528, 28]}
      Then the answer has 3 tokens
      And it gets a text with " London"

    @R18.1
    Scenario: A bad word is never in an answer, at its beginning or behind a space
      When it completes {"prompt": "The capital of France is", "max_tokens": 6, "bad_words": ["Paris"]}
      Then it does not get a text with "Paris"

    @R18.1
    Scenario: A top_k of -1 keeps all tokens, as vLLM's does
      When it completes {"prompt": "The capital of France is", "max_tokens": 1, "top_k": -1}
      Then it gets " Paris"

    @R18.1
    Scenario: A bias makes a token certain
      When it completes {"prompt": "The capital of France is", "max_tokens": 2, "logit_bias": {"4528": 100}}
      Then it gets " London London"

    @R18.1
    Scenario Outline: An answer ends at <what>
      When it completes {"prompt": "One, two, three,", "max_tokens": 8, <fields>}
      Then it gets <text>
      And the answer ended by "stop"

      Examples:
        | what                 | fields                         | text      |
        | a stop string        | "stop": " five"                | " four,"  |
        | the first of several | "stop": ["six", "ive", "five"] | " four, " |
        | a stop token         | "stop_token_ids": [28]         | " four"   |

    @R18.1
    Scenario: The stop string is part of the answer where that is asked for
      When it completes {"prompt": "One, two, three,", "max_tokens": 8, "stop": " five", "include_stop_str_in_output": true}
      Then it gets " four, five"
      And the answer ended by "stop"

    @R18.1
    Scenario: Special tokens have a text where that is asked for
      When it chats {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": true, "logit_bias": {"2": 100}, "skip_special_tokens": false}
      Then it gets "<|im_end|><|im_end|>"

    @R18.1
    Scenario: The last message is continued, and repeated before the answer
      When it chats {"messages": [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "The capital of France is"}], "max_tokens": 1, "continue_final_message": true, "echo": true}
      Then it gets "The capital of France is Paris"

    @R18.1
    Scenario: A prompt is cut to its last tokens
      When it completes {"prompt": "Berlin is the capital of Germany. Paris is", "max_tokens": 1, "truncate_prompt_tokens": 2}
      And it completes {"prompt": " Paris is", "max_tokens": 1}
      Then both texts are the same

    @R18.1
    Scenario: No answer ends before its least number of tokens
      When it completes {"prompt": "One, two, three,", "max_tokens": 8, "stop": "four", "min_tokens": 3}
      Then the answer has 8 tokens

    @R18.1
    Scenario: An answer goes on behind the model's end where it should
      When it chats {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "ignore_eos": true, "logit_bias": {"2": 100}}
      Then the answer has 12 tokens
      And the answer ended by "length"

  Rule: Log-probabilities come with the tokens

    @R18.1
    Scenario: Those of a completion are parallel lists, with each token's place in the text
      When it completes {"prompt": "One, two, three,", "max_tokens": 4, "logprobs": 2}
      Then its log-probabilities are lists of 4 with 2 alternatives each
      And the tokens join to the text, each at its offset

    @R18.1
    Scenario: Those of a chat are a list of tokens
      When it chats {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 4, "logprobs": true, "top_logprobs": 3}
      Then each of the 4 tokens has its bytes and 3 alternatives
      And the bytes join to the text

    @R18.1
    Scenario: A part of a character has its bytes
      When it chats {"messages": [{"role": "user", "content": "Smile!"}], "max_tokens": 1, "logprobs": true, "allowed_token_ids": [10813]}
      Then the bytes of its only token are [240, 159]

    @R18.1
    Scenario: The token that ends a chat has no text, and no bytes
      When it chats {"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 40, "temperature": 0, "logprobs": true}
      Then the answer ended by "stop"
      And the bytes join to the text

    @R18.1
    Scenario: A greedy token is the likeliest of its alternatives
      When it completes {"prompt": "One, two, three,", "max_tokens": 4, "logprobs": 5}
      Then each token's log-probability is the highest of its alternatives

    @R18.1
    Scenario: Without alternatives each token has its own alone
      When it chats {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 2, "logprobs": true}
      Then each of the 2 tokens has its bytes and 0 alternatives

    @R18.1
    Scenario: A stream's are those of the whole answer
      When it completes {"prompt": "One, two, three,", "max_tokens": 4, "logprobs": 1}
      And it completes {"prompt": "One, two, three,", "max_tokens": 4, "logprobs": 1, "stream": true}
      Then both have the same log-probabilities

    @R18.13
    Scenario: With echo those of the prompt come first, as evaluations want them
      When it completes {"prompt": "The capital of France is Paris", "max_tokens": 1, "logprobs": 1, "echo": true}
      Then its log-probabilities are of 6 tokens of the prompt and 1 of the answer
      And " Paris" is the likeliest token in its place

    @R18.13
    Scenario: A prompt alone is scored with max_tokens 0
      When it completes {"prompt": "The capital of France is Paris", "max_tokens": 0, "logprobs": 1, "echo": true}
      Then it gets "The capital of France is Paris"
      And its log-probabilities are of 6 tokens of the prompt and 0 of the answer
      And the answer has 0 tokens

    @R18.13
    Scenario: A prompt that is cached has the same, and is computed for them
      When it completes {"prompt": "Of all the capitals of the world, from Lisbon to Tokyo and from Oslo to Cape Town, none is as old", "max_tokens": 1}
      And it completes {"prompt": "Of all the capitals of the world, from Lisbon to Tokyo and from Oslo to Cape Town, none is as old", "max_tokens": 1, "prompt_logprobs": 2}
      Then 0 of its prompt tokens were cached
      And each token of the prompt but the first has its log-probability and 2 alternatives

  Rule: A stream has a chunk for each token

    @R18.2
    Scenario: The chunks join to the whole answer
      When it completes {"prompt": "One, two, three,", "max_tokens": 5}
      And it completes {"prompt": "One, two, three,", "max_tokens": 5, "stream": true}
      Then both texts are the same
      And the stream had 5 chunks, the last with the finish reason "length"

    @R18.2
    Scenario: A chat gives its role with the first token
      When it chats {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 3, "stream": true}
      Then the first chunk has the role "assistant" and a text
      And the stream had 3 chunks, the last with the finish reason "length"

    @R18.2
    Scenario: Events are written as the protocol says
      When it posts /v1/completions {"prompt": "One, two, three,", "max_tokens": 2, "stream": true}
      Then it gets lines of "data: " and JSON, a blank line after each, and "data: [DONE]" at the end

    @R18.2
    Scenario: No chunk comes before the first token
      Given a pass of the model takes 0.1 s
      When it completes {"prompt": "One, two, three,", "max_tokens": 2, "stream": true}
      Then the first chunk has a text

    @R18.2
    Scenario: What may become a stop string is held back
      When it completes {"prompt": "One, two, three,", "max_tokens": 5, "stop": [", five, seven"], "stream": true}
      Then an empty chunk stands for each token that was held back
      And it gets " four, five, six"

    @R18.2
    Scenario: A stop string is never shown
      When it completes {"prompt": "One, two, three,", "max_tokens": 9, "stop": ["five, six"], "stream": true}
      Then it gets " four, "
      And the answer ended by "stop"

    @R18.2
    Scenario: Samples come interleaved, and each ends once
      When it completes {"prompt": ["One, two, three,", "My favourite food is"], "n": 2, "max_tokens": 4, "temperature": 1, "seed": 1, "stream": true, "ignore_eos": true}
      Then the chunks of 4 choices come interleaved
      And each choice ended once

    @R18.2
    Scenario Outline: Usage in a stream: <options>
      When it completes {"prompt": "One, two, three,", "max_tokens": 3, "stream": true, "stream_options": <options>}
      Then the chunks have usage: <usage>

      Examples:
        | options                                                  | usage               |
        | null                                                     | no, no, no          |
        | {"include_usage": false}                                 | no, no, no          |
        | {"include_usage": true}                                  | no, no, no, yes     |
        | {"continuous_usage_stats": true}                         | yes, yes, yes       |
        | {"include_usage": true, "continuous_usage_stats": true}  | yes, yes, yes, yes  |

    @R18.2
    Scenario: The chunk with the usage has no choice
      When it chats {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}}
      Then the last chunk has no choice, and a usage of 2 completion tokens

    @R18.2
    Scenario: Running usage counts one token more with each chunk
      When it completes {"prompt": "One, two, three,", "max_tokens": 3, "stream": true, "stream_options": {"continuous_usage_stats": true}}
      Then the chunks count 1, 2, 3 completion tokens

    @R18.2
    Scenario: Token ids come chunk by chunk
      When it completes {"prompt": "The capital of France is", "max_tokens": 2, "return_token_ids": true, "stream": true}
      Then the first chunk has the prompt's ids, and each chunk its token's

    @R18.2
    Scenario: A request that fails on the way ends its stream with an error
      Given a model that fails after 2 tokens
      When it streams {"prompt": [1], "max_tokens": 5} to an error
      Then it got 2 chunks and then the error "the request failed"

  Rule: Text is whole, however its characters are split

    @R18.3
    Scenario Outline: The <what> <text>, in every way that tokens can split it
      Given a model that says "<text>" in every split of its characters that the vocabulary has
      When all of them are streamed
      Then each joins to "<text>"
      And no chunk has a part of a character

      Examples:
        | what               | text  |
        | accent             | né    |
        | Chinese            | 你好  |
        | emoji              | 😀!   |
        | joined emoji       | 👩‍🚀 |

    @R18.3
    Scenario: Emoji that a model says in a chat come whole
      Given a model that says "😀😃😄" in parts of characters
      When it chats {"messages": [{"role": "user", "content": "Repeat: 😀😃😄"}], "stream": true}
      Then it gets "😀😃😄"
      And no chunk has a part of a character

    @R18.3
    Scenario Outline: A prompt with <what> is echoed as it was sent
      When it completes {"prompt": "<text>", "max_tokens": 1, "echo": true, "logit_bias": {"30": 100}}
      Then it gets "<text>."

      Examples:
        | what    | text                |
        | accents | Café naïve          |
        | Chinese | 你好，世界          |
        | emoji   | 🎈👩‍🚀🇫🇷          |

  Rule: Answers are those of the engine

    @R18.4
    Scenario Outline: Greedy answers equal those in process: <prompt>
      When it completes {"prompt": "<prompt>", "max_tokens": 8, "return_token_ids": true}
      Then the engine gives the same tokens in process

      Examples:
        | prompt                        |
        | The capital of France is      |
        | Why is the sky blue? Because  |
        | def fibonacci(n):             |

    @R18.4
    Scenario: Drawn answers equal those in process
      When it completes {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 3, "return_token_ids": true}
      Then the engine gives the same tokens in process

    @R18.4
    Scenario: Clients at once get what each gets alone
      When 8 clients at once ask for 8 tokens each
      Then each gets what it gets alone

    @R18.4
    Scenario: The second time a prompt's full blocks are found in the prefix cache
      When it completes {"prompt": [900, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912, 913, 914, 915, 916, 917], "max_tokens": 1}
      Then 0 of its prompt tokens were cached
      When it completes {"prompt": [900, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912, 913, 914, 915, 916, 917], "max_tokens": 1}
      Then 16 of its prompt tokens were cached

    @R18.4
    Scenario: Cached tokens are in a stream's usage too
      When it completes {"prompt": [800, 801, 802, 803, 804, 805, 806, 807, 808, 809, 810, 811, 812, 813, 814, 815, 816, 817], "max_tokens": 1}
      And it completes {"prompt": [800, 801, 802, 803, 804, 805, 806, 807, 808, 809, 810, 811, 812, 813, 814, 815, 816, 817], "max_tokens": 1, "stream": true, "stream_options": {"include_usage": true}}
      Then 16 of its prompt tokens were cached

    @R18.4
    Scenario: Under another salt nothing is found
      When it completes {"prompt": [700, 701, 702, 703, 704, 705, 706, 707, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717], "max_tokens": 1, "cache_salt": "ann"}
      And it completes {"prompt": [700, 701, 702, 703, 704, 705, 706, 707, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717], "max_tokens": 1, "cache_salt": "bob"}
      Then 0 of its prompt tokens were cached

    @R18.4
    Scenario: Each turn of a conversation finds the turns before it
      When it chats for 3 turns
      Then each turn found all full blocks of the turn before

  Rule: A full server says so, and who leaves gives memory back

    @R18.5
    Scenario: A full queue is a 503 that says when to try again
      Given a pass of the model takes 0.02 s
      And 16 clients with answers of 300 tokens
      When it completes {"prompt": "One", "max_tokens": 1}
      Then it is refused with 503: "8 requests are waiting, and scheduler.max_waiting_requests=8 allows no more"
      And the header Retry-After is 1
      And the metrics count it as refused

    @R18.5
    Scenario: A client that tries again gets in
      Given a pass of the model takes 0.02 s
      And 16 clients with answers of 300 tokens that leave after 0.5 s
      When it completes {"prompt": "The capital of France is", "max_tokens": 1}, trying again by itself
      Then it gets " Paris"

    @R18.5
    Scenario: A request that came later goes first by its priority
      Given a pass of the model takes 0.05 s
      And 7 clients with answers of 100 tokens
      And a client with an answer of 60 tokens
      When requests of the priorities 2, 1 and 0 come one after the other
      Then those of the priorities 0, 1 and 2 are answered in this order

    @R18.5
    Scenario: A client that leaves its stream gives its blocks back with the next step
      Given a pass of the model takes 0.02 s
      And 2 clients with answers of 300 tokens
      When one of them leaves after 3 tokens
      Then the first step without it has the blocks of the other one alone

    @R18.5
    Scenario: A client that does not wait for its whole answer gives its blocks back
      Given a pass of the model takes 0.02 s
      When it completes {"prompt": "One", "max_tokens": 400, "ignore_eos": true}, but leaves after 0.2 s
      Then all blocks are free before it would have been answered

    @R18.5
    Scenario: A client that leaves the waiting queue is forgotten
      Given a pass of the model takes 0.02 s
      And 8 clients with answers of 300 tokens
      When it completes {"prompt": "One", "max_tokens": 400}, but leaves after 0.2 s
      Then no request is waiting

    @R18.5
    Scenario: A client that reads nothing is cut
      Given a client of a server with {"write_timeout_s": 0.3}
      When a client asks for a long stream and reads nothing of it
      Then its request is aborted, and all blocks are free

    @R18.5
    Scenario: The server answers while the engine computes
      Given a client with an answer of 400 tokens
      And a pass of the model takes 20 s
      Then /health is answered within one pass

  Rule: A mistake is one sentence that names the field

    @R18.6
    Scenario Outline: A completion with <what>
      When it posts /v1/completions <body>
      Then it is refused with <status> for <param>: "<message>"

      Examples:
        | what                          | body                                                | status | param | message |
        | broken JSON                   | {"prompt": "a"                                      | 400 | null        | the body is no JSON object |
        | a body that is no object      | [1]                                                 | 400 | null        | the body is no JSON object |
        | bytes that are no UTF-8       | {"prompt": "\xff"}                                  | 400 | null        | the body is no JSON object: it is not UTF-8 |
        | half a surrogate pair         | {"prompt": "\ud83d"}                                | 400 | prompt      | smollm2_135m: cannot encode '\ud83d' |
        | no prompt                     | {"max_tokens": 1}                                   | 400 | prompt      | prompt is missing |
        | a prompt of another type      | {"prompt": 7}                                       | 400 | prompt      | prompt=7: Input should be |
        | an empty prompt               | {"prompt": []}                                      | 400 | prompt      | prompt is empty |
        | an id out of vocabulary       | {"prompt": [49152]}                                 | 400 | prompt      | token id 49152 is outside the vocabulary of 49152 |
        | a negative id                 | {"prompt": [-1]}                                    | 400 | prompt      | token id -1 is outside the vocabulary |
        | a text for a number           | {"prompt": "a", "max_tokens": "9"}                  | 400 | max_tokens  | max_tokens='9' |
        | a pin beyond the prompt       | {"prompt": [1, 2], "cache_pin_tokens": 3}           | 400 | cache_pin_tokens | cache_pin_tokens=3: must be a number of the prompt's first tokens, from 0 to 2 |
        | no tokens                     | {"prompt": "a", "max_tokens": 0}                    | 400 | max_tokens  | max_tokens=0; at least 1 |
        | more than can ever fit        | {"prompt": "a", "max_tokens": 512}                  | 400 | max_tokens  | This model's maximum context length is 512 tokens. However, 1 prompt tokens + 512 output tokens can never fit; the pool takes sequences of up to 512 tokens; max_tokens=511 would fit |
        | a temperature that is NaN     | {"prompt": "a", "temperature": NaN}                 | 400 | temperature | temperature=nan |
        | an infinite temperature       | {"prompt": "a", "temperature": 1e999}               | 400 | temperature | temperature=inf |
        | a temperature below zero      | {"prompt": "a", "temperature": -1}                  | 400 | temperature | temperature=-1.0; a number |
        | a top_p above one             | {"prompt": "a", "top_p": 1.5}                       | 400 | top_p       | top_p=1.5; a number in (0, 1] |
        | more than 20 log-probabilities | {"prompt": "a", "logprobs": 21}                    | 400 | logprobs    | logprobs=21: at most 20 |
        | more than 20 of a prompt's    | {"prompt": "a", "prompt_logprobs": 21}              | 400 | prompt_logprobs | prompt_logprobs=21; at most 20 |
        | no samples                    | {"prompt": "a", "n": 0}                             | 400 | n           | n=0; at least 1 sample |
        | a bias of no token id         | {"prompt": "a", "logit_bias": {"x": 1}}             | 400 | logit_bias  | keys are token ids |
        | no allowed token              | {"prompt": "a", "allowed_token_ids": []}            | 400 | allowed_token_ids | nothing could be sampled; leave it out |
        | a bad word alone allowed      | {"prompt": "a", "allowed_token_ids": [28], "bad_words": [","]} | 400 | bad_words | leaves none of allowed_token_ids |
        | a prompt cut to nothing       | {"prompt": "a", "truncate_prompt_tokens": 0}        | 400 | truncate_prompt_tokens | from 1 to 512; -1 keeps |
        | an empty stop string          | {"prompt": "a", "stop": [""]}                       | 400 | stop        | stop= |
        | a stop of another type        | {"prompt": "a", "stop": 5}                          | 400 | stop        | stop=5: Input should be a valid string |
        | stream options alone          | {"prompt": "a", "stream_options": {}}               | 400 | stream_options | stream_options needs stream=true |
        | another model                 | {"prompt": "a", "model": "gpt-4"}                   | 404 | model       | model='gpt-4': there is 'smollm2_135m' |

    @R18.6
    Scenario Outline: A chat with <what>
      When it posts /v1/chat/completions <body>
      Then it is refused with 400 for <param>: "<message>"

      Examples:
        | what                     | body                                                                       | param        | message |
        | no messages              | {"messages": []}                                                           | messages     | messages=[] |
        | a message without a role | {"messages": [{"content": "a"}]}                                           | messages     | messages[0].role is missing |
        | a role that is none      | {"messages": [{"role": "robot", "content": "a"}]}                           | messages     | 'assistant', 'developer', 'function', 'system', 'tool' or 'user' |
        | two ends of the prompt   | {"messages": [{"role": "user", "content": "a"}], "continue_final_message": true, "add_generation_prompt": true} | continue_final_message | leave out add_generation_prompt |
        | a picture                | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}        | messages     | messages[0].content has a part that is no text |
        | alternatives alone       | {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}         | top_logprobs | top_logprobs needs logprobs=true |
        | too many alternatives    | {"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 21} | top_logprobs | from 0 to 20 |

    @R18.6
    Scenario: Messages that leave no room for an answer
      When it chats with a message of 600 words
      Then it is refused with 400 for messages: "This model's maximum context length is 512 tokens. However, you sent"

    @R18.6
    Scenario Outline: <field> would change what the answer means, and is refused
      When it posts /v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "<field>": <value>}
      Then it is refused with 400 for <field>: "is not supported; leave it out"

      Examples:
        | field           | value                                            |
        | functions       | [{"name": "f"}]                                  |
        | modalities      | ["audio"]                                        |
        | guided_json     | {}                                               |
        | chat_template   | "x"                                              |
        | documents       | [{"text": "a"}]                                  |
        | prompt_embeds   | "AAAA"                                           |
        | best_of         | 2                                                |
        | suffix          | "b"                                              |
        | use_beam_search | true                                             |

    @R18.6
    Scenario: Fields that ask for nothing, or that nobody knows, are ignored
      When it completes {"prompt": "The capital of France is", "max_tokens": 1, "best_of": 1, "suffix": "", "user": "me", "metadata": {"a": 1}, "never_heard_of": [1]}
      Then it gets " Paris"

    @R18.6
    Scenario: A mistake in a stream is told before it begins
      When it completes {"prompt": "a", "max_tokens": 9999, "stream": true}
      Then it is refused with 400 for max_tokens: "This model's maximum context length is 512 tokens. However, 1 prompt tokens + 9999 output tokens can never fit"

    @R18.6
    Scenario: A body of 10 MB is refused unread
      When it completes a prompt of 10000000 characters
      Then it is refused with 413 for null: "the body is larger than server.max_body=8MiB"

    @R18.6
    Scenario: A body that does not come is given up
      Given a client of a server with {"read_timeout_s": 1}
      When a client sends "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{" and no more
      Then it is answered 408

    @R18.6
    Scenario Outline: A connection that sends <what> is cut
      Given a client of a server with {"read_timeout_s": 0.2, "keep_alive_s": 1}
      When a client sends "<sent>" and no more
      Then it is cut

      Examples:
        | what             | sent                                        |
        | nothing          |                                             |
        | half a head      | POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n |
        | no second request | GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n     |

    @R18.6
    Scenario: A model without a chat template takes prompts alone
      Given a client of a server whose model has no chat template
      When it posts /v1/chat/completions {"messages": [{"role": "user", "content": "a"}]}
      Then it is refused with 400 for messages: "smollm2_135m has no chat template, which messages need; give a text as prompt"

    @R18.6
    Scenario: A model without a tokenizer takes token ids alone
      Given a client of a server whose model has no tokenizer
      When it posts /v1/completions {"prompt": "a"}
      Then it is refused with 400 for prompt: "smollm2_135m has no tokenizer: send token ids as prompt to /v1/completions"
      When it completes {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 1, "return_token_ids": true}
      Then the prompt was [504, 3575, 282, 4649, 314] and the answer [7042]

    @R18.6
    Scenario: An unknown path and a wrong method have the shape of every error
      When it gets /nowhere
      Then it is refused with 404: "GET /nowhere: Not Found"
      When it gets /v1/completions
      Then it is refused with 405: "GET /v1/completions: Method Not Allowed"

  Rule: Who runs the server sees and controls it

    @R18.7
    Scenario: It is ready, and every invariant of its memory holds
      When it gets /health?audit=true
      Then it gets the JSON {"status": "ready", "audit": []}

    @R18.7
    Scenario: Metrics count what was served, under vLLM's names
      When the metrics are read before and after it completes {"prompt": [600, 601, 602, 603], "max_tokens": 6, "ignore_eos": true}
      Then these grew by
        | vllm:prompt_tokens_total                              | 4 |
        | vllm:generation_tokens_total                          | 6 |
        | vllm:request_success_total{finished_reason="length"}  | 1 |
        | vllm:prefix_cache_queries_total                       | 4 |
        | vllm:prefix_cache_hits_total                          | 0 |
        | vllm:time_to_first_token_seconds_count                | 1 |
        | vllm:inter_token_latency_seconds_count                | 5 |
        | vllm:e2e_request_latency_seconds_count                | 1 |
        | vllm:request_queue_time_seconds_count                 | 1 |
        | vllm:request_prefill_time_seconds_count               | 1 |
        | vllm:request_decode_time_seconds_count                | 1 |
        | vllm:request_inference_time_seconds_count             | 1 |
        | vllm:request_time_per_output_token_seconds_count      | 1 |
        | vllm:request_prefill_kv_computed_tokens_sum           | 4 |

    @R23.5
    Scenario: Its memory, while it serves 20 tokens of prompt and 13 of output in blocks of 16
      When the metrics are read before and after it completes {"prompt": [700, 701, 702, 703, 704, 705, 706, 707, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717, 718, 719], "max_tokens": 13, "ignore_eos": true}
      Then these grew by
        | kvlab:kv_blocks_allocated_total | 2 |
        | kvlab:kv_blocks_freed_total     | 2 |
        | kvlab:kv_evictions_total        | 0 |
      And /stats has kv_usage_percent 0, fragmentation_percent 0, evictions and blocks_allocated_per_s above 0

    @R18.7
    Scenario: Statistics, version and documents are there for everybody
      Then /stats, /version, /docs and /openapi.json are answered

    @R18.8
    Scenario: A key is asked for, except by who probes the server
      Given a client of a server with {"api_key": "secret"} that has the key "secret"
      When it completes {"prompt": "The capital of France is", "max_tokens": 1}
      Then it gets " Paris"
      And without a key /health and /ping are answered
      And without a key its audit, which takes time of the engine, is refused

    @R18.8
    Scenario Outline: <what> is refused
      Given a client of a server with {"api_key": "secret"} that has the key "<key>"
      When it completes {"prompt": "The capital of France is", "max_tokens": 1}
      Then it is refused with 401: "a key is needed: send it as Authorization: Bearer KEY"

      Examples:
        | what                | key     |
        | a wrong key         | public  |
        | a part of the key   | secre   |
        | more than the key   | secrets |

    @R18.8
    Scenario: A port in use is told before the model is loaded
      When I start "kvlab serve" on the same port
      Then it ends with 2 and "Address already in use; choose another one, or server.port=0 for any that is free"

    @R18.8
    Scenario: SIGTERM lets open answers end, and takes no new ones
      Given "kvlab serve" on a slow simulated H200, with a client that has the first of 20 tokens
      When it gets SIGTERM
      Then /health says "draining"
      And it is refused with 503: "the server is shutting down and takes no more requests"
      And the client gets all 20 tokens
      And the server's command ends with 0

    @R18.8
    Scenario: A second SIGTERM ends at once
      Given "kvlab serve" on a slow simulated H200, with a client that has the first of 400 tokens
      When it gets SIGTERM twice
      Then the client's answer breaks off
      And the server's command ends with 130

    @R18.9
    Scenario Outline: A simulated device answers <how>
      Given a client of a server of Qwen3 8B on a simulated H200, with server.time_factor=<factor>, whose waiting is counted
      When it asks for 40 tokens
      Then the server waited as long as 40 passes take on an H200, divided by <factor>

      Examples:
        | how                    | factor |
        | in its own time        | 1      |
        | four times as slowly   | 0.25   |
        | ten times as fast      | 10     |

    @R18.9
    Scenario: A machine that does not keep up with the device says so
      Given a client of a server of Qwen3 8B on a simulated H200, with server.time_factor=5000
      When it completes 800 tokens
      Then /stats and the metrics have seconds by which steps began late
      And the log says "this machine does not keep up with the simulated device at server.time_factor=5000"
