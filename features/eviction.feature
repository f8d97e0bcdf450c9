Feature: Cached blocks are evicted when memory is needed
  Blocks whose sequences have left keep their content, until their room is needed. Which goes first is a policy;
  what a running sequence holds is never among them.

  Rule: The least recently used block goes first, and a hit is a use

    @R7.1
    Scenario Outline: Three prompts left one after the other, and <used> came again
      Given a pool of 6 blocks of 16 tokens that shares prefixes
      And texts of 32 tokens were stored and freed: "alice", "bob", "carol"
      And a text "again" with the tokens of "<used>" was stored and freed
      When a text "new" of 32 tokens is stored and freed
      Then <first> are evicted, and the others are not
      When a text "newer" of 32 tokens is stored and freed
      Then <both> are evicted, and the others are not

      Examples:
        | used  | first   | both             |
        | alice | "bob"   | "bob", "carol"   |
        | bob   | "alice" | "alice", "carol" |
        | carol | "alice" | "alice", "bob"   |

    @R7.1
    Scenario: What is used for longest counts from when it is let go
      Given a pool of 5 blocks of 16 tokens that shares prefixes
      And a text "alice" of 32 tokens
      And a text "bob" of 32 tokens was stored and freed
      When "alice" ends
      And a text "new" of 48 tokens is stored and freed
      Then "bob" are evicted, and the others are not

    @R7.1
    Scenario: A free block without content is taken ahead of any cached one
      Given a pool of 4 blocks of 16 tokens that shares prefixes
      And a text "alice" of 48 tokens was stored and freed
      When a text "new" of 16 tokens arrives
      Then 0 blocks were evicted
      And the first 3 blocks of "alice" are cached, and no more

    @R7.1
    Scenario Outline: Only part of a text came again: its first <tokens> tokens
      Given a pool of 6 blocks of 16 tokens that shares prefixes
      And texts of 48 tokens were stored and freed: "alice", "bob"
      And a text "again" of <tokens> tokens was stored and freed that are the first of "alice"
      When a text "new" of <new> tokens is stored and freed
      Then the first <alice> blocks of "alice" are cached, and no more
      And the first <bob> blocks of "bob" are cached, and no more

      Examples:
        | tokens | new | alice | bob |
        | 32     | 16  | 2     | 3   |
        | 32     | 32  | 2     | 2   |
        | 32     | 64  | 2     | 0   |
        | 16     | 32  | 1     | 3   |

  Rule: What a running sequence holds is never evicted

    @R7.2
    Scenario Outline: 60 other texts are stored and freed while "alice" holds <blocks> of <pool> blocks, evicting by <policy>
      Given a pool of <pool> blocks of 16 tokens that shares prefixes and evicts by <policy>
      And a text "alice" of <tokens> tokens
      And "bob" is forked from "alice"
      And what each sequence reads is kept to compare with
      When 60 texts of up to <most> tokens are stored and freed
      Then at least 40 blocks were evicted
      And each sequence reads what was kept, bit for bit, before what is new
      And "alice" holds <blocks> blocks
      When "alice" and "bob" grow by 1 token in the same step
      Then each sequence reads what was kept, bit for bit, before what is new
      And every token of "alice" and "bob" reads back as it was written

      Examples:
        | policy  | pool | tokens | blocks | most |
        | lru     | 6    | 40     | 3      | 48   |
        | fifo    | 6    | 40     | 3      | 48   |
        | lfu     | 6    | 40     | 3      | 48   |
        | s3_fifo | 6    | 40     | 3      | 48   |
        | sieve   | 6    | 40     | 3      | 48   |
        | cost    | 6    | 40     | 3      | 48   |
        | lru     | 10   | 64     | 4      | 64   |

    @R7.2
    Scenario: When only a running sequence's blocks are left, it is refused
      Given a pool of 4 blocks of 16 tokens that shares prefixes
      And a text "old" of 16 tokens was stored and freed
      And a text "alice" of 48 tokens
      When a text "bob" of 17 tokens tries to enter
      Then it is refused: 2 blocks wanted, 1 free, 4 in the pool
      And nothing has changed
      And every token of "alice" reads back as it was written

    @R7.2
    Scenario Outline: The blocks a newcomer finds are not evicted for its own rest: <tokens> tokens, 48 of them cached
      Given a pool of 5 blocks of 16 tokens that shares prefixes
      And a text "old" of 48 tokens was stored and freed
      And a text "other" of 16 tokens was stored and freed
      When a text "new" of <tokens> tokens arrives whose first 48 are those of "old"
      Then "new" found 48 of its tokens in the cache and computed <rest>
      And <evicted> blocks were evicted
      And every token of "new" reads back as it was written

      Examples:
        | tokens | rest | evicted |
        | 64     | 16   | 0       |
        | 80     | 32   | 1       |

    @R7.2
    Scenario Outline: A busy server with <blocks> blocks answers as one that is alone with each
      Given the model "<model>"
      And no admission reserve
      And a server with <blocks> blocks of 16 tokens that shares prefixes
      When 12 prompts of 3 to 40 tokens behind the same 32 ask for 24 tokens each
      Then more than <evicted> blocks were evicted
      And every answer is what transformers generates, token for token
      And every block is free

      Examples:
        | model | blocks | evicted |
        | qwen3 | 10     | 10      |
        | qwen3 | 16     | 10      |
        | llama | 12     | 10      |

  Rule: Evictions are counted and logged

    @R7.3
    Scenario: Calls that had to evict, and the blocks they reclaimed
      Given a pool of 6 blocks of 16 tokens that shares prefixes
      And texts of 48 tokens were stored and freed: "alice", "bob"
      Then blocks were evicted 0 times, 0 blocks in all
      When a text "carol" of 40 tokens arrives
      Then blocks were evicted 1 time, 3 blocks in all
      When "carol" grows by 9 tokens
      Then blocks were evicted 2 times, 4 blocks in all
      When "carol" ends
      And a text "dave" of 10 tokens arrives
      Then blocks were evicted 2 times, 4 blocks in all

    @R7.3
    Scenario: The step log says in which step blocks were reclaimed
      Given the model "qwen3"
      And a server with 4 blocks of 16 tokens that shares prefixes
      And a request "alice" of 32 prompt tokens and 2 output tokens
      When the server steps until it has no work
      Then no step reclaimed a block
      When a request "bob" of 50 prompt tokens and 2 output tokens arrives
      And the server steps once
      Then that step evicted 1 time and reclaimed 2 blocks
      When the server steps until it has no work
      Then the step log has 1 eviction and 2 reclaimed blocks, as the pool counted
      And "bob" got what transformers generates, token for token

  Rule: The end of a text goes before its beginning

    @R7.4
    Scenario Outline: <evicted> of the 5 blocks of a text are evicted by <policy>
      Given a pool of 5 blocks of 16 tokens that shares prefixes and evicts by <policy>
      And a text "alice" of 80 tokens was stored and freed
      When a text "new" of <tokens> tokens arrives
      Then <evicted> blocks were evicted
      And the first <left> blocks of "alice" are cached, and no more

      Examples:
        | policy  | tokens | evicted | left |
        | lru     | 1      | 1       | 4    |
        | lru     | 30     | 2       | 3    |
        | lru     | 64     | 4       | 1    |
        | lru     | 80     | 5       | 0    |
        | fifo    | 1      | 1       | 4    |
        | fifo    | 30     | 2       | 3    |
        | fifo    | 64     | 4       | 1    |
        | fifo    | 80     | 5       | 0    |
        | lfu     | 1      | 1       | 4    |
        | lfu     | 30     | 2       | 3    |
        | lfu     | 64     | 4       | 1    |
        | lfu     | 80     | 5       | 0    |
        | s3_fifo | 30     | 2       | 3    |
        | s3_fifo | 64     | 4       | 1    |
        | sieve   | 30     | 2       | 3    |
        | sieve   | 64     | 4       | 1    |
        | cost    | 30     | 2       | 3    |
        | cost    | 64     | 4       | 1    |

    @R7.4
    Scenario Outline: What two texts begin with goes after both of their ends, evicting by <policy>
      Given a pool of 5 blocks of 16 tokens that shares prefixes and evicts by <policy>
      And a text "head" of 16 tokens was stored and freed
      And a text "alice" of 48 tokens was stored and freed whose first 16 are those of "head"
      And a text "bob" of 48 tokens was stored and freed whose first 16 are those of "head"
      When a text "new" of <tokens> tokens arrives
      Then <evicted> blocks were evicted
      And the first <left> blocks of "head" are cached, and no more

      Examples:
        | policy  | tokens | evicted | left |
        | lru     | 64     | 4       | 1    |
        | lru     | 80     | 5       | 0    |
        | fifo    | 64     | 4       | 1    |
        | fifo    | 80     | 5       | 0    |
        | lfu     | 64     | 4       | 1    |
        | lfu     | 80     | 5       | 0    |
        | s3_fifo | 64     | 4       | 1    |
        | s3_fifo | 80     | 5       | 0    |
        | sieve   | 64     | 4       | 1    |
        | sieve   | 80     | 5       | 0    |
        | cost    | 64     | 4       | 1    |
        | cost    | 80     | 5       | 0    |

    @R7.4
    Scenario: An aborted request leaves the beginning of its prompt to the next
      Given the model "qwen3"
      And a server with 5 blocks of 16 tokens that shares prefixes
      And a request "alice" of 64 prompt tokens and 10 output tokens
      When the server steps until "alice" is aborted after 3 tokens
      And a request "carol" of 20 prompt tokens and 8 output tokens arrives
      And the server steps until it has no work
      And a request "bob" comes with the prompt of "alice" and 4 output tokens
      And the server steps until it has no work
      Then "bob" found 48 of its prompt tokens in the cache
      And "bob" got what transformers generates, token for token

  Rule: Each policy orders evictions as its name says

    # Three texts came in this order; then "alice" was asked twice more, and "bob" once, last of all.

    @R7.5
    Scenario Outline: <policy> evicts <first>, then <second>, then <third>
      Given a pool of 6 blocks of 16 tokens that shares prefixes and evicts by <policy>
      And texts of 32 tokens were stored and freed: "alice", "bob", "carol"
      And a text "again" with the tokens of "alice" was stored and freed
      And a text "again" with the tokens of "alice" was stored and freed
      And a text "again" with the tokens of "bob" was stored and freed
      When a text "new" of 32 tokens arrives
      Then "<first>" are evicted, and the others are not
      When a text "newer" of 32 tokens arrives
      Then "<first>", "<second>" are evicted, and the others are not
      When a text "newest" of 32 tokens arrives
      Then "<first>", "<second>", "<third>" are evicted, and the others are not

      Examples:
        | policy  | first | second | third |
        | lru     | carol | alice  | bob   |
        | fifo    | alice | bob    | carol |
        | lfu     | carol | bob    | alice |
        | s3_fifo | bob   | carol  | alice |
        | sieve   | carol | alice  | bob   |
        | cost    | carol | bob    | alice |

    @R7.5
    Scenario: A count of hits ends with the content it was of
      Given a pool of 4 blocks of 16 tokens that shares prefixes and evicts by lfu
      And a text "alice" of 32 tokens was stored and freed
      And a text "again" with the tokens of "alice" was stored and freed
      And a text "again" with the tokens of "alice" was stored and freed
      And a text "all" of 64 tokens was stored and freed
      When a text "bob" of 32 tokens is stored and freed
      And a text "carol" of 32 tokens is stored and freed
      And a text "again" with the tokens of "carol" is stored and freed
      And a text "new" of 32 tokens is stored and freed
      Then "alice", "all", "bob" are evicted, and the others are not

    @R7.5
    Scenario Outline: kv.eviction=<policy> is what the server evicts by
      Given a server configured with kv.num_blocks=6, kv.eviction=<policy>
      And sequences of up to 64 tokens
      When the server starts
      And its pool serves texts
      Given texts of 32 tokens were stored and freed: "alice", "bob"
      And a text "again" with the tokens of "alice" was stored and freed
      When a text "new" of 48 tokens arrives
      Then "<evicted>" is the text that lost blocks

      Examples:
        | policy  | evicted |
        | lru     | bob     |
        | lfu     | bob     |
        | fifo    | alice   |
        | s3_fifo | alice   |
        | sieve   | bob     |
        | cost    | bob     |

    @R7.5
    Scenario Outline: A text that was hit twice <stays> under <policy> while others pass that come once
      Given a pool of 6 blocks of 16 tokens that shares prefixes and evicts by <policy>
      And a text "alice" of 32 tokens was stored and freed
      And a text "again" with the tokens of "alice" was stored and freed
      And a text "again" with the tokens of "alice" was stored and freed
      And texts of 32 tokens were stored and freed: "one", "two", "three", "four"
      Then the first <left> blocks of "alice" are cached, and no more

      Examples:
        | policy  | stays | left |
        | lru     | goes  | 0    |
        | fifo    | goes  | 0    |
        | s3_fifo | stays | 2    |
        | sieve   | stays | 2    |
        | cost    | stays | 2    |

    @R7.5
    Scenario: Of two texts that were never hit, the one whose end costs more to compute again stays under cost
      Given a pool of 8 blocks of 16 tokens that shares prefixes and evicts by cost
      And a text "long" of 96 tokens was stored and freed
      And a text "short" of 32 tokens was stored and freed
      When a text "new" of 32 tokens arrives
      Then the first 6 blocks of "long" are cached, and no more
      And the first 0 blocks of "short" are cached, and no more
