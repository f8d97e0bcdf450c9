Feature: Attention reads and writes pages
  Every scenario on reading runs once for each attention backend and compares it with plain attention over the
  K and V that were written, kept apart from the pool.

  Rule: K and V are read from a sequence's blocks through its table

    @R5.1 @every_backend
    Scenario Outline: Whatever else the pool holds, a sequence of <tokens> tokens reads its own
      Given a pool of 16 blocks of 16 tokens
      And the free blocks are in shuffled order
      And a sequence "bob" of 50 tokens
      And a sequence "alice" of <tokens> tokens
      And every token slot without a token holds garbage
      When "alice" attends with 1 new token
      Then each sequence gets what plain attention gives
      When "alice" attends with 5 new tokens
      Then each sequence gets what plain attention gives

      Examples:
        | tokens |
        | 1      |
        | 16     |
        | 40     |
        | 90     |

    @R5.1 @every_backend
    Scenario Outline: Attention follows the table when block <entry> of a sequence moves
      Given a pool of 16 blocks of 16 tokens
      And a sequence "alice" of 60 tokens
      When block <entry> of "alice" moves to another place in the pool, and its old place is wiped
      And "alice" attends with 1 new token
      Then each sequence gets what plain attention gives

      Examples:
        | entry |
        | 0     |
        | 1     |
        | 3     |

  Rule: K and V are written where the table says, and nowhere else

    @R5.2
    Scenario Outline: A step of <new> tokens on top of <tokens>, in a pool of <memory>
      Given a pool of <memory>
      And the free blocks are in shuffled order
      And a sequence "bob" of 20 tokens
      And a sequence "alice" of <tokens> tokens
      And every token slot without a token holds a canary of its own
      When "alice" grows by <new> tokens
      Then every token of "alice" reads back as it was written
      And no other token slot of the pool has changed a bit

      Examples:
        | memory                          | tokens | new |
        | 16 blocks of 16 tokens          | 14     | 1   |
        | 16 blocks of 16 tokens          | 15     | 1   |
        | 16 blocks of 16 tokens          | 16     | 1   |
        | 16 blocks of 16 tokens          | 14     | 40  |
        | 16 blocks of 16 tokens          | 16     | 32  |
        | 100 blocks of 1 token           | 14     | 40  |
        | 3 contiguous slots of 64 tokens | 14     | 40  |

    @R5.2
    Scenario: A batch writes each sequence's tokens into its own blocks
      Given a pool of 16 blocks of 16 tokens
      And the free blocks are in shuffled order
      And a sequence "alice" of 15 tokens
      And a sequence "bob" of 16 tokens
      And a sequence "carol" of 1 token
      And every token slot without a token holds a canary of its own
      When the sequences grow in the same step
        | sequence | tokens |
        | bob      | 1      |
        | alice    | 20     |
        | carol    | 2      |
      Then every token of "alice", "bob" and "carol" reads back as it was written
      And no other token slot of the pool has changed a bit

    @R5.2
    Scenario: Writing one layer leaves the other as it was
      Given a pool of 16 blocks of 16 tokens
      And a sequence "alice" of 20 tokens
      And every token slot without a token holds a canary of its own
      When "alice" grows by 3 tokens in layer 0 alone
      Then layer 1 has not changed a bit

  Rule: A block boundary loses nothing

    @R5.3 @every_backend
    Scenario Outline: <tokens> tokens in blocks of <block_size>
      Given a pool of <pool> blocks of <block_size> tokens
      And the free blocks are in shuffled order
      And an empty sequence "whole"
      And an empty sequence "half"
      And an empty sequence "last"
      When "whole" attends with <tokens> new tokens
      Then each sequence gets what plain attention gives
      When "half" grows by <half> tokens
      And "half" attends with <rest> new tokens
      Then each sequence gets what plain attention gives
      When "last" grows by <but_one> tokens
      And "last" attends with 1 new token
      Then each sequence gets what plain attention gives

      Examples:
        | block_size | pool | tokens | half | rest | but_one |
        | 16         | 9    | 15     | 7    | 8    | 14      |
        | 16         | 9    | 16     | 8    | 8    | 15      |
        | 16         | 9    | 17     | 8    | 9    | 16      |
        | 16         | 9    | 32     | 16   | 16   | 31      |
        | 16         | 9    | 33     | 16   | 17   | 32      |
        | 8          | 9    | 17     | 8    | 9    | 16      |
        | 1          | 9    | 3      | 1    | 2    | 2       |
        | 64         | 9    | 129    | 64   | 65   | 128     |

  Rule: In a batch, each sequence gets what it gets alone

    @R5.4 @every_backend
    Scenario Outline: Five sequences of 1 to 101 tokens in one batch, in <memory>
      Given a pool of <memory>
      And the free blocks are in shuffled order
      And sequences of these lengths
        | sequence | tokens |
        | alice    | 16     |
        | bob      | 0      |
        | carol    | 100    |
        | dave     | 1      |
        | erin     | 33     |
      When they attend in one batch with new tokens
        | sequence | tokens |
        | alice    | 1      |
        | bob      | 17     |
        | carol    | 1      |
        | dave     | 40     |
        | erin     | 5      |
      Then each sequence gets what plain attention gives
      And each sequence gets what it gets alone

      Examples:
        | memory                           |
        | 20 blocks of 16 tokens           |
        | 9 blocks of 64 tokens            |
        | 5 contiguous slots of 128 tokens |

    @R5.4 @every_backend
    Scenario: Decoding together, token after token
      Given a pool of 20 blocks of 16 tokens
      And the free blocks are in shuffled order
      And a sequence "alice" of 14 tokens
      And a sequence "bob" of 3 tokens
      And a sequence "carol" of 31 tokens
      When "alice", "bob" and "carol" attend with 1 new token each, 4 times
      Then each sequence gets what plain attention gives
      And each sequence gets what it gets alone

  Rule: Query heads share K and V by index, and K and V are stored once

    @R5.5 @every_backend
    Scenario Outline: <heads> query heads over <kv_heads> KV heads
      Given a pool of 8 blocks of 16 tokens for <heads> query heads and <kv_heads> KV heads
      And a sequence "alice" of 40 tokens
      When "alice" attends with 1 new token
      Then each sequence gets what plain attention gives with each KV head repeated <group> times
      When "alice" attends with 9 new tokens
      Then each sequence gets what plain attention gives with each KV head repeated <group> times
      And a token takes <bytes> bytes in the pool

      Examples:
        | heads | kv_heads | group | bytes |
        | 8     | 8        | 1     | 2048  |
        | 8     | 4        | 2     | 1024  |
        | 8     | 2        | 4     | 512   |
        | 8     | 1        | 8     | 256   |
        | 6     | 2        | 3     | 512   |

    @R5.5 @every_backend
    Scenario Outline: Where KV head j holds the number j, query heads answer with the number of theirs
      Given a pool of 8 blocks of 16 tokens for <heads> query heads and <kv_heads> KV heads
      And a sequence "alice" of 40 tokens whose V is the number of its KV head
      When "alice" attends with <new> new tokens
      Then its query heads answer <answers>

      Examples:
        | heads | kv_heads | new | answers         |
        | 8     | 2        | 1   | 0 0 0 0 1 1 1 1 |
        | 8     | 2        | 20  | 0 0 0 0 1 1 1 1 |
        | 8     | 4        | 1   | 0 0 1 1 2 2 3 3 |
        | 6     | 2        | 1   | 0 0 0 1 1 1     |
        | 4     | 4        | 1   | 0 1 2 3         |

  Rule: A backend computes what it supports, and says why where it does not

    @R5.6 @every_backend
    Scenario Outline: Whatever a backend says it supports, it computes as plain attention does
      Given a pool of 40 blocks of <block> tokens for <heads> query heads and <kv> KV heads of <dim> numbers in <dtype>
      And attention with a window of <window> tokens and scores capped at <cap>
      And the free blocks are in shuffled order
      And a sequence "alice" of 21 tokens
      And a sequence "bob" of 8 tokens
      And every token slot without a token holds garbage
      When "alice" and "bob" attend with 3 new tokens
      Then each sequence gets what plain attention gives
      When "alice" and "bob" attend with 1 new token
      Then each sequence gets what plain attention gives

      Examples: block sizes
        | heads | kv | dim | dtype    | block | window | cap |
        | 4     | 2  | 16  | float32  | 1     | no     | no  |
        | 4     | 2  | 16  | float32  | 8     | no     | no  |
        | 4     | 2  | 16  | float32  | 24    | no     | no  |

      Examples: windows and soft caps; a window of 1 token, below a block, across blocks, beyond the sequence
        | heads | kv | dim | dtype    | block | window | cap |
        | 4     | 2  | 16  | float32  | 8     | 1      | no  |
        | 4     | 2  | 16  | float32  | 8     | 5      | no  |
        | 4     | 2  | 16  | float32  | 8     | 13     | no  |
        | 4     | 2  | 16  | float32  | 8     | 100    | no  |
        | 4     | 2  | 16  | float32  | 8     | no     | 0.5 |
        | 4     | 2  | 16  | float32  | 8     | 13     | 0.5 |

      Examples: head sizes and groups
        | heads | kv | dim | dtype    | block | window | cap |
        | 2     | 2  | 64  | float32  | 8     | no     | no  |
        | 8     | 1  | 80  | float32  | 8     | 13     | no  |
        | 6     | 2  | 128 | float32  | 8     | no     | no  |
        | 2     | 1  | 256 | float32  | 8     | no     | 0.5 |

      Examples: half precision
        | heads | kv | dim | dtype    | block | window | cap |
        | 4     | 2  | 16  | bfloat16 | 8     | no     | no  |
        | 8     | 1  | 80  | bfloat16 | 8     | 13     | 0.5 |
        | 6     | 2  | 128 | bfloat16 | 24    | 5      | no  |
        | 4     | 2  | 64  | float16  | 8     | 13     | no  |

    @R5.6
    Scenario: A backend asked for what it cannot compute says why, and is not replaced
      When I ask for the backend "sdpa" with a soft cap of 30
      Then I am refused with "sdpa" and "soft cap"

    @R5.6
    Scenario: Left to choose, kvlab takes a backend that can
      When I ask for the backend "auto" with a soft cap of 30
      Then I am given a backend that computes it, not "sdpa"
