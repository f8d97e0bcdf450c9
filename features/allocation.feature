Feature: KV memory is handed out in pages
  K and V are kept in blocks of a fixed number of token slots. A sequence takes blocks as it grows, so that
  it never holds more than one block which is not full.

  Rule: A sequence takes a block when its last one is full, and not before

    @R1.1
    Scenario Outline: A sequence of <tokens> tokens in blocks of <block_size> grows by one
      Given a pool of 8 blocks of <block_size> tokens
      And a sequence "alice" of <tokens> tokens
      When "alice" grows by 1 token
      Then "alice" gets <taken> more blocks, out of those that were free
      And every token of "alice" reads back as it was written

      Examples:
        | block_size | tokens | taken |
        | 16         | 1      | 0     |
        | 16         | 15     | 0     |
        | 16         | 16     | 1     |
        | 16         | 17     | 0     |
        | 16         | 112    | 1     |
        | 1          | 3      | 1     |
        | 8          | 8      | 1     |
        | 32         | 16     | 0     |

    @R1.1
    Scenario: A long answer takes a block every sixteenth token
      Given a pool of 8 blocks of 16 tokens
      And a sequence "alice" of 10 tokens
      When "alice" grows token by token to 80 tokens
      Then "alice" took one block each for tokens 17, 33, 49, 65 and none for the others

    @R1.1
    Scenario: In a batch, only the sequences whose last block is full get one
      Given a pool of 8 blocks of 16 tokens
      And a sequence "alice" of 16 tokens
      And a sequence "bob" of 15 tokens
      And a sequence "carol" of 31 tokens
      When "alice", "bob" and "carol" grow by 1 token in the same step
      Then "alice" gets 1 more block, out of those that were free
      And "bob" and "carol" get 0 more blocks
      When "alice", "bob" and "carol" grow by 1 token in the same step
      Then "bob" and "carol" get 1 more block, out of those that were free
      And "alice" gets 0 more blocks
      And every token of "alice", "bob" and "carol" reads back as it was written

    @R1.1
    Scenario: In a full pool a sequence fills the room of its last block, and not a token more
      Given a pool of 2 blocks of 16 tokens
      And a sequence "alice" of 20 tokens
      When "alice" grows by 12 tokens
      Then "alice" gets 0 more blocks
      When "alice" tries to grow by 1 token
      Then it is refused: 1 block wanted, 0 free, 2 in the pool
      And "alice" holds 2 blocks
      And every token of "alice" reads back as it was written

  Rule: Every block has the same size

    @R1.2
    Scenario: A block holds 16 tokens unless another size is configured
      Given a server configured with kv.memory=1MiB
      When the server starts
      Then its pool has 128 blocks of 16 tokens
      And K and V of every block are shaped 2 x 16 x 16 in each of 2 layers

    @R1.2
    Scenario Outline: Blocks of <block_size> tokens, as configured
      Given a server configured with kv.memory=1MiB, kv.block_size=<block_size>
      When the server starts
      Then its pool has <blocks> blocks of <block_size> tokens
      And K and V of every block are shaped 2 x <block_size> x 16 in each of 2 layers

      Examples:
        | block_size | blocks |
        | 1          | 2048   |
        | 32         | 64     |
        | 256        | 8      |

    @R1.2
    Scenario: No other size ever appears, whatever the lengths of sequences
      Given a pool of 16 blocks of 16 tokens
      And a sequence "alice" of 40 tokens
      And a sequence "bob" of 1 token
      And a sequence "carol" of 64 tokens
      When "bob" ends
      And "alice" grows by 30 tokens
      And a sequence "dave" of 33 tokens arrives
      Then the blocks of "alice" hold 16, 16, 16, 16, 6 of its tokens
      And the blocks of "carol" hold 16, 16, 16, 16 of its tokens
      And the blocks of "dave" hold 16, 16, 1 of its tokens
      And no block is held by two of them
      And K and V of every block are shaped 2 x 16 x 16 in each of 2 layers

  Rule: A sequence of n tokens holds n / block_size blocks, rounded up

    @R1.3
    Scenario Outline: <tokens> tokens, prefilled <way>, hold <blocks> blocks
      Given a pool of 64 blocks of 16 tokens
      When "alice" is prefilled with <tokens> tokens <way>
      Then "alice" holds <blocks> blocks
      And <free> blocks are free
      And every token of "alice" reads back as it was written

      Examples: The whole prompt in one step
        | tokens | way     | blocks | free |
        | 1      | at once | 1      | 63   |
        | 15     | at once | 1      | 63   |
        | 16     | at once | 1      | 63   |
        | 17     | at once | 2      | 62   |
        | 31     | at once | 2      | 62   |
        | 32     | at once | 2      | 62   |
        | 33     | at once | 3      | 61   |
        | 1000   | at once | 63     | 1    |

      Examples: Grown bit by bit
        | tokens | way                 | blocks | free |
        | 32     | token by token      | 2      | 62   |
        | 33     | token by token      | 3      | 61   |
        | 33     | in chunks of 7      | 3      | 61   |
        | 1000   | in chunks of 100    | 63     | 1    |

    @R1.3
    Scenario Outline: A contiguous slot of 1024 tokens is taken whole for <tokens> tokens
      Given a pool of 2 contiguous slots of 1024 tokens
      When "alice" is prefilled with <tokens> tokens at once
      Then "alice" holds 1 block
      And 1 block is free

      Examples:
        | tokens |
        | 1      |
        | 1000   |

  Rule: Any block size works

    @R1.4 @every_backend
    Scenario Outline: 310 tokens in blocks of <block_size>
      Given a pool of <pool> blocks of <block_size> tokens
      And the free blocks are in shuffled order
      When "alice" is prefilled with 300 tokens in chunks of 64
      And "alice" grows token by token to 310 tokens
      Then "alice" holds <blocks> blocks
      And every token of "alice" reads back as it was written
      When "alice" attends with 1 new token
      Then each sequence gets what plain attention gives

      Examples:
        | block_size | pool | blocks |
        | 1          | 400  | 310    |
        | 8          | 50   | 39     |
        | 32         | 12   | 10     |
        | 64         | 6    | 5      |
        | 256        | 3    | 2      |
