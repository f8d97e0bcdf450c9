Feature: The allocator refuses what would break it, and finds what was lost

  Rule: A block is freed by its owner, once

    @R8.1
    Scenario Outline: Of 8 blocks, 0 to 3 are handed out; freeing <blocks> is refused
      Given an allocator of 8 blocks
      And blocks 0, 1, 2, 3 are handed out, and 3 is freed again
      When blocks <blocks> are freed by mistake
      Then it is refused, naming block <named>
      And the allocator is as it was

      Examples: Twice
        | blocks     | named |
        | 3          | 3     |
        | 0, 0       | 0     |
        | 1, 0, 1    | 1     |
        | 0, 1, 2, 3 | 3     |
        | 2, 1, 3, 0 | 3     |

      Examples: Never handed out
        | blocks  | named |
        | 5       | 5     |
        | 0, 1, 5 | 5     |
        | 5, 0    | 5     |

      Examples: No block of the pool
        | blocks  | named |
        | 8       | 8     |
        | -1      | -1    |
        | -8      | -8    |
        | 1, -8   | -8    |
        | 1, 1000 | 1000  |

    @R8.1
    Scenario Outline: A block that 2 hold is freed by <blocks>
      Given an allocator of 8 blocks
      And blocks 0, 1 are handed out, and 1 is shared
      When blocks <blocks> are freed by mistake
      Then it is refused, naming block <named>
      And the allocator is as it was
      When blocks 0, 1, 1 are freed
      Then all 8 blocks are free

      Examples:
        | blocks     | named |
        | 1, 1, 1    | 1     |
        | 1, 1, 0, 0 | 0     |
        | 1, 0, 2    | 2     |

    @R8.1
    Scenario: One owner does not free what another holds
      Given an allocator of 8 blocks
      And "alice" owns 3 blocks and "bob" 2
      When "bob" frees a block of his own and one of "alice"
      Then it is refused, naming that block
      And the allocator is as it was

    @R8.1
    Scenario Outline: Sharing <block>, which no sequence holds
      Given an allocator of 8 blocks
      And blocks 0, 1, 2, 3 are handed out, and 3 is freed again
      When blocks <block> are shared by mistake
      Then it is refused, naming block <named>
      And the allocator is as it was

      Examples:
        | block   | named |
        | 3       | 3     |
        | 0, 1, 7 | 7     |
        | 8       | 8     |
        | 0, -1   | -1    |

    @R8.1
    Scenario: A sequence is ended once
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And a text "bob" of 20 tokens
      When "bob" ends, and is ended once more by mistake
      Then nothing has changed
      And every token of "alice" reads back as it was written

  Rule: An allocation that is refused changes nothing

    @R8.2
    Scenario Outline: <count> blocks are asked for when <free> of 8 are free
      Given an allocator of 8 blocks
      And all but <free> blocks are handed out
      When <count> blocks are asked for
      Then it is refused: <count> blocks wanted, <free> free, 8 in the pool
      And the allocator is as it was
      And <free> blocks can still be had

      Examples:
        | free | count |
        | 0    | 1     |
        | 3    | 4     |
        | 7    | 1000  |

    @R8.2
    Scenario: What is cached is not evicted for an allocation that fails
      Given a pool of 6 blocks of 16 tokens that shares prefixes
      And a text "old" of 48 tokens was stored and freed
      And a text "alice" of 20 tokens
      When a text "bob" of 65 tokens tries to enter
      Then it is refused: 5 blocks wanted, 4 free, 6 in the pool
      And nothing has changed

    @R8.2
    Scenario Outline: A prompt of <tokens> tokens, 48 of them cached, comes when <free> blocks are free
      Given a pool of 6 blocks of 16 tokens that shares prefixes
      And a text "old" of 48 tokens was stored and freed
      And a text "alice" of <alice> tokens
      When a text "bob" of <tokens> tokens tries to enter whose first 48 are those of "old"
      Then it is refused: <wanted> blocks wanted, <free> free, 6 in the pool
      And nothing has changed

      Examples:
        | alice | free | tokens | wanted |
        | 32    | 4    | 80     | 5      |
        | 48    | 3    | 49     | 4      |
        | 48    | 3    | 96     | 6      |

    @R8.2
    Scenario: Of three sequences that grow in a step the last has no room, and none of them grows
      Given a pool of 5 blocks of 16 tokens that shares prefixes
      And a text "alice" of 16 tokens
      And a text "bob" of 16 tokens
      And a text "carol" of 16 tokens
      When "alice", "bob" and "carol" try to grow by 1 token in the same step
      Then it is refused: 3 blocks wanted, 2 free, 5 in the pool
      And it names "carol"
      And nothing has changed
      When "alice" and "bob" grow by 1 token in the same step
      Then every token of "alice", "bob" and "carol" reads back as it was written

    @R8.2
    Scenario: A fork whose copy has no room grows no sequence
      Given a pool of 4 blocks of 16 tokens that shares prefixes
      And a text "alice" of 20 tokens
      And "bob" and "carol" are forked from "alice"
      And a text "dave" of 16 tokens
      When "dave", "bob" and "carol" try to grow by 1 token in the same step
      Then it is refused: 3 blocks wanted, 1 free, 4 in the pool
      And it names "bob", "carol"
      And nothing has changed

  Rule: Nothing can be asked for

    @R8.3
    Scenario Outline: 0 blocks of <blocks>, <taken> of which are handed out
      Given an allocator of <blocks> blocks
      And <taken> blocks are handed out
      When 0 blocks are asked for
      Then none is handed out
      And the allocator is as it was

      Examples:
        | blocks | taken |
        | 8      | 0     |
        | 8      | 8     |
        | 8      | 3     |
        | 0      | 0     |

    @R8.3
    Scenario Outline: <count> of 0 blocks
      Given an allocator of 0 blocks
      When <count> blocks are asked for
      Then it is refused: <count> blocks wanted, 0 free, 0 in the pool
      And the allocator is as it was

      Examples:
        | count |
        | 1     |
        | 16    |

    @R8.3
    Scenario Outline: Of 0 blocks, block <block> is <what>
      Given an allocator of 0 blocks
      When blocks <block> are <what> by mistake
      Then it is refused, naming block <block>
      And the allocator is as it was

      Examples:
        | block | what   |
        | 0     | freed  |
        | 0     | shared |
        | -1    | freed  |

  Rule: Blocks whose owner is gone are found and reclaimed

    @R8.4
    Scenario: Two owners vanished with 3 and 2 blocks
      Given a pool of 12 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And "ghost" took 3 blocks and vanished
      And "phantom" took 2 blocks and vanished
      Then the blocks of owners that are gone are 3 of "ghost" and 2 of "phantom"
      And the audit finds these 5 blocks leaked, and says who holds them
      When leaked blocks are reclaimed
      Then that gave back 5 blocks
      And 9 blocks are free
      And nothing is leaked
      And every token of "alice" reads back as it was written
      When a text "bob" of 144 tokens arrives
      Then every token of "alice" and "bob" reads back as it was written

    @R8.4
    Scenario: A sequence's table is gone, and its blocks were never freed
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And a text "bob" of 50 tokens whose first 32 are those of "alice"
      And the table of "bob" is dropped without freeing its blocks
      Then the blocks of owners that are gone are 4 of "bob"
      When leaked blocks are reclaimed
      Then that gave back 2 blocks
      And nothing is leaked
      And 3 blocks of the pool are in use, 37.5 %
      And 8 token slots of the blocks in use are unused, 16.6667 % of them
      And every token of "alice" reads back as it was written

    @R8.4
    Scenario: One vanished that shared the blocks of a running sequence
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And "ghost" shared the first 2 blocks of "alice" and vanished
      Then the blocks of owners that are gone are 2 of "ghost"
      When leaked blocks are reclaimed
      Then that gave back 0 blocks
      And nothing is leaked
      And 3 blocks are in use
      And every token of "alice" reads back as it was written
      When "alice" ends
      Then 8 blocks are free

    @R8.4
    Scenario: A running sequence is no leak
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And a text "bob" of 40 tokens whose first 32 are those of "alice"
      Then nothing is leaked
      When leaked blocks are reclaimed
      Then that gave back 0 blocks
      And every token of "alice" and "bob" reads back as it was written

  Rule: Blocks that no table names are found and reclaimed

    @R8.5
    Scenario: Blocks that were allocated and recorded nowhere
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And 2 blocks are allocated and recorded nowhere
      And "alice" was given a block that her table does not name
      Then 3 blocks are named by no table
      And the audit finds these 3 blocks leaked, and says who holds them
      When leaked blocks are reclaimed
      Then that gave back 3 blocks
      And nothing is leaked
      And 5 blocks are free
      And every token of "alice" reads back as it was written
      When "alice" ends
      Then 8 blocks are free

    @R8.5
    Scenario: Figures stay right after a recovery
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And 2 blocks are allocated and recorded nowhere
      When leaked blocks are reclaimed
      Then 3 blocks of the pool are in use, 37.5 %
      And 8 token slots of the blocks in use are unused, 16.6667 % of them

    @R8.5
    Scenario: A reference that is recorded nowhere keeps a block of a sequence that has ended
      Given a pool of 8 blocks of 16 tokens that shares prefixes
      And a text "alice" of 40 tokens
      And the first block of "alice" was shared once more, and that was recorded nowhere
      When "alice" has ended
      Then 1 block is named by no table
      When leaked blocks are reclaimed
      Then that gave back 1 block
      And 0 blocks of the pool are in use, 0 %
      And 0 token slots of the blocks in use are unused, 0 % of them
      And 8 blocks are free
      And the first 2 blocks of "alice" are cached, and no more

    @R8.5
    Scenario Outline: Normal operation of a server leaves none: <memory>
      Given the model "qwen3"
      And no admission reserve
      And a server with <memory> that shares prefixes
      When requests come, share, fork, are preempted, fail and are aborted
      Then no step left a leaked block
      And nothing is leaked
      And every block is free

      Examples:
        | memory                 |
        | 12 blocks of 16 tokens |
        | 14 blocks of 16 tokens |
        | 40 blocks of 5 tokens  |
