Feature: The engine gives the same answers from any memory, and paged memory serves more at once

  Rule: Memory never changes an answer

    # Greedy decoding in float32, for models with random weights, against transformers' generate.

    @R10.2
    Scenario Outline: 8 prompts through <memory> with <model>
      Given the model "<model>"
      And a server with <memory>
      When 8 prompts of 3 to 60 tokens ask for 32 tokens each
      Then every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | model       | memory                           |
        | qwen3       | 8 contiguous slots of 96 tokens  |
        | qwen3       | 64 blocks of 16 tokens           |
        | qwen3       | 1024 blocks of 1 token           |
        | qwen3       | 100 blocks of 12 tokens          |
        | llama       | 8 contiguous slots of 96 tokens  |
        | llama       | 64 blocks of 16 tokens           |
        | llama3 rope | 8 contiguous slots of 96 tokens  |
        | llama3 rope | 64 blocks of 16 tokens           |
        | qwen2       | 8 contiguous slots of 96 tokens  |
        | qwen2       | 64 blocks of 16 tokens           |
        | gemma3      | 8 contiguous slots of 96 tokens  |
        | gemma3      | 64 blocks of 16 tokens           |

    @R10.2
    Scenario Outline: Prompts in chunks, as steps of up to <tokens> tokens allow, through <memory>
      Given the model "qwen3"
      And steps of up to <tokens> tokens
      And a server with <memory>
      When 8 prompts of 3 to 60 tokens ask for 32 tokens each
      Then every answer is what transformers generates, token for token

      Examples:
        | tokens | memory                          |
        | 8      | 8 contiguous slots of 96 tokens |
        | 8      | 64 blocks of 16 tokens          |
        | 13     | 64 blocks of 16 tokens          |
        | 512    | 64 blocks of 16 tokens          |

    @R10.2
    Scenario Outline: Slots that are used again: 8 prompts through <memory>
      Given the model "llama"
      And a server with <memory>
      When 8 prompts of 3 to 60 tokens ask for 32 tokens each
      Then every answer is what transformers generates, token for token

      Examples:
        | memory                          |
        | 2 contiguous slots of 96 tokens |
        | 3 contiguous slots of 96 tokens |

    @R10.2
    Scenario Outline: Preempted and resumed, in <memory>
      Given the model "<model>"
      And no admission reserve
      And a server with <memory>
      When 8 prompts of 3 to 60 tokens ask for 32 tokens each
      Then at least <preempted> requests lost their blocks and were computed again
      And every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | model  | memory                 | preempted |
        | qwen3  | 6 blocks of 16 tokens  | 4         |
        | qwen3  | 16 blocks of 16 tokens | 3         |
        | qwen3  | 96 blocks of 1 token   | 4         |
        | llama  | 16 blocks of 16 tokens | 3         |
        | gemma3 | 16 blocks of 16 tokens | 3         |

  Rule: At equal KV bytes, paged memory runs more sequences at once when they are shorter than the longest allowed

    @R10.3
    Scenario Outline: <requests> requests of <prompt> + <output> tokens where 256 are allowed
      Given the model "qwen3"
      And batches of up to 32 sequences
      And servers with 4 contiguous slots of 256 tokens and with 64 blocks of 16 tokens
      When both serve <requests> requests of <prompt> prompt tokens and <output> output tokens
      Then both have 524288 bytes for K and V
      And the contiguous one ran 4 sequences at once, the paged one at least <paged>
      And both answer what transformers generates, token for token

      Examples:
        | requests | prompt | output | paged |
        | 32       | 12     | 8      | 32    |
        | 18       | 32     | 16     | 18    |
        | 10       | 60     | 30     | 10    |

  Rule: A running server can be asked how it is, from another thread and at any time

    # What it tells is how the last step left it. All three share the two blocks of their prompt; an output's first
    # token takes one more block when it is stored, which is in the step after it was sampled. Two run at once.

    @R10.5
    Scenario: Asked in the middle of each step
      Given the model "qwen3"
      And batches of up to 2 sequences
      And a server with 32 blocks of 16 tokens that shares prefixes
      And requests with the same 32 prompt tokens and 3, 3 and 2 output tokens
      When another thread asks the server how it is in the middle of each step
      Then it was told
        | in step | running | waiting | batches | output tokens | blocks in use | hit rate |
        | 1       | 0       | 3       | 0       | 0             | 0             | None     |
        | 2       | 2       | 1       | 1       | 2             | 2             | 0.48     |
        | 3       | 2       | 1       | 2       | 4             | 4             | 0.48     |
        | 4       | 2       | 1       | 3       | 6             | 4             | 0.48     |
        | 5       | 1       | 0       | 4       | 7             | 2             | 0.65     |
