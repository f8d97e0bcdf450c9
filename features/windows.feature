Feature: Layers with a sliding window give back what has left it
  A layer with a sliding window of 1,024 tokens never reads what is before them. Layers form groups by window, each
  with block tables of its own over one pool of equal blocks.

  Rule: A group holds the blocks that the queries of a step can see, and no others

    @R21.1
    Scenario Outline: A window of <window> tokens at <tokens> tokens
      Given blocks of 16 tokens, a group of layers that see all tokens, and two that see the last <window>
      When a sequence of <tokens> tokens is computed
      Then it holds <all> blocks of the first group and <last> of each of the others: <total>

      Examples: as vLLM's hybrid manager
        | window | tokens | all | last | total |
        | 32     | 112    | 7   | 2    | 11    |

      Examples: windows that are not whole blocks, and sequences that are within them
        | window | tokens | all | last | total |
        | 32     | 20     | 2   | 2    | 6     |
        | 32     | 113    | 8   | 3    | 14    |
        | 20     | 112    | 7   | 2    | 11    |
        | 33     | 112    | 7   | 3    | 13    |
        | 1      | 112    | 7   | 2    | 11    |

  Rule: The planner says what a run holds

    @R21.2
    Scenario Outline: Gemma 3 27B at 32,768 tokens, on a simulated H100 that decides its steps <when>
      Given "model=gemma3_27b executor=simulated hardware=h100_sxm model.max_seq_len=33000 scheduler.ahead=<ahead>"
      When one request grows to 32,768 tokens
      Then it holds <blocks> blocks of 1,310,720 bytes, and the planner says the same

      Examples: the token before sees its window while the next step is decided
        | when                      | ahead | blocks |
        | while the one before runs | true  | 2,438  |
        | one after the other       | false | 2,432  |

    @R21.2
    Scenario: Gemma 3 27B at 8,192 tokens has room for four times the sequences
      Given "model=gemma3_27b executor=simulated hardware=h100_sxm model.max_seq_len=33000 executor.memory_utilization=0.9 scheduler.max_batched_tokens=512 scheduler.max_batch_size=48"
      Then the planner has room for 16 sequences of 8,192 tokens, and for 4 with "kv.windows=false"

    @R21.2
    Scenario: A run says of how many layers its blocks are
      When I run "model=gemma3_tiny executor=simulated hardware=l4 kv.num_blocks=64" on a tiny model
      Then the message says "blocks of 16 tokens x 1 layer, "

  Rule: The answers are those of a cache that keeps every token

    @R21.3 @R4.5
    Scenario Outline: <family>: cold, warm, without sharing, and with every token kept
      Given a small <family> that transformers wrote, and its own greedy answers beyond its window
      When they are asked for in turn: cold, warm, without sharing, and with every token kept
      Then all 4 times the answers are transformers' own
      And the warm run found more than 100 tokens

      Examples:
        | family      |
        | gemma3_text |
        | mistral     |
        | gemma2      |

    @R21.3
    Scenario Outline: <family>: across eviction, preemption and prefix hits
      Given a small <family> that transformers wrote, and its own greedy answers beyond its window
      When 6 answers of 24 tokens are asked for twice of 24 blocks, which are overwritten when they are free
      Then all 2 times the answers are transformers' own
      And sequences were preempted, blocks evicted, and prefixes found

      Examples:
        | family      |
        | gemma3_text |
        | mistral     |
        | gemma2      |

    @R21.3 @every_backend
    Scenario: On each attention backend, across eviction, preemption and prefix hits
      Given a small gemma3_text that transformers wrote, and its own greedy answers beyond its window
      When 3 answers of 8 tokens are asked for twice of 12 blocks, which are overwritten when they are free
      Then all 2 times the answers are transformers' own
      And sequences were preempted, blocks evicted, and prefixes found

  Rule: Pins, which are of whole prefixes, are refused beside windows

    @R21.4
    Scenario: A pinned share
      Given "model=gemma3_27b executor=simulated hardware=h100_sxm model.max_seq_len=4096 kv.pinned_share=0.25"
      Then the engine is refused with "kv.pinned_share=0.25: pins whole prefixes, and layers of gemma3_27b keep the last 1,024 tokens; use kv.windows=false"
      And with "kv.windows=false" it is not refused so
