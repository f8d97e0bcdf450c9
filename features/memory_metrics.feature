Feature: Figures about memory
  What part of the pool is in use, what part of that is wasted, how fast blocks are allocated and freed.

  Rule: Utilisation is blocks in use over blocks in the pool

    @R6.1
    Scenario Outline: "alice" has <alice> and "bob" <bob> tokens in <memory>
      Given a pool of <memory>
      And a sequence "alice" of <alice> tokens
      And a sequence "bob" of <bob> tokens
      Then <used> blocks of the pool are in use, <percent> %
      When "alice" ends
      And "bob" ends
      Then 0 blocks of the pool are in use, 0 %

      Examples:
        | memory                           | alice | bob | used | percent |
        | 8 blocks of 16 tokens            | 33    | 1   | 4    | 50      |
        | 8 blocks of 16 tokens            | 16    | 17  | 3    | 37.5    |
        | 8 blocks of 16 tokens            | 112   | 16  | 8    | 100     |
        | 200 blocks of 1 token            | 33    | 17  | 50   | 25      |
        | 4 contiguous slots of 128 tokens | 33    | 1   | 2    | 50      |

    @R6.1
    Scenario: A shared block is in use once, a cached one not at all
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And a text "bob" of 40 tokens whose first 32 are those of "alice"
      Then 4 blocks of the pool are in use, 50 %
      And sharing saves 2 blocks, and 0 are cached
      When "alice" ends
      Then 3 blocks of the pool are in use, 37.5 %
      And sharing saves 0 blocks, and 0 are cached
      When "bob" ends
      Then 0 blocks of the pool are in use, 0 %
      And sharing saves 0 blocks, and 2 are cached

  Rule: Internal fragmentation is the part of the blocks in use that holds no token

    @R6.2
    Scenario Outline: <tokens> tokens in <memory>
      Given a pool of <memory>
      And a sequence "alice" of <tokens> tokens
      Then <unused> token slots of the blocks in use are unused, <percent> % of them

      Examples:
        | memory                          | tokens | unused | percent |
        | 8 blocks of 16 tokens           | 1      | 15     | 93.75   |
        | 8 blocks of 16 tokens           | 15     | 1      | 6.25    |
        | 8 blocks of 16 tokens           | 16     | 0      | 0       |
        | 8 blocks of 16 tokens           | 17     | 15     | 46.875  |
        | 8 blocks of 16 tokens           | 40     | 8      | 16.6667 |
        | 64 blocks of 1 token            | 40     | 0      | 0       |
        | 2 blocks of 64 tokens           | 40     | 24     | 37.5    |
        | 2 contiguous slots of 64 tokens | 1      | 63     | 98.4375 |
        | 2 contiguous slots of 64 tokens | 40     | 24     | 37.5    |

    @R6.2
    Scenario: It follows a sequence that grows, and one that ends
      Given a pool of 8 blocks of 16 tokens
      And a sequence "alice" of 20 tokens
      And a sequence "bob" of 10 tokens
      Then 18 token slots of the blocks in use are unused, 37.5 % of them
      When "alice" grows by 12 tokens
      Then 6 token slots of the blocks in use are unused, 12.5 % of them
      When "alice" grows by 1 token
      Then 21 token slots of the blocks in use are unused, 32.8125 % of them
      When "bob" ends
      Then 15 token slots of the blocks in use are unused, 31.25 % of them
      When "alice" ends
      Then 0 token slots of the blocks in use are unused, 0 % of them

    @R6.2
    Scenario: Tokens that are shared count once
      Given a pool of 16 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And a text "bob" of 33 tokens whose first 32 are those of "alice"
      Then 23 token slots of the blocks in use are unused, 35.9375 % of them
      When "carol" is forked from "alice"
      Then 23 token slots of the blocks in use are unused, 35.9375 % of them
      When "carol" grows by 1 token
      Then 30 token slots of the blocks in use are unused, 37.5 % of them
      When "alice" ends
      Then 22 token slots of the blocks in use are unused, 34.375 % of them
      And every token of "bob" and "carol" reads back as it was written

    @R6.2
    Scenario: A step that fails after it copied a block leaves right figures
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And "bob" is forked from "alice"
      When a step fails in which "bob" computes 1 token
      Then 4 blocks of the pool are in use, 50 %
      And 16 token slots of the blocks in use are unused, 25 % of them
      And every token of "alice" and "bob" reads back as it was written

  Rule: Blocks that are allocated and freed are counted

    @R6.3
    Scenario: Blocks allocated and freed since the start
      Given a pool of 8 blocks of 16 tokens
      Then 0 blocks were allocated and 0 freed
      Given a sequence "alice" of 40 tokens
      Then 3 blocks were allocated and 0 freed
      When "alice" grows by 9 tokens
      Then 4 blocks were allocated and 0 freed
      When "alice" ends
      Then 4 blocks were allocated and 4 freed
      When a sequence "bob" of 129 tokens tries to enter
      Then 4 blocks were allocated and 4 freed

    @R6.3
    Scenario: A block that is shared is allocated once and freed once
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 32 tokens
      And a text "bob" with the tokens of "alice"
      Then 2 blocks were allocated and 0 freed
      When "alice" ends
      Then 2 blocks were allocated and 0 freed
      When "bob" ends
      Then 2 blocks were allocated and 2 freed
      When a text "carol" arrives with the tokens of "alice"
      Then 4 blocks were allocated and 2 freed

    @R6.3
    Scenario Outline: A run that takes <seconds> seconds, of <requests> requests with <blocks> blocks each
      Given the model "qwen3"
      And batches of up to 4 sequences
      And a clock on which each step takes <step> seconds
      And a server with 32 blocks of 16 tokens, on that clock
      When a run of <requests> requests of 40 prompt tokens and 10 output tokens is finished
      Then it took <seconds> seconds
      And its figures say <allocated> blocks allocated, <per_second> a second, and as many freed

      Examples:
        | requests | blocks | step | seconds | allocated | per_second |
        | 1        | 4      | 0.5  | 5       | 4         | 0.8        |
        | 4        | 4      | 0.25 | 3       | 16        | 5.3333     |

  Rule: What a run reports is what its step log says

    @R6.4
    Scenario Outline: Every figure about memory, recomputed from the log of <requests> requests in <memory>
      Given the model "qwen3"
      And no admission reserve
      And a server with <memory> that shares prefixes
      When a run of <requests> requests of 40 prompt tokens, the first 32 of which are the same, and 24 output tokens is finished
      Then the figures about memory equal those recomputed from its step log
      And each row of the step log says what the pool held in that step
      And the sums of the step log are what the pool counted
      And the run saw <events>

      Examples:
        | requests | memory                 | events                 |
        | 6        | 32 blocks of 16 tokens | hits                   |
        | 12       | 9 blocks of 16 tokens  | preemptions, evictions |
        | 6        | 200 blocks of 3 tokens | hits                   |

    @R6.4
    Scenario: With samples of a prompt, which are copied when they diverge
      Given the model "qwen3"
      And a server with 32 blocks of 16 tokens that shares prefixes
      When a run of 4 requests of 40 prompt tokens and 12 output tokens in 3 samples is finished
      Then the figures about memory equal those recomputed from its step log
      And each row of the step log says what the pool held in that step
      And the sums of the step log are what the pool counted
      And the run saw copies

    @R6.4
    Scenario: The step log is kept on disk as it was
      Given the model "qwen3"
      And a server with 16 blocks of 16 tokens that shares prefixes
      When a run of 6 requests of 40 prompt tokens, the first 32 of which are the same, and 24 output tokens is finished
      And its files are written and read again
      Then the figures about memory equal those recomputed from its step log
